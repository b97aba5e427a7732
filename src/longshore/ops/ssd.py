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
from longshore.ops.chunks import Chunks, carry, chunks_of, decays, first_states, kept
from longshore.ops.products import product


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

    dt is biased and positive already, A negative. Head h uses group h·G // H. initial: (S, H, P,
    N), 0 for None.
    """
    prepared = prepare_ssd(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H=D_H, bounds=bounds, chunk=chunk)
    return prepared.run(initial)


def ssd_transition(
    dt_TH: Tensor, A_H: Tensor, *, bounds: Bounds | None = None, chunk: int | None = None
) -> Tensor:
    """(S, H): by how much each run shrinks the state it is handed."""
    layout = chunks_of(offsets_of(bounds, len(dt_TH)), chunk, device=dt_TH.device)
    dtype = torch.promote_types(dt_TH.dtype, torch.float32)
    logs = layout.cut(dt_TH.to(dtype) * A_H.to(dtype))
    return _shrinking(layout, logs.sum(1))


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
) -> "PreparedSSD":
    """The part of `ssd` that does not depend on the initial states."""
    rows, heads, _ = x_THP.shape
    groups = B_TGN.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} groups; choose another")
    layout = chunks_of(offsets_of(bounds, rows), chunk, device=x_THP.device)
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
        whole=logs.sum(-1)[..., None, None],
        added=product(faded.mT.flatten(2, 3), B).unflatten(2, (x.shape[2], -1)),
        inner=product(scores, x),
        direct=None if D_H is None else D_H.to(dtype)[:, None] * x_THP,
        dtype=x_THP.dtype,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedSSD:
    """What the chunks do, whatever states they begin with.

    C: (M, G, Q, N). since_start: (M, G, H/G, Q, 1), what is left at a row of the state that
    entered. whole: (M, G, H/G, 1, 1), the log of what is left of it past the last row. added: what
    a chunk adds to the state, (M, G, H/G, P, N). inner: outputs from a state of 0, (M, G, H/G, Q,
    P). direct: (T, H, P), D·x, or None. dtype: of the outputs.
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
        final = self._carried(None)[0]
        return _shrinking(self.layout, self.whole.flatten(1)), final.flatten(1, 2)

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, P) and final states (S, H, P, N)."""
        final, entering = self._carried(initial)
        seen = product(self.C, entering.flatten(2, 3).mT)
        outer = seen.unflatten(3, entering.shape[2:4]).transpose(2, 3) * self.since_start
        y_THP = self.layout.join((self.inner + outer).flatten(1, 2).transpose(1, 2))
        if self.direct is not None:
            y_THP = y_THP + self.direct
        return y_THP.to(self.dtype), final.flatten(1, 2)

    def _carried(self, initial: Tensor | None) -> tuple[Tensor, ...]:
        """The states that leave the runs, and those that enter the chunks."""
        groups, each, width, state = self.added.shape[1:]
        shape = (self.layout.runs, groups * each, width, state)
        start = first_states(initial, shape, like=self.added).unflatten(1, (groups, each))
        parts = (*kept(self.whole), self.added)
        return carry(self.layout, start, _past_chunk, parts=parts)


def _past_chunk(h: Tensor, one: Tensor, rest: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The next state, and the one that entered."""
    return one * h + (rest * h + added), h


def _shrinking(layout: Chunks, whole_MH: Tensor) -> Tensor:
    """(S, H): what each run leaves, from the logs of what its chunks leave."""
    start = whole_MH.new_zeros(layout.runs, whole_MH.shape[1])
    return carry(layout, start, lambda sums, logs: (sums + logs,), parts=(whole_MH,))[0].exp()


def _cut(layout: Chunks, rows_TG: Tensor) -> Tensor:
    """(T, G, …) as (M, G, Q, …)."""
    return layout.cut(rows_TG).transpose(1, 2)
