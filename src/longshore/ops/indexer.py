"""Which compressed entries a query attends to, by the scores of a small indexer, and its loss.

In: the indexer's queries (T, H, D), a weight for each of them (T, H), keys of entries (E, D), and
the ranges of entries that a query may see (ops/sparse_attention.py). The score of an entry is the
sum over heads of weight · relu(query · key). Out: the best entries of each query, in rising order,
ties to the lower index; and the divergence of the scores from what the attention did. `pooled`
makes the entries: a softmax over the rows of a group, for each channel.

Of four entries with scores 1, 3, 0, 3 the best three are 0 1 3, and of 2, 2, 2, 0 the best two are
0 1. With scores 0 and log 3 for the two chosen entries the indexer predicts ¼ and ¾; an attention
of 0.1 and 0.1 on them is ½ and ½, and the loss of the row ½·log(½/¼) + ½·log(½/¾) = 0.144.

T queries, H heads, D width of a head, E entries, K chosen entries of a query; n queries of a block,
e entries that it meets. No T × E matrix exists at any time. Pooling: R rows, C channels, G slots of
a group.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.backends import pick
from longshore.ops.linear import by_rows
from longshore.ops.sparse_attention import RangeBlock, RowRanges, add_rows_, sums_for, take_rows

MOST_ROWS = 64
MOST_ENTRIES = 512
"""Rows of a block, and entries that it meets at a time."""
MOST_SCORES = 1 << 25
"""Scores of a block where kernels compute them."""
MOST_COPIED = 1 << 22
"""Numbers in the copies of chosen keys for a block, unless one query already has more."""


def choose(
    q_THD: Tensor, weights_TH: Tensor, keys_ED: Tensor, *, ranges: RowRanges, top_k: int
) -> Tensor:
    """int32 (T, K), absolute, rising, then −1; K = min(top_k, the largest count). No autograd."""
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; give 1 or more")
    _check(q_THD, weights_TH, keys_ED)
    ranges.check(len(q_THD), None, len(keys_ED))
    width = min(top_k, ranges.most_entries)
    chosen_TK = ranges.entry_first.new_full((len(q_THD), width), -1)
    kernels = pick("indexer", q_THD, keys_ED)
    most_rows = (
        MOST_ROWS if kernels is None else max(MOST_ROWS, MOST_SCORES // max(1, len(keys_ED)))
    )
    with torch.no_grad():
        for block in ranges.blocks(lambda _: most_rows):
            first_n1 = ranges.entry_first[block.rows, None]
            count_n1 = ranges.entry_count[block.rows, None]
            if block.most_entries <= width:
                best_nk = _all_entries(first_n1, count_n1, block.most_entries)
            else:
                if kernels is None:
                    scores_ne = _block_scores(q_THD, weights_TH, keys_ED, block)
                else:
                    own = q_THD[block.rows], weights_TH[block.rows], keys_ED[block.entries]
                    scores_ne = kernels.scores(*own)
                before_n1 = first_n1 - block.entries.start
                best_nk = _best(scores_ne, before_n1, before_n1 + count_n1, width)
                best_nk = torch.where(best_nk < 0, -1, best_nk + block.entries.start)
            chosen_TK[block.rows, : best_nk.shape[1]] = best_nk
    return chosen_TK


def index_loss(
    q_THD: Tensor,
    weights_TH: Tensor,
    keys_ED: Tensor,
    chosen_TK: Tensor,
    mass_TK: Tensor,
    counted_T: Tensor,
) -> Tensor:
    """Σ over counted rows of KL(mass over the chosen ‖ softmax of the scores over the chosen).

    0-dim, in float32 at least; differentiable in q, weights and keys. A row without chosen entries,
    or with a mass of 0, gives 0.
    """
    _check(q_THD, weights_TH, keys_ED)
    if chosen_TK.shape != mass_TK.shape or len(chosen_TK) != len(q_THD):
        raise ValueError(
            f"chosen is {tuple(chosen_TK.shape)} and mass {tuple(mass_TK.shape)}; both must be "
            f"(rows, entries) with {len(q_THD)} rows"
        )
    kernels = pick("indexer", q_THD, keys_ED) if chosen_TK.numel() else None
    if kernels is not None:
        scores_TK = _ChosenScores.apply(q_THD, weights_TH, keys_ED, chosen_TK, kernels)
        target_TK = _target(mass_TK.detach(), chosen_TK)
        return _divergence(scores_TK, target_TK, chosen_TK, counted_T)
    return _IndexLoss.apply(q_THD, weights_TH, keys_ED, chosen_TK, mass_TK.detach(), counted_T)


def _divergence(
    scores_TK: Tensor, target_TK: Tensor, chosen_TK: Tensor, counted_T: Tensor
) -> Tensor:
    """Rows without a chosen entry have scores of −∞ alone, whose softmax would be NaN."""
    none_TK = chosen_TK < 0
    safe_TK = scores_TK.masked_fill(none_TK.all(1, keepdim=True), 0.0)
    logs_TK = safe_TK.log_softmax(1).masked_fill(none_TK, 0.0)
    loss_T = (torch.xlogy(target_TK, target_TK) - target_TK * logs_TK).sum(1)
    return torch.where(counted_T, loss_T, 0.0).sum()


class _ChosenScores(torch.autograd.Function):
    """(T, K) by kernels."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, weights: Tensor, keys: Tensor, chosen: Tensor, kernels: Any
    ) -> Tensor:
        ctx.save_for_backward(q, weights, keys, chosen)
        ctx.kernels = kernels
        return kernels.chosen_scores(q, weights, keys, chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, weights, keys, chosen = ctx.saved_tensors
        grad = grad.masked_fill(chosen < 0, 0.0)
        return *ctx.kernels.chosen_gradients(grad, q, weights, keys, chosen), None, None


def _block_scores(q: Tensor, weights: Tensor, keys: Tensor, block: RangeBlock) -> Tensor:
    """(n, e): of all entries of the block, also those that a row does not see."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    q_nHD, weights_n1H = q[block.rows].to(dtype), weights[block.rows, None].to(dtype)
    scores = []
    for start in range(block.entries.start, block.entries.stop, MOST_ENTRIES):
        keys_eD = keys[start : min(start + MOST_ENTRIES, block.entries.stop)].to(dtype, copy=True)
        products_Ne = q_nHD.flatten(0, 1) @ by_rows(keys_eD.T)
        products_nHe = products_Ne.relu_().unflatten(0, q_nHD.shape[:2])
        scores.append((weights_n1H @ products_nHe).squeeze(1))
    return torch.cat(scores, 1)


def _all_entries(first_n1: Tensor, count_n1: Tensor, most: int) -> Tensor:
    """(n, most): the entries of each row's range, then −1."""
    number = torch.arange(most, dtype=torch.int32, device=first_n1.device)
    return torch.where(number < count_n1, first_n1 + number, -1)


def _best(scores_ne: Tensor, first_n1: Tensor, stop_n1: Tensor, top_k: int) -> Tensor:
    """int32 (n, top_k): the best of each row in [first, stop), rising, then −1.

    `topk` does not say which of several equal scores it takes, but its last value is certain: all
    that is better is kept, and of its equals as many as are missing, from the lowest index on.
    """
    number_e = torch.arange(scores_ne.shape[1], dtype=torch.int32, device=scores_ne.device)
    own_ne = (number_e >= first_n1) & (number_e < stop_n1)
    scores_ne = scores_ne.masked_fill(~own_ne, -torch.inf)
    last_n1 = scores_ne.topk(top_k, 1).values[:, -1:]
    better_ne, equal_ne = scores_ne > last_n1, scores_ne == last_n1
    missing_n1 = top_k - better_ne.sum(1, keepdim=True)
    kept_ne = own_ne & (better_ne | (equal_ne & (equal_ne.cumsum(1) <= missing_n1)))
    # The others go to a place after the last, which is dropped.
    place_ne = torch.where(kept_ne, kept_ne.cumsum(1) - 1, top_k)
    best = first_n1.new_full((len(scores_ne), top_k + 1), -1)
    return best.scatter_(1, place_ne, number_e.expand_as(place_ne))[:, :top_k]


class _IndexLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        chosen: Tensor,
        mass: Tensor,
        counted: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, weights, keys, chosen, mass, counted)
        dtype = torch.promote_types(q.dtype, torch.float32)
        loss = q.new_zeros((), dtype=dtype)
        for rows in _row_blocks(chosen, q):
            products_nKH, _ = _chosen_products(q[rows].to(dtype), keys, chosen[rows])
            scores_nK = _masked_scores(products_nKH, weights[rows].to(dtype), chosen[rows])
            logs_nK = scores_nK.log_softmax(1).masked_fill_(chosen[rows] < 0, 0.0)
            target_nK = _target(mass[rows].to(dtype), chosen[rows])
            loss_n = (torch.xlogy(target_nK, target_nK) - target_nK * logs_nK).sum(1)
            loss += torch.where(counted[rows], loss_n, 0.0).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, weights, keys, chosen, mass, counted = ctx.saved_tensors
        dtype = torch.promote_types(q.dtype, torch.float32)
        dq, dweights = torch.zeros_like(q), torch.zeros_like(weights)
        dkeys = sums_for(keys, dtype)
        for rows in _row_blocks(chosen, q):
            q_nHD, weights_nH = q[rows].to(dtype), weights[rows].to(dtype)
            products_nKH, keys_nKD = _chosen_products(q_nHD, keys, chosen[rows])
            scores_nK = _masked_scores(products_nKH, weights_nH, chosen[rows])
            dropped_nK = (chosen[rows] < 0) | ~counted[rows, None]
            target_nK = _target(mass[rows].to(dtype), chosen[rows])
            dscores_nK = scores_nK.softmax(1) * target_nK.sum(1, keepdim=True) - target_nK
            dscores_nK = dscores_nK.mul_(grad).masked_fill_(dropped_nK, 0.0)
            dweights[rows] = (dscores_nK[:, None] @ products_nKH).squeeze(1)
            dproducts_nKH = dscores_nK[:, :, None] * weights_nH[:, None]
            dproducts_nKH = dproducts_nKH.masked_fill_(products_nKH == 0, 0.0)
            dq[rows] = dproducts_nKH.mT @ keys_nKD
            add_rows_(dkeys, chosen[rows], dproducts_nKH @ q_nHD)
        return dq, dweights, dkeys[:-1].to(keys.dtype), None, None, None


