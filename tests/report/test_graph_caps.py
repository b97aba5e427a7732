import numpy as np
import pytest

from longshore.data.pack import lane_context
from longshore.plan.graph_use import MicroBatchSizes, as_graphed
from longshore.report.plan_page import cap_rows, page_data


def test_counts_what_a_graph_can_serve(make):
    """By hand: lane 0 has two packs, lane 1 shares one, lane 2 is alone, lane 3 has no work."""
    rounds = [[(0, 2, (0,)), (0, 1, (1, 2)), (2, 1, (3,))], [(0, 1, (4, 5))]]
    plan = make([8, 3, 1, 3, 5, 3], rounds, lanes=4, capacity=8)
    sizes = MicroBatchSizes.of([plan])
    assert (sizes.alone.tolist(), sizes.others) == ([1, 2], 2)
    data = page_data([plan], {})
    assert data["micro_batches"] == {"alone": 2, "others": 2}
    assert [row["cap"] for row in data["caps"]] == [1, 2]


def test_padding_up_to_a_bucket_is_one_more(make):
    """Capacity 64 has buckets of 8, 16, …: 11 tokens are padded to 16, and 16 are not."""
    plan = make([5, 6, 8, 8], [[(0, 1, (0, 1)), (1, 1, (2, 3))]], lanes=2, capacity=64)
    assert MicroBatchSizes.of([plan]).alone.tolist() == [2, 2]
    graphed = as_graphed(plan)
    assert MicroBatchSizes.of([graphed]).alone.tolist() == [3, 2]
    spans = [len(lane_context(graphed, 0, lane).packs[0].local) for lane in range(2)]
    assert spans == [3, 2]
    assert page_data([plan], {})["caps"][-1]["cap"] == 4


def test_covered_share_and_empty_slots():
    rows = {row["cap"]: row for row in cap_rows(np.array([1, 1, 2, 5]))}
    assert list(rows) == [1, 2, 4, 5, 8]
    assert [row["covered"] for row in rows.values()] == [0.5, 0.75, 0.75, 1, 1]
    assert rows[2]["empty_slots"] == pytest.approx(2 / 3)
    assert rows[2]["empty_share"] == pytest.approx(1 / 3)
    assert rows[5]["empty_slots"] == pytest.approx((4 + 4 + 3 + 0) / 4)
    assert [row["marks"] for row in rows.values()] == [("P50",), (), (), ("P90", "P99", "max"), ()]


def test_a_percentile_is_the_least_cap_that_covers_so_much():
    rows = {row["cap"]: row for row in cap_rows(np.arange(1, 101))}
    assert [row["cap"] for row in rows.values() if row["marks"]] == [50, 90, 99, 100]
    assert rows[90]["covered"] == 0.9


def test_a_cap_that_covers_nothing_has_no_empty_slots():
    first = cap_rows(np.array([3, 3]))[0]
    assert (first["cap"], first["covered"], first["empty_slots"]) == (1, 0, 0)


def test_no_micro_batches_no_rows():
    assert cap_rows(np.array([], dtype=np.int64)) == []
