from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import FIELDS, Sample, any_plans, make_samples, plan_of

from longshore.data.pack import LaneCut, count_targets, cut_shards, cut_tokens, lane_cuts
from longshore.data.source import Field
from longshore.plan import Pack, Plan, Round
from longshore.plan.shapes import route

PLAN = plan_of([7, 2], [Round((Pack(0, 2, (0,), 4), Pack(0, 1, (1,), 2)))], lanes=2)
TOKENS = np.array([5, 6, 7, 8, 9, 4, 3])
MASK = np.array([0, 0, 1, 1, 1, 1, 1], dtype=bool)
GOOD = {0: Sample(TOKENS, MASK), 1: Sample(np.array([1, 2]), np.array([True, True]))}


def test_by_hand() -> None:
    shards = cut_shards(PLAN, GOOD, lane_cuts(PLAN, 0), depths=1)
    assert shards.sequences.tolist() == [0, 1]
    assert shards.tokens.tolist() == [3, 2]
    assert shards.ids.tolist() == [[5, 6, 7], [6, 7, 8], [3, -1, -1], [1, 2, -1], [2, -1, -1]]
    assert shards.mask.tolist() == [[0, 1], [1, 1], [0, 0], [1, 0], [0, 0]]
    assert shards.depths == 1
    assert (shards.ids.dtype, shards.mask.dtype) == (np.int32, np.bool_)


def test_lane_cuts_by_hand() -> None:
    assert lane_cuts(PLAN, 0) == (LaneCut(0, 0, 2), LaneCut(1, 0, 1))
    assert lane_cuts(PLAN, 1) == (LaneCut(0, 1, 2),)


def test_count_targets_leaves_out_what_nothing_predicts() -> None:
    mask = np.array([True, True, False, True])
    assert count_targets(mask, 4) == (2, 1, 1, 0, 0)
    assert count_targets(mask[:1], 1) == (0, 0)


@pytest.mark.property
@given(any_plans(), st.integers(0, 3), st.randoms(use_true_random=False))
def test_cutting_for_other_lanes_gives_what_each_cuts_for_itself(
    plan: Plan, depths: int, random: object
) -> None:
    """All transfers of an owner cut at once, sorted by destination, as an exchange sends them."""
    if sum(len(pack.sequences) for _, pack in plan.packs()) < len(plan.sequences):
        return
    samples, lanes = make_samples(plan), plan.setting.lanes
    owners = [random.randrange(lanes) for _ in plan.sequences]
    routes = route(plan, owners)
    for lane in range(lanes):
        own = cut_shards(plan, samples, lane_cuts(plan, lane), depths=depths, fields=FIELDS)
        by_place = {place: at for at, place in enumerate(own.sequences.tolist())}
        first = np.cumsum(own.tokens) - own.tokens
        for source, transfers in ((a, t) for (a, b), t in routes.items() if b == lane):
            held = {place: s for place, s in samples.items() if owners[place] == source}
            sent = cut_shards(plan, held, transfers, depths=depths, fields=FIELDS)
            assert sent.tokens.tolist() == cut_tokens(plan, transfers).tolist()
            cuts = [by_place[place] for place in sent.sequences.tolist()]
            rows = [r for i in cuts for r in range(first[i], first[i] + own.tokens[i])]
            assert (sent.ids == own.ids[rows]).all()
            assert (sent.mask == own.mask[rows]).all()
            for name, values in sent.token_fields.items():
                assert (values == own.token_fields[name][rows]).all()
            for name, values in sent.sequence_fields.items():
                assert (values == own.sequence_fields[name][cuts]).all()


def test_takes_read_only_views_and_any_integer_dtype() -> None:
    tokens = np.array([0, 65535], dtype=np.uint16)
    tokens.flags.writeable = False
    samples = {1: Sample(tokens, GOOD[1].loss_mask)}
    shards = cut_shards(PLAN, samples, [LaneCut(1, 0, 1)])
    assert shards.ids.tolist() == [[0, 65535], [65535, -1]]


def cut_all(samples: dict[int, Sample], fields: tuple[Field, ...] = (), depths: int = 0) -> None:
    cut_shards(PLAN, samples, lane_cuts(PLAN, 0), depths=depths, fields=fields)


def changed(**parts: object) -> dict[int, Sample]:
    return GOOD | {0: replace(GOOD[0], **parts)}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({0: GOOD[0]}, r"sequence 1 \(id 101\): its tokens are missing"),
        (changed(tokens=TOKENS[:6]), r"tokens has shape \(6,\); the plan's length is 7"),
        (changed(loss_mask=MASK[:6]), r"loss_mask has shape \(6,\); the plan's length is 7"),
        (changed(tokens=TOKENS + 0.5), "tokens is float64; it must be integers"),
        (changed(loss_mask=TOKENS), "loss_mask is int64; it must be bool"),
        (changed(tokens=TOKENS - 5), "sequence 0: its token ids go from -2 to 4"),
        (changed(tokens=TOKENS + 2**31), "sequence 0: its token ids go from 2147483651"),
        (changed(fields={"x": 1}), r"sequence 0 \(id 100\): field 'x' is not declared"),
    ],
)
def test_refuses_what_does_not_fit_the_plan(samples: dict[int, Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_all(samples)


@pytest.mark.parametrize(
    ("value", "spec", "message"),
    [
        (None, Field("x", "token", "float32"), "the declared field 'x' is missing"),
        (np.zeros(6), Field("x", "token", "float32"), r"shape \(6,\); per token it must be \(7,\)"),
        (np.zeros(7), Field("x", "target", "float32", (2,)), r"per target it must be \(7, 2\)"),
        (
            np.zeros(7),
            Field("x", "sequence", "float32"),
            r"per sequence it must be \(\)",
        ),
        (0.5, Field("x", "sequence", "int64"), "is float64; convert it to the declared int64"),
    ],
)
def test_refuses_a_field_that_is_not_as_declared(value: object, spec: Field, message: str) -> None:
    fields = {} if value is None else {"x": value}
    with pytest.raises(ValueError, match=message):
        cut_all(changed(fields=fields), (spec,))


def test_refuses_bad_cuts_depths_and_doubles() -> None:
    with pytest.raises(ValueError, match="depths is -1"):
        cut_all(GOOD, depths=-1)
    with pytest.raises(ValueError, match="field x: is declared more than once"):
        cut_all(GOOD, (Field("x", "token", "float32"), Field("x", "target", "float32")))
    with pytest.raises(ValueError, match="there is no sequence 2 in the plan"):
        cut_shards(PLAN, GOOD, [LaneCut(2, 0, 1)])
    with pytest.raises(ValueError, match="there is no sequence -1 in the plan"):
        cut_tokens(PLAN, [LaneCut(-1, 0, 1)])
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"cp_rank is {rank}; .* from 0 to cp_size"):
            cut_shards(PLAN, GOOD, [LaneCut(0, rank, 2)])
