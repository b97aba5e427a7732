"""Cut, pack, unpack: sequences become a lane's micro-batches, and outputs become sequences.

`cut_shards`: from whole sequences and the cuts wanted of them (for which rank of which CP size) the
real tokens of all cuts. Each has the tokens that follow it beside it, so neither labels nor the
shifted ids of multi-token prediction need another lane. There is no padding yet: it is never sent.
Tokens [5 6 7 8 9 4 3] cut for rank 0 of 2, which has positions 0 1 6:

    ids  [[5 6] [6 7] [3 −1]]        the token and the next, −1 past the end
    mask [[1] [1] [0]]               whether the next is a target; a column more for each MTP depth

`pack_step`: these shards as one MicroBatch for each round, with padding, buckets and empty packs as
plan/shapes.py defines them; `lane_context` follows from the plan alone, so every rank of a lane
computes it by itself. `pack_lane` does both for a controller that owns all sequences of a step.

    token_ids  5 6 3 0        labels  6 7 −100 −100        positions  0 1 6 7

`unpack` and `merge`: a lane's outputs (T, …), one row a token, as each sequence's (length, …), in
order and without padding. Lane 0 returns positions 0:2 and 6:7, lane 1 returns 2:6.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
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
from longshore.data.source import Array, Field, TokenizedSample, check_declared
from longshore.plan.cost import Ints
from longshore.plan.layout import StageInputs
from longshore.plan.shapes import (
    Transfer,
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

MOST_IDS = 2**31
ALL_INPUTS = StageInputs()


@dataclass(frozen=True, slots=True)
class LaneCut:
    """One sequence, by its index in the plan, for one lane of a CP group."""

    sequence: int
    cp_rank: int
    cp_size: int


Cut: TypeAlias = LaneCut | Transfer


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Cuts one after the other: N cuts, M real tokens in all, D depths."""

    sequences: Ints
    """(N): each cut's sequence, by its index in the plan."""
    tokens: Ints
    """(N): each cut's real tokens."""
    ids: NDArray[np.int32]
    """(M, `id_columns`): the id of the token some positions ahead, −1 past the end."""
    mask: NDArray[np.bool_]
    """(M, `mask_columns`): whether the label of the main loss, or of a depth, is a target."""
    token_fields: dict[str, Array]
    """(M, …) each; values per target stand at the position that predicts the token."""
    sequence_fields: dict[str, Array]
    """(N, …) each."""
    depths: int
    """D, the model's depths of multi-token prediction."""
    inputs: StageInputs = ALL_INPUTS
    """What the rank reads, which decides the columns."""


def id_columns(inputs: StageInputs, depths: int) -> tuple[int, ...]:
    """How many positions ahead the ids are that a rank reads: 0 the token, 1 the label, …"""
    columns: set[int] = {0} if inputs.token_ids else set()
    columns |= {1} if inputs.targets else set()
    columns |= set(range(1, depths + 1)) if inputs.depth_ids else set()
    columns |= set(range(2, depths + 2)) if inputs.depth_targets else set()
    return tuple(sorted(columns))


def mask_columns(inputs: StageInputs, depths: int) -> tuple[int, ...]:
    """The losses whose mask a rank reads: 0 the main loss, then the depths."""
    main = (0,) if inputs.targets else ()
    return (*main, *range(1, depths + 1)) if inputs.depth_targets else main


def needed_fields(fields: Iterable[Field], inputs: StageInputs) -> list[Field]:
    """The extra fields that a rank reads."""
    return [
        spec
        for spec in fields
        if (inputs.sequence_fields if spec.per == "sequence" else inputs.token_fields)
    ]


def lane_cuts(plan: Plan, lane: int) -> tuple[LaneCut, ...]:
    """All cuts of a lane in a step, by round, then pack, then order in the pack."""
    return tuple(
        LaneCut(sequence, lane - pack.first_lane, pack.cp_size)
        for number in range(len(plan.rounds))
        for pack in lane_packs(plan, number, lane)
        for sequence in pack.sequences
    )


