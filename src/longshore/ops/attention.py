"""Causal attention over joined sequences: no sequence sees another.

In: queries (T, H, D), keys (S, K, D), values (S, K, V), where sequences begin and end, and an
optional window. Out: (T, H, V). Query head h reads key head h·K // H, so K divides H; V may differ
from D. Sequence i of the queries attends to sequence i of the keys, and the two are aligned at
their end. With 2 queries over 5 keys, and with window 3:

    query 0   sees keys 0 1 2 3         with window 3   1 2 3
    query 1   sees keys 0 1 2 3 4       with window 3     2 3 4

Plain torch takes blocks of query rows, each against the keys visible to it: scores of at most
MOST_ROWS rows exist at a time. 1200 queries over 1500 keys in blocks of 512 rows: rows 0:512 see
keys 0:812, rows 512:1024 keys 0:1324, rows 1024:1200 all 1500. How a sequence is divided depends
only on its own lengths, and its matrices are copied before they are multiplied: its result is
bitwise the same, whatever it is packed with. The right operand of each product is copied in the
layout the product reads, for the reason given in ops/linear.py.

Shapes: n rows of a block, m keys of a sequence, N = H/K · n, the rows of all query heads that share
a key head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.backends import pick
from longshore.ops.boundaries import Bounds, offsets_of


@dataclass(frozen=True, slots=True, eq=False)
class OneSequence:
    """The bounds of rows that are all one sequence."""

    offsets: tuple[int, ...]
    cu_seqlens: Tensor
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Which keys each query sees, and what becomes of its scores."""

    bounds: Bounds
    """The sequences of the queries."""
    key_bounds: Bounds
    """The sequences of the keys."""
    scale: float
    """What scores are multiplied by."""
    window: int | None
    """Keys that a query sees at most, itself included; None for all before it."""
    softcap: float | None = None
    """A score s becomes softcap · tanh(s / softcap); not every backend can do that."""


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
    bounds the queries are the last T tokens of one sequence of S. softcap c: a score s becomes
    c · tanh(s / c). sinks: (H), for each head a score without a key, which takes its share of the
    softmax and adds nothing: with 2 keys of score 0 and a sink of 0, each key weighs 1/3.
    """
    _check_shapes(q_THD, k_SKD, v_SKV)
    spec = _spec(
        q_THD, k_SKD, sinks,
        bounds=bounds, key_bounds=key_bounds, scale=scale, window=window, softcap=softcap,
    )  # fmt: skip
    return _Attention.apply(q_THD, k_SKD, v_SKV, sinks, spec)


def attention_forward(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, *, sinks: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The output (T, H, V) and the log-sum-exp of each query's scores (H, T). No autograd.

    For callers that save less than k and v for backward. options: as those of `attention`. The
    log-sum-exp counts sinks too, so that the backward of kernels which know no sinks is right as it
    is: weights are exp(score − log-sum-exp).
    """
    _check_shapes(q_THD, k_SKD, v_SKV)
    return _forward(q_THD, k_SKD, v_SKV, sinks, _spec(q_THD, k_SKD, sinks, **options))


