"""Pack and unpack: a lane's shards become micro-batches, and a model's outputs become sequences.

`pack_step`: a plan, a lane, its shards (data/shard.py) and the step's counts become one MicroBatch
for each round, with padding, buckets and empty packs as plan/shapes.py defines them. Its context
(`lane_context`) follows from the plan alone, so every rank of a lane computes it by itself. No
process, no device, no randomness. Lane 0 of two has positions 0 1 6 of tokens [5 6 7 8 9 4 3] at
CP size 2, padded to 8:

    token_ids  5 6 3 0        labels  6 7 −100 −100        positions  0 1 6 7

`pack_lane` does the same for a controller that owns all sequences of a step.

`unpack` and `merge`: a lane's outputs (T, …), one row a token, become each sequence's values
(length, …), in order and without padding. The sequence above comes back in three pieces: positions
0…2 and 6…7 from lane 0, 2…6 from lane 1, whose two chunks are adjacent.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from longshore.batch import (
    IGNORE,
    Boundaries,
    Counts,
    CPGroup,
    Depth,
    MicroBatch,
    PackContext,
    SeqContext,
    TableMaker,
    Targets,
    Zigzag,
)
from longshore.data.fields import Array, Field
from longshore.data.shard import (
    Shards,
    count_targets,
    cut_shards,
    cut_tokens,
    id_columns,
    lane_cuts,
    mask_columns,
)
from longshore.data.source import TokenizedSample
from longshore.plan.cost import Ints
from longshore.plan.shapes import (
    chunk_pair,
    lane_packs,
    lane_tokens,
    natural_order,
    padded_lengths,
    ranges,
    shard_positions,
    spans,
    visible_lengths,
)
from longshore.plan.types import Plan


def lane_context(
    plan: Plan,
    number: int,
    lane: int,
    *,
    buckets: Seq[int] = (),
    tables: Seq[TableMaker] = (),
    max_sequences: int = 0,
) -> SeqContext:
    """Boundaries, positions and CP groups of one lane in round `number`, padding included.

    tables: make the tables of each pack's boundaries that the model needs. max_sequences: CUDA
    graphs need boundaries of this size; those of a pack with fewer sequences, alone in its
    micro-batch, are padded to it.

    Two lanes with align 8: a sequence of 7 tokens at CP size 2 gives lane 0 positions 0 1 6 7; one
    of 3 tokens at CP size 1 fills rows 4 to 6, and one row of padding makes 8. The packs are rows
    0…4 with padded boundaries (0, 8), and rows 4…8 with (0, 3, 4).
    """
    tokens = lane_tokens(plan, number, lane, buckets=buckets)
    drafts = _drafts(plan, number, lane, tokens)
    sequences = tuple(index for draft in drafts for index in draft.sequences)
    lengths = np.concatenate([draft.lengths for draft in drafts])
    local_lengths = np.concatenate([draft.padded // draft.group.cp_size for draft in drafts])
    positions = np.concatenate([draft.positions() for draft in drafts])
    sequence_index = np.repeat(np.arange(len(lengths), dtype=np.int64), local_lengths)
    is_real = positions < np.repeat(lengths, local_lengths)
    sequence_index[~is_real] = len(sequences)
    packs = _packs(drafts, max_sequences)
    for pack in packs:
        for make_tables in tables:
            make_tables(pack)
    return SeqContext(
        tokens=tokens,
        real_tokens=int(np.count_nonzero(is_real)),
        positions=torch.from_numpy(positions),
        sequence_index=torch.from_numpy(sequence_index),
        is_real=torch.from_numpy(is_real),
        lengths=torch.tensor([*lengths[: len(sequences)].tolist(), 1]),
        sequences=sequences,
        packs=packs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A pack before its tensors exist; a lane's own padding is one more sequence, of length 0."""

    group: CPGroup
    sequences: tuple[int, ...]
    lengths: Ints
    padded: Ints

    @property
    def tokens(self) -> int:
        return int(self.padded.sum()) // self.group.cp_size

    def positions(self) -> Ints:
        group = self.group
        return shard_positions(self.padded, cp_rank=group.cp_rank, cp_size=group.cp_size)