def _row_blocks(chosen_TK: Tensor, q_THD: Tensor) -> Iterator[slice]:
    """Blocks of query rows; none where no query has an entry."""
    (rows, most), width = chosen_TK.shape, max(q_THD.shape[1:])
    step = max(1, MOST_COPIED // max(1, most * width))
    for start in range(0, rows if most else 0, step):
        yield slice(start, min(start + step, rows))


def _chosen_products(q_nHD: Tensor, keys_ED: Tensor, chosen_nK: Tensor) -> tuple[Tensor, Tensor]:
    """relu(query · key) of each chosen key (n, K, H), and these keys (n, K, D)."""
    keys_nKD = take_rows(keys_ED, chosen_nK, q_nHD.dtype)
    return (keys_nKD @ by_rows(q_nHD.mT)).relu_(), keys_nKD


def _masked_scores(products_nKH: Tensor, weights_nH: Tensor, chosen_nK: Tensor) -> Tensor:
    scores_nK = (products_nKH @ weights_nH[:, :, None]).squeeze(2)
    return scores_nK.masked_fill_(chosen_nK < 0, -torch.inf)


def _target(mass_nK: Tensor, chosen_nK: Tensor) -> Tensor:
    """The mass, normalised over the chosen; 0 for a row without mass."""
    mass_nK = mass_nK.masked_fill(chosen_nK < 0, 0.0)
    total_n1 = mass_nK.sum(1, keepdim=True)
    return mass_nK / torch.where(total_n1 > 0, total_n1, 1.0)


def _check(q: Tensor, weights: Tensor, keys: Tensor) -> None:
    if q.dim() != 3 or weights.shape != q.shape[:2] or keys.shape[1:] != q.shape[2:]:
        raise ValueError(
            f"the shapes are q {tuple(q.shape)}, weights {tuple(weights.shape)}, keys "
            f"{tuple(keys.shape)}; they must be (rows, heads, width), (rows, heads) and "
            "(entries, width)"
        )


MOST_POOLED = 1 << 21
"""Numbers pooled at a time, unless one group already has more."""


def pooled(
    values_RC: Tensor, gates_RC: Tensor, bias_GC: Tensor, rows_EG: Tensor, *, overlap: bool = False
) -> Tensor:
    """(E, C) in the dtype of values; with overlap (E, C/2), where bias is (r, C).

    rows: int32, the rows of each group, −1 for none, which has weight 0. A group without rows gives
    0. Rows 2 and 6 with gates 0 and log 3 give ¼·2 + ¾·6 = 5. Computed in float32 at least;
    differentiable in values, gates and bias.

    overlap: groups have G = 2r slots: the first r are the previous group's, of which the first half
    of the channels counts, the last r its own, of which the second half counts. With r = 1 and rows
    (1, 2), (3, 4), equal gates give the entries 2 (it has no previous group) and (1 + 4) / 2 = 2.5.
    """
    _check_pooling(values_RC, gates_RC, bias_GC, rows_EG, overlap)
    if overlap:
        # A row of 2D channels is two rows of D: slot by slot the first or the second of them.
        late_G = torch.arange(rows_EG.shape[1], device=rows_EG.device) >= len(bias_GC)
        rows_EG = torch.where(rows_EG < 0, -1, 2 * rows_EG + late_G)
        bias_GC = torch.cat(bias_GC.chunk(2, 1))
        values_RC, gates_RC = (
            x.reshape(2 * len(x), x.shape[1] // 2) for x in (values_RC, gates_RC)
        )
    return _Pooled.apply(values_RC, gates_RC, bias_GC, rows_EG)


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, bias: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(values, gates, bias, rows)
        dtype = torch.promote_types(values.dtype, torch.float32)
        out_EC = values.new_empty(len(rows), values.shape[1])
        for block in _blocks(rows, values.shape[1]):
            weights_eGC = _weights(gates, bias, rows[block], dtype)
            values_eGC = take_rows(values, rows[block], dtype)
            out_EC[block] = weights_eGC.mul_(values_eGC).sum(1)
        return out_EC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, gates, bias, rows = ctx.saved_tensors
        dtype = torch.promote_types(values.dtype, torch.float32)
        dvalues, dgates = sums_for(values, dtype), sums_for(gates, dtype)
        dbias = torch.zeros_like(bias, dtype=dtype)
        for block in _blocks(rows, values.shape[1]):
            weights_eGC = _weights(gates, bias, rows[block], dtype)
            values_eGC = take_rows(values, rows[block], dtype)
            grad_e1C = grad[block, None].to(dtype)
            mean_e1C = (weights_eGC * values_eGC).sum(1, keepdim=True)
            add_rows_(dvalues, rows[block], weights_eGC * grad_e1C)
            dscores_eGC = values_eGC.sub_(mean_e1C).mul_(weights_eGC).mul_(grad_e1C)
            add_rows_(dgates, rows[block], dscores_eGC)
            dbias += dscores_eGC.sum(0)
        dvalues, dgates = dvalues[:-1].to(values.dtype), dgates[:-1].to(gates.dtype)
        return dvalues, dgates, dbias.to(bias.dtype), None


def _blocks(rows_EG: Tensor, width: int) -> Iterator[slice]:
    entries, slots = rows_EG.shape
    step = max(1, MOST_POOLED // max(1, slots * width))
    for start in range(0, entries, step):
        yield slice(start, start + step)


def _weights(gates: Tensor, bias: Tensor, rows_eG: Tensor, dtype: torch.dtype) -> Tensor:
    """(e, G, C), 0 where there is no row."""
    none_eG1 = (rows_eG < 0)[:, :, None]
    scores_eGC = take_rows(gates, rows_eG, dtype).add_(bias)
    # The softmax over a group without rows is NaN.
    return scores_eGC.masked_fill_(none_eG1, -torch.inf).softmax(1).masked_fill_(none_eG1, 0.0)


def _check_pooling(
    values: Tensor, gates: Tensor, bias: Tensor, rows: Tensor, overlap: bool
) -> None:
    parts = 2 if overlap else 1
    if values.shape != gates.shape or values.dim() != 2:
        raise ValueError(
            f"values are {tuple(values.shape)} and gates {tuple(gates.shape)}; both must be "
            "(rows, channels)"
        )
    if bias.dim() != 2 or rows.dim() != 2 or bias.shape != (rows.shape[1] / parts, values.shape[1]):
        raise ValueError(
            f"bias is {tuple(bias.shape)}, and groups are {tuple(rows.shape)} of rows with "
            f"{values.shape[1]} channels; with overlap={overlap} bias must have a row for each "
            + ("two slots" if overlap else "slot")
        )
    if overlap and values.shape[1] % 2:
        raise ValueError(
            f"there are {values.shape[1]} channels; overlapping groups need two halves"
        )
