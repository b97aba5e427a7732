"""Shards: a lane's part of each sequence; labels are computed before the sequence is cut.

In: tokenized sequences by their place in the plan, and the cuts wanted (which sequence, for which
rank of which CP size). Out: the real tokens of all cuts, one row a token, each with the tokens that
follow it in the sequence, so that neither labels nor the shifted ids of multi-token prediction need
another lane. Shards have no padding: `pack_step` adds it, and it is never sent.

Tokens [5 6 7 8 9 4 3] cut for rank 0 of 2 (positions 0 1 6) with no depth:

    ids  [[5 6] [6 7] [3 −1]]        the token and the next, −1 past the end
    mask [[1] [1] [0]]               whether the next is a target, False past the end

Each depth of multi-token prediction adds one column to both. A rank of a pipeline needs some of the
columns: the embedding column 0 of ids, the head of a model without depths column 1 and the mask.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import Ints
from longshore.plan.layout import StageInputs
from longshore.plan.shapes import lane_packs, padded_lengths, ranges, spans
from longshore.plan.types import Plan

Array = NDArray[Any]
MOST_IDS = 2**31
ALL_INPUTS = StageInputs()


class Tokenized(Protocol):
    """An uncut sequence: tokens (n); loss_mask (n), True where a token is a target; fields."""

    @property
    def tokens(self) -> Array: ...
    @property
    def loss_mask(self) -> Array: ...
    @property
    def fields(self) -> Mapping[str, Any]: ...


class FieldSpec(Protocol):
    """A declared extra field: (n, *shape) per token or target, (*shape) per sequence.

    A value per target belongs to a token as a target, so it is shifted like the labels, to the
    position that predicts this token; the last token of a sequence gets 0.
    """

    @property
    def name(self) -> str: ...
    @property
    def per(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


AnyField = TypeVar("AnyField", bound=FieldSpec)


class Cut(Protocol):
    """One sequence, named by its place in the plan, for one lane of a CP group."""

    @property
    def sequence(self) -> int: ...
    @property
    def cp_rank(self) -> int: ...
    @property
    def cp_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class LaneCut:
    """A cut that a lane holds in a round."""

    sequence: int
    cp_rank: int
    cp_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """Cuts one after the other: N cuts, M real tokens in all, D depths."""

    sequences: Ints
    """(N): each cut's sequence, by its place in the plan."""
    tokens: Ints
    """(N): each cut's real tokens."""
    ids: NDArray[np.int32]
    """(M, D + 2): column j is the id of the token j positions ahead, −1 past the end. Of these
    columns those of `id_columns`."""
    mask: NDArray[np.bool_]
    """(M, D + 1): column j says whether the token j + 1 positions ahead is a target. Of these
    columns those of `mask_columns`."""
    token_fields: dict[str, Array]
    """(M, …) each; those per target are shifted."""
    sequence_fields: dict[str, Array]
    """(N, …) each."""
    depths: int
    """D: of the model."""
    inputs: StageInputs = ALL_INPUTS
    """What they have, for the stages of one rank."""


def id_columns(inputs: StageInputs, depths: int) -> tuple[int, ...]:
    """How many positions ahead the ids are that a rank reads: 0 the token, 1 the label, …"""
    columns: set[int] = {0} if inputs.token_ids else set()
    columns |= {1} if inputs.targets else set()
    columns |= set(range(1, depths + 1)) if inputs.depth_ids else set()
    columns |= set(range(2, depths + 2)) if inputs.depth_targets else set()
    return tuple(sorted(columns))


def mask_columns(inputs: StageInputs, depths: int) -> tuple[int, ...]:
    """Of which losses a rank reads the mask: 0 the main loss, then the depths."""
    main = (0,) if inputs.targets else ()
    return (*main, *range(1, depths + 1)) if inputs.depth_targets else main


def needed_fields(fields: Iterable[AnyField], inputs: StageInputs) -> list[AnyField]:
    """Those of the extra fields that a rank reads."""
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


def cut_tokens(plan: Plan, cuts: Iterable[Cut]) -> Ints:
    """Real tokens of each cut."""
    counts: Ints = CutSpans.of(plan, tuple(cuts)).tokens
    return counts


def count_targets(loss_mask: Array, depths: int) -> tuple[int, ...]:
    """How many labels of a sequence count: in the main loss, then at each depth."""
    total = int(np.count_nonzero(loss_mask))
    return tuple(total - int(np.count_nonzero(loss_mask[: j + 1])) for j in range(depths + 1))


