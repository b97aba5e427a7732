"""Experts over ranks: lanes meet inside the layers, so mixers and experts have their own maxima."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.brute_force import Tiny, best_time
from tests.plan.evaluator import lanes_of, padded, sequence_cost
from tests.plan.samples import CHARGED, FREE, TOKENS, examples, long_tail

from longshore.plan import Plan, check, make_plan, policies
from longshore.plan.cost import FINE, StageCosts, share_out
from longshore.plan.layout import make_order
from longshore.plan.pipeline_times import walk_columns
from longshore.plan.simulate import simulate
from longshore.plan.task import Task

QUADRATIC = replace(TOKENS, quadratic=0.01)


@st.composite
def stage_costs(draw: st.DrawFn, stages: int, pp: int) -> StageCosts:
    pairs = st.tuples(st.integers(1, 40), st.integers(1, 80))
    linear, quadratic = (draw(st.lists(pairs, min_size=stages, max_size=stages)) for _ in range(2))
    shares = st.lists(st.integers(0, 8), min_size=stages, max_size=stages)
    apart = [
        (forward * share // 8, backward * share // 8)
        for (forward, backward), share in zip(linear, draw(shares), strict=True)
    ]
    streams = [1 + n for n in accumulate([0] * stages)]
    return share_out(linear=linear, quadratic=quadratic, streams=streams, pp=pp, tokenwise=apart)


def one_stage(share: float) -> StageCosts:
    """Without a pipeline, with this share of the linear part token-wise."""
    apart = [(int(1000 * share), int(2000 * share))]
    return share_out(linear=[(1000, 2000)], quadratic=[(1, 2)], streams=[1], pp=1, tokenwise=apart)


def columns(plan: Plan) -> list[list[float]]:
    """Seconds of each round's forwards and backwards on all stages, and messages of none."""
    setting, costs, profile = plan.setting, plan.setting.shares, plan.setting.profile
    linear_parts = costs.forward_linear + costs.backward_linear
    quadratic_parts = costs.forward_quadratic + costs.backward_quadratic
    rows = []
    for round_ in plan.rounds:
        fixed, linear, rest = np.zeros((3, setting.lanes))
        fixed += profile.round
        for pack in round_.packs:
            lanes = slice(pack.first_lane, lanes_of(pack).stop)
            fixed[lanes] += profile.pack
            for place in pack.sequences:
                length, size = plan.sequences[place].length, pack.cp_size
                share = profile.linear * padded(length, size) / size
                linear[lanes] += share
                rest[lanes] += sequence_cost(profile, length, size) - share
        times = [
            (((a - t) * linear + a * fixed + b * rest).max() + (t * linear).max()) / costs.whole
            for a, b, t in zip(linear_parts, quadratic_parts, costs.tokenwise, strict=True)
        ]
        rows.append([*times, *[0.0] * costs.stages])
    return rows


def predicted(plan: Plan) -> float:
    setting = plan.setting
    if setting.pp == 1:
        return sum(map(sum, columns(plan)))
    # The walk counts in integers.
    scale = 1e9
    whole = [[round(time * scale) for time in column] for column in columns(plan)]
    order = make_order(len(whole), pp=setting.pp, vpp=setting.vpp)
    return walk_columns(order, whole, stages=setting.pp * setting.vpp).finish / scale


@pytest.mark.slow
@settings(max_examples=examples(15, fuzz=2_000), deadline=None)
@given(st.data(), st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 2), (3, 1)]), st.integers(1, 60))
def test_what_a_plan_predicts(data: st.DataObject, pipe: tuple[int, int], count: int):
    pp, vpp = pipe
    costs = data.draw(stage_costs(pp * vpp, pp) | st.none())
    plan = make_plan(
        long_tail(count, count, most=3000),
        lanes=4,
        capacity=1024,
        profile=replace(CHARGED, round=10.0),
        pp=pp,
        vpp=vpp,
        ep=2,
        stage_costs=costs,
        policy=data.draw(st.sampled_from(["mixed", "static", "dynamic"])),
    )
    check(plan)
    assert plan.stats.predicted == pytest.approx(predicted(plan), rel=1e-7)
    assert plan.stats.lower_bound <= plan.stats.predicted * (1 + 1e-9)
    apart = simulate(replace(plan, setting=replace(plan.setting, ep=1)))
    assert plan.stats.predicted >= apart.predicted * (1 - 1e-9)
    assert 0 <= plan.stats.imbalance < 1
    assert 0 <= plan.stats.bubble < 1
    assert simulate(plan).predicted == plan.stats.predicted


def test_by_hand():
    """A long sequence and four short ones on 2 lanes: cost 20 + 4 and 4·5 + 4·0.25."""
    asked = {"lanes": 2, "capacity": 20, "profile": QUADRATIC, "max_cp": 1}
    lengths = [20, 5, 5, 5, 5]
    assert make_plan(lengths, **asked).stats.predicted == pytest.approx(24)
    # Mixers 4 and 1, experts 20 and 20.
    assert make_plan(lengths, **asked, ep=2).stats.predicted == pytest.approx(24)
    fewer = make_plan(lengths[:3], **asked, ep=2)
    assert fewer.stats.predicted == pytest.approx(4 + 20)
    # 12 and 12 of 24 tokens: mixers of 1.44 and 0.72.
    other = {**asked, "capacity": 12, "policy": "given", "packs": [[0], [1, 2]]}
    assert make_plan([12, 6, 6], **other, ep=2).stats.predicted == pytest.approx(12 + 1.44)
    # 9 and 12 tokens: 0.81 and 0.72 for the mixers, 12 for the experts.
    assert make_plan([9, 6, 6], **other).stats.predicted == pytest.approx(12.72)
    assert make_plan([9, 6, 6], **other, ep=2).stats.predicted == pytest.approx(0.81 + 12)


