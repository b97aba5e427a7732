from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import any_plans, plan_of, twin_layout

from longshore.batch import CPGroup, SeqContext
from longshore.data.pack import lane_context
from longshore.plan import Pack, Plan, Round
from longshore.plan.shapes import make_buckets


def test_by_hand() -> None:
    packs = (Pack(0, 2, (1,), 4), Pack(0, 1, (0,), 3))
    ctx = lane_context(plan_of([3, 7], [Round(packs)], lanes=2, capacity=8, align=8), 0, 0)
    assert (ctx.tokens, ctx.real_tokens, ctx.sequences) == (8, 6, (1, 0))
    assert ctx.positions.tolist() == [0, 1, 6, 7, 0, 1, 2, 0]
    assert ctx.sequence_index.tolist() == [0, 0, 0, 2, 1, 1, 1, 2]
    assert ctx.is_real.tolist() == [True, True, True, False, True, True, True, False]
    assert ctx.lengths.tolist() == [7, 3, 1]
    shared, own = ctx.packs
    assert (shared.group, shared.rows, shared.lengths) == (CPGroup(0, 2, 0), slice(0, 4), (7,))
    assert (shared.real.offsets, shared.padded.offsets) == ((0, 7), (0, 8))
    assert (shared.local.offsets, shared.zigzag.chunks.offsets) == ((0, 4), (0, 2, 4))
    assert shared.zigzag.to_natural.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert shared.zigzag.to_shards.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert shared.zigzag.visible.offsets == (0, 2, 10)
    assert shared.zigzag.visible_rows.tolist() == [0, 1, 0, 1, 4, 5, 6, 7, 2, 3]
    assert (own.group, own.rows, own.lengths) == (CPGroup(0, 1, 0), slice(4, 8), (3, 0))
    assert (own.padded.offsets, own.padded.longest, own.zigzag) == ((0, 3, 4), 3, None)
    assert own.local is own.padded
    assert (shared.sequences, own.sequences) == (slice(0, 1), slice(1, 2))
    assert list(shared.group.lanes) == [0, 1]


def test_padding_beside_a_shared_pack_gets_a_pack_of_its_own() -> None:
    plan = plan_of([7], [Round((Pack(0, 2, (0,), 4),))], lanes=2, capacity=8, align=8)
    shared, padding = lane_context(plan, 0, 1).packs
    assert (shared.rows, padding.rows) == (slice(0, 4), slice(4, 8))
    assert (padding.group, padding.lengths) == (CPGroup(1, 1, 0), (0,))
    assert padding.padded.offsets == (0, 4)
    assert padding.sequences == slice(1, 1)


def test_a_lane_without_work_is_one_run_of_padding() -> None:
    plan = plan_of([7], [Round((Pack(0, 1, (0,), 7),))], lanes=2)
    ctx = lane_context(plan, 0, 1)
    (pack,) = ctx.packs
    assert (ctx.tokens, ctx.real_tokens, ctx.sequences) == (16, 0, ())
    assert (pack.group, pack.padded.offsets, pack.lengths) == (CPGroup(1, 1, 0), (0, 16), (0,))
    assert ctx.sequence_index.tolist() == [0] * 16
    assert ctx.lengths.tolist() == [1]


def test_policy_padded_gives_every_sequence_the_longest_length() -> None:
    rounds = [Round((Pack(0, 2, (0,), 6), Pack(2, 1, (1,), 10)))]
    plan = plan_of([3, 10], rounds, lanes=3, policy="padded")
    ctx = lane_context(plan, 0, 1)
    assert ctx.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert (ctx.real_tokens, ctx.packs[0].lengths) == (0, (3,))
    assert ctx.packs[0].padded.offsets == (0, 12)
    assert lane_context(plan, 0, 2).real_tokens == 10


def contexts(plan: Plan, buckets: tuple[int, ...]) -> list[list[SeqContext]]:
    return [
        [lane_context(plan, n, lane, buckets=buckets) for lane in range(plan.setting.lanes)]
        for n in range(len(plan.rounds))
    ]


def check_tokens(plan: Plan, ctx: SeqContext, held: list[tuple[int, int]]) -> None:
    real = [position < plan.sequences[place].length for place, position in held]
    extra = ctx.tokens - len(held)
    assert ctx.is_real.tolist() == real + [False] * extra
    assert ctx.real_tokens == sum(real)
    assert ctx.positions.tolist() == [p for _, p in held] + list(range(extra))
    rows = {place: row for row, place in enumerate(ctx.sequences)}
    want = [
        rows[place] if is_real else len(rows)
        for (place, _), is_real in zip(held, real, strict=True)
    ]
    assert ctx.sequence_index.tolist() == want + [len(rows)] * extra
    assert ctx.lengths.tolist() == [*(plan.sequences[place].length for place in ctx.sequences), 1]


