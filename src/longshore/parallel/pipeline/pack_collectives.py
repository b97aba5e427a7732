"""The collectives by which the parts of a layer share packs: one table, by the config of the part.

In: the config of a mixer or feed-forward part, and the packs that a lane shares in a round. Out:
what the lane issues for them, in order, forward and backward, with bytes. Numbers alone; the tests
of parallel/pipeline/trace.py compare them with what a model really issues.

    attention, gather   gather                                back   gather, reduce_scatter
    attention, heads    all_to_all, all_to_all                back   all_to_all, all_to_all
    MLA                 gather                                back   gather, reduce_scatter
    scan, heads         all_to_all, all_to_all                back   all_to_all, all_to_all
    scan, states        all_to_all (halo), gather             back   reduce_scatter, all_to_all
    sparse attention    all_to_all (halo), gather             back   reduce_scatter, all_to_all
    experts, balanced   sum_over                              back   nothing

A lane receives, by gather with K = 2 heads of D = 4 in 8 bytes, at CP size 2 and 6 rows a lane,
6 · 2·K·D · 8 = 768 bytes; both lanes together 1,536.

c lanes share a pack. Attention puts packs over heads before gathered ones, and backward is the
mirror image; gathered packs go in the order of model/interface.py, scans pack by pack.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.choices import AttentionKind, ScanKind
from longshore.model.attention_core import over_heads
from longshore.model.interface import backward_steps, forward_steps
from longshore.plan.entries import halo_rows as entry_halo
from longshore.plan.entries import most_owned

COUNT_BYTES = 8
"""Of an expert's count, int64."""


@dataclass(frozen=True, slots=True)
class SharedPack:
    """A pack of several lanes, as one of them has it."""

    first_lane: int
    """The first of its lanes."""
    cp_size: int
    """How many lanes share it."""
    cp_rank: int
    """This lane's place among them."""
    rows: int
    """Of each lane."""
    padded: tuple[int, ...]
    """Tokens of each sequence over all lanes, padding included."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How packs are shared, as parallel/apply.py sets it."""

    attention: AttentionKind
    scan: ScanKind
    item: int
    """Bytes of a number of the arithmetic."""

    @property
    def wide(self) -> int:
        """Bytes of a number in float32 at least."""
        return max(self.item, 4)


class PackCollective(NamedTuple):
    """One collective of a lane."""

    kind: str
    """As in distributed/collectives.py."""
    pack: SharedPack
    bytes: int
    """That this lane receives from others."""
    total: int
    """That all lanes of the pack receive."""
    name: str
    """What travels."""


Packs = Sequence[SharedPack]
PartCollectives = Callable[[Any, Packs, Ways, bool], list[PackCollective]]
"""(config, packs, ways, is_forward): the packs that a lane shares, by falling CP size."""


def part_collectives(
    part: Part, packs: Packs, ways: Ways, *, forward: bool
) -> list[PackCollective]:
    """What a lane issues for the packs that it shares, in this order."""
    return table_entry(part)(part, packs, ways, forward)


def table_entry(part: Part) -> PartCollectives:
    entry = COLLECTIVES.get(type(part))
    if entry is None:
        known = ", ".join(kind.__name__ for kind in COLLECTIVES)
        raise ValueError(
            f"the trace does not know which collectives {type(part).__name__} issues; known are "
            f"{known}. Add it to COLLECTIVES of parallel/pipeline/pack_collectives.py, or train "
            "without the comparison"
        )
    return entry


def _attention(
    part: AttentionConfig, packs: Packs, ways: Ways, forward: bool
) -> list[PackCollective]:
    kind = ways.attention
    shared = [p for p in packs if over_heads(part.heads, part.kv_heads, p.cp_size, kind=kind)]
    gathered = [pack for pack in packs if pack not in shared]
    queries, keys = part.heads * part.head_dim, part.kv_heads * part.head_dim
    swaps = _swaps(shared, queries + 2 * keys, queries, ways.item, forward)
    rows = _visible(gathered, 2 * keys, "keys and values", ways.item, forward)
    return swaps + rows if forward else rows + swaps


def _latent(part: MLAConfig, packs: Packs, ways: Ways, forward: bool) -> list[PackCollective]:
    return _visible(packs, part.latent_dim, "latents", ways.item, forward)


