"""How near to its bound a pipeline's plan comes, and that no plan beats the bound."""

import numpy as np
import pytest
from bench.cases import Case, lengths
from bench.evaluate import Setting, pipeline_time, round_heights
from tests.plan.samples import CHARGED, FREE, TOKENS, examples, long_tail

from longshore.plan import CostProfile, check, make_plan
from longshore.plan.as_json import step_as_json
from longshore.plan.bound import step_bound
from longshore.plan.cost import CostTable
from longshore.plan.types import Plan

# Four rounds and more for each stage: the tokens alone ask for them.
MANY_ROUNDS = [
    (Case("long tail", 1024, 8, 16384), 4, 1),
    (Case("long tail", 2048, 16, 8192), 4, 1),
    (Case("long tail", 2048, 8, 16384), 4, 2),
    (Case("long tail", 2048, 8, 16384), 8, 1),
    (Case("long tail", 4096, 8, 16384), 8, 2),
]


def piped(case: Case, pp: int, vpp: int, profile: CostProfile = CHARGED) -> Plan:
    return make_plan(
        lengths(case), lanes=case.lanes, capacity=case.capacity, profile=profile, pp=pp, vpp=vpp
    )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "pp", "vpp"), MANY_ROUNDS)
def test_a_long_tail_is_within_a_tenth_of_the_bound(case: Case, pp: int, vpp: int):
    plan = piped(case, pp, vpp)
    check(plan)
    assert plan.stats.rounds >= 4 * pp * vpp
    assert 0 <= plan.stats.gap <= 0.10


def test_more_rounds_than_the_tokens_ask_for():
    """Two rounds would hold everything, but then most ranks wait."""
    case = Case("lognormal", 512, 8, 65536)
    plan = piped(case, 4, 1)
    least = -(-sum(lengths(case)) // (case.lanes * case.capacity))
    assert plan.stats.rounds > 4 * least
    assert plan.stats.bubble < 0.2


@pytest.mark.parametrize("lanes", [256, 1024])
def test_few_sequences_a_lane_run_no_slower_than_the_rounds_of_a_step_without_a_pipeline(lanes):
    """One or two rounds hold all; cut into more, the tallest would hardly be lower."""
    case = Case("long tail", 2 * lanes, lanes, 16384)
    alone, plan = piped(case, 1, 1), piped(case, 4, 1)
    setting = Setting(lengths(case), lanes, case.capacity, CHARGED.as_json(), "round")
    heights = round_heights(step_as_json(alone), setting)
    assert len(heights) < 4
    assert plan.stats.predicted <= pipeline_time(heights, 4) * (1 + 1e-9)


def test_the_bound_of_a_pipeline_by_hand():
    """Three sequences of cost 6 on 2 lanes at CP size 1 and 2 ranks: 9 + 6/3, or 2·6 + 3/3."""
    plan = make_plan([6, 6, 6], lanes=2, capacity=6, max_cp=1, profile=TOKENS, pp=2)
    table = CostTable(np.array([6, 6, 6]), sizes=(1,), profile=TOKENS)
    bound = step_bound(plan.setting, table, capacity=6) / 3 / table.scale
    assert bound == pytest.approx(13, rel=1e-6)
    assert plan.stats.lower_bound == pytest.approx(13, rel=1e-6)
    assert plan.stats.predicted == pytest.approx(18)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(examples(6, fuzz=300)))
@pytest.mark.parametrize("policy", ["mixed", "dynamic", "balanced", "static", "padded"])
def test_no_policy_beats_the_bound(seed: int, policy: str):
    rng = np.random.default_rng(seed)
    lanes, pp, vpp = (int(rng.integers(1, most)) for most in (9, 5, 4))
    drawn = long_tail(seed, int(rng.integers(1, 40)), most=lanes * 2048)
    plan = make_plan(
        drawn,
        lanes=lanes,
        capacity=2048 if policy != "padded" else 16384,
        policy=policy,
        profile=[FREE, CHARGED][seed % 2],
        pp=pp + 1,
        vpp=vpp,
    )
    assert plan.stats.lower_bound <= plan.stats.predicted * (1 + 1e-9)
