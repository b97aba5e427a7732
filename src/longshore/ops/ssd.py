"""Mamba2's state-space scan over joined runs, chunk by chunk.

In: rows. Out: rows, and the state each run ends with. With a = exp(dt·A), a number for each head:

    h_t = a_t·h_{t−1} + dt_t·x_t ⊗ B_t        y_t = h_t·C_t + D·x_t

The state of a run begins at 0, or where another lane left it. It is affine in that beginning:
final = ssd_transition · initial + (final from 0), which is how lanes pass it on. With one head,
P = N = 1, dt = B = C = 1 and exp(A) = ½, runs of x 4 2 8 | 6 give y 4 4 10 | 6.

`prepare_ssd` does all that needs no initial state, so that lanes can exchange states in between:

    prepared = prepare_ssd(x, dt, A, B, C, bounds=bounds)
    transition, final = prepared.ends()         of each run, from a state of 0
    y, final = prepared.run(initial)

T rows, S runs, H heads, P width of a head, G groups of heads, N width of the state; M chunks of Q
rows, as ops/chunks.py lays them out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of
from longshore.ops.chunks import Chunks, carry, chunks_of, decays, first_states


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
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """(T, H, P) in the dtype of x, and final states (S, H, P, N) in float32 at least.

    dt is biased and positive already, A negative. Head h uses group h·G // H. initial: (S, H, P,
    N), 0 for None.
    """
    prepared = prepare_ssd(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H=D_H, bounds=bounds, chunk=chunk)
    return prepared.run(initial)


def ssd_transition(
    dt_TH: Tensor, A_H: Tensor, *, bounds: Bounds | None = None, chunk: int = 64
) -> Tensor:
    """(S, H): by how much each run shrinks the state it is handed."""
    layout = chunks_of(offsets_of(bounds, len(dt_TH)), chunk, device=dt_TH.device)
    dtype = torch.promote_types(dt_TH.dtype, torch.float32)
    logs = layout.cut(dt_TH.to(dtype) * A_H.to(dtype))
    return _shrinking(layout, logs.sum(1).exp())


def prepare_ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    *,
    D_H: Tensor | None = None,
    bounds: Bounds | None = None,
    chunk: int = 64,
) -> "PreparedSSD":
    """The part of `ssd` that does not depend on the initial states."""
    rows, heads, _ = x_THP.shape
    groups = B_TGN.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} groups; choose another")
    layout = chunks_of(offsets_of(bounds, rows), chunk, device=x_THP.device)
    dtype = torch.promote_types(x_THP.dtype, torch.float32)
    dt, A = dt_TH.to(dtype), A_H.to(dtype)
    B, C = layout.cut(B_TGN.to(dtype)), layout.cut(C_TGN.to(dtype))
    # In einsums: m chunk, i and j its rows, g group, r head of the group, p width, n state.
    logs = torch.unflatten(layout.cut(dt * A), 2, (groups, -1))
    x = torch.unflatten(layout.cut(dt[:, :, None] * x_THP), 2, (groups, -1))
    decay = decays(logs.movedim(1, -1))
    to_end = decay[..., -1, :].movedim(-1, 1)[..., None]
    scores = torch.einsum("mign,mjgn->mgij", C, B)[:, :, None] * decay
    return PreparedSSD(
        layout=layout,
        C=C,
        since_start=logs.cumsum(1).exp(),
        whole=logs.sum(1).exp(),
        added=torch.einsum("mjgrp,mjgn->mgrpn", to_end * x, B),
        inner=torch.einsum("mgrij,mjgrp->migrp", scores, x),
        direct=None if D_H is None else D_H.to(dtype)[:, None] * x_THP,
        dtype=x_THP.dtype,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSSD:
    """What the chunks do, whatever states they begin with.

    C: (M, Q, G, N). since_start: (M, Q, G, H/G), what is left at a row of the state that entered.
    whole: (M, G, H/G), the same past the last row. added: (M, G, H/G, P, N), what a chunk adds to
    the state. inner: (M, Q, G, H/G, P), outputs from a state of 0. direct: (T, H, P), D·x, or None.
    dtype: of the outputs.
    """

    layout: Chunks
    C: Tensor
    since_start: Tensor
    whole: Tensor
    added: Tensor
    inner: Tensor
    direct: Tensor | None
    dtype: torch.dtype

    def ends(self) -> tuple[Tensor, Tensor]:
        """Of each run, the transition (S, H) and the final state from 0 (S, H, P, N)."""
        final = self._carried(None)[1]
        return _shrinking(self.layout, self.whole.flatten(1)), final.flatten(1, 2)

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, P) and final states (S, H, P, N)."""
        entering, final = self._carried(initial)
        outer = torch.einsum("mign,mgrpn->migrp", self.C, entering) * self.since_start[..., None]
        y_THP = self.layout.join((self.inner + outer).flatten(2, 3))
        if self.direct is not None:
            y_THP = y_THP + self.direct
        return y_THP.to(self.dtype), final.flatten(1, 2)

    def _carried(self, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        groups, each, width, state = self.added.shape[1:]
        shape = (self.layout.runs, groups * each, width, state)
        start = first_states(initial, shape, like=self.added).unflatten(1, (groups, each))
        parts = (self.whole[..., None, None], self.added)
        return carry(self.layout, start, lambda h, a, b: a * h + b, parts=parts)


def _shrinking(layout: Chunks, whole_MH: Tensor) -> Tensor:
    """(S, H): the product of what each chunk of a run leaves."""
    start = whole_MH.new_ones(layout.runs, whole_MH.shape[1])
    return carry(layout, start, torch.mul, parts=(whole_MH,))[1]