def _visible(
    packs: Packs, values: int, name: str, item: int, forward: bool
) -> list[PackCollective]:
    """Rows of so many values, gathered in both passes; backward also returns their gradients."""
    sizes = [pack.cp_size for pack in packs]
    steps = forward_steps(sizes) if forward else backward_steps(sizes)
    kinds = {"gather": ("gather", name), "reduce": ("reduce_scatter", f"gradients of {name}")}
    return [
        _even(kinds[action][0], packs[place], packs[place].rows * values * item, kinds[action][1])
        for action, place in steps
        if action in kinds
    ]


def _swaps(
    packs: Packs, values: int, returned: int, item: int, forward: bool
) -> list[PackCollective]:
    """Tokens for heads, and back: values of a row on the way there and on the way back."""
    there, back = "tokens for heads", "heads for tokens"
    calls = []
    for pack in packs:
        share = pack.rows * item
        assert values % pack.cp_size == returned % pack.cp_size == 0
        calls.append(_even("all_to_all", pack, share * values // pack.cp_size, there))
        calls.append(_even("all_to_all", pack, share * returned // pack.cp_size, back))
    return calls if forward else _mirrored(calls)


def _mirrored(calls: list[PackCollective]) -> list[PackCollective]:
    return [call._replace(name=f"gradients of {call.name}") for call in reversed(calls)]


@dataclass(frozen=True, slots=True)
class _ScanNumbers:
    """What a scan has for a row and for a head."""

    parts: tuple[tuple[int, int], ...]
    """Heads and width of each part of the convolution's channels."""
    heads: int
    """That carry states."""
    gates: int
    """Numbers of each head."""
    returned: int
    """Values of a row of the output."""
    state: int
    """Values of a chunk's transition and final state."""
    kernel: int
    """Tokens that the convolution sees."""

    @property
    def channels(self) -> int:
        return sum(heads * width for heads, width in self.parts)

    def over_heads(self, cp_size: int, kind: ScanKind) -> bool:
        """As model/scan.py chooses."""
        counts = [heads for heads, _ in self.parts]
        legal = all(n % cp_size == 0 or cp_size % n == 0 for n in counts)
        return kind != "states" and self.heads % cp_size == 0 and legal

    def swapped(self, cp_size: int) -> int:
        """Values of a row that are swapped: a part with fewer heads than lanes is repeated."""
        spread = sum(
            (heads if heads % cp_size == 0 else cp_size) * width for heads, width in self.parts
        )
        return spread + self.gates * self.heads


def _mamba2(part: Mamba2Config, packs: Packs, ways: Ways, forward: bool) -> list[PackCollective]:
    group = (part.groups, part.state_dim)
    numbers = _ScanNumbers(
        parts=((part.heads, part.head_dim), group, group),
        heads=part.heads,
        gates=1,
        returned=part.inner,
        state=part.heads + part.inner * part.state_dim,
        kernel=part.kernel,
    )
    return _scan(numbers, packs, ways, forward)


def _delta_net(
    part: DeltaNetConfig, packs: Packs, ways: Ways, forward: bool
) -> list[PackCollective]:
    key = (part.key_heads, part.key_dim)
    numbers = _ScanNumbers(
        parts=(key, key, (part.value_heads, part.value_dim)),
        heads=part.value_heads,
        gates=2,
        returned=part.values,
        state=part.value_heads * part.key_dim * (part.key_dim + part.value_dim),
        kernel=part.kernel,
    )
    return _scan(numbers, packs, ways, forward)


def _scan(numbers: _ScanNumbers, packs: Packs, ways: Ways, forward: bool) -> list[PackCollective]:
    """Pack after pack; in backward the last pack first."""
    calls = []
    for pack in packs if forward else reversed(packs):
        if numbers.over_heads(pack.cp_size, ways.scan):
            values = numbers.swapped(pack.cp_size)
            calls += _swaps([pack], values, numbers.returned, ways.item, forward)
        else:
            calls += _states(numbers, pack, ways, forward)
    return calls


def _states(
    numbers: _ScanNumbers, pack: SharedPack, ways: Ways, forward: bool
) -> list[PackCollective]:
    """The rows before each chunk, then the ends of all chunks."""
    amount = 2 * len(pack.padded) * numbers.state * ways.wide
    kind = "gather" if forward else "reduce_scatter"
    calls = [_even(kind, pack, amount, "states")]
    if numbers.kernel > 1:
        row = numbers.channels * ways.item
        calls.insert(0, _halo(pack, numbers.kernel - 1, row, forward))
    return calls if forward else _mirrored(calls)


def _halo(pack: SharedPack, count: int, row: int, forward: bool) -> PackCollective:
    """So many rows before each chunk, of so many bytes; in backward their gradients."""
    travelling = halo_rows if forward else _returned
    rows = [travelling(length, count, pack.cp_size) for length in pack.padded]
    by_lane = [sum(counts) * row for counts in zip(*rows, strict=True)]
    mine = by_lane[pack.cp_rank]
    return PackCollective("all_to_all", pack, mine, sum(by_lane), "rows before")


def _sparse(
    part: SparseAttentionConfig, packs: Packs, ways: Ways, forward: bool
) -> list[PackCollective]:
    """Of each pack the rows before chunks, then the entries that lanes own."""
    overlap = part.index is not None
    index = part.index.head_dim if part.index is not None else 0
    halo = entry_halo(part.window, part.ratio, overlap=overlap)
    row = (part.head_dim + 2 * part.entry_channels + 4 * index) * ways.item
    calls = []
    for pack in packs if forward else reversed(packs):
        each = [_halo(pack, halo, row, forward)] if halo else []
        if part.ratio:
            padded = np.array(pack.padded, dtype=np.int64)
            amount = most_owned(padded, part.ratio, pack.cp_size)
            kind = "gather" if forward else "reduce_scatter"
            size = amount * (part.head_dim + index) * ways.item
            each.append(_even(kind, pack, size, "entries"))
        calls += each if forward else _mirrored(each)
    return calls


@lru_cache(maxsize=1 << 14)
def halo_rows(padded: int, count: int, cp_size: int) -> tuple[int, ...]:
    """Of one sequence, the rows that each lane receives from others as those before its chunks."""
    rows = [0] * cp_size
    for reader, _ in _crossings(padded, count, cp_size):
        rows[reader] += 1
    return tuple(rows)


@lru_cache(maxsize=1 << 14)
def _returned(padded: int, count: int, cp_size: int) -> tuple[int, ...]:
    """Of one sequence, the gradients that come back to each lane for rows that others read."""
    rows = [0] * cp_size
    for _, owner in _crossings(padded, count, cp_size):
        rows[owner] += 1
    return tuple(rows)


def _crossings(padded: int, count: int, cp_size: int) -> list[tuple[int, int]]:
    """(lane that reads, lane that has it) of each row before a chunk, where the two differ."""
    chunk = padded // (2 * cp_size)
    lane_of = [min(number, 2 * cp_size - 1 - number) for number in range(2 * cp_size)]
    pairs = [
        (lane_of[number], lane_of[position // chunk])
        for number in range(2 * cp_size)
        for position in range(max(0, number * chunk - count), number * chunk)
    ]
    return [(reader, owner) for reader, owner in pairs if reader != owner]


def _experts(part: MoEConfig, packs: Packs, ways: Ways, forward: bool) -> list[PackCollective]:
    """Counts of the sequences, for the balance loss; they have no gradient."""
    if not forward or not part.aux_weight:
        return []
    each = part.experts * COUNT_BYTES
    return [_even("sum_over", pack, len(pack.padded) * each, "experts' counts") for pack in packs]


def _nothing(part: Part, packs: Packs, ways: Ways, forward: bool) -> list[PackCollective]:
    return []


def _even(kind: str, pack: SharedPack, amount: int, name: str) -> PackCollective:
    """amount: bytes that a lane receives from each other one."""
    received = (pack.cp_size - 1) * amount
    return PackCollective(kind, pack, received, pack.cp_size * received, name)


COLLECTIVES: dict[type, PartCollectives] = {
    AttentionConfig: _attention,
    MLAConfig: _latent,
    Mamba2Config: _mamba2,
    DeltaNetConfig: _delta_net,
    SparseAttentionConfig: _sparse,
    MLPConfig: _nothing,
    MoEConfig: _experts,
}