def _drafts(plan: Plan, number: int, lane: int, tokens: int) -> list[_Draft]:
    """The lane's packs; its padding goes into its pack of CP size 1, or into a new one."""
    drafts = []
    for pack in lane_packs(plan, number, lane):
        if not pack.sequences:
            raise ValueError(
                f"round {number}, lane {lane}: a pack of CP size {pack.cp_size} has no sequences; "
                "leave the pack out: lanes without packs get padding automatically"
            )
        lengths = np.array([plan.sequences[i].length for i in pack.sequences], dtype=np.int64)
        padded = padded_lengths(plan, lengths, pack.cp_size)
        group = CPGroup(pack.first_lane, pack.cp_size, lane - pack.first_lane)
        draft = _Draft(group, pack.sequences, lengths, padded)
        if draft.tokens != pack.tokens_per_lane:
            raise ValueError(
                f"round {number}, lane {lane}: tokens_per_lane of a pack of CP size {pack.cp_size} "
                f"is {pack.tokens_per_lane}, but its sequences have {draft.tokens} tokens per lane"
            )
        drafts.append(draft)
    padding = tokens - sum(draft.tokens for draft in drafts)
    if padding:
        none: Ints = np.zeros(0, dtype=np.int64)
        alone = _Draft(CPGroup(lane, 1, 0), (), none, none)
        last = drafts.pop() if drafts and drafts[-1].group.cp_size == 1 else alone
        lengths, padded = np.append(last.lengths, 0), np.append(last.padded, padding)
        drafts.append(_Draft(last.group, last.sequences, lengths, padded))
    return drafts


def _packs(drafts: Seq[_Draft], max_sequences: int) -> tuple[PackContext, ...]:
    (first_draft, *others) = drafts
    alone = not others and first_draft.group.cp_size == 1
    fits = alone and len(first_draft.padded) <= max_sequences
    starts = accumulate((draft.tokens for draft in drafts), initial=0)
    firsts = accumulate((len(draft.sequences) for draft in drafts), initial=0)
    return tuple(
        PackContext(
            group=draft.group,
            start=start,
            stop=start + draft.tokens,
            first_sequence=first,
            lengths=tuple(draft.lengths.tolist()),
            real=_boundaries(draft.lengths),
            padded=_boundaries(draft.padded, max_sequences if fits else 0),
            zigzag=_zigzag(draft.padded, draft.group) if draft.group.cp_size > 1 else None,
        )
        for draft, start, first in zip(drafts, starts, firsts, strict=False)
    )


