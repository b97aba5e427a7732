"""Causal attention over joined sequences: no sequence sees another.

In: queries (T, H, D), keys (S, K, D), values (S, K, V), where sequences begin and end, and an
optional window. Out: (T, H, V). Query head h reads key head h·K // H, so K divides H; V may differ
from D. `attention` is differentiable; `attention_forward` and `attention_backward` are the pair
underneath, for callers that save less than k and v in between.

Sequence i of the queries attends to sequence i of the keys, and the two are aligned at their end.
With 2 queries over 5 keys, and with window 3:

    query 0   sees keys 0 1 2 3         with window 3   1 2 3
    query 1   sees keys 0 1 2 3 4       with window 3     2 3 4

Queries of lengths (2, 1) over keys of lengths (5, 1): the last query sees only the last key.

softcap c: a score s becomes c · tanh(s / c). sinks: (H), of each head a score without a key, which
takes its share of the softmax and adds nothing: with 2 keys of score 0 and a sink of 0, each key
weighs 1/3. With sinks the log-sum-exp counts them too, so that the backward of kernels which know
no sinks is right as it is: weights are exp(score − log-sum-exp).

Attention in plain torch: blocks of query rows, each against the keys visible to it.

In and out: as ops/attention.py, without defaults. Works on any device and dtype; half
precision is computed in float32. Scores of at most MOST_ROWS rows exist at a time, so memory grows
with a sequence's length, not with its square.

A sequence of 1200 queries over 1500 keys in blocks of 512 rows: rows 0…511 see keys 0…811, rows
512…1023 keys 0…1323, rows 1024…1199 all 1500. With window 100 the second block sees 713…1323.

How a sequence is divided depends only on its own lengths, and its matrices are copied before they
are multiplied: its result is bitwise the same, whatever it is packed with. The right operand of
each product is copied in the layout the product reads, for the reason given in ops/linear.py.

A block has all scores of its rows at once, so backward recomputes their softmax and needs no
statistics from forward. exp(score − lse) would be off by the rounding of lse, 1e-3 in float32 where
scores are about 1e4.

Shapes: n rows of a block, m keys of a sequence, N = H/K · n, the rows of all query heads that share
a key head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops import attention as attention_blocks
from longshore.ops.backends import pick
from longshore.ops.boundaries import Bounds, offsets_of


@dataclass(frozen=True, slots=True, eq=False)
class OneSequence:
    """The bounds of rows that are all one sequence."""

    offsets: tuple[int, ...]
    cu_seqlens: Tensor
    longest: int


class AttentionSpec(TypedDict):
    """Which keys each query sees, and the scale of its scores."""

    bounds: Bounds
    key_bounds: Bounds
    scale: float
    window: int | None


class ScoreSpec(NamedTuple):
    """What becomes of the scores, of which not every backend can do all."""

    softcap: float | None = None
    sinks: Tensor | None = None


def attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """(T, H, V). key_bounds: None if keys have the queries' bounds. scale: 1/√D for None.

    window: a token sees itself and the window − 1 before it; None for all before it. Without any
    bounds the queries are the last T tokens of one sequence of S.
    """
    _check_shapes(q_THD, k_SKD, v_SKV)
    spec = _spec(q_THD, k_SKD, bounds, key_bounds, scale, window)
    return _Attention.apply(q_THD, k_SKD, v_SKV, sinks, spec, softcap)


def attention_forward(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (T, H, V) and the log-sum-exp of each query's scores (H, T). No autograd."""
    _check_shapes(q_THD, k_SKD, v_SKV)
    spec = _spec(q_THD, k_SKD, bounds, key_bounds, scale, window)
    return _forward(q_THD, k_SKD, v_SKV, spec, _scores(q_THD, softcap, sinks))


