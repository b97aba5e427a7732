import numpy as np
import pytest

from longshore.data.lane_context import lane_context
from longshore.report.graph_caps import cap_rows, micro_batch_sizes


def test_counts_sequences_of_each_lane_and_round(make):
    rounds = [[(0, 2, (0, 1)), (1, 1, (2, 3, 4))], [(0, 1, (5,))]]
    plan = make([8, 8, 1, 1, 1, 4], rounds, lanes=4)
    assert micro_batch_sizes(plan).tolist() == [3, 6, 2], "each with a run of padding"


def test_counts_what_kernels_see(make):
    """By hand: lane 0 is full, lane 1 has 2 rows of padding, lane 2 has 5, lane 3 has no work."""
    rounds = [[(0, 2, (0,)), (0, 1, (1, 2)), (1, 1, (3,)), (2, 1, (4,))]]
    plan = make([8, 3, 1, 2, 3], rounds, lanes=4, capacity=8)
    assert micro_batch_sizes(plan).tolist() == [3, 3, 2]
    for lane, sequences in enumerate([3, 3, 2, 1]):
        packs = lane_context(plan, 0, lane, buckets=(8,)).packs
        assert sum(len(pack.local) for pack in packs) == sequences


def test_covered_share_and_empty_slots():
    rows = {row.cap: row for row in cap_rows(np.array([1, 1, 2, 5]))}
    assert list(rows) == [1, 2, 4, 5, 8]
    assert [row.covered for row in rows.values()] == [0.5, 0.75, 0.75, 1, 1]
    assert rows[2].empty_slots == pytest.approx(2 / 3)
    assert rows[2].empty_share == pytest.approx(1 / 3)
    assert rows[5].empty_slots == pytest.approx((4 + 4 + 3 + 0) / 4)
    assert [row.marks for row in rows.values()] == [("P50",), (), (), ("P90", "P99", "max"), ()]


def test_a_percentile_is_the_least_cap_that_covers_so_much():
    rows = {row.cap: row for row in cap_rows(np.arange(1, 101))}
    assert [row.cap for row in rows.values() if row.marks] == [50, 90, 99, 100]
    assert rows[90].covered == 0.9


def test_a_cap_that_covers_nothing_has_no_empty_slots():
    first = cap_rows(np.array([3, 3]))[0]
    assert (first.cap, first.covered, first.empty_slots) == (1, 0, 0)


def test_no_micro_batches_no_rows():
    assert cap_rows(np.array([], dtype=np.int64)) == []
