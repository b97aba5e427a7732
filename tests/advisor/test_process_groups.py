import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.advisor.peak_memory import (
    LARGER_BYTES,
    PAIR_BYTES,
    communicator_bytes,
    joined_groups,
)
from longshore.plan.types import Axes

POWERS = st.integers(0, 3).map(lambda power: 1 << power)


def sizes(groups, *, on_gpu):
    return {group.name: group.ranks for group in groups if group.on_gpu == on_gpu}


def test_the_worked_example():
    groups = joined_groups(Axes(lanes=2, tp=2, pp=2))
    on_gpu = {"world": 8, "pp": 2, "lanes": 2, "tp": 2, "CP 1": 1, "CP 2": 2}
    assert sizes(groups, on_gpu=True) == on_gpu | {"experts": 1, "expert replicas": 4}
    assert len(groups) == 16
    assert communicator_bytes(groups) == 2 * LARGER_BYTES + 4 * PAIR_BYTES
    more = joined_groups(Axes(lanes=4096, tp=2, pp=2))
    assert len(more) == 16 + 11


def test_the_largest_job_stays_bounded():
    groups = joined_groups(Axes(lanes=16384, tp=8, pp=8, ep=64), copies=2)
    on_gpu = sizes(groups, on_gpu=True)
    assert on_gpu["experts"] == 64
    assert on_gpu["expert replicas"] == 16384 * 8 // 64
    assert len(on_gpu) == 22
    assert len(sizes(groups, on_gpu=False)) == 8


def test_experts_without_ep_are_sharded_over_a_stage_where_tp_splits_the_rest():
    assert sizes(joined_groups(Axes(lanes=4, tp=2)), on_gpu=True)["expert replicas"] == 8
    assert "expert replicas" not in sizes(joined_groups(Axes(lanes=4)), on_gpu=True)


def test_ep_must_divide_a_stage():
    joined_groups(Axes(lanes=32, tp=8, ep=64))
    with pytest.raises(
        ValueError, match="ep is 3, which does not divide the 8 ranks of a pipeline stage"
    ):
        joined_groups(Axes(lanes=4, tp=2, ep=3))


def test_a_rank_alone_needs_no_memory():
    assert communicator_bytes(joined_groups(Axes(lanes=1))) == 0
    pair = joined_groups(Axes(lanes=2))
    assert communicator_bytes(pair, pair=5, larger=7) == 5 * 2  # world and CP 2


@pytest.mark.property
@given(lanes=st.integers(1, 40), tp=POWERS, pp=POWERS)
def test_groups_of_a_kind_hold_each_rank_at_most_once(lanes, tp, pp):
    world = lanes * tp * pp
    for group in joined_groups(Axes(lanes=lanes, tp=tp, pp=pp, ep=tp)):
        members = group.ranks * group.blocks
        left_over = lanes % group.ranks * tp * pp if group.name.startswith("CP ") else 0
        assert members == world - left_over
