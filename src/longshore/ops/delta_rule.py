"""The gated delta rule over joined runs, chunk by chunk.

In: rows. Out: rows, and the state each run ends with. A state S is a map from keys to values that
fades, then is corrected at one key towards one value:

    S ← exp(g_t)·S        S ← S + k_t ⊗ u_t,  u_t = beta_t·(v_t − k_tᵀS)        o_t = scale·q_tᵀS

A state begins at 0, or where another lane left it, and is affine in that beginning:
final = delta_transition · initial + (final from 0), which is how lanes pass it on.

Within a chunk that begins with S0, with c_ij the decay from row j to row i and c_i from S0 to it,

    u_i + beta_i·Σ_{j<i} c_ij·(k_i·k_j)·u_j = beta_i·v_i − beta_i·c_i·k_iᵀS0

is a triangular system; solved for both right sides it gives u = U − W·S0, and all else is products.
`prepare_delta` does all that needs no S0, so that lanes can exchange states in between.

T rows, S runs, H heads, K and V width of keys and values; M chunks of Q rows, laid out as in
ops/chunks.py. With one head, K = V = 1, q = k = scale = 1, g = 0 and beta = ½ the state goes half
way to each value: runs of values 4 8 | 6 give 2 5 | 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of
from longshore.ops.chunks import Chunks, carry, chunks_of, decays, first_states


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
    prepared = prepare_delta(
        q_THK, k_THK, v_THV, g_TH, beta_TH, scale=scale, bounds=bounds, chunk=chunk
    )
    return prepared.run(initial)


def delta_transition(
    k_THK: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    bounds: Bounds | None = None,
    chunk: int = 64,
) -> Tensor:
    """(S, H, K, K): the matrix by which each run multiplies the state it is handed."""
    layout = chunks_of(offsets_of(bounds, len(k_THK)), chunk, device=k_THK.device)
    dtype = torch.promote_types(k_THK.dtype, torch.float32)
    none = _cut(layout, k_THK[..., :0], dtype)
    return _product(layout, _solve(layout, k_THK, none, g_TH, beta_TH).transition)


def prepare_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    scale: float | None = None,
    bounds: Bounds | None = None,
    chunk: int = 64,
) -> "PreparedDelta":
    """The part of `gated_delta_rule` that does not depend on the initial states."""
    rows, _, keys = k_THK.shape
    layout = chunks_of(offsets_of(bounds, rows), chunk, device=v_THV.device)
    dtype = torch.promote_types(v_THV.dtype, torch.float32)
    q = _cut(layout, q_THK, dtype) * (keys**-0.5 if scale is None else scale)
    solved = _solve(layout, k_THK, _cut(layout, v_THV, dtype), g_TH, beta_TH)
    return PreparedDelta(
        layout=layout,
        from_values=solved.from_values,
        from_state=solved.from_state,
        transition=solved.transition,
        added=solved.faded_k.mT @ solved.from_values,
        scores=q @ solved.k.mT * solved.decay,
        faded_q=q * solved.since_start,
        dtype=v_THV.dtype,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDelta:
    """What the chunks do, whatever states they begin with.

    from_values, from_state: U (M, H, Q, V) and W (M, H, Q, K). transition, added: (M, H, K, K) and
    (M, H, K, V), what a chunk does to the state. scores: (M, H, Q, Q). faded_q: queries as they see
    the state that entered. dtype: of the outputs.
    """

    layout: Chunks
    from_values: Tensor
    from_state: Tensor
    transition: Tensor
    added: Tensor
    scores: Tensor
    faded_q: Tensor
    dtype: torch.dtype

    def ends(self) -> tuple[Tensor, Tensor]:
        """Of each run, the transition (S, H, K, K) and the final state from 0 (S, H, K, V)."""
        return _product(self.layout, self.transition), self._carried(None)[1]

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, V) and final states (S, H, K, V)."""
        entering, final = self._carried(initial)
        updates = self.from_values - self.from_state @ entering
        made = self.scores @ updates + self.faded_q @ entering
        return self.layout.join(made.transpose(1, 2)).to(self.dtype), final

    def _carried(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = (self.layout.runs, *self.added.shape[1:])
        start = first_states(initial, shape, like=self.added)
        parts = (self.transition, self.added)
        return carry(self.layout, start, lambda s, a, b: a @ s + b, parts=parts)


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


def _product(layout: Chunks, transition: Tensor) -> Tensor:
    """(S, H, K, K): the product of the chunks of each run."""
    heads, keys = transition.shape[1:3]
    eye = torch.eye(keys, dtype=transition.dtype, device=transition.device)
    start = eye.expand(layout.runs, heads, keys, keys)
    return carry(layout, start, lambda s, a: a @ s, parts=(transition,))[1]


def _cut(layout: Chunks, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, H, …) as (M, H, Q, …)."""
    return layout.cut(rows.to(dtype)).transpose(1, 2)