def cut_spans(plan: Plan, cuts: Iterable[Cut]) -> tuple[Ints, Ints, Ints, Ints]:
    """Sequences (N), their lengths (N), and the positions [start, stop) of both spans (N, 2)."""
    table = [(cut.sequence, cut.cp_rank, cut.cp_size) for cut in cuts]
    index, rank, size = np.array(table, dtype=np.int64).reshape(-1, 3).T
    if (bad := (rank < 0) | (rank >= size)).any():
        raise ValueError(f"cp_rank is {rank[bad][0]}; it must be from 0 to cp_size − 1")
    if (bad := (index < 0) | (index >= len(plan.sequences))).any():
        raise ValueError(f"there is no sequence {index[bad][0]} in the plan")
    lengths = np.array([plan.sequences[i].length for i in index.tolist()], dtype=np.int64)
    padded = padded_lengths(plan, lengths, size)
    return index, lengths, *spans(lengths, padded, cp_rank=rank, cp_size=size)


def cut_tokens(plan: Plan, cuts: Seq[Cut]) -> Ints:
    """Real tokens of each cut."""
    if not cuts:  # of most pairs of lanes, in large runs
        return np.empty(0, dtype=np.int64)
    _, _, starts, stops = cut_spans(plan, cuts)
    counts: Ints = (stops - starts).sum(axis=1)
    return counts


def count_targets(loss_mask: Array, depths: int) -> tuple[int, ...]:
    """How many labels of a sequence count: in the main loss, then at each depth."""
    total = int(np.count_nonzero(loss_mask))
    return tuple(total - int(np.count_nonzero(loss_mask[: j + 1])) for j in range(depths + 1))


