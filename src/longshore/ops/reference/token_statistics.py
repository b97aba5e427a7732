"""Statistics of tokens from the full logits: the twin of ops/token_statistics.py.

In and out: as there. Logits [0, 0] with label 1 give −log 2, log 2, log 2 and 0.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longshore.ops.reference.cross_entropy import logits


def token_statistics(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = -100,
    softcap: float | None = None,
) -> Tensor:
    logits_TV = logits(hidden_TC, weight_VC, softcap) / temperature
    logp_TV = logits_TV.log_softmax(-1)
    keep_T = labels_T != ignore
    own_T = logp_TV.gather(1, labels_T.where(keep_T, 0)[:, None])[:, 0]
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    columns = [own_T, entropy_T, logits_TV.logsumexp(-1), logits_TV.mean(-1)]
    return torch.stack(columns, dim=1).where(keep_T[:, None], 0)


def map_logits(
    function: Callable[..., Tensor],
    hidden_TC: Tensor,
    weight_VC: Tensor,
    rows: Sequence[Tensor] = (),
    *,
    softcap: float | None = None,
) -> Tensor:
    return function(logits(hidden_TC, weight_VC, softcap), *rows)
