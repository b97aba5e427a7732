import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import plan_of
from tests.plan.chunks import chunk_ranges

from longshore.plan import Pack, Round
from longshore.plan.shapes import (
    lane_packs,
    lane_tokens,
    make_buckets,
    natural_order,
    padded_length,
    padded_lengths,
    ranges,
    shard_positions,
    spans,
)

ROUND = Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1, 2), 300)))


def totals(**options: int) -> list[int]:
    buckets = options.pop("buckets", ())
    plan = plan_of([7, 100, 200], [ROUND, Round(())], lanes=3, **options)
    return [lane_tokens(plan, n, lane, buckets=buckets) for n in range(2) for lane in range(3)]


def test_totals_by_hand() -> None:
    assert totals() == [4, 304, 16, 16, 16, 16]
    assert totals(align=20, capacity=1030) == [20, 320, 20, 20, 20, 20]
    assert totals(align=16, capacity=1024, buckets=(512, 256)) == [256, 512, 256, 256, 256, 256]
    assert totals(capacity=304) == [4, 304, 16, 16, 16, 16]


def test_capacity_is_always_a_bucket() -> None:
    assert totals(capacity=400, align=16, buckets=(256,)) == [256, 400, 256, 256, 256, 256]
    assert totals(capacity=410, align=16, buckets=(256,)) == [256, 400, 256, 256, 256, 256]


def test_an_empty_pack_fits_the_capacity() -> None:
    plan = plan_of([1], [Round((Pack(0, 1, (0,), 1),))], lanes=2, capacity=5, align=2)
    assert lane_tokens(plan, 0, 1) == 4


def test_make_buckets() -> None:
    assert make_buckets(16384) == tuple(range(2048, 16385, 2048))
    assert make_buckets(100, align=16, count=4) == (32, 48, 80, 96)
    assert make_buckets(3) == (1, 2, 3)
    assert make_buckets(64, align=64) == (64,)
    with pytest.raises(ValueError, match="buckets is 0"):
        make_buckets(3, count=0)
    with pytest.raises(ValueError, match=r"capacity is 3, less than plan\.align"):
        make_buckets(3, align=4)


def test_packs_of_a_lane_fall_in_cp_size() -> None:
    big, small = ROUND.packs
    plan = plan_of([7, 100, 200], [Round((small, big))], lanes=3)
    assert lane_packs(plan, 0, 1) == (big, small)
    assert lane_packs(plan, 0, 0) == (big,)
    assert lane_packs(plan, 0, 2) == ()


@pytest.mark.parametrize("size", [0, 24, 512, -16])
def test_refuses_a_bucket_that_is_none(size: int) -> None:
    with pytest.raises(ValueError, match=rf"bucket size {size}: .*align \(16\).*capacity \(400\)"):
        totals(capacity=410, align=16, buckets=(256, size))


def test_refuses_a_plan_over_capacity_and_a_strange_lane() -> None:
    with pytest.raises(ValueError, match="round 0, lane 1: 304 tokens, but the capacity is 303"):
        totals(capacity=303)
    with pytest.raises(ValueError, match="lane is 3; the plan has lanes 0 to 2"):
        lane_tokens(plan_of([1], [ROUND], lanes=3), 0, 3)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_zigzag_by_hand() -> None:
    assert shard_positions(ints(8), cp_rank=0, cp_size=2).tolist() == [0, 1, 6, 7]
    assert shard_positions(ints(8), cp_rank=1, cp_size=2).tolist() == [2, 3, 4, 5]
    assert shard_positions(ints(3, 1), cp_rank=0, cp_size=1).tolist() == [0, 1, 2, 0]
    starts, stops = spans(ints(7), ints(8), cp_rank=0, cp_size=2)
    assert (starts.tolist(), stops.tolist()) == ([[0, 6]], [[2, 7]])
    to_natural, to_shards = natural_order(ints(8), 2)
    assert to_natural.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert to_shards.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert ranges(ints(5, 0), ints(2, 3)).tolist() == [5, 6, 0, 1, 2]


@pytest.mark.property
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 9), st.data())
def test_spans_are_the_chunk_ranges(lengths: list[int], k: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, k - 1))
    padded = ints(*(padded_length(n, k) for n in lengths))
    starts, stops = spans(ints(*lengths), padded, cp_rank=rank, cp_size=k)
    for n, start, stop in zip(lengths, starts.tolist(), stops.tolist(), strict=True):
        found = [t for a, b in zip(start, stop, strict=True) for t in range(a, b)]
        assert found == [t for a, b in chunk_ranges(n, rank, k) for t in range(a, b)]


@pytest.mark.property
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(2, 8))
def test_gathered_shards_become_natural_and_back(chunks: list[int], k: int) -> None:
    padded = ints(*chunks) * 2 * k
    first = np.repeat(np.cumsum(padded) - padded, padded // k)
    gathered = np.concatenate(
        [first + shard_positions(padded, cp_rank=r, cp_size=k) for r in range(k)]
    )
    to_natural, to_shards = natural_order(padded, k)
    assert (to_natural.dtype, to_shards.dtype) == (np.int32, np.int32)
    assert (gathered[to_natural] == np.arange(padded.sum())).all()
    assert (to_shards == gathered).all()


def test_policy_padded_pads_to_the_longest() -> None:
    plan = plan_of([3, 10], [], lanes=4, policy="padded")
    assert padded_lengths(plan, ints(3), 1).tolist() == [10]
    assert padded_lengths(plan, ints(3, 10), 2).tolist() == [12, 12]
    plan = plan_of([3, 10], [], lanes=4)
    assert padded_lengths(plan, ints(3, 10), ints(1, 4)).tolist() == [3, 16]