def cut_shards(
    plan: Plan,
    samples: Mapping[int, TokenizedSample],
    cuts: Iterable[Cut],
    *,
    depths: int = 0,
    fields: Seq[Field] = (),
    inputs: StageInputs = ALL_INPUTS,
) -> Shards:
    """Cuts sequences; `samples` are by index in the plan, and may be more than the cuts need.

    `cuts` are `lane_cuts(plan, lane)` or the transfers of a route; the shards keep their order.
    inputs: what the rank reads that gets the shards. All fields of the samples are checked.
    """
    if depths < 0:
        raise ValueError(f"depths is {depths}; it must be 0 or more")
    check_declared(fields)
    sequences, lengths, starts, stops = cut_spans(plan, cuts)
    for index in dict.fromkeys(sequences.tolist()):
        _check_sample(plan, index, samples, fields)
    uncut = [samples[index] for index in sequences.tolist()]
    rows = _Lookahead.of(lengths, starts, stops, reach=depths + 1)
    token_fields, sequence_fields = {}, {}
    for spec in needed_fields(fields, inputs):
        values = [np.asarray(sample.fields[spec.name]) for sample in uncut]
        if spec.per == "sequence":
            sequence_fields[spec.name] = np.array(values, spec.dtype).reshape(-1, *spec.shape)
        else:
            flat = rows.joined(values, spec.dtype, spec.shape)
            token_fields[spec.name] = rows.ahead(flat, int(spec.per == "target"), 0)
    ids = rows.joined([sample.tokens for sample in uncut], "int64")
    if ids.size and (ids.min() < 0 or ids.max() >= MOST_IDS):
        _refuse_ids(samples, sequences)
    mask = rows.joined([sample.loss_mask for sample in uncut], "bool")
    targets = [column + 1 for column in mask_columns(inputs, depths)]
    return Shards(
        sequences=sequences,
        tokens=(stops - starts).sum(axis=1),
        ids=rows.columns(ids.astype(np.int32), id_columns(inputs, depths), -1),
        mask=rows.columns(mask, targets, False),
        token_fields=token_fields,
        sequence_fields=sequence_fields,
        depths=depths,
        inputs=inputs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Lookahead:
    """Finds for each row of the shards the tokens that follow it.

    The spans of all cuts are joined into one array, each with up to `reach` tokens more.
    """

    slices: list[tuple[slice, slice]]
    """For each cut the two slices of its sequence, lengthened by `reach`."""
    index: Ints
    """(M): where each row is in the joined array."""
    left: Ints
    """(M): tokens of the sequence from this row on, itself included."""
    reach: int

    @classmethod
    def of(cls, lengths: Ints, starts: Ints, stops: Ints, *, reach: int) -> "_Lookahead":
        ends = np.minimum(stops + reach, lengths[:, None])
        counts = (stops - starts).ravel()
        sizes = (ends - starts).ravel()
        before = np.cumsum(sizes) - sizes
        index = ranges(before, counts)
        left = np.repeat((lengths[:, None] - starts).ravel() + before, counts) - index
        bounds = zip(starts.tolist(), ends.tolist(), strict=True)
        slices = [(slice(a, b), slice(c, d)) for (a, c), (b, d) in bounds]
        return cls(slices, index, left, reach)

    def joined(self, values: Seq[Array], dtype: str, shape: tuple[int, ...] = ()) -> Array:
        """The spans of all cuts in one array, with `reach` rows of 0 at the end."""
        parts = [
            value[cut] for value, cuts in zip(values, self.slices, strict=True) for cut in cuts
        ]
        parts.append(np.zeros((self.reach, *shape), dtype=dtype))
        return np.concatenate(parts, dtype=dtype, casting="same_kind")

    def ahead(self, joined: Array, distance: int, past: int | bool) -> Array:
        """For each row the value `distance` tokens ahead, or `past` past the sequence's end."""
        values: Array = joined[self.index + distance]
        if distance:
            values[self.left <= distance] = past
        return values

    def columns(self, joined: Array, distances: Seq[int], past: int | bool) -> Array:
        """(M, distances): a column for each distance."""
        out = np.empty((len(self.index), len(distances)), dtype=joined.dtype)
        for column, distance in enumerate(distances):
            out[:, column] = self.ahead(joined, distance, past)
        return out


def _check_sample(
    plan: Plan, index: int, samples: Mapping[int, TokenizedSample], fields: Seq[Field]
) -> None:
    who = f"sequence {index} (id {plan.sequences[index].id})"
    if index not in samples:
        raise ValueError(
            f"{who}: its tokens are missing; `samples` must have every sequence to cut"
        )
    sample, length = samples[index], plan.sequences[index].length
    for name, array, kinds, wanted in (
        ("tokens", sample.tokens, "iu", "integers"),
        ("loss_mask", sample.loss_mask, "b", "bool"),
    ):
        if array.shape != (length,):
            raise ValueError(
                f"{who}: {name} has shape {array.shape}; the plan's length is {length}"
            )
        if array.dtype.kind not in kinds:
            raise ValueError(f"{who}: {name} is {array.dtype}; it must be {wanted}")
    if undeclared := [name for name in sample.fields if name not in {f.name for f in fields}]:
        raise ValueError(
            f"{who}: field {undeclared[0]!r} is not declared; declare it or take it out"
        )
    for spec in fields:
        _check_field(who, sample, spec, length)


def _check_field(who: str, sample: TokenizedSample, spec: Field, length: int) -> None:
    if spec.name not in sample.fields:
        raise ValueError(f"{who}: the declared field {spec.name!r} is missing")
    value = np.asarray(sample.fields[spec.name])
    shape = spec.array_shape(length)
    if value.shape != shape:
        raise ValueError(
            f"{who}: field {spec.name!r} has shape {value.shape}; per {spec.per} it must be {shape}"
        )
    if value.dtype != spec.dtype:
        raise ValueError(
            f"{who}: field {spec.name!r} is {value.dtype}; convert it to the declared {spec.dtype}"
        )


def _refuse_ids(samples: Mapping[int, TokenizedSample], sequences: Ints) -> None:
    for index in np.unique(sequences).tolist():
        tokens = samples[index].tokens
        if tokens.min() < 0 or tokens.max() >= MOST_IDS:
            raise ValueError(
                f"sequence {index}: its token ids go from {tokens.min()} to {tokens.max()}; "
                "they must be from 0 to 2³¹ − 1"
            )


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
