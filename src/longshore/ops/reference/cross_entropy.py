"""Cross entropy from the full logits: the twin of ops/cross_entropy.py.

In and out: as there. Logits [0, 0] with label 1 give −log ½ = 0.693.
"""

import torch
from torch import Tensor
from torch.nn import functional


def logits(hidden_TC: Tensor, weight_VC: Tensor, softcap: float | None) -> Tensor:
    dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
    logits_TV = hidden_TC.to(dtype) @ weight_VC.to(dtype).T
    return logits_TV if softcap is None else softcap * (logits_TV / softcap).tanh()


def linear_cross_entropy(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    ignore: int = -100,
    softcap: float | None = None,
) -> Tensor:
    logits_TV = logits(hidden_TC, weight_VC, softcap)
    return functional.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=ignore)
