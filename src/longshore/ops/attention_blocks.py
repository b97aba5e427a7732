"""Attention in plain torch: blocks of query rows, each against the keys visible to it.

In and out: as ops/attention.py, without defaults. Works on any device and dtype; half
precision is computed in float32. Scores of at most MOST_ROWS rows exist at a time, so memory grows
with a sequence's length, not with its square.

A sequence of 1200 queries over 1500 keys in blocks of 512 rows: rows 0…511 see keys 0…811, rows
512…1023 keys 0…1323, rows 1024…1199 all 1500. With window 100 the second block sees 713…1323.

How a sequence is divided depends only on its own lengths, and its matrices are copied before they
are multiplied: its result is bitwise the same, whatever it is packed with. The right operand of
each product is copied in the layout the product reads, for the reason given in ops/products.py.

A block has all scores of its rows at once, so backward recomputes their softmax and needs no
statistics from forward. exp(score − lse) would be off by the rounding of lse, 1e-3 in float32 where
scores are about 1e4.

Shapes: n rows of a block, m keys of a sequence, N = H/K · n, the rows of all query heads that share
a key head.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds

_softmax_backward = torch.ops.aten._softmax_backward_data.default

MOST_ROWS = 512
FEWEST_ROWS = 16
MOST_SCORES = 1 << 24
"""Scores computed at once, over all heads, unless FEWEST_ROWS rows already have more."""


@dataclass(frozen=True, slots=True)
class QueriesAndKeys:
    """The rows of one sequence among the queries and among the keys."""

    rows: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A block of query rows of one sequence."""

    rows: slice
    """In the tensor of all queries."""
    keys: slice
    """The keys, of this sequence, that some row sees."""
    own: int
    """The key, of this sequence, that is the first row's own token."""


def forward(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds,
    key_bounds: Bounds,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THD.shape
    dtype = _compute_dtype(q_THD)
    out_THV = q_THD.new_empty(tokens, heads, v_SKV.shape[2])
    lse_HT = q_THD.new_empty(heads, tokens, dtype=dtype)
    for sequence in _sequences(bounds, key_bounds):
        k_KDm, v_KmV = (
            _transposed(k_SKD[sequence.keys], dtype),
            _by_head(v_SKV[sequence.keys], dtype),
        )
        for block in _blocks(sequence, heads, window):
            q_KND = _grouped(q_THD[block.rows], k_KDm).mul_(scale)
            scores_KNm = _scores(q_KND, k_KDm, block, window, softcap)
            sinks_KN = _sinks(sinks, q_KND)
            probs_KNm = _softmax(scores_KNm, sinks_KN)
            _put(out_THV, block, probs_KNm @ v_KmV[:, block.keys])
            # The largest probability is 1 / Σ exp(score − largest score).
            lse_KN = scores_KNm.amax(2) - probs_KNm.amax(2).log()
            if sinks_KN is not None:
                # A large sink leaves probabilities of 0.
                lse_KN = torch.logaddexp(scores_KNm.logsumexp(2), sinks_KN)
            lse_HT[:, block.rows] = lse_KN.view(heads, -1)
    return out_THV, lse_HT


def backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    *,
    bounds: Bounds,
    key_bounds: Bounds,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    del out_THV, lse_HT
    dtype = _compute_dtype(q_THD)
    # Keys that no query sees keep a gradient of 0.
    dq_THD, dk_SKD, dv_SKV = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_SKD, v_SKV)
    )
    for sequence in _sequences(bounds, key_bounds):
        k_KmD, v_KVm = (
            _by_head(k_SKD[sequence.keys], dtype),
            _transposed(v_SKV[sequence.keys], dtype),
        )
        k_KDm = k_KmD.mT.contiguous()
        dk_KmD, dv_KmV = torch.zeros_like(k_KmD), torch.zeros_like(v_KVm.mT)
        for block in _blocks(sequence, q_THD.shape[1], window):
            q_KND = _grouped(q_THD[block.rows], k_KmD).mul_(scale)
            grad_KNV = _grouped(grad_THV[block.rows], k_KmD)
            scores_KNm = _scores(q_KND, k_KDm, block, window, softcap)
            probs_KNm = _softmax(scores_KNm, _sinks(sinks, q_KND))
            dv_KmV[:, block.keys] += probs_KNm.mT @ grad_KNV
            dprobs_KNm = grad_KNV @ v_KVm[:, :, block.keys]
            dscores_KNm = _softmax_backward(dprobs_KNm, probs_KNm, 2, dtype)
            if softcap is not None:
                slope_KNm = (scores_KNm / softcap).square().neg_().add_(1)
                dscores_KNm = torch.where(probs_KNm > 0, dscores_KNm * slope_KNm, 0)
            dk_KmD[:, block.keys] += dscores_KNm.mT @ q_KND
            _put(dq_THD, block, (dscores_KNm @ k_KmD[:, block.keys]).mul_(scale))
        dk_SKD[sequence.keys] = dk_KmD.transpose(0, 1)
        dv_SKV[sequence.keys] = dv_KmV.transpose(0, 1)
    return dq_THD, dk_SKD, dv_SKV


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _sequences(bounds: Bounds, key_bounds: Bounds) -> Iterator[QueriesAndKeys]:
    """The sequences that have queries."""
    rows, keys = bounds.offsets, key_bounds.offsets
    for i in range(len(rows) - 1):
        if rows[i] < rows[i + 1]:
            yield QueriesAndKeys(slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1]))


