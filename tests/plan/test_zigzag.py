import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import plan_of

from longshore.plan.cp_size import padded_length
from longshore.plan.route import chunk_ranges
from longshore.plan.shapes import natural_order, padded_lengths, ranges, shard_positions, spans


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_by_hand() -> None:
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
