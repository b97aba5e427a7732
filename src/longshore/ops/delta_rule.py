"""The gated delta rule over joined sequences, chunk by chunk.

In: rows. Out: rows, and the final state of each sequence. A state S maps keys to values; each token
decays it, then corrects it at one key towards one value:

    S ← exp(g_t)·S        S ← S + k_t ⊗ u_t,  u_t = beta_t·(v_t − k_tᵀS)        o_t = scale·q_tᵀS

The initial state is 0, or another lane's final state, and the final state is affine in it:
final = transition · initial + (final from 0), which is how lanes pass states.

In a chunk with the initial state S0, with c_ij the decay from row j to row i and c_i from S0 to it,

    u_i + beta_i·Σ_{j<i} c_ij·(k_i·k_j)·u_j = beta_i·v_i − beta_i·c_i·k_iᵀS0

is a triangular system; solved for both right sides it gives u = U − W·S0, and the rest is matrix
products. `prepare_delta` does everything that needs no S0, so that lanes can then exchange states.

The final state of a chunk is S = c·S0 + K̂ᵀ(U − W·S0), with c and K̂ the decay, and the keys decayed
to the chunk's end. The matrix form (c − K̂ᵀW)·S0 + K̂ᵀU is not used: its rounding error would be the
same in every chunk, and with repeated keys and little decay states would drift in long sequences.

T rows, S sequences, H heads, K and V width of keys and values; M chunks of Q rows, laid out as in
ops/boundaries.py. With one head, K = V = 1, q = k = scale = 1, g = 0 and beta = ½ the state goes
half way to each value: sequences of values 4 8 | 6 give 2 5 | 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from longshore.ops.backends import pick
from longshore.ops.boundaries import (
    Bounds,
    Chunks,
    PreparedScan,
    carry,
    chunks,
    decays,
    first_states,
    split_decay,
)
from longshore.ops.linear import product, solve_unit_lower

L2_EPS = 1e-6
"""Added to the squared length of queries and keys; flash-linear-attention has the same."""


def prepare_heads(
    q_TRK: Tensor,
    k_TRK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    bounds: Bounds | None = None,
) -> PreparedScan:
    """`prepare_delta` of queries and keys of any length, each head serving H/R value heads."""

    def plain() -> PreparedDelta:
        served = v_THV.shape[1] // k_TRK.shape[1]
        q_THK, k_THK = (_unit(x).repeat_interleave(served, dim=1) for x in (q_TRK, k_TRK))
        return prepare_delta(q_THK, k_THK, v_THV, g_TH, beta_TH, bounds=bounds)

    kernels = pick("delta rule", k_TRK, v_THV)
    if kernels is None:
        return plain()
    return kernels.prepare(q_TRK, k_TRK, v_THV, g_TH, beta_TH, bounds=bounds, make_plain=plain)


def prepare_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    scale: float | None = None,
    bounds: Bounds | None = None,
    chunk: int | None = None,
) -> "PreparedDelta":
    """Everything that does not depend on the initial states.

    g: log decay, 0 or less. q and k are already normalised; scale: K^−½ for None.
    """
    rows, _, keys = k_THK.shape
    layout = chunks(bounds, rows, chunk, v_THV.device)
    dtype = torch.promote_types(v_THV.dtype, torch.float32)
    q, k, v, g, beta = (_cut(layout, each, dtype) for each in (q_THK, k_THK, v_THV, g_TH, beta_TH))
    q = q * (keys**-0.5 if scale is None else scale)
    decay = decays(g)
    return PreparedDelta(
        layout=layout,
        updates=_updates(k, v, g, beta, decay=decay),
        scores=product(q, k.mT) * decay,
        faded_q=q * _since_start(g),
        dtype=v_THV.dtype,
    )


def _past_chunk(
    state: Tensor,
    from_values: Tensor,
    from_state: Tensor,
    faded_k: Tensor,
    one: Tensor,
    rest: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next state, the chunk's initial state, and the updates u of its rows."""
    updates = from_values - product(from_state, state)
    changed = rest * state + product(faded_k.mT, updates)
    return one * state + changed, state, updates


@dataclass(frozen=True, slots=True, eq=False)
class PreparedDelta:
    """What each chunk computes independently of its initial state."""

    layout: Chunks
    """How the rows are divided into chunks."""
    updates: tuple[Tensor, ...]
    """U (M, H, Q, V), W and K̂ (M, H, Q, K), and c in two parts (M, H, 1, 1), see split_decay."""
    scores: Tensor
    """(M, H, Q, Q)."""
    faded_q: Tensor
    """(M, H, Q, K): queries with the decay since the chunk's start."""
    dtype: torch.dtype
    """The dtype of the outputs."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """The transition (S, H, K, K) and the final state from 0 (S, H, K, V) of each sequence."""
        from_values, from_state, *others = self.updates
        heads, _, values = from_values.shape[1:]
        keys = from_state.shape[3]
        nothing, eye = torch.zeros_like(from_state), from_state.new_ones(keys).diag()
        # Extra columns that start as the identity and get no values become the transition.
        start = pad(eye, (values, 0)).expand(self.layout.sequences, heads, keys, values + keys)
        wide = (torch.cat([from_values, nothing], dim=3), from_state, *others)
        joined = carry(self.layout, start, _past_chunk, parts=wide)[0]
        final, transition = joined.split([values, keys], dim=3)
        return transition, final

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, V) and final states (S, H, K, V)."""
        heads, _, values = self.updates[0].shape[1:]
        shape = (self.layout.sequences, heads, self.faded_q.shape[3], values)
        start = first_states(initial, shape, like=self.faded_q)
        final, entering, updates = carry(self.layout, start, _past_chunk, parts=self.updates)
        out = product(self.scores, updates) + product(self.faded_q, entering)
        return self.layout.join(out.transpose(1, 2)).to(self.dtype), final


def _updates(k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, decay: Tensor) -> tuple[Tensor, ...]:
    """How chunks (M, H, Q, …) update their initial states: solves their triangular systems."""
    scaled_k = beta[..., None] * k
    system = (product(scaled_k, k.mT) * decay).tril(-1)
    right = torch.cat([beta[..., None] * v, scaled_k * _since_start(g)], dim=-1)
    solution = solve_unit_lower(system, right)
    from_values, from_state = solution.split([v.shape[3], k.shape[3]], dim=-1)
    one, rest = split_decay(g.sum(-1)[..., None, None])
    return from_values, from_state, k * decay[..., -1, :, None], one, rest


def _unit(x: Tensor) -> Tensor:
    """Heads of length 1, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * (wide.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _since_start(g: Tensor) -> Tensor:
    """c_i: (M, H, Q, 1)."""
    return g.cumsum(-1).exp()[..., None]


def _cut(layout: Chunks, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(T, H, …) as (M, H, Q, …)."""
    return layout.cut(rows.to(dtype)).transpose(1, 2).contiguous()
