"""Shapes that follow from a plan alone: CP sizes, padding, positions, tokens and transfers.

In: integers or arrays of them, or a plan. Out: the same. With 6 lanes the powers of two and the
whole give CP sizes (1, 2, 4, 6); a group of 4 may start at lane 0 only, one of 2 at lanes 0, 2, 4.

A sequence padded to P tokens is cut into 2·k chunks of P/(2·k) at CP size k, and lane r holds
chunks r and 2·k−1−r. At CP size 2 a sequence of 7 tokens is padded to 8: lane 0 holds positions
0 1 6 7, where 7 is padding, so its spans of real tokens are 0:2 and 6:7; lane 1 holds 2 3 4 5.
Gathered in the order of the lanes, [0 1 6 7 2 3 4 5] becomes natural by taking its items
[0 1 4 5 6 7 2 3].

Entries of compressed attention: entry j of a sequence pools its positions j·r … j·r + r − 1, full
groups only, so a sequence of n real tokens has n // r entries. An entry belongs to the lane that
holds the last position of its group. Position p sees the positions p − window + 1 … p and the
entries j < (p + 1) // r. Two whole sequences of 3 and 5 tokens, window 2, ratio 4:

    near        [0, 1) [0, 2) [1, 3) | [3, 4) [3, 5) [4, 6) [5, 7) [6, 8)
    entries       0      0      0    |   0      0      0      1      1      of the second: number 0
    entry 0     rows 3 4 5 6; where groups overlap, −1 −1 −1 −1 3 4 5 6
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import EMPTY_TOKENS, Ints
from longshore.plan.types import Pack, Plan
from longshore.settings import CPSizes, names_of

ANY_SIZE_LANES = 64


def legal_cp_sizes(
    lanes: int,
    *,
    kind: str = "pow2",
    min_cp: int = 1,
    max_cp: int | None = None,
    heads: int | None = None,
) -> tuple[int, ...]:
    """The CP sizes a plan may use, rising: powers of two and all lanes together, or any size.

    heads: a rank's heads that a CP group shares out, so a size must divide them.
    """
    highest = lanes if max_cp is None else max_cp
    if kind not in names_of(CPSizes):
        raise ValueError(f"plan.cp_sizes is {kind!r}; it may be 'pow2' or 'any'")
    if kind == "any" and lanes > ANY_SIZE_LANES:
        raise ValueError(
            f"plan.cp_sizes='any' works up to {ANY_SIZE_LANES} lanes, but there are {lanes}; use "
            "'pow2'"
        )
    if not 1 <= min_cp <= highest:
        raise ValueError(
            f"plan.min_cp is {min_cp}; it must be between 1 and plan.max_cp ({highest})"
        )
    if highest > lanes:
        raise ValueError(f"plan.max_cp is {highest}, but there are only {lanes} lanes")
    powers = [1 << i for i in range(lanes.bit_length())]
    sizes = range(1, lanes + 1) if kind == "any" else [*powers, lanes]
    between = {size for size in sizes if min_cp <= size <= highest}
    legal = tuple(sorted(size for size in between if not heads or heads % size == 0))
    if not legal:
        dividing = f" that divides the {heads} heads" if heads and between else ""
        raise ValueError(
            f"no CP size{dividing} is legal from plan.min_cp {min_cp} to plan.max_cp {highest} on "
            f"{lanes} lanes; widen this range, or set plan.cp_sizes='any'"
        )
    return legal


def sync_refusals(sync: str, *, pp: int, ep: int) -> Iterator[str]:
    """Why lanes cannot wait for each other only once a step."""
    if sync == "step" and pp > 1:
        yield (
            f"plan.sync=step does not work with a pipeline (parallel.pp {pp}), whose ranks wait "
            "for each other in every round; use plan.sync=round"
        )
    if sync == "step" and ep > 1:
        yield (
            f"plan.sync=step does not work with parallel.ep {ep}: the ranks that share experts "
            "wait for each other in every layer; use plan.sync=round, or parallel.ep=1"
        )


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def padded_length(length: int, cp_size: int) -> int:
    """A sequence's tokens after padding: none at CP size 1, else a multiple of 2·cp_size."""
    if cp_size == 1:
        return length
    step = 2 * cp_size
    return -(-length // step) * step


def usable_capacity(capacity: int, align: int) -> int:
    """The most tokens a lane's packs may have so that their total, rounded up to `align`, fits."""
    return capacity // align * align


Ints32 = NDArray[np.int32]


def padded_lengths(plan: Plan, lengths: Ints, cp_size: int | Ints) -> Ints:
    """Tokens of a plan's sequences with their padding; policy `padded` makes all as the longest."""
    if plan.setting.planned_by.pads_to_longest:
        longest = max(sequence.length for sequence in plan.sequences)
        lengths = np.full_like(lengths, longest)
    step = np.where(np.equal(cp_size, 1), 1, 2 * np.asarray(cp_size))
    padded: Ints = -(-lengths // step) * step
    return padded


def chunk_pair(padded: Ints, cp_rank: int | Ints, cp_size: int | Ints) -> tuple[Ints, Ints, Ints]:
    """The chunk length, and the positions at which a lane's early and late chunk start.

    One lane alone holds chunks 0 and 1 of two, which join; the second is the shorter if P is odd.
    """
    chunk = -(-padded // (2 * cp_size))
    return chunk, cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk


def spans(
    lengths: Ints, padded: Ints, *, cp_rank: int | Ints, cp_size: int | Ints
) -> tuple[Ints, Ints]:
    """Starts and stops, both (sequences, 2), of the real tokens in a lane's two chunks."""
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    starts = np.stack([early, late], axis=-1)
    stops = starts + chunk[..., None]
    end = lengths[..., None]
    return np.minimum(starts, end), np.minimum(stops, end)


def shard_positions(padded: Ints, *, cp_rank: int, cp_size: int) -> Ints:
    """The position, in its sequence, of each token a lane holds of a pack, padding included."""
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    pieces = np.stack([chunk, padded // cp_size - chunk], axis=-1).ravel()
    return ranges(np.stack([early, late], axis=-1).ravel(), pieces)


def natural_order(padded: Ints, cp_size: int) -> tuple[Ints32, Ints32]:
    """(to_natural, to_shards) for a pack whose shards were gathered in the order of the lanes.

    natural = gathered[to_natural] and gathered = natural[to_shards].
    """
    chunk = padded // (2 * cp_size)
    first = np.cumsum(padded) - padded
    chunks = np.arange(2 * cp_size, dtype=np.int64)
    rank = np.minimum(chunks, chunks[::-1])
    local = first // cp_size + chunk * (chunks[:, None] >= cp_size)
    gathered = local + rank[:, None] * (padded.sum() // cp_size)
    to_natural = _ranges32(gathered.T.ravel(), np.repeat(chunk, 2 * cp_size))
    pair = np.stack([chunks[:cp_size], chunks[: cp_size - 1 : -1]], axis=-1)
    natural = first[:, None] + chunk[:, None] * pair[:, None]
    to_shards = _ranges32(natural.ravel(), np.tile(np.repeat(chunk, 2), cp_size))
    return to_natural, to_shards


def visible_lengths(padded: Ints, *, cp_rank: int, cp_size: int) -> Ints:
    """For a lane's early and late chunk of each sequence, alternating: the tokens up to its end."""
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    visible: Ints = (np.stack([early, late], axis=-1) + chunk[:, None]).ravel()
    return visible


def ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, … of each range, joined: starts (5, 0) and counts (2, 3) give 5 6 0 1 2."""
    joined: Ints = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    joined += np.arange(len(joined), dtype=np.int64)
    return joined


def _ranges32(starts: Ints, counts: Ints) -> Ints32:
    """The same as int32, in less than half the time: these are as long as a whole pack."""
    shift: Ints32 = (starts - (np.cumsum(counts) - counts)).astype(np.int32)
    joined: Ints32 = np.repeat(shift, counts)
    joined += np.arange(len(joined), dtype=np.int32)
    return joined


def make_buckets(capacity: int, *, align: int = 1, count: int = 8) -> tuple[int, ...]:
    """Evenly spaced bucket sizes up to the capacity, each a multiple of `align`.

    Even steps, not halves: padding is a sequence of its own, whose attention costs its square. With
    eight buckets it is at most an eighth of the capacity.
    """
    if count < 1:
        raise ValueError(f"plan.buckets is {count}; it must be at least 1")
    most = usable_capacity(capacity, align)
    if most < 1:
        raise ValueError(f"plan.capacity is {capacity}, less than plan.align ({align}); raise it")
    sizes = (-(-most * part // (count * align)) * align for part in range(1, count + 1))
    return tuple(sorted(set(sizes)))


def lane_packs(plan: Plan, number: int, lane: int) -> tuple[Pack, ...]:
    """The packs that a lane shares in a round, by falling CP size, then by first lane."""
    if not 0 <= lane < plan.setting.lanes:
        raise ValueError(f"lane is {lane}; the plan has lanes 0 to {plan.setting.lanes - 1}")
    packs = plan.rounds[number].packs
    shared = (pack for pack in packs if 0 <= lane - pack.first_lane < pack.cp_size)
    return tuple(sorted(shared, key=lambda pack: (-pack.cp_size, pack.first_lane)))


def lane_tokens(plan: Plan, number: int, lane: int, *, buckets: Seq[int] = ()) -> int:
    """Tokens of a lane's micro-batch in a round, all padding included.

    buckets: instead of the setting's. With capacity 1024, align 16 and buckets (256, 512) a lane
    whose packs have 300 tokens runs 512, one with 513 runs 1024, and one without work runs 256
    tokens of padding (16 without buckets).
    """
    setting = plan.setting
    most = usable_capacity(setting.capacity, setting.align)
    sizes = check_buckets(
        buckets or setting.buckets, capacity=setting.capacity, align=setting.align
    )
    tokens = sum(pack.tokens_per_lane for pack in lane_packs(plan, number, lane))
    tokens = -(-(tokens or min(EMPTY_TOKENS, most)) // setting.align) * setting.align
    if tokens > most:
        raise ValueError(
            f"round {number}, lane {lane}: {tokens} tokens, but the capacity is {most} (a multiple "
            f"of align {setting.align}); check(plan) finds what is wrong with the plan"
        )
    return next(size for size in sizes or (tokens,) if size >= tokens)


def check_buckets(buckets: Seq[int], *, capacity: int, align: int) -> tuple[int, ...]:
    """The bucket sizes, rising, with the usable capacity as the last; none if none were given."""
    most = usable_capacity(capacity, align)
    for size in buckets:
        if size < 1 or size % align or size > most:
            raise ValueError(
                f"bucket size {size}: it must be a multiple of plan.align ({align}), at least 1 "
                f"and at most the capacity ({most}); make_buckets computes such sizes"
            )
    return tuple(sorted({*buckets, most})) if buckets else ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A lane's shard of one sequence, on its way from the sequence's owner."""

    sequence: int
    """Its index in the plan."""
    round: int
    """The round in which it is used."""
    source: int
    """The lane that owns the sequence."""
    destination: int
    """The lane that holds the shard."""
    cp_rank: int
    """The destination's rank in the CP group."""
    cp_size: int
    """The size of the group."""


def route(plan: Plan, owners: Seq[int]) -> dict[tuple[int, int], tuple[Transfer, ...]]:
    """The transfers of a step by (source, destination); plan.sequences[i] is owned by owners[i].

    A sequence of 7 tokens at CP size 2, owned by lane 1 and packed on lanes 0 and 1, makes two
    transfers, 1 → 0 with 3 real tokens and 1 → 1 with 4. Padding is never sent.

    Those of a pair are ordered by round, then pack, then place in the pack. A lane's own sequences
    are listed too (source = destination), and so are shards without a real token: a sequence at CP
    size k always makes k transfers.
    """
    _check_owners(owners, sequences=len(plan.sequences), lanes=plan.setting.lanes)
    pairs: dict[tuple[int, int], list[Transfer]] = {}
    for number, pack in plan.packs():
        for sequence in pack.sequences:
            source = int(owners[sequence])
            for cp_rank, lane in enumerate(pack.lanes):
                transfer = Transfer(sequence, number, source, lane, cp_rank, pack.cp_size)
                pairs.setdefault((source, lane), []).append(transfer)
    return {pair: tuple(transfers) for pair, transfers in pairs.items()}


def _check_owners(owners: Seq[int], *, sequences: int, lanes: int) -> None:
    if len(owners) != sequences:
        raise ValueError(f"there are {len(owners)} owners for {sequences} sequences; give one each")
    for sequence, owner in enumerate(owners):
        try:
            inside = 0 <= index(owner) < lanes and not isinstance(owner, bool)
        except TypeError:
            inside = False
        if not inside:
            raise ValueError(
                f"sequence {sequence} is owned by {owner!r}, which is not a lane; "
                f"an owner is an integer from 0 to {lanes - 1}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Runs of consecutive positions that a lane holds, each of one sequence; all are (spans).

    At CP size 1 a span is a whole sequence, else a chunk, whose rows follow those of its halo. The
    row of position p is base + p.
    """

    starts: Ints
    """The first position that the lane holds."""
    stops: Ints
    """One past the last one, padding included."""
    lengths: Ints
    """Real tokens of the whole sequence; 0 for padding."""
    bases: Ints
    """The row where position 0 lies, or would lie: negative if that is far before the halo."""
    firsts: Ints
    """The number of the sequence's first entry among all entries of the pack."""


def whole_spans(offsets: Seq[int], lengths: Seq[int], ratio: int) -> Spans:
    """Spans of sequences that the lane holds whole, joined at these offsets.

    lengths: real tokens of each, and 0 for each span of padding that may follow. ratio: 0 for no
    entries.
    """
    joints = np.asarray(offsets, dtype=np.int64)
    real = np.asarray(lengths, dtype=np.int64)
    bases, rows = joints[:-1], joints[1:] - joints[:-1]
    if len(real) != len(rows) or (real > rows).any():
        raise ValueError(f"sequences of {list(lengths)} tokens do not fit the rows {rows.tolist()}")
    entries = real // ratio if ratio else np.zeros_like(real)
    return Spans(np.zeros_like(rows), rows, real, bases, np.cumsum(entries) - entries)


def chunk_spans(padded: Ints, ratio: int, *, cp_rank: int, cp_size: int, halo: int) -> Spans:
    """Spans of a lane's two chunks of each sequence, early and late, each after its halo.

    padded: rows of each whole sequence. Padding may make an entry of its own, which no real row
    sees: so what lanes exchange depends on shapes alone.
    """
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    starts = np.stack([early, late], axis=1).reshape(-1)
    counts = np.repeat(chunk, 2)
    halos = halo * np.arange(1, len(starts) + 1)
    entries = padded // ratio if ratio else np.zeros_like(padded)
    return Spans(
        starts=starts,
        stops=starts + counts,
        lengths=np.repeat(padded, 2),
        bases=halos + np.cumsum(counts) - counts - starts,
        firsts=np.repeat(np.cumsum(entries) - entries, 2),
    )


def halo_rows(window: int, ratio: int, *, overlap: bool) -> int:
    """Rows before a chunk that its rows see, or that entries whose groups end in it pool."""
    groups = 2 if overlap else 1
    return max(window - 1, groups * ratio - 1 if ratio else 0)


def rows_after_halos(spans: Spans, halo: int) -> Ints:
    """Indices into all halos followed by the lane's rows that put each span after its halo."""
    counts = spans.stops - spans.starts
    each = np.arange(len(counts))
    firsts = len(counts) * halo + np.cumsum(counts) - counts
    starts = np.stack([each * halo, firsts], axis=1).reshape(-1)
    return ranges(starts, np.stack([np.full_like(counts, halo), counts], axis=1).reshape(-1))


def gathered_entries(spans_of_lanes: Seq[Spans], ratio: int) -> tuple[Ints, int]:
    """Where each entry of the pack is among those of all lanes, and how many each lane sends.

    Each lane sends the entries it owns, padded to the number of the lane that has most.
    """
    owned = [owned_entries(spans, ratio) for spans in spans_of_lanes]
    most = max(len(numbers) for numbers, _ in owned)
    total = sum(len(numbers) for numbers, _ in owned)
    order = np.zeros(total, dtype=np.int64)
    for lane, (spans, (numbers, span)) in enumerate(zip(spans_of_lanes, owned, strict=True)):
        order[spans.firsts[span] + numbers] = lane * most + np.arange(len(numbers))
    return order, most


def positions(spans: Spans) -> Ints:
    """The position of each row of the lane in its sequence."""
    return ranges(spans.starts, spans.stops - spans.starts)


def near_rows(spans: Spans, window: int) -> tuple[Ints32, Ints32]:
    """For each row of the lane, the first row that it sees and one past the last."""
    position = positions(spans)
    bases = _by_row(spans, spans.bases)
    first, stop = bases + np.maximum(position - (window - 1), 0), bases + position + 1
    return first.astype(np.int32), stop.astype(np.int32)


def visible_entries(spans: Spans, ratio: int) -> tuple[Ints32, Ints32]:
    """For each row of the lane, the first entry of its sequence, and how many of them it may see.

    A row of padding sees no more of them than its sequence's last real row.
    """
    firsts = _by_row(spans, spans.firsts)
    if not ratio:
        return np.zeros_like(firsts, dtype=np.int32), np.zeros_like(firsts, dtype=np.int32)
    counts = np.minimum((positions(spans) + 1) // ratio, _by_row(spans, spans.lengths // ratio))
    return firsts.astype(np.int32), counts.astype(np.int32)


def owned_entries(spans: Spans, ratio: int) -> tuple[Ints, Ints]:
    """The number, in its sequence, of each entry that the lane owns, and its span."""
    if not ratio:
        nothing = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    first = spans.starts // ratio
    counts = np.maximum(np.minimum(spans.stops, spans.lengths) // ratio - first, 0)
    return ranges(first, counts), np.repeat(np.arange(len(first)), counts)


def pooled_rows(spans: Spans, ratio: int, *, overlap: bool) -> Ints32:
    """The rows of each owned entry: (entries, ratio), or with overlap (entries, 2·ratio).

    With overlap those of the group before come first, −1 where there is none.
    """
    numbers, span = owned_entries(spans, ratio)
    before = ratio if overlap else 0
    pooled = numbers[:, None] * ratio + np.arange(-before, ratio)
    rows = np.where(pooled >= 0, spans.bases[span][:, None] + pooled, -1)
    return rows.astype(np.int32)


def _by_row(spans: Spans, values: Ints) -> Ints:
    repeated: Ints = np.repeat(values, spans.stops - spans.starts)
    return repeated