def attention_backward(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    *,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of the output; sinks_gradient has that of sinks.

    No autograd.
    """
    spec = _spec(q_THD, k_SKD, sinks, **options)
    return _backward((grad_THV, q_THD, k_SKD, v_SKV, out_THV, lse_HT), sinks, spec)


def sinks_gradient(grad_THV: Tensor, out_THV: Tensor, lse_HT: Tensor, sinks: Tensor) -> Tensor:
    """(H), from the gradient of the output. A sink has a share of the softmax and no value."""
    wide = lse_HT.dtype
    taken_HT = (grad_THV.to(wide) * out_THV.to(wide)).sum(2).T
    shares_HT = (sinks.to(wide)[:, None] - lse_HT).exp()
    return -(shares_HT * taken_HT).sum(1).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec
    ) -> Tensor:
        out, lse = _forward(q, k, v, sinks, spec)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.spec = spec
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv = _backward((grad, q, k, v, out, lse), sinks, ctx.spec)
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return dq, dk, dv, dsinks, None


@torch.no_grad()
def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    backend = _backend(q, v, spec)
    if backend is None:
        return forward_by_blocks(q, k, v, sinks, spec)
    out, lse = backend.forward(q, k, v, spec)
    if sinks is None:
        return out, lse
    both_HT = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return (out * (lse - both_HT).exp().T[:, :, None]).to(out.dtype), both_HT


@torch.no_grad()
def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: the output's gradient, q, k, v, the output and the log-sum-exp."""
    grad, q, k, v, _, _ = saved
    backend = _backend(q, v, spec)
    if backend is None:
        return _backward_by_blocks(grad, q, k, v, sinks, spec)
    return backend.backward(*saved, spec)


def _backend(q: Tensor, v: Tensor, spec: AttentionSpec) -> Any:
    # No kernel has a softcap that was tested.
    return pick("attention", q, v) if spec.softcap is None else None


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
    sinks: Tensor | None,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees at least itself, so give 1 or more")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; give a number above 0, or None for no cap")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ValueError(
            f"sinks have the shape {tuple(sinks.shape)}; each of {q.shape[1]} heads has one"
        )
    if bounds is None and key_bounds is None:
        key_bounds = _one_sequence(k)
    bounds = bounds or _one_sequence(q)
    key_bounds = key_bounds or bounds
    _check_sequences(offsets_of(bounds, q.shape[0]), offsets_of(key_bounds, k.shape[0]))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    return AttentionSpec(bounds, key_bounds, scale, window, softcap)


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


Block = tuple[slice, slice, int]
"""Some query rows of one sequence: their rows among all queries, the keys of the sequence that some
row sees, and the key that is the first row's own token."""