def test_how_much_is_token_wise_matters():
    asked = {"lanes": 2, "capacity": 12, "profile": QUADRATIC, "max_cp": 1, "ep": 2}
    asked |= {"policy": "given", "packs": [[0], [1, 2]]}
    none, half, whole = (
        make_plan([9, 6, 6], **asked, stage_costs=one_stage(share)) for share in (0, 0.5, 1)
    )
    assert none.stats.predicted == pytest.approx(12.72)
    # Mixers 4.5 + 0.81 and 6 + 0.72, experts 4.5 and 6.
    assert half.stats.predicted == pytest.approx(6.72 + 6)
    assert whole.stats.predicted == pytest.approx(12.81)
    assert whole.setting.shares.whole == FINE
    assert none.digest == half.digest == whole.digest, "costs order messages of pipelines only"


def test_in_a_pipeline_the_digest_covers_the_token_wise_part():
    asked = {"lanes": 2, "capacity": 16, "pp": 2, "policy": "static", "profile": TOKENS}
    kinds = {"linear": [(4, 8)] * 2, "quadratic": [(1, 2)] * 2, "streams": [1, 1], "pp": 2}
    one, other = (share_out(**kinds, tokenwise=[(n, 2 * n)] * 2) for n in (1, 2))
    synced = [make_plan([16, 16], **asked, ep=2, stage_costs=each) for each in (one, other)]
    assert synced[0].digest != synced[1].digest
    plain = [make_plan([16, 16], **asked, stage_costs=each) for each in (one, other)]
    assert plain[0].digest == plain[1].digest, "without experts over ranks it is not used"


TINY = [
    Tiny((2, 15, 6, 12), 4, 7, FREE, "round"),
    Tiny((4, 4, 4, 4), 3, 6, CHARGED, "round"),
    Tiny((123, 162, 131, 38, 248), 3, 125, CHARGED, "round"),
    Tiny((60, 55, 19, 38, 90), 4, 60, replace(QUADRATIC, gather=(0.05, 0.05)), "round"),
    Tiny((9000, 400, 1100, 5000, 2000), 3, 5100, CHARGED, "round"),
]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: str(tiny.lengths))
def test_against_every_plan_there_is(tiny: Tiny, share: float):
    plan = make_plan(
        tiny.lengths,
        lanes=tiny.lanes,
        capacity=tiny.capacity,
        profile=tiny.profile,
        ep=tiny.lanes,
        stage_costs=one_stage(share),
    )
    best = best_time(replace(tiny, tokenwise=share))
    assert plan.stats.lower_bound <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= plan.stats.predicted <= best * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_mixed_is_never_slower_than_another_policy(pp: int):
    """A step that is small: with a pipeline all policies are tried then."""
    asked = {"lanes": 8, "capacity": 4096, "profile": CHARGED, "ep": 8, "pp": pp}
    for seed in range(4):
        lengths = long_tail(seed, 60, most=16000)
        mixed = make_plan(lengths, **asked)
        check(mixed)
        for policy in ("dynamic", "balanced", "static"):
            other = make_plan(lengths, **asked, policy=policy)
            assert mixed.stats.predicted <= other.stats.predicted * (1 + 1e-12), (seed, policy)


@pytest.mark.slow
def test_the_search_levels_mixers_and_experts(monkeypatch: pytest.MonkeyPatch):
    """Faster than the best of plans that were searched for lanes that meet after rounds only."""
    asked = {"lanes": 64, "capacity": 16384, "profile": CHARGED, "ep": 64}
    steps = [long_tail(seed, 300, most=131072) for seed in range(4)]
    aware = [make_plan(lengths, **asked).stats.predicted for lengths in steps]
    monkeypatch.setattr(Task, "tokenwise", 0)
    blind = [make_plan(lengths, **asked).stats.predicted for lengths in steps]
    ratios = [one / other for one, other in zip(aware, blind, strict=True)]
    assert max(ratios) <= 1
    assert min(ratios) < 0.95, ratios


@pytest.mark.parametrize("pp", [1, 4])
def test_rounds_are_level_in_tokens_too(pp, monkeypatch):
    """A long tail on 64 lanes: levelling the cost alone is slower, in a pipeline as well."""
    draw = np.random.default_rng(3).lognormal(np.log(1024), 1.5, 128)
    lengths = np.clip(draw, 1, 65536).astype(int).tolist()
    each, tokenwise = [(10, 20)] * pp, [(7, 14)] * pp
    costs = share_out(linear=each, quadratic=each, streams=[1] * pp, pp=pp, tokenwise=tokenwise)
    options = {"lanes": 64, "capacity": 16384, "pp": pp, "ep": 64, "stage_costs": costs}
    level = make_plan(lengths, **options).stats.predicted
    monkeypatch.setattr(policies, "_level_problems", lambda problem, draft: ())
    assert level < 0.98 * make_plan(lengths, **options).stats.predicted
