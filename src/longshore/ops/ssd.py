"""Mamba2's state-space scan over joined runs, chunk by chunk, and the chunks themselves.

In: rows. Out: rows, and the state each run ends with. With a = exp(dt·A), a number for each head:

    h_t = a_t·h_{t−1} + dt_t·x_t ⊗ B_t        y_t = h_t·C_t + D·x_t

The state of a run begins at 0, or where another lane left it. It is affine in that beginning:
final = ssd_transition · initial + (final from 0), which is how lanes pass it on. With one head,
P = N = 1, dt = B = C = 1 and exp(A) = ½, runs of x 4 2 8 | 6 give y 4 4 10 | 6.

T rows, S runs, H heads, P width of a head, G groups of heads, N width of the state; M chunks of Q
rows. Each run is padded to whole chunks of its own, so no chunk holds two runs. Chunks lie by their
number within the run, longest run first. Runs a of 3 chunks, b of 1 and c of 2:

    chunks  a0 c0 b0 | a1 c1 | a2        steps (3, 2, 1)

so that a step takes the next slice of the chunks and the first rows of the states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore.ops.boundaries import Bounds, offsets_of


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
    rows, heads, width = x_THP.shape
    groups, state = B_TGN.shape[1:]
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} groups; choose another")
    layout = chunks_of(offsets_of(bounds, rows), chunk, device=x_THP.device)
    start = first_states(initial, (layout.runs, heads, width, state), like=x_THP)
    dt, A = dt_TH.to(start.dtype), A_H.to(start.dtype)
    B, C = layout.cut(B_TGN.to(start.dtype)), layout.cut(C_TGN.to(start.dtype))
    # In einsums: m chunk, i and j its rows, g group, r head of the group, p width, n state.
    logs = torch.unflatten(layout.cut(dt * A), 2, (groups, -1))
    x = torch.unflatten(layout.cut(dt[:, :, None] * x_THP), 2, (groups, -1))
    decay = decays(logs.movedim(1, -1))
    to_end = decay[..., -1, :].movedim(-1, 1)[..., None]
    added = torch.einsum("mjgrp,mjgn->mgrpn", to_end * x, B)
    whole = logs.sum(1).exp()[..., None, None]
    start = torch.unflatten(start, 1, (groups, -1))
    entering, final = carry(layout, start, lambda h, a, b: a * h + b, parts=(whole, added))

    scores = torch.einsum("mign,mjgn->mgij", C, B)[:, :, None] * decay
    inner = torch.einsum("mgrij,mjgrp->migrp", scores, x)
    outer = torch.einsum("mign,mgrpn->migrp", C, entering) * logs.cumsum(1).exp()[..., None]
    y_THP = layout.join((inner + outer).flatten(2, 3))
    if D_H is not None:
        y_THP = y_THP + D_H.to(start.dtype)[:, None] * x_THP
    return y_THP.to(x_THP.dtype), final.flatten(1, 2)


def ssd_transition(
    dt_TH: Tensor, A_H: Tensor, *, bounds: Bounds | None = None, chunk: int = 64
) -> Tensor:
    """(S, H): by how much each run shrinks the state it is handed."""
    layout = chunks_of(offsets_of(bounds, len(dt_TH)), chunk, device=dt_TH.device)
    start = first_states(None, (layout.runs, dt_TH.shape[1]), like=dt_TH) + 1
    logs = layout.cut(dt_TH.to(start.dtype) * A_H.to(start.dtype))
    return carry(layout, start, torch.mul, parts=(logs.sum(1).exp(),))[1]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The rows of joined runs, laid out in chunks as the top of this file shows.

    places: int64 (T), of each row among the M·Q. steps: the chunks of each step, falling. order:
    int64 (S), the runs from the longest down; back: its inverse.
    """

    size: int
    runs: int
    steps: tuple[int, ...]
    places: Tensor
    order: Tensor
    back: Tensor

    def cut(self, rows: Tensor) -> Tensor:
        """(T, …) as (M, Q, …), with 0 at padding."""
        chunks = rows.new_zeros(sum(self.steps) * self.size, *rows.shape[1:])
        chunks = chunks.index_copy(0, self.places, rows)
        return chunks.view(sum(self.steps), self.size, *rows.shape[1:])

    def join(self, chunks: Tensor) -> Tensor:
        """(M, Q, …) as (T, …)."""
        return chunks.flatten(0, 1).index_select(0, self.places)


def chunks_of(offsets: Sequence[int], size: int, *, device: torch.device) -> Chunks:
    """The chunks of runs with these offsets, made on the host."""
    if size < 1:
        raise ValueError(f"a chunk of {size} rows is impossible; take 1 or more")
    starts = np.asarray(offsets[:-1], dtype=np.int64)
    lengths = np.asarray(offsets[1:], dtype=np.int64) - starts
    counts = -(-lengths // size)
    order = np.argsort(-counts, kind="stable")
    back = np.argsort(order, kind="stable")
    most = int(counts.max(initial=0))
    steps = len(counts) - np.searchsorted(np.sort(counts), np.arange(most), side="right")

    run = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(run)) - (np.cumsum(counts) - counts)[run]
    place = (np.cumsum(steps) - steps)[number] + back[run]
    first = starts[run] + number * size
    tokens = np.minimum(size, starts[run] + lengths[run] - first)
    places = np.arange(offsets[-1]) + np.repeat(place * size - first, tokens)
    return Chunks(
        size=size,
        runs=len(counts),
        steps=tuple(steps.tolist()),
        places=to_device(places, device),
        order=to_device(order, device),
        back=to_device(back, device),
    )


def carry(
    layout: Chunks, initial: Tensor, step: Callable[..., Tensor], *, parts: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The state entering each chunk (M, …) and leaving each run (S, …).

    step(state, *parts) takes the states of some runs past one chunk of each; parts are (M, …).
    """
    state = initial.index_select(0, layout.order)
    entering: list[Tensor] = [state[:0]]
    ended: list[Tensor] = []
    # Splits, not slices: their backward joins all parts once instead of filling M rows for each.
    for each in zip(*(part.split_with_sizes(layout.steps) for part in parts), strict=True):
        state, done = state.split_with_sizes([len(each[0]), len(state) - len(each[0])])
        ended.append(done)
        entering.append(state)
        state = step(state, *each)
    final = torch.cat([state, *reversed(ended)])
    return torch.cat(entering), final.index_select(0, layout.back)


def decays(logs: Tensor) -> Tensor:
    """(…, Q) of log decays as (…, Q, Q): what is left at row i of what came in at row j, 0 for
    j > i.

    Each sum of logs from j + 1 to i is made on its own: a difference of two long sums would lose
    the small decays that follow a strong one.
    """
    ones = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device)
    sums = torch.where(ones.tril(-1), logs[..., None], 0.0).cumsum(-2)
    return sums.masked_fill(ones.triu(1), float("-inf")).exp()


def first_states(initial: Tensor | None, shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """`initial`, or zeros, of this shape and of float32 or float64 as the rows `like` need."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if initial is None:
        return like.new_zeros(shape, dtype=dtype)
    if initial.shape != shape:
        raise ValueError(f"initial states have shape {tuple(initial.shape)}; they must be {shape}")
    return initial.to(dtype)


def to_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The numbers on a device; from page-locked memory, so that the host does not wait."""
    tensor = torch.from_numpy(numbers)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
