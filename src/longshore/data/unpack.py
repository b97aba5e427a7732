"""Unpack: what a model said of each token goes back to its sequence, in order and without padding.

In: a lane's outputs (T, …) with the micro-batch's context, then the pieces of all lanes. Out: for
each sequence its values (length, …).

At CP size 2 a sequence of 7 tokens comes back in three pieces: positions 0…2 and 6…7 from the first
lane, 2…6 from the second, whose two chunks join. `merge` puts them in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longshore.batch import PackContext, SeqContext
from longshore.plan.types import Plan
from longshore.plan.zigzag import chunk_pair, spans


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Values of consecutive tokens of one sequence, from position `start` on.

    `sequence` is its place in the plan; `values` is a view of what was unpacked.
    """

    sequence: int
    start: int
    values: Tensor


def unpack(ctx: SeqContext, values: Tensor) -> list[Piece]:
    """Cuts a lane's values (T, …) into the pieces of its sequences."""
    if values.ndim == 0 or len(values) != ctx.tokens:
        raise ValueError(
            f"values have shape {tuple(values.shape)}; the first dimension must be the "
            f"micro-batch's {ctx.tokens} tokens"
        )
    return [
        Piece(sequence, start, values[row : row + count])
        for pack in ctx.packs
        for sequence, start, row, count in _runs(ctx, pack)
    ]


def merge(plan: Plan, pieces: Iterable[Piece]) -> dict[int, Tensor]:
    """Every sequence's values (length, …) by its place in the plan, from the pieces of all lanes.

    Pieces may come in any order and of a part of the sequences; each of those must be complete.
    """
    by_sequence: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_sequence.setdefault(piece.sequence, []).append(piece)
    return {i: _joined(plan, i, by_sequence[i]) for i in sorted(by_sequence)}


def _runs(ctx: SeqContext, pack: PackContext) -> list[tuple[int, int, int, int]]:
    """(sequence, first position, first row, tokens) of each run of real tokens in a lane's pack."""
    group, sequences = pack.group, ctx.sequences[pack.sequences]
    count = len(sequences)
    lengths = np.array(pack.lengths[:count], dtype=np.int64)
    offsets = np.array(pack.padded.offsets[: count + 1], dtype=np.int64)
    padded = offsets[1:] - offsets[:-1]
    starts, stops = spans(lengths, padded, cp_rank=group.cp_rank, cp_size=group.cp_size)
    chunk, _, _ = chunk_pair(padded, group.cp_rank, group.cp_size)
    early = pack.start + np.array(pack.local.offsets[:count], dtype=np.int64)
    rows = np.stack([early, early + chunk], axis=-1)
    tokens = stops - starts
    joins = stops[:, 0] == starts[:, 1]
    tokens[joins, 0] += tokens[joins, 1]
    tokens[joins, 1] = 0
    table = np.stack([starts, rows, tokens], axis=-1).reshape(-1, 3)
    twice = [sequence for sequence in sequences for _ in range(2)]
    runs = zip(twice, table.tolist(), strict=True)
    return [(sequence, start, row, n) for sequence, (start, row, n) in runs if n]


def _joined(plan: Plan, sequence: int, pieces: list[Piece]) -> Tensor:
    if not 0 <= sequence < len(plan.sequences):
        raise ValueError(f"there is no sequence {sequence} in the plan")
    pieces = sorted(pieces, key=lambda piece: piece.start)
    end = 0
    for piece in pieces:
        if piece.start != end:
            fault = "are missing" if piece.start > end else "came twice"
            low, high = sorted((piece.start, end))
            raise ValueError(f"sequence {sequence}: positions {low} to {high - 1} {fault}")
        end += len(piece.values)
    length = plan.sequences[sequence].length
    if end != length:
        raise ValueError(f"sequence {sequence}: {end} of its {length} positions came back")
    return torch.cat([piece.values for piece in pieces])