def _blocks(sequence: QueriesAndKeys, heads: int, window: int | None) -> Iterator[RowBlock]:
    rows, keys = sequence.rows.stop - sequence.rows.start, sequence.keys.stop - sequence.keys.start
    step = min(MOST_ROWS, max(FEWEST_ROWS, MOST_SCORES // (heads * keys)))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        own = keys - rows + start
        first = 0 if window is None else max(0, own - window + 1)
        block_rows = slice(sequence.rows.start + start, sequence.rows.start + stop)
        yield RowBlock(block_rows, slice(first, own + stop - start), own)


def _by_head(x_mKD: Tensor, dtype: torch.dtype) -> Tensor:
    """(K, m, D), a copy."""
    return x_mKD.transpose(0, 1).to(dtype, copy=True, memory_format=torch.contiguous_format)


def _transposed(x_mKD: Tensor, dtype: torch.dtype) -> Tensor:
    """(K, D, m), a copy."""
    return x_mKD.permute(1, 2, 0).to(dtype, copy=True, memory_format=torch.contiguous_format)


def _grouped(x_nHD: Tensor, like: Tensor) -> Tensor:
    """(K, N, D), a copy in the dtype of `like` (K, …): under each key head its query heads."""
    (rows, heads, width), shared = x_nHD.shape, len(like)
    split_KGnD = x_nHD.reshape(rows, shared, heads // shared, width).permute(1, 2, 0, 3)
    copied = split_KGnD.to(like.dtype, copy=True, memory_format=torch.contiguous_format)
    return copied.view(shared, -1, width)


def _put(out_THD: Tensor, block: RowBlock, part_KND: Tensor) -> None:
    """Writes to where `_grouped` would read."""
    target_nHD = out_THD[block.rows]
    rows, heads, width = target_nHD.shape
    target_nHD.copy_(part_KND.reshape(heads, rows, width).transpose(0, 1))


def _sinks(sinks: Tensor | None, q_KND: Tensor) -> Tensor | None:
    """(K, N): the sink of each row's head."""
    if sinks is None:
        return None
    rows = q_KND.shape[0] * q_KND.shape[1] // len(sinks)
    return sinks.to(q_KND.dtype).repeat_interleave(rows).view(q_KND.shape[:2])


def _softmax(scores_KNm: Tensor, sinks_KN: Tensor | None) -> Tensor:
    if sinks_KN is None:
        return scores_KNm.softmax(2)
    return torch.cat([scores_KNm, sinks_KN[:, :, None]], 2).softmax(2)[:, :, :-1]


def _scores(
    q_KND: Tensor, k_KDm: Tensor, block: RowBlock, window: int | None, softcap: float | None
) -> Tensor:
    """(K, N, keys of the block), −inf where a row does not see the key."""
    scores_KNm = q_KND @ k_KDm[:, :, block.keys]
    if softcap is not None:
        scores_KNm = scores_KNm.div_(softcap).tanh_().mul_(softcap)
    rows = block.rows.stop - block.rows.start
    row_n1 = torch.arange(block.own, block.own + rows, device=q_KND.device).unsqueeze(1)
    key_m = torch.arange(block.keys.start, block.keys.stop, device=q_KND.device)
    hidden_nm = key_m > row_n1
    if window is not None:
        hidden_nm |= key_m <= row_n1 - window
    scores_KNm.view(-1, rows, len(key_m)).masked_fill_(hidden_nm, -torch.inf)
    return scores_KNm
