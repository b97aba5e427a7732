"""Random plans run under FSDP2 in both sync modes: none hangs, and each has the right gradient."""

import faulthandler
import random
from dataclasses import replace

import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.spine import alone, dense, exact, lanes_of, make_samples, together, worst

from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.shapes import legal_cp_sizes, padded_length

WATCHDOG_S = 30
POLICIES = ("padded", "static", "balanced", "dynamic", "mixed")


def planned(random: random.Random, lanes: int, sync: str) -> Plan:
    lengths = [random.choice((1, 2, 3, random.randint(4, 40))) for _ in range(random.randint(1, 9))]
    lengths += [random.randint(41, 120)] * random.randint(0, 1)
    return make_plan(
        lengths,
        lanes=lanes,
        capacity=random.choice((64, 128, 256)) if lanes > 1 else 256,
        policy=random.choice(POLICIES),
        sync=sync,
        cp_sizes=random.choice(("pow2", "any")),
        align=random.choice((1, 1, 8)),
    )


def scattered(random: random.Random, lanes: int, sync: str) -> Plan:
    """No planner would make it: rounds and lanes at random, many of them empty."""
    plan = planned(random, lanes, sync)
    sizes = legal_cp_sizes(lanes, kind="any")
    rounds: list[dict] = [{} for _ in range(random.randint(1, 4))]
    for place in range(len(plan.sequences)):
        cp_size = random.choice(sizes)
        first = random.choice(range(0, lanes - cp_size + 1, cp_size))
        random.choice(rounds).setdefault((cp_size, first), []).append(place)
    setting = replace(plan.setting, capacity=4096)
    made = tuple(as_round(packs, plan) for packs in rounds)
    return Plan(setting, plan.sequences, made, plan.stats, "")


def as_round(packs: dict, plan: Plan) -> Round:
    ordered = sorted(packs.items(), key=lambda item: (-item[0][0], item[0][1]))
    lengths = [sequence.length for sequence in plan.sequences]
    longest = max(lengths)
    is_padded = plan.setting.policy == "padded"
    return Round(
        tuple(
            Pack(
                first,
                cp_size,
                tuple(places),
                sum(padded_length(longest if is_padded else lengths[i], cp_size) for i in places)
                // cp_size,
            )
            for (cp_size, first), places in ordered
        )
    )


def run_plans(lanes: int, seeds: range) -> list[str]:
    faults = []
    with lanes_of(lanes) as (topology, groups):
        for seed in seeds:
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            draw = random.Random(seed)
            mode = draw.choice(("zero3", "zero2", "none"))
            sync = "round" if mode == "zero3" else draw.choice(("round", "step"))
            plan = draw.choice((planned, scattered))(draw, lanes, sync)
            recompute, attention = draw.choice(("none", "blocks")), draw.choice(("auto", "gather"))
            choices = exact(mode=mode, recompute=recompute, attention=attention)
            samples = make_samples(plan, seed)
            got = together(dense(2), plan, samples, topology, groups, choices)
            if topology.lane == 0:
                error, name = worst(got, alone(dense(2), samples))
                if not error <= 1e-9:
                    faults.append(f"seed {seed}: {name} is off by {error:.1e}")
        faulthandler.cancel_dump_traceback_later()
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize("lanes", [2, 3, 4, 6])
def test_no_plan_hangs(lanes: int, is_fuzz: bool) -> None:
    plans = 125 if is_fuzz else 4
    seeds = range(lanes * 1000, lanes * 1000 + plans)
    assert run_ranks(lanes, run_plans, lanes, seeds, timeout=WATCHDOG_S * plans)[0] == []
