"""The gated delta rule over joined runs, chunk by chunk.

In: rows. Out: rows, and the state each run ends with. A state S is a map from keys to values that
fades, then is corrected at one key towards one value:

    S ← exp(g_t)·S        S ← S + k_t ⊗ u_t,  u_t = beta_t·(v_t − k_tᵀS)        o_t = scale·q_tᵀS

A state begins at 0, or where another lane left it, and is affine in that beginning:
final = delta_transition · initial + (final from 0), which is how lanes pass it on.

Within a chunk that begins with S0, with c_ij the decay from row j to row i and c_i from S0 to it,

    u_i + beta_i·Σ_{j<i} c_ij·(k_i·k_j)·u_j = beta_i·v_i − beta_i·c_i·k_iᵀS0

is a triangular system; solved for both right sides it gives u = U − W·S0, and all else is products.

T rows, S runs, H heads, K and V width of keys and values; M chunks of Q rows, laid out as in
ops/ssd.py. With one head, K = V = 1, q = k = scale = 1, g = 0 and beta = ½ the state goes half way
to each value: runs of values 4 8 | 6 give 2 5 | 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of
from longshore.ops.ssd import Chunks, carry, chunks_of, decays, first_states


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    scale: float | None = None,
    bounds: Bounds | None = None,
    initial: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """(T, H, V) in the dtype of v, and final states (S, H, K, V) in float32 at least.

    g: log decay, 0 or less. q and k are normalised already; scale: K^−½ for None. initial: (S, H,
    K, V), 0 for None.
    """
    rows, heads, keys = k_THK.shape
    layout = chunks_of(offsets_of(bounds, rows), chunk, device=v_THV.device)
    start = first_states(initial, (layout.runs, heads, keys, v_THV.shape[2]), like=v_THV)
    q = _cut(layout, q_THK, start.dtype) * (keys**-0.5 if scale is None else scale)
    v = _cut(layout, v_THV, start.dtype)
    solved = _solve(layout, k_THK, v, g_TH, beta_TH)
    entering, final = carry(
        layout,
        start,
        lambda s, a, b: a @ s + b,
        parts=(solved.transition, solved.faded_k.mT @ solved.from_values),
    )
    updates = solved.from_values - solved.from_state @ entering
    inner = (q @ solved.k.mT * solved.decay) @ updates
    outer = (q * solved.since_start) @ entering
    o_THV = layout.join((inner + outer).transpose(1, 2))
    return o_THV.to(v_THV.dtype), final


def delta_transition(
    k_THK: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    bounds: Bounds | None = None,
    chunk: int = 64,
) -> Tensor:
    """(S, H, K, K): the matrix by which each run multiplies the state it is handed."""
    rows, heads, keys = k_THK.shape
    layout = chunks_of(offsets_of(bounds, rows), chunk, device=k_THK.device)
    zeros = first_states(None, (layout.runs, heads, keys, keys), like=k_THK)
    start = zeros + torch.eye(keys, dtype=zeros.dtype, device=zeros.device)
    none = _cut(layout, k_THK[..., :0], start.dtype)
    solved = _solve(layout, k_THK, none, g_TH, beta_TH)
    return carry(layout, start, lambda s, a: a @ s, parts=(solved.transition,))[1]


@dataclass(frozen=True, slots=True, eq=False)
class _Solved:
    """What a chunk does, whatever state it begins with.

    from_values, from_state: U (M, H, Q, V) and W (M, H, Q, K). decay: c_ij. since_start: c_i (M, H,
    Q, 1). faded_k: keys as the end of the chunk sees them. transition: (M, H, K, K).
    """

    k: Tensor
    from_values: Tensor
    from_state: Tensor
    decay: Tensor
    since_start: Tensor
    faded_k: Tensor
    transition: Tensor


def _solve(layout: Chunks, k_THK: Tensor, v: Tensor, g_TH: Tensor, beta_TH: Tensor) -> _Solved:
    keys, values = k_THK.shape[2], v.shape[3]
    k = _cut(layout, k_THK, v.dtype)
    g = _cut(layout, g_TH, v.dtype)
    beta = _cut(layout, beta_TH, v.dtype)[..., None]
    decay = decays(g)
    since_start = g.cumsum(-1).exp()[..., None]
    system = (beta * k @ k.mT * decay).tril(-1)
    right = torch.cat([beta * v, beta * since_start * k], dim=-1)
    # The ones of the diagonal are implied.
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solution.split([values, keys], dim=-1)
    faded_k = k * decay[..., -1, :, None]
    kept = g.sum(-1).exp()[..., None, None] * torch.eye(keys, dtype=v.dtype, device=v.device)
    return _Solved(
        k=k,
        from_values=from_values,
        from_state=from_state,
        decay=decay,
        since_start=since_start,
        faded_k=faded_k,
        transition=kept - faded_k.mT @ from_state,
    )


def _cut(layout: Chunks, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, H, …) as (M, H, Q, …)."""
    return layout.cut(rows.to(dtype)).transpose(1, 2)