def _zigzag(padded: Ints, group: CPGroup) -> Zigzag:
    to_natural, to_shards = natural_order(padded, group.cp_size)
    chunk, _, _ = chunk_pair(padded, group.cp_rank, group.cp_size)
    visible = visible_lengths(padded, cp_rank=group.cp_rank, cp_size=group.cp_size)
    first = np.repeat(np.cumsum(padded) - padded, 2)
    return Zigzag(
        local=_boundaries(padded // group.cp_size),
        chunks=_boundaries(np.repeat(chunk, 2)),
        to_natural=torch.from_numpy(to_natural),
        to_shards=torch.from_numpy(to_shards),
        visible=_boundaries(visible),
        visible_rows=torch.from_numpy(to_natural[ranges(first, visible)]),
    )


def _boundaries(lengths: Ints, sequences: int = 0) -> Boundaries:
    """sequences: the number to pad to with empty ones, for tables of a fixed size; 0: none."""
    offsets = np.zeros(max(len(lengths), sequences) + 1, dtype=np.int32)
    offsets[1:] = lengths.sum()
    np.cumsum(lengths, out=offsets[1 : len(lengths) + 1])
    return Boundaries(
        tuple(offsets.tolist()),
        torch.from_numpy(offsets),
        int(lengths.max()),
        fixed=sequences > 0,
    )


def pack_step(
    plan: Plan,
    lane: int,
    shards: Shards,
    *,
    counts: Counts,
    buckets: Seq[int] = (),
    pad_id: int = 0,
    tables: Seq[TableMaker] = (),
    max_sequences: int = 0,
) -> list[MicroBatch]:
    """The lane's micro-batches of a step. `shards` may come in any order, each sequence once.

    tables: make the tables of each pack's boundaries that the model needs. max_sequences: what
    CUDA graphs pad the boundaries of a pack to; 0 without graphs.
    """
    if not len(counts.mtp) == len(counts.mtp_tokens) == shards.depths:
        raise ValueError(
            f"counts have {len(counts.mtp)} depths of multi-token prediction, and the shards "
            f"{shards.depths}; compute both for the same depths (Counts.of, cut_shards)"
        )
    if not plan.rounds:
        raise ValueError(
            "the plan has no rounds; check(plan) lists everything that is wrong with it"
        )
    cut_of = _cut_of_sequence(plan, lane, shards)
    batches = []
    for number in range(len(plan.rounds)):
        ctx = lane_context(
            plan, number, lane, buckets=buckets, tables=tables, max_sequences=max_sequences
        )
        cuts = np.array([cut_of[index] for index in ctx.sequences], dtype=np.int64)
        rows = _CutRows(shards, ctx, cuts)
        batches.append(
            MicroBatch(
                lane=lane,
                round=number,
                rounds=len(plan.rounds),
                ctx=ctx,
                counts=counts,
                token_ids=rows.ids(0, past=pad_id) if shards.inputs.token_ids else None,
                targets=rows.targets(0) if shards.inputs.targets else None,
                mtp=_depths(rows, pad_id),
                token_fields={k: rows.spread(v, 0) for k, v in shards.token_fields.items()},
                sequence_fields={
                    # With a row of 0 at the end, for padding.
                    k: torch.from_numpy(np.pad(v[cuts], ((0, 1), *((0, 0),) * (v.ndim - 1))))
                    for k, v in shards.sequence_fields.items()
                },
            )
        )
    return batches


def context_batches(
    plan: Plan,
    lane: int,
    *,
    counts: Counts,
    buckets: Seq[int] = (),
    tables: Seq[TableMaker] = (),
) -> list[MicroBatch]:
    """Micro-batches for a rank whose stages read no data: the contexts, from the plan alone."""
    return [
        MicroBatch(
            lane=lane,
            round=number,
            rounds=len(plan.rounds),
            ctx=lane_context(plan, number, lane, buckets=buckets, tables=tables),
            counts=counts,
            token_ids=None,
            targets=None,
            mtp=(),
            token_fields={},
            sequence_fields={},
        )
        for number in range(len(plan.rounds))
    ]


def _cut_of_sequence(plan: Plan, lane: int, shards: Shards) -> dict[int, int]:
    """For each sequence of the lane the number of its cut among the shards; all must be there."""
    cuts = lane_cuts(plan, lane)
    cut_of = {index: number for number, index in enumerate(shards.sequences.tolist())}
    if len(cut_of) < len(shards.sequences):
        raise ValueError(f"lane {lane}: the shards have a sequence twice; give each once")
    planned = {cut.sequence for cut in cuts}
    if missing := sorted(planned - cut_of.keys()):
        raise ValueError(f"lane {lane}: the shard of sequence {missing[0]} is missing")
    if extra := sorted(cut_of.keys() - planned):
        raise ValueError(
            f"lane {lane}: there is a shard of sequence {extra[0]}, which the plan does not put "
            "on this lane"
        )
    for cut, tokens in zip(cuts, cut_tokens(plan, cuts).tolist(), strict=True):
        actual = int(shards.tokens[cut_of[cut.sequence]])
        if actual != tokens:
            raise ValueError(
                f"lane {lane}: the shard of sequence {cut.sequence} has {actual} tokens; at rank "
                f"{cut.cp_rank} of CP size {cut.cp_size} it must have {tokens}"
            )
    return cut_of


class _CutRows:
    """The rows of some cuts among the shards, and the rows of a micro-batch they go to."""

    def __init__(self, shards: Shards, ctx: SeqContext, cuts: Ints) -> None:
        counts = shards.tokens[cuts]
        first = np.cumsum(shards.tokens) - shards.tokens
        self.shards = shards
        self.tokens = ctx.tokens
        self.id_columns = id_columns(shards.inputs, shards.depths)
        self.mask_columns = mask_columns(shards.inputs, shards.depths)
        self.rows = _as_slice(ranges(first[cuts], counts))
        self.real = _as_slice(np.flatnonzero(ctx.is_real.numpy()))

    def spread(self, values: Array, fill: int | bool) -> Tensor:
        """values (M, …) of the shards as (T, …), with `fill` at padding."""
        out = np.full((self.tokens, *values.shape[1:]), fill, dtype=values.dtype)
        out[self.real] = values[self.rows]
        return torch.from_numpy(out)

    def ids(self, ahead: int, *, past: int) -> Tensor:
        """The ids `ahead` tokens ahead, int64 (T), with `past` at padding and past the end."""
        out = np.full(self.tokens, past, dtype=np.int64)
        ids = self.shards.ids[self.rows, self.id_columns.index(ahead)]
        out[self.real] = np.where(ids < 0, past, ids) if ahead else ids
        return torch.from_numpy(out)

    def targets(self, depth: int) -> Targets:
        """Targets of a depth, 0 for the main loss: labels are depth + 1 tokens ahead."""
        mask = self.shards.mask[:, self.mask_columns.index(depth)]
        return Targets(self.ids(depth + 1, past=IGNORE), self.spread(mask, False))


def _as_slice(index: Ints) -> slice | Ints:
    """The same rows as a slice, which copies far faster, where they rise by 1."""
    if not len(index) or index[-1] - index[0] + 1 > len(index) or (np.diff(index) != 1).any():
        return index
    return slice(int(index[0]), int(index[-1]) + 1)


def _depths(rows: _CutRows, pad_id: int) -> tuple[Depth, ...]:
    """Token ids and targets of each depth d: ids d and labels d + 1 tokens ahead."""
    inputs = rows.shards.inputs
    if not (inputs.depth_ids or inputs.depth_targets):
        return ()
    return tuple(
        Depth(
            rows.ids(depth, past=pad_id) if inputs.depth_ids else None,
            rows.targets(depth) if inputs.depth_targets else None,
        )
        for depth in range(1, rows.shards.depths + 1)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Values of consecutive tokens of one sequence, from position `start` on.

    `sequence` is its index in the plan; `values` is a view of the tensor that was unpacked.
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
        for sequence, start, row, count in _spans_of_pack(ctx, pack)
    ]


def merge(plan: Plan, pieces: Iterable[Piece]) -> dict[int, Tensor]:
    """Every sequence's values (length, …) by its index in the plan, from the pieces of all lanes.

    Pieces may come in any order, of all sequences or of some; each of those must be complete.
    """
    by_sequence: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_sequence.setdefault(piece.sequence, []).append(piece)
    return {i: _joined(plan, i, by_sequence[i]) for i in sorted(by_sequence)}


def _spans_of_pack(ctx: SeqContext, pack: PackContext) -> list[tuple[int, int, int, int]]:
    """(sequence, first position, first row, tokens) of each span of real tokens in a lane's pack.

    A lane has two chunks of each sequence: two spans, or one where the chunks are adjacent.
    """
    group, sequences = pack.group, ctx.sequences[pack.sequences]
    count = len(sequences)
    lengths = np.array(pack.lengths[:count], dtype=np.int64)
    offsets = np.array(pack.padded.offsets[: count + 1], dtype=np.int64)
    padded = offsets[1:] - offsets[:-1]
    starts, stops = spans(lengths, padded, cp_rank=group.cp_rank, cp_size=group.cp_size)
    chunk, _, _ = chunk_pair(padded, group.cp_rank, group.cp_size)
    first_rows = pack.start + np.array(pack.local.offsets[:count], dtype=np.int64)
    rows = np.stack([first_rows, first_rows + chunk], axis=-1)
    tokens = stops - starts
    adjacent = stops[:, 0] == starts[:, 1]
    tokens[adjacent, 0] += tokens[adjacent, 1]
    tokens[adjacent, 1] = 0
    table = np.stack([starts, rows, tokens], axis=-1).reshape(-1, 3)
    twice = [sequence for sequence in sequences for _ in range(2)]
    every = zip(twice, table.tolist(), strict=True)
    return [(sequence, start, row, n) for sequence, (start, row, n) in every if n]


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


def pack_lane(
    plan: Plan,
    lane: int,
    samples: Seq[TokenizedSample],
    *,
    fields: Seq[Field] = (),
    depths: int = 0,
    pad_id: int = 0,
) -> list[MicroBatch]:
    """A lane's micro-batches, one for each round, for a controller that has all sequences.

    An RL controller calls it once for each lane and sends the results to the workers; `unpack` and
    `merge` bring their outputs back. samples: all of the plan, in its order. fields: what they
    carry besides tokens. depths: how many modules of multi-token prediction the model has.
    """
    if len(samples) != len(plan.sequences):
        raise ValueError(
            f"{len(samples)} samples were given for a plan of {len(plan.sequences)} sequences; "
            "give all of them, in the order in which they were planned"
        )
    labels = [count_targets(sample.loss_mask, depths) for sample in samples]
    totals = [sum(column) for column in zip(*labels, strict=True)]
    counts = Counts.of(totals, [sample.length for sample in samples])
    owned = dict(enumerate(samples))
    shards = cut_shards(plan, owned, lane_cuts(plan, lane), depths=depths, fields=fields)
    return pack_step(plan, lane, shards, counts=counts, pad_id=pad_id)
