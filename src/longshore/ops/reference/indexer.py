"""The indexer's choice and loss, query by query: the twin of ops/indexer.py.

In and out: as there. Of the scores 1, 3, 3, 2 the two best are those of the entries 1 and 2.
"""

import torch
from torch import Tensor

from longshore.ops.row_ranges import RowRanges


def choose(
    q_THD: Tensor, weights_TH: Tensor, keys_ED: Tensor, *, ranges: RowRanges, top_k: int
) -> Tensor:
    width = min(top_k, ranges.most_entries)
    chosen = []
    firsts, counts = ranges.entry_first.tolist(), ranges.entry_count.tolist()
    for t, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        scores = _scores(q_THD[t], weights_TH[t], keys_ED[first : first + count]).tolist()
        ranked = sorted(range(count), key=lambda j: (-scores[j], j))
        best = sorted(first + j for j in ranked[:width])
        chosen.append(best + [-1] * (width - len(best)))
    return torch.tensor(chosen, dtype=torch.int32).view(len(q_THD), width)


def index_loss(
    q_THD: Tensor,
    weights_TH: Tensor,
    keys_ED: Tensor,
    chosen_TK: Tensor,
    mass_TK: Tensor,
    counted_T: Tensor,
) -> Tensor:
    # All inputs are used, so that each gets a gradient.
    loss = 0.0 * (q_THD.sum() + weights_TH.sum() + keys_ED.sum())
    for t in range(len(q_THD)):
        own = chosen_TK[t] >= 0
        total = mass_TK[t][own].sum()
        if not counted_T[t] or not total > 0:
            continue
        target_k = mass_TK[t][own] / total
        scores_k = _scores(q_THD[t], weights_TH[t], keys_ED[chosen_TK[t][own].long()])
        loss = loss + (torch.xlogy(target_k, target_k) - target_k * scores_k.log_softmax(0)).sum()
    return loss


def _scores(q_HD: Tensor, weights_H: Tensor, keys_kD: Tensor) -> Tensor:
    dtype = torch.promote_types(q_HD.dtype, torch.float32)
    products_Hk = (q_HD.to(dtype) @ keys_kD.to(dtype).T).relu()
    return (weights_H.to(dtype)[:, None] * products_Hk).sum(0)