def check_packs(plan: Plan, ctx: SeqContext, lane: int) -> None:
    """Packs cover all rows, in falling CP size, and host and device numbers agree."""
    assert [pack.start for pack in ctx.packs] == [0, *(pack.stop for pack in ctx.packs[:-1])]
    assert ctx.packs[-1].stop == ctx.tokens
    sizes = [pack.group.cp_size for pack in ctx.packs]
    assert sizes == sorted(sizes, reverse=True)
    for pack in ctx.packs:
        assert pack.group.lanes[pack.group.cp_rank] == lane
        assert pack.local.offsets[-1] == pack.stop - pack.start
        assert pack.padded.offsets[-1] == (pack.stop - pack.start) * pack.group.cp_size
        assert 0 not in pack.lengths[:-1]
        assert (pack.zigzag is None) == (pack.group.cp_size == 1)
        places = ctx.sequences[pack.sequences]
        assert pack.lengths[: len(places)] == tuple(plan.sequences[i].length for i in places)
        parts = [pack.real, pack.padded, pack.local]
        parts += [pack.zigzag.chunks, pack.zigzag.visible] if pack.zigzag else []
        for part in parts:
            assert part.cu_seqlens.dtype == torch.int32
            assert part.cu_seqlens.tolist() == list(part.offsets)
            assert part.longest == max(b - a for a, b in pairwise(part.offsets))
        for a, b in pairwise(pack.padded.offsets):
            assert b > a
        for row, (a, b) in enumerate(pairwise(pack.local.offsets)):
            index = ctx.sequence_index[pack.rows][a:b]
            own = pack.first_sequence + row
            assert set(index.tolist()) <= {own, len(ctx.sequences)}


def check_group(members: list[SeqContext], first_lane: int, cp_size: int) -> None:
    """Shards of one pack, gathered in the order of the lanes, make whole sequences, and back."""
    found = [
        (ctx, pack)
        for ctx in members
        for pack in ctx.packs
        if (pack.group.first_lane, pack.group.cp_size) == (first_lane, cp_size)
    ]
    assert [pack.group.cp_rank for _, pack in found] == list(range(cp_size))
    gathered = torch.cat([ctx.positions[pack.rows] for ctx, pack in found])
    whole = [p for a, b in pairwise(found[0][1].padded.offsets) for p in range(b - a)]
    for ctx, pack in found:
        assert pack.padded.offsets == found[0][1].padded.offsets
        natural = gathered.index_select(0, pack.zigzag.to_natural)
        assert natural.tolist() == whole
        assert torch.equal(natural.index_select(0, pack.zigzag.to_shards), gathered)
        chunks = [ctx.positions[pack.rows][a:b] for a, b in pairwise(pack.zigzag.chunks.offsets)]
        for early, late in zip(chunks[::2], chunks[1::2], strict=True):
            size, k, rank = len(early), cp_size, pack.group.cp_rank
            assert early.tolist() == list(range(rank * size, (rank + 1) * size))
            assert late.tolist() == [(2 * k - 1 - rank) * size + i for i in range(size)]
        seen = gathered.index_select(0, pack.zigzag.visible_rows)
        for chunk, (a, b) in zip(chunks, pairwise(pack.zigzag.visible.offsets), strict=True):
            assert seen[a:b].tolist() == list(range(int(chunk[-1]) + 1))


@pytest.mark.slow
@pytest.mark.property
@given(any_plans(), st.integers(0, 8))
def test_contexts_of_any_plan(plan: Plan, count: int) -> None:
    setting = plan.setting
    buckets = make_buckets(setting.capacity, align=setting.align, count=count) if count else ()
    for number, lanes in enumerate(contexts(plan, buckets)):
        for lane, ctx in enumerate(lanes):
            check_tokens(plan, ctx, twin_layout(plan, number, lane))
            check_packs(plan, ctx, lane)
        for pack in plan.rounds[number].packs:
            if pack.cp_size > 1:
                members = [lanes[lane] for lane in pack.lanes]
                check_group(members, pack.first_lane, pack.cp_size)


def test_refuses_a_pack_whose_tokens_are_not_its_sequences() -> None:
    plan = plan_of([7], [Round((Pack(0, 2, (0,), 5),))], lanes=2)
    with pytest.raises(ValueError, match=r"round 0, lane 1: tokens_per_lane .* is 5, .* have 4"):
        lane_context(plan, 0, 1)