def attention_backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of the output; sinks_gradient has that of sinks.

    No autograd.
    """
    spec = _spec(q_THD, k_SKD, bounds, key_bounds, scale, window)
    scores = _scores(q_THD, softcap, sinks)
    return _backward((grad_THV, q_THD, k_SKD, v_SKV, out_THV, lse_HT), spec, scores)


def sinks_gradient(grad_THV: Tensor, out_THV: Tensor, lse_HT: Tensor, sinks: Tensor) -> Tensor:
    """(H), from the gradient of the output. A sink has a share of the softmax and no value."""
    wide = lse_HT.dtype
    taken_HT = (grad_THV.to(wide) * out_THV.to(wide)).sum(2).T
    shares_HT = (sinks.to(wide)[:, None] - lse_HT).exp()
    return -(shares_HT * taken_HT).sum(1).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        spec: AttentionSpec,
        softcap: float | None,
    ) -> Tensor:
        out, lse = _forward(q, k, v, spec, _scores(q, softcap, sinks))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.spec, ctx.softcap = spec, softcap
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        scores = ScoreSpec(ctx.softcap, sinks)
        dq, dk, dv = _backward((grad, q, k, v, out, lse), ctx.spec, scores)
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return dq, dk, dv, dsinks, None, None


@torch.no_grad()
def _forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, scores: ScoreSpec
) -> tuple[Tensor, Tensor]:
    backend: Any = _backend(q, v, scores)
    if backend is None:
        return attention_blocks.forward(q, k, v, **spec, **scores._asdict())
    out, lse = backend.forward(q, k, v, **spec)
    if scores.sinks is None:
        return out, lse
    both_HT = torch.logaddexp(lse, scores.sinks.to(lse.dtype)[:, None])
    return (out * (lse - both_HT).exp().T[:, :, None]).to(out.dtype), both_HT


@torch.no_grad()
def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    spec: AttentionSpec,
    scores: ScoreSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: the output's gradient, q, k, v, the output and the log-sum-exp."""
    _, q, _, v, _, _ = saved
    backend: Any = _backend(q, v, scores)
    if backend is None:
        return attention_blocks.backward(*saved, **spec, **scores._asdict())
    dq, dk, dv = backend.backward(*saved, **spec)
    return dq, dk, dv


def _backend(q: Tensor, v: Tensor, scores: ScoreSpec) -> ModuleType | None:
    # No kernel has a softcap that was tested.
    return pick("attention", q, v) if scores.softcap is None else None


def _scores(q: Tensor, softcap: float | None, sinks: Tensor | None) -> ScoreSpec:
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; give a number above 0, or None for no cap")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(
            f"sinks have the shape {tuple(sinks.shape)}; each of {q.shape[1]} heads has one"
        )
    return ScoreSpec(softcap, sinks)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    # Each shape is asked for once: this runs for every pack of every layer.
    shapes = q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if not len(q_shape) == len(k_shape) == len(v_shape) == 3:
        raise ValueError(f"{_shown(shapes)}; each must be (rows, heads, width)")
    if q_shape[2] != k_shape[2] or k_shape[:2] != v_shape[:2]:
        raise ValueError(
            f"{_shown(shapes)}; q and k must have the same width, k and v the same rows and heads"
        )
    if k_shape[1] < 1 or q_shape[1] % k_shape[1]:
        raise ValueError(
            f"there are {q_shape[1]} query heads and {k_shape[1]} key heads; the first must be a "
            "multiple of the second"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give one dtype")


def _shown(shapes: tuple[torch.Size, ...]) -> str:
    q, k, v = map(tuple, shapes)
    return f"the shapes are q {q}, k {k}, v {v}"


def _spec(
    q: Tensor,
    k: Tensor,
    bounds: Bounds | None,
    key_bounds: Bounds | None,
    scale: float | None,
    window: int | None,
) -> AttentionSpec:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees at least itself, so give 1 or more")
    if bounds is None and key_bounds is None:
        bounds, key_bounds = _one_sequence(q), _one_sequence(k)
    bounds = bounds or _one_sequence(q)
    key_bounds = key_bounds or bounds
    _check_sequences(offsets_of(bounds, q.shape[0]), offsets_of(key_bounds, k.shape[0]))
    return {
        "bounds": bounds,
        "key_bounds": key_bounds,
        "scale": q.shape[2] ** -0.5 if scale is None else scale,
        "window": window,
    }


def _one_sequence(rows_of: Tensor) -> OneSequence:
    rows = rows_of.shape[0]
    # On the device: a copy from the host would wait, and cannot be captured in a CUDA graph.
    cu_seqlens = torch.arange(2, dtype=torch.int32, device=rows_of.device) * rows
    return OneSequence((0, rows), cu_seqlens, rows)


def _check_sequences(offsets: tuple[int, ...], key_offsets: tuple[int, ...]) -> None:
    if offsets == key_offsets:
        return
    if len(offsets) != len(key_offsets):
        raise ValueError(
            f"bounds have {len(offsets) - 1} sequences and key_bounds {len(key_offsets) - 1}; "
            "both must have the same number"
        )
    for i in range(len(offsets) - 1):
        queries, keys = offsets[i + 1] - offsets[i], key_offsets[i + 1] - key_offsets[i]
        if queries > keys:
            raise ValueError(
                f"sequence {i} has {queries} queries and {keys} keys; it must have at least as "
                "many keys as queries"
            )


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
            scores_KNm = _block_scores(q_KND, k_KDm, block, window, softcap)
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
            scores_KNm = _block_scores(q_KND, k_KDm, block, window, softcap)
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


def _block_scores(
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
