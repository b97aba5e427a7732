"""Shards: a lane's part of each sequence; labels are computed before the sequence is cut.

In: tokenized sequences by their index in the plan, and the cuts wanted (which sequence, for which
rank of which CP size). Out: the real tokens of all cuts, one row a token, each with the tokens that
follow it in the sequence, so that neither labels nor the shifted ids of multi-token prediction need
another lane. Shards have no padding: `pack_step` adds it, and it is never sent.

Tokens [5 6 7 8 9 4 3] cut for rank 0 of 2 (positions 0 1 6) with no depth:

    ids  [[5 6] [6 7] [3 −1]]        the token and the next, −1 past the end
    mask [[1] [1] [0]]               whether the next is a target, False past the end

Each depth of multi-token prediction adds one column to both; a pipeline rank has those it reads.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from longshore.data.fields import Array, Field, check_declared
from longshore.data.source import TokenizedSample
from longshore.plan.cost import Ints
from longshore.plan.layout import StageInputs
from longshore.plan.shapes import Transfer, lane_packs, padded_lengths, ranges, spans
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
