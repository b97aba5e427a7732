"""How near to its bound a plan comes, at the thresholds of the first issue."""

import numpy as np
import pytest
from bench.cases import Case, lengths
from tests.plan.evaluator import padded
from tests.plan.samples import CHARGED, FREE, examples, long_tail

from longshore.plan import Stats, make_plan

KINDS = ("lognormal", "long tail", "two kinds")
SHAPES = [(256, 8, 16384), (1024, 8, 16384), (256, 6, 32768), (256, 24, 32768), (1024, 128, 16384)]
CASES = [Case(kind, *shape) for kind in KINDS for shape in SHAPES]
FEW = [Case(kind, *shape) for kind in KINDS for shape in [(256, 128, 16384), (256, 512, 16384)]]


def stats_of(case: Case, **asked: object) -> Stats:
    return make_plan(lengths(case), lanes=case.lanes, capacity=case.capacity, **asked).stats


def share_of_bound(stats: Stats) -> float:
    return stats.lower_bound / stats.predicted


def needs_one_round(case: Case) -> bool:
    return sum(lengths(case)) <= case.lanes * case.capacity


@pytest.mark.parametrize("case", CASES + FEW, ids=lambda case: case.name)
def test_free_exchange_reaches_the_bound(case: Case):
    wanted = 0.97 if case.sequences >= 4 * case.lanes else 0.90
    assert share_of_bound(stats_of(case, profile=FREE)) >= wanted


@pytest.mark.parametrize("case", CASES + FEW, ids=lambda case: case.name)
def test_charged_exchange_reaches_the_bound(case: Case):
    share = share_of_bound(stats_of(case, profile=CHARGED))
    enough = case.sequences >= case.lanes
    if case.lanes == 8 or (needs_one_round(case) and enough):
        assert share >= 0.95
    elif case.kind == "long tail":
        assert share >= 0.85


@pytest.mark.parametrize("sequences", [256, 1024, 4096])
@pytest.mark.parametrize("lanes", [128, 512])
def test_a_long_tail_is_much_faster_than_at_one_cp_size(sequences: int, lanes: int):
    case = Case("long tail", sequences, lanes, 16384)
    mixed = stats_of(case, profile=CHARGED)
    balanced = stats_of(case, profile=CHARGED, policy="balanced").predicted
    # Where one CP size comes so near to the bound that 1.4 is out of reach: nearly all that is in.
    wanted = min(1.4, 0.94 * balanced / mixed.lower_bound)
    assert balanced / mixed.predicted >= wanted


def mid_size(seed: int) -> tuple[list[int], dict[str, int]]:
    rng = np.random.default_rng(seed)
    lanes = int(rng.choice([6, 8, 12, 16, 24, 32, 40]))
    capacity = int(rng.choice([2048, 8192, 16384]))
    drawn = long_tail(seed, int(rng.integers(20, 300)), most=min(131072, lanes * capacity))
    return drawn, {"lanes": lanes, "capacity": capacity}


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("sync", ["round", "step"])
@pytest.mark.parametrize("seed", range(examples(8, fuzz=200)))
def test_mixed_is_never_slower_than_another_policy(seed: int, sync: str):
    drawn, asked = mid_size(seed)
    mixed = make_plan(drawn, sync=sync, profile=CHARGED, **asked)
    rivals = [{"policy": "dynamic"}, {"policy": "balanced"}]
    for size in mixed.setting.cp_sizes:
        if padded(max(drawn), size) <= size * asked["capacity"]:
            rivals += [{"policy": policy, "cp_size": size} for policy in ("balanced", "static")]
    assert len(rivals) > 2
    for rival in rivals:
        other = make_plan(drawn, sync=sync, profile=CHARGED, **asked, **rival)
        assert mixed.stats.predicted <= other.stats.predicted * (1 + 1e-9), rival


def test_mixed_tries_dynamic_as_hard_as_dynamic_itself():
    """Where lanes run free, a search once depended on what had been found before it."""
    case = Case("two kinds", 1024, 1024, 16384)
    mixed, dynamic = (
        stats_of(case, profile=CHARGED, sync="step", policy=policy).predicted
        for policy in ("mixed", "dynamic")
    )
    assert mixed <= dynamic
