"""Distillation from a teacher's stored top-k log-probabilities.

In: the student's head, and for each token as a target the ids of the teacher's k likeliest tokens
(`teacher_ids`) and their log-probabilities (`teacher_logprobs`), (T, k) each. Out: a value for each
token:

    Σ over the k of p·(log p − log q)

with the teacher's p and the student's q at this temperature, over the whole vocabulary. Two stored
tokens with p = ½ and ¼ and a student with q = ¼ and ¼ give ½·log 2 = 0.347. renormalize=true scales
the k probabilities to a sum of 1 first. nll_weight adds so much of the label's own nll.

Its metrics are means over loss tokens: kl, the sum above, and agreement, the share of tokens whose
likeliest successor is the same for student and teacher.

The temperature divides the student's logits alone: the teacher's values must be stored at the same
one. Where fewer than k tokens are stored, a log-probability of −inf fills the row, with any id. An
id past the vocabulary gives NaN, which is reported with its place; run/data.py refuses it before.
"""

import torch
from torch import Tensor

from longshore.batch import MicroBatch
from longshore.data.source import TEACHER_IDS, TEACHER_LOGPROBS
from longshore.train.loss_inputs import LogitsHead, Metric

METRICS = ("kl", "agreement")


def distill(
    head: LogitsHead,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    renormalize: bool = False,
    nll_weight: float = 0.0,
) -> tuple[Tensor, dict[str, Metric]]:
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    ids_TK = batch.token_fields[TEACHER_IDS].long()
    # Where no loss counts the fields may have anything; a label −100 is no index.
    teacher_TK = batch.token_fields[TEACHER_LOGPROBS].where(mask_T.unsqueeze(1), 0.0)
    ids_TK = ids_TK.where(mask_T.unsqueeze(1) & (teacher_TK > -torch.inf), 0)
    is_unknown_TK = (ids_TK < 0) | (ids_TK >= head.vocab_size)
    ids_TK = ids_TK.where(~is_unknown_TK, 0)
    teacher_TK = teacher_TK.where(~is_unknown_TK, torch.nan)
    labels_T = batch.targets.labels.where(mask_T, 0)

    def divergence(
        logits_nV: Tensor, ids_nK: Tensor, teacher_nK: Tensor, labels_n: Tensor
    ) -> Tensor:
        teacher_nK = teacher_nK.to(logits_nV.dtype)
        if renormalize:
            teacher_nK = teacher_nK.log_softmax(1)
        logits_nV = logits_nV if temperature == 1 else logits_nV / temperature
        lse_n1 = logits_nV.logsumexp(1, keepdim=True)
        student_nK = logits_nV.gather(1, ids_nK) - lse_n1
        p_nK = teacher_nK.exp()
        # A stored −inf has p = 0, and 0 · −inf counts as 0.
        kl_n = torch.where(p_nK == 0, 0.0, p_nK * (teacher_nK - student_nK)).sum(1)
        likeliest_n1 = ids_nK.gather(1, teacher_nK.detach().argmax(1, keepdim=True))
        agrees_n = logits_nV.detach().argmax(1) == likeliest_n1.squeeze(1)
        values_n = kl_n
        if nll_weight:
            own_n = temperature * logits_nV.gather(1, labels_n.unsqueeze(1)).squeeze(1)
            lse_n = (temperature * logits_nV).logsumexp(1)
            values_n = values_n + nll_weight * (lse_n - own_n)
        return torch.stack([values_n, kl_n.detach(), agrees_n.to(kl_n.dtype)], dim=1)

    values_T, kl_T, agrees_T = head.map_logits(divergence, ids_TK, teacher_TK, labels_T).unbind(1)
    return values_T, {"kl": kl_T, "agreement": agrees_T}
