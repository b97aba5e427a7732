"""Any plan gives the outputs, the loss and the gradients of each sequence run alone."""

from itertools import product

import numpy as np
import pytest
import torch
from tests.ranks.harness import run_ranks
from tests.ranks.spine import alone, dense, exact, lanes_of, make_samples, together, worst

from longshore.plan import Pack, Plan, Round, make_plan

LENGTHS = [1, 2, 7, 33, 150, 5, 9, 64, 3, 18]
LIMIT = 1e-9


def compare(lanes: int, cases: list) -> list[str]:
    """On rank 0, the cases that differ from the model alone."""
    faults, known = [], {}
    with lanes_of(lanes) as (topology, groups):
        for config, plan, choices in cases:
            samples = make_samples(plan)
            got = together(config, plan, samples, topology, groups, choices)
            if topology.lane == 0:
                key = (config, tuple(sequence.length for sequence in plan.sequences))
                if key not in known:
                    known[key] = alone(config, samples)
                error, name = worst(got, known[key])
                if not error <= LIMIT:
                    faults.append(f"{name} is off by {error:.1e}: {choices}, {plan.rounds}")
    return faults


def check(lanes: int, cases: list, *, timeout: float = 120) -> None:
    assert run_ranks(lanes, compare, lanes, cases, timeout=timeout)[0] == []


@pytest.mark.fuzz
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_every_policy_mode_and_core(lanes: int, is_fuzz: bool) -> None:
    if lanes == 2 and not is_fuzz:
        pytest.skip("in `make fuzz`")
    cases = []
    ways = product(("zero3", "zero2", "none"), ("gather", "heads"))
    policies = ["padded", "static", "balanced", "dynamic", "mixed"]
    for number, (mode, attention) in enumerate(ways):
        for policy in policies[number % 2 :: 2]:
            plan = make_plan(LENGTHS, lanes=lanes, capacity=200 // lanes + 8, policy=policy)
            recompute = ("none", "blocks")[number % 2]
            choices = exact(mode=mode, attention=attention, recompute=recompute)
            cases.append((dense(4), plan, choices))
    check(lanes, cases)


@pytest.mark.parametrize("attention", ["gather", "heads"])
def test_cp_size_8(attention: str) -> None:
    lengths = [1, 2, 17, 300, 5]
    cases = []
    for policy, cp_size in (("static", 8), ("mixed", None)):
        plan = make_plan(lengths, lanes=8, capacity=48, policy=policy, cp_size=cp_size)
        assert max(pack.cp_size for _, pack in plan.packs()) == 8
        cases.append((dense(8), plan, exact(mode="zero3", attention=attention)))
    check(8, cases)


def test_grouped_heads_tied_embeddings_and_odd_lanes() -> None:
    plan = make_plan([1, 40, 3, 90, 2, 11], lanes=6, capacity=24, cp_sizes="any")
    assert {pack.cp_size for _, pack in plan.packs()} - {1, 2, 4}
    choices = exact(mode="zero2", attention="auto", recompute="blocks")
    check(6, [(dense(2, tied=True), plan, choices)])


def several_packs() -> Plan:
    """Lane 0 holds shards at CP sizes 4 and 2 and two sequences of its own; lane 3 less."""
    packs = (
        Pack(0, 4, (0, 1), 26),
        Pack(0, 2, (2,), 6),
        Pack(2, 2, (3,), 2),
        Pack(0, 1, (4, 5), 4),
        Pack(1, 1, (6,), 9),
    )
    late = Round((Pack(2, 2, (7,), 4),))
    plan = make_plan([81, 9, 11, 3, 1, 3, 9, 6], lanes=4, capacity=64)
    return Plan(plan.setting, plan.sequences, (Round(packs), late), plan.stats, "by hand")


@pytest.mark.parametrize("mode", ["zero3", "zero2"])
def test_several_packs_in_a_micro_batch_and_lanes_without_work(mode: str) -> None:
    ways = product(("gather", "heads"), ("none", "blocks"))
    check(
        4,
        [
            (dense(4), several_packs(), exact(mode=mode, attention=attention, recompute=recompute))
            for attention, recompute in ways
        ],
    )


def test_the_check_can_fail() -> None:
    """A model whose sequences see each other is caught."""
    plan = make_plan([9, 7], lanes=1, capacity=16)
    samples = make_samples(plan)
    want = alone(dense(), samples)
    changed = {**samples, 1: make_samples(plan, seed=1)[1]}
    assert worst(alone(dense(), changed), want)[0] > LIMIT
    assert np.isfinite(worst(want, want)[0])
    assert torch.get_default_dtype() == torch.float32
