import json
from dataclasses import replace

import pytest

from longshore.plan.planner import make_plan
from longshore.plan.types import POLICIES, Stats
from longshore.report.pages import advice, plans_as_json, total_stats

LENGTHS = [9000, 300, 200, 4000, 77]
STEP_CONTRACT = [
    *("rounds", "predicted", "lower_bound", "efficiency", "imbalance", "fill", "padding"),
    "planning_seconds",
]
FILE_CONTRACT = [
    *("version", "lanes", "capacity", "policy", "sync", "pp", "vpp", "align", "max_sequences"),
    *("profile", "steps"),
]
FIGURES = Stats(
    predicted=10.0,
    lower_bound=8.0,
    gap=0.25,
    efficiency=0.7,
    imbalance=0.2,
    bubble=0.0,
    fill=0.5,
    padding=0.0,
    cp_histogram=((1, 3), (2, 1)),
    rounds=1,
    tokens=100,
    sum_squared_lengths=4000,
    planning_seconds=0.5,
)


@pytest.fixture
def plan():
    return make_plan(LENGTHS, lanes=2, capacity=8192)


def test_the_keys_of_the_contract(plan):
    data = plans_as_json([plan])
    later = ["tp", "ep", "layout", "buckets", "cp_sizes", "profile", "steps", "total", "advice"]
    assert list(data) == [*FILE_CONTRACT[:-2], *later]
    step = data["steps"][0]
    extra = {"gap", "bubble", "cp_histogram", "tokens", "sum_squared_lengths", "digest"}
    assert set(step) == {*STEP_CONTRACT, *extra}
    numbers = {"linear", "quadratic", "gather", "node", "pack", "round", "message"}
    assert set(data["profile"]) == numbers
    for round_ in step["rounds"]:
        assert set(round_) == {"packs"}
        for pack in round_["packs"]:
            assert set(pack) == {"first_lane", "cp_size", "sequences", "tokens_per_lane"}


def test_the_values_are_the_plans(plan):
    data = plans_as_json([plan, plan])
    setting = (data["version"], data["lanes"], data["capacity"], data["policy"], data["sync"])
    assert setting == (1, 2, 8192, "mixed", "round")
    assert (data["pp"], data["vpp"], data["align"], data["max_sequences"]) == (1, 1, 1, None)
    assert (data["tp"], data["ep"], data["layout"], data["buckets"]) == (1, 1, "", [])
    assert data["cp_sizes"] == [1, 2]
    assert data["profile"] == plan.setting.profile.as_json()
    step = data["steps"][1]
    assert step == data["steps"][0]
    assert step["digest"] == plan.digest
    assert step["tokens"] == sum(LENGTHS)
    assert step["cp_histogram"] == {str(k): n for k, n in plan.stats.cp_histogram}
    packs = [
        (number, pack["first_lane"], pack["cp_size"], tuple(pack["sequences"]))
        for number, round_ in enumerate(step["rounds"])
        for pack in round_["packs"]
    ]
    assert packs == [(n, p.first_lane, p.cp_size, p.sequences) for n, p in plan.packs()]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policys_plan_is_json(policy):
    packs = [[0], [1, 2], [3, 4]] if policy == "given" else None
    plan = make_plan(LENGTHS, lanes=2, capacity=8192, policy=policy, packs=packs, pp=2)
    data = plans_as_json([plan])
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_an_empty_round_has_no_packs():
    plan = make_plan([5], lanes=1, capacity=8, pp=4, vpp=2)
    rounds = plans_as_json([plan])["steps"][0]["rounds"]
    assert len(rounds) == 4
    assert rounds.count({"packs": []}) == 3


def test_one_step_is_its_own_total(plan):
    assert total_stats([plan.stats]) is plan.stats


def test_totals_weigh_each_step_by_its_share():
    other = replace(
        FIGURES,
        predicted=30.0,
        lower_bound=24.0,
        efficiency=0.3,
        imbalance=0.1,
        bubble=0.5,
        fill=0.9,
        padding=0.75,
        cp_histogram=((2, 1), (8, 2)),
        rounds=3,
        tokens=300,
        planning_seconds=0.25,
    )
    total = total_stats([FIGURES, other])
    assert (total.predicted, total.lower_bound, total.gap) == (40.0, 32.0, 0.25)
    assert total.efficiency == pytest.approx((0.7 * 10 + 0.3 * 30) / 40)
    assert total.imbalance == pytest.approx((0.2 * 10 + 0.1 * 15) / 25)
    assert total.bubble == pytest.approx(1 - 25 / 40)
    assert total.fill == pytest.approx((0.5 + 3 * 0.9) / 4)
    assert total.padding == pytest.approx(1 - 400 / (100 + 1200))
    assert total.cp_histogram == ((1, 3), (2, 2), (8, 2))
    assert (total.rounds, total.tokens, total.sum_squared_lengths) == (4, 400, 8000)
    assert total.planning_seconds == 0.75


@pytest.mark.parametrize(
    ("policy", "figures", "words"),
    [
        ("static", {"efficiency": 0.96}, "Little is left to gain: 96.0%"),
        ("static", {}, "Look at the gap: another plan could save up to 20%; try --policy mixed"),
        ("mixed", {}, "Look at idle"),
        ("static", {"lower_bound": 9.9}, "Look at idle"),
        ("mixed", {"bubble": 0.3}, "Look at the bubble"),
        ("mixed", {"padding": 0.3}, "Look at padding"),
        ("mixed", {"imbalance": 0.01}, "Look at the CP sizes"),
        ("mixed", {"imbalance": 0.01, "cp_histogram": ((1, 4),)}, "Look at the packs"),
    ],
)
def test_advice_names_what_costs_most(plan, policy, figures, words):
    setting = replace(plan.setting, policy=policy)
    assert advice(replace(FIGURES, **figures), setting).startswith(words)
