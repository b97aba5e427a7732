"""Mamba2's state-space scan over joined sequences, chunk by chunk.

In: rows. Out: rows, and the final state of each sequence. With a = exp(dt·A), one for each head:

    h_t = a_t·h_{t−1} + dt_t·x_t ⊗ B_t        y_t = h_t·C_t + D·x_t

The initial state of a sequence is 0, or another lane's final state. The final state is affine in
it: final = transition · initial + (final from 0), which is how lanes pass states. With one
head, P = N = 1, dt = B = C = 1 and exp(A) = ½, sequences x 4 2 8 | 6 give y 4 4 10 | 6.

`prepare_ssd` does everything that needs no initial state, so that lanes can then exchange states:

    prepared = prepare_ssd(x, dt, A, B, C, bounds=bounds)
    transition, final = prepared.ends()         of each sequence, from a state of 0
    y, final = prepared.run(initial)

T rows, S sequences, H heads, P width of a head, G groups of heads, N width of the state; M chunks
of Q rows, laid out as in ops/boundaries.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

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
from longshore.ops.linear import product


def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    *,
    D_H: Tensor | None = None,
    bounds: Bounds | None = None,
    initial: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(T, H, P) in the dtype of x, and final states (S, H, P, N) in float32 at least.

    dt already has its bias and is positive, A is negative. Head h uses group h·G // H. initial:
    (S, H, P, N), 0 for None.
    """
    prepared = prepare_ssd(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H=D_H, bounds=bounds, chunk=chunk)
    return prepared.run(initial)


def prepare_ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    *,
    D_H: Tensor | None = None,
    bounds: Bounds | None = None,
    chunk: int | None = None,
) -> PreparedScan:
    """The part of `ssd` that does not depend on the initial states.

    chunk: rows of a chunk in plain torch; kernels have their own, and run only for None.
    """
    rows, heads, _ = x_THP.shape
    groups = B_TGN.shape[1]
    if heads % groups:
        raise ValueError(
            f"there are {heads} heads, which must be a multiple of the {groups} groups"
        )
    kernels = pick("ssd", x_THP, B_TGN) if chunk is None else None
    if kernels is not None:
        return kernels.prepare(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, bounds)
    layout = chunks(bounds, rows, chunk, x_THP.device)
    dtype = torch.promote_types(x_THP.dtype, torch.float32)
    dt, A = dt_TH.to(dtype), A_H.to(dtype)
    B, C = _cut(layout, B_TGN.to(dtype)), _cut(layout, C_TGN.to(dtype))
    logs = _cut(layout, (dt * A).unflatten(1, (groups, -1)))
    x = _cut(layout, (dt[:, :, None] * x_THP).unflatten(1, (groups, -1)))
    # From here on (M, G, H/G, Q, …): what the heads of a group do to the rows of a chunk.
    logs, x = logs.transpose(2, 3).contiguous(), x.transpose(2, 3).contiguous()
    decay = decays(logs)
    scores = product(C, B.mT)[:, :, None] * decay
    faded = decay[..., -1, :, None] * x
    return PreparedSSD(
        layout=layout,
        C=C,
        since_start=logs.cumsum(-1).exp()[..., None],
        log_decay=logs.sum(-1)[..., None, None],
        added=product(faded.mT.flatten(2, 3), B).unflatten(2, (x.shape[2], -1)),
        inner=product(scores, x),
        direct=None if D_H is None else D_H.to(dtype)[:, None] * x_THP,
        dtype=x_THP.dtype,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSSD:
    """What each chunk computes independently of its initial state."""

    layout: Chunks
    """How the rows are divided into chunks."""
    C: Tensor
    """(M, G, Q, N)."""
    since_start: Tensor
    """(M, G, H/G, Q, 1): the decay of the chunk's initial state at each row."""
    log_decay: Tensor
    """(M, G, H/G, 1, 1): the log of its decay over the chunk."""
    added: Tensor
    """(M, G, H/G, P, N): what the chunk adds to the state."""
    inner: Tensor
    """(M, G, H/G, Q, P): outputs from a state of 0."""
    direct: Tensor | None
    """(T, H, P): D·x, or None."""
    dtype: torch.dtype
    """The dtype of the outputs."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """The transition (S, H) and the final state from 0 (S, H, P, N) of each sequence."""
        final = self._carried(None)[0]
        return _total_decay(self.layout, self.log_decay.flatten(1)), final.flatten(1, 2)

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, P) and final states (S, H, P, N)."""
        final, entering = self._carried(initial)
        read = product(self.C, entering.flatten(2, 3).mT)
        outer = read.unflatten(3, entering.shape[2:4]).transpose(2, 3) * self.since_start
        y_THP = self.layout.join((self.inner + outer).flatten(1, 2).transpose(1, 2))
        if self.direct is not None:
            y_THP = y_THP + self.direct
        return y_THP.to(self.dtype), final.flatten(1, 2)

    def _carried(self, initial: Tensor | None) -> tuple[Tensor, ...]:
        """The final states of the sequences, and the initial states of the chunks."""
        groups, each, width, state = self.added.shape[1:]
        shape = (self.layout.sequences, groups * each, width, state)
        start = first_states(initial, shape, like=self.added).unflatten(1, (groups, each))
        parts = (*split_decay(self.log_decay), self.added)
        return carry(self.layout, start, _past_chunk, parts=parts)


def _past_chunk(h: Tensor, one: Tensor, rest: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The next state, and the chunk's initial state."""
    return one * h + (rest * h + added), h


def _total_decay(layout: Chunks, logs_MH: Tensor) -> Tensor:
    """(S, H): the decay over each sequence, from the log decays of its chunks."""
    start = logs_MH.new_zeros(layout.sequences, logs_MH.shape[1])
    return carry(layout, start, lambda sums, logs: (sums + logs,), parts=(logs_MH,))[0].exp()


def _cut(layout: Chunks, rows_TG: Tensor) -> Tensor:
    """(T, G, …) as (M, G, Q, …)."""
    return layout.cut(rows_TG).transpose(1, 2)
