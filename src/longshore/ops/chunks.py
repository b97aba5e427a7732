"""Chunks of joined runs: how a scan is cut so that most of it becomes matrix products.

In: the offsets of runs, rows. Out: chunks of Q rows, and the states that enter them. Each run is
padded to whole chunks of its own, so no chunk holds two runs. Chunks lie by their number within the
run, longest run first. Runs a of 3 chunks, b of 1 and c of 2:

    chunks  a0 c0 b0 | a1 c1 | a2        steps (3, 2, 1)

so that a step takes the next slice of the chunks and the first rows of the states.

T rows, S runs; M chunks of Q rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.ops.boundaries import to_device
from longshore.ops.sizes import CHUNK_ROWS, CPU_CHUNK_ROWS


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


def chunks_of(offsets: Sequence[int], size: int | None, *, device: torch.device) -> Chunks:
    """The chunks of runs with these offsets, made on the host; size: the device's for None."""
    if size is None:
        size = CPU_CHUNK_ROWS if device.type == "cpu" else CHUNK_ROWS
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
    layout: Chunks,
    initial: Tensor,
    step: Callable[..., tuple[Tensor, ...]],
    *,
    parts: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """The state leaving each run (S, …), then what the steps emitted, (M, …) each.

    step(state, *parts) takes the states of some runs past one chunk of each and returns the next
    states, then what it emits; parts are (M, …).
    """
    state = initial.index_select(0, layout.order)
    ended: list[Tensor] = []
    emitted: list[tuple[Tensor, ...]] = []
    # Splits, not slices: their backward joins all parts once instead of filling M rows for each.
    for each in zip(*(part.split_with_sizes(layout.steps) for part in parts), strict=True):
        state, done = state.split_with_sizes([len(each[0]), len(state) - len(each[0])])
        ended.append(done)
        state, *here = step(state, *each)
        emitted.append(tuple(here))
    if not emitted:
        emitted.append(step(state[:0], *parts)[1:])
    final = torch.cat([state, *reversed(ended)]).index_select(0, layout.back)
    return final, *(torch.cat(each) for each in zip(*emitted, strict=True))


def decays(logs: Tensor) -> Tensor:
    """(…, Q) of log decays as (…, Q, Q): what is left at row i of what came in at row j, 0 for
    j > i.

    Each sum of logs from j + 1 to i is made on its own: a difference of two long sums would lose
    the small decays that follow a strong one.
    """
    ones = torch.ones(logs.shape[-1], logs.shape[-1], dtype=torch.bool, device=logs.device)
    sums = torch.where(ones.tril(-1), logs[..., None], 0.0).cumsum(-2)
    return sums.masked_fill(ones.triu(1), float("-inf")).exp()


def kept(logs: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logs) in two parts, the first 0 or 1: what is kept of a state S is one·S + rest·S.

    A decay so near 1 that it rounds to 1, or off by 1e-8 each time, shows after many chunks. With
    what is added A it is one·S + (rest·S + A): the small terms meet first.
    """
    mostly = logs > -0.5
    return mostly.to(logs.dtype), torch.where(mostly, logs.expm1(), logs.exp())


def first_states(initial: Tensor | None, shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """`initial`, or zeros, of this shape and of float32 or float64 as the rows `like` need."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if initial is None:
        return like.new_zeros(shape, dtype=dtype)
    if initial.shape != shape:
        raise ValueError(f"initial states have shape {tuple(initial.shape)}; they must be {shape}")
    return initial.to(dtype)