def forward_by_blocks(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, sinks: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THD.shape
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    out_THV = q_THD.new_empty(tokens, heads, v_SKV.shape[2])
    lse_HT = q_THD.new_empty(heads, tokens, dtype=dtype)
    for rows, keys in _sequences(spec):
        k_KDm = _copied(k_SKD[keys].permute(1, 2, 0), dtype)
        v_KmV = _copied(v_SKV[keys].transpose(0, 1), dtype)
        for block in _blocks(rows, keys, heads=heads, window=spec.window):
            q_KND = _grouped(q_THD[block[0]], k_KDm).mul_(spec.scale)
            scores_KNm = _block_scores(q_KND, k_KDm, block, spec)
            sinks_KN = _sinks(sinks, q_KND)
            probs_KNm = _softmax(scores_KNm, sinks_KN)
            _put(out_THV[block[0]], probs_KNm @ v_KmV[:, block[1]])
            # The largest probability is 1 / Σ exp(score − largest score).
            lse_KN = scores_KNm.amax(2) - probs_KNm.amax(2).log()
            if sinks_KN is not None:
                # A large sink leaves probabilities of 0.
                lse_KN = torch.logaddexp(scores_KNm.logsumexp(2), sinks_KN)
            lse_HT[:, block[0]] = lse_KN.view(heads, -1)
    return out_THV, lse_HT


def _backward_by_blocks(
    grad_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax is computed again, from all scores of a block's rows, without the log-sum-exp.

    exp(score − lse) would be off by the rounding of lse, 1e-3 in float32 where scores are about
    1e4.
    """
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    # Keys that no query sees keep a gradient of 0.
    dq_THD, dk_SKD, dv_SKV = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_THD, k_SKD, v_SKV)
    )
    for rows, keys in _sequences(spec):
        k_KmD = _copied(k_SKD[keys].transpose(0, 1), dtype)
        v_KVm = _copied(v_SKV[keys].permute(1, 2, 0), dtype)
        k_KDm = k_KmD.mT.contiguous()
        dk_KmD, dv_KmV = torch.zeros_like(k_KmD), torch.zeros_like(v_KVm.mT)
        for block in _blocks(rows, keys, heads=q_THD.shape[1], window=spec.window):
            block_rows, block_keys, _ = block
            q_KND = _grouped(q_THD[block_rows], k_KmD).mul_(spec.scale)
            grad_KNV = _grouped(grad_THV[block_rows], k_KmD)
            scores_KNm = _block_scores(q_KND, k_KDm, block, spec)
            probs_KNm = _softmax(scores_KNm, _sinks(sinks, q_KND))
            dv_KmV[:, block_keys] += probs_KNm.mT @ grad_KNV
            dprobs_KNm = grad_KNV @ v_KVm[:, :, block_keys]
            dscores_KNm = _softmax_backward(dprobs_KNm, probs_KNm, 2, dtype)
            if spec.softcap is not None:
                slope_KNm = (scores_KNm / spec.softcap).square().neg_().add_(1)
                dscores_KNm = torch.where(probs_KNm > 0, dscores_KNm * slope_KNm, 0)
            dk_KmD[:, block_keys] += dscores_KNm.mT @ q_KND
            _put(dq_THD[block_rows], (dscores_KNm @ k_KmD[:, block_keys]).mul_(spec.scale))
        dk_SKD[keys] = dk_KmD.transpose(0, 1)
        dv_SKV[keys] = dv_KmV.transpose(0, 1)
    return dq_THD, dk_SKD, dv_SKV


def _sequences(spec: AttentionSpec) -> Iterator[tuple[slice, slice]]:
    """The rows and the keys of the sequences that have queries."""
    rows, keys = spec.bounds.offsets, spec.key_bounds.offsets
    for i in range(len(rows) - 1):
        if rows[i] < rows[i + 1]:
            yield slice(rows[i], rows[i + 1]), slice(keys[i], keys[i + 1])


def _blocks(rows: slice, keys: slice, *, heads: int, window: int | None) -> Iterator[Block]:
    count, key_count = rows.stop - rows.start, keys.stop - keys.start
    step = min(MOST_ROWS, max(FEWEST_ROWS, MOST_SCORES // (heads * key_count)))
    for start in range(0, count, step):
        stop = min(start + step, count)
        own = key_count - count + start
        first = 0 if window is None else max(0, own - window + 1)
        block_rows = slice(rows.start + start, rows.start + stop)
        yield block_rows, slice(first, own + stop - start), own


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _grouped(x_nHD: Tensor, like: Tensor) -> Tensor:
    """(K, N, D), a copy in the dtype of `like` (K, …): under each key head its query heads."""
    (rows, heads, width), shared = x_nHD.shape, len(like)
    split_KGnD = x_nHD.reshape(rows, shared, heads // shared, width).permute(1, 2, 0, 3)
    return _copied(split_KGnD, like.dtype).view(shared, -1, width)


def _put(target_nHD: Tensor, part_KND: Tensor) -> None:
    """Writes to where `_grouped` would read."""
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


def _block_scores(q_KND: Tensor, k_KDm: Tensor, block: Block, spec: AttentionSpec) -> Tensor:
    """(K, N, keys of the block), −inf where a row does not see the key."""
    block_rows, keys, own = block
    scores_KNm = q_KND @ k_KDm[:, :, keys]
    if spec.softcap is not None:
        scores_KNm = scores_KNm.div_(spec.softcap).tanh_().mul_(spec.softcap)
    rows = block_rows.stop - block_rows.start
    row_n1 = torch.arange(own, own + rows, device=q_KND.device).unsqueeze(1)
    key_m = torch.arange(keys.start, keys.stop, device=q_KND.device)
    hidden_nm = key_m > row_n1
    if spec.window is not None:
        hidden_nm |= key_m <= row_n1 - spec.window
    scores_KNm.view(-1, rows, len(key_m)).masked_fill_(hidden_nm, -torch.inf)
    return scores_KNm