def cut_shards(
    plan: Plan,
    samples: Mapping[int, Tokenized],
    cuts: Iterable[Cut],
    *,
    depths: int = 0,
    fields: Seq[FieldSpec] = (),
    inputs: StageInputs = ALL_INPUTS,
) -> Shards:
    """Cuts sequences; `samples` are by place in the plan, and may be more than the cuts need.

    `cuts` are `lane_cuts(plan, lane)` or the transfers of a route; the shards keep their order.
    inputs: what the rank reads that gets the shards. All fields of the samples are checked.
    """
    _check_fields(fields, depths)
    wanted = tuple(cuts)
    cut_spans = CutSpans.of(plan, wanted)
    for place in dict.fromkeys(cut.sequence for cut in wanted):
        _check_sample(plan, place, samples, fields)
    uncut = [samples[cut.sequence] for cut in wanted]
    rows = _Lookahead.of(cut_spans, reach=depths + 1)
    token_fields, sequence_fields = {}, {}
    for spec in needed_fields(fields, inputs):
        values = [np.asarray(sample.fields[spec.name]) for sample in uncut]
        if spec.per == "sequence":
            sequence_fields[spec.name] = _stacked(values, spec)
        else:
            flat = rows.joined(values, spec.dtype, spec.shape)
            token_fields[spec.name] = rows.ahead(flat, int(spec.per == "target"), 0)
    ids = _checked_ids(rows.joined([sample.tokens for sample in uncut], "int64"), wanted, samples)
    mask = rows.joined([sample.loss_mask for sample in uncut], "bool")
    targets = [column + 1 for column in mask_columns(inputs, depths)]
    return Shards(
        sequences=cut_spans.sequences,
        tokens=cut_spans.tokens,
        ids=rows.columns(ids, id_columns(inputs, depths), -1),
        mask=rows.columns(mask, targets, False),
        token_fields=token_fields,
        sequence_fields=sequence_fields,
        depths=depths,
        inputs=inputs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CutSpans:
    """Positions [start, stop) of the two spans of each cut: starts and stops are (N, 2)."""

    sequences: Ints
    lengths: Ints
    starts: Ints
    stops: Ints

    @property
    def tokens(self) -> Ints:
        """(N): real tokens of each cut."""
        counts: Ints = (self.stops - self.starts).sum(axis=1)
        return counts

    @classmethod
    def of(cls, plan: Plan, cuts: Seq[Cut]) -> "CutSpans":
        table = [(cut.sequence, cut.cp_rank, cut.cp_size) for cut in cuts]
        place, rank, size = np.array(table, dtype=np.int64).reshape(-1, 3).T
        if (bad := (rank < 0) | (rank >= size)).any():
            raise ValueError(f"cp_rank is {rank[bad][0]}; it must be from 0 to cp_size − 1")
        if (bad := (place < 0) | (place >= len(plan.sequences))).any():
            raise ValueError(f"there is no sequence {place[bad][0]} in the plan")
        lengths = np.array([plan.sequences[i].length for i in place.tolist()], dtype=np.int64)
        padded = padded_lengths(plan, lengths, size)
        starts, stops = spans(lengths, padded, cp_rank=rank, cp_size=size)
        return cls(place, lengths, starts, stops)


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
    def of(cls, cut_spans: CutSpans, *, reach: int) -> "_Lookahead":
        ends = np.minimum(cut_spans.stops + reach, cut_spans.lengths[:, None])
        counts = (cut_spans.stops - cut_spans.starts).ravel()
        sizes = (ends - cut_spans.starts).ravel()
        before = np.cumsum(sizes) - sizes
        index = ranges(before, counts)
        remaining = (cut_spans.lengths[:, None] - cut_spans.starts).ravel()
        left = np.repeat(remaining + before, counts) - index
        bounds = zip(cut_spans.starts.tolist(), ends.tolist(), strict=True)
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


def _stacked(values: Seq[Array], spec: FieldSpec) -> Array:
    out = np.zeros((len(values), *spec.shape), dtype=spec.dtype)
    for row, value in enumerate(values):
        out[row] = value
    return out


def _check_fields(fields: Seq[FieldSpec], depths: int) -> None:
    if depths < 0:
        raise ValueError(f"depths is {depths}; it must be 0 or more")
    names = set()
    for spec in fields:
        if spec.per not in ("token", "target", "sequence"):
            raise ValueError(
                f"field {spec.name!r} is per {spec.per!r}; it must be per token, target or sequence"
            )
        if spec.name in names:
            raise ValueError(f"field {spec.name!r} is declared twice")
        names.add(spec.name)


def _check_sample(
    plan: Plan, place: int, samples: Mapping[int, Tokenized], fields: Seq[FieldSpec]
) -> None:
    who = f"sequence {place} (id {plan.sequences[place].id})"
    if place not in samples:
        raise ValueError(
            f"{who}: its tokens are missing; `samples` must have every sequence to cut"
        )
    sample, length = samples[place], plan.sequences[place].length
    for name, array, kind in (
        ("tokens", sample.tokens, "iu"),
        ("loss_mask", sample.loss_mask, "b"),
    ):
        if array.shape != (length,):
            raise ValueError(
                f"{who}: {name} has shape {array.shape}; the plan's length is {length}"
            )
        if array.dtype.kind not in kind:
            wanted = "integers" if name == "tokens" else "bool"
            raise ValueError(f"{who}: {name} is {array.dtype}; it must be {wanted}")
    declared = {spec.name for spec in fields}
    for name in sample.fields:
        if name not in declared:
            raise ValueError(f"{who}: field {name!r} is not declared; declare it or take it out")
    for spec in fields:
        _check_field(who, sample, spec, length)


def _check_field(who: str, sample: Tokenized, spec: FieldSpec, length: int) -> None:
    if spec.name not in sample.fields:
        raise ValueError(f"{who}: the declared field {spec.name!r} is missing")
    value = np.asarray(sample.fields[spec.name])
    shape = spec.shape if spec.per == "sequence" else (length, *spec.shape)
    if value.shape != shape:
        raise ValueError(
            f"{who}: field {spec.name!r} has shape {value.shape}; per {spec.per} it must be {shape}"
        )
    if value.dtype != spec.dtype:
        raise ValueError(
            f"{who}: field {spec.name!r} is {value.dtype}; convert it to the declared {spec.dtype}"
        )


def _checked_ids(ids: Array, cuts: Seq[Cut], samples: Mapping[int, Tokenized]) -> NDArray[np.int32]:
    """The ids as int32; all are checked to fit."""
    if ids.size and (ids.min() < 0 or ids.max() >= MOST_IDS):
        for place in sorted({cut.sequence for cut in cuts}):
            tokens = samples[place].tokens
            if tokens.min() < 0 or tokens.max() >= MOST_IDS:
                raise ValueError(
                    f"sequence {place}: its token ids go from {tokens.min()} to {tokens.max()}; "
                    "they must be from 0 to 2³¹ − 1"
                )
    return ids.astype(np.int32)
