"""Pipelines: loss and gradients of each sequence alone, for every layout, plan and shard mode."""

import faulthandler
import random
import re

import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.piped import deep, error_of, piped, pipeline_of, stage_batches, staged
from tests.ranks.spine import alone, exact, make_samples

from longshore.distributed import recording
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

WATCHDOG_S = 60
CONFIGS = {
    "tied": lambda: deep(4, tied=True),
    "dense": lambda: deep(6),
    "deep": lambda: deep(16),
    "hybrid": hybrid,
    "deepseek": deepseek,
}

# (config, layout, policy, mode): of 2 lanes with pp 2, 2 lanes with pp 4, 4 lanes with pp 2.
CASES = {
    (2, 2): [
        ("tied", "Ett|ttL", "mixed", "zero3"),
        ("dense", "Et|t|t|t|t|tL", "mixed", "zero2"),
        ("deepseek", "Et|tmmL", "mixed", "none"),
        ("deepseek", "Et|tm|m|L", "dynamic", "zero3"),
        ("hybrid", "Et|tt|m|L", "dynamic", "zero3"),
        ("tied", "Et|t|t|tL", "dynamic", "zero2"),
        ("hybrid", "Et|ttmL", "mixed", "zero3"),
        ("deepseek", "Ett|m|m|L", "mixed", "zero2"),
    ],
    (2, 4): [
        ("dense", "Ett|tt|t|tL", "mixed", "zero2"),
        ("deep", "E(t|)*15tL", "dynamic", "zero3"),
        ("deepseek", "Et|tm|m|L", "mixed", "zero3"),
    ],
    (4, 2): [
        ("tied", "Ett|ttL", "mixed", "zero2"),
        ("hybrid", "Et|t|tm|L", "mixed", "zero3"),
        ("deepseek", "Ett|mmL", "dynamic", "zero3"),
    ],
}


SAMPLE = {(2, 2): 4, (2, 4): 1, (4, 2): 1}
"""How many of them are run in each test run; all in `make fuzz`."""


def run_cases(lanes: int, pp: int, recompute: str, count: int) -> list[str]:
    faults = []
    with pipeline_of(lanes, pp) as (topology, groups):
        for number, (name, text, policy, mode) in enumerate(CASES[lanes, pp][:count]):
            config, draw = CONFIGS[name](), random.Random(number)
            layout = parse_layout(text, pp=pp, layers=len(config.layers), depths=len(config.mtp))
            lengths = [draw.choice((1, 2, 5, 17, 40)) for _ in range(9)] + [90]
            plan = make_plan(
                lengths, lanes=lanes, capacity=64, policy=policy, pp=pp, vpp=layout.vpp
            )
            samples = make_samples(plan, number)
            choices = exact(mode=mode, recompute=recompute)
            result = piped(config, plan, samples, layout, topology, groups, choices)
            if topology.rank == 0:
                error, worst = error_of(result, alone(config, samples))
                if not error <= 1e-9:
                    faults.append(f"{name} {layout} {policy} {mode}: {worst} is off by {error}")
            if layout.vpp == 1:
                most = [min(pp - rank, len(plan.rounds)) for rank in range(pp)]
                if result.most_graphs != most:
                    faults.append(f"{layout}: holds {result.most_graphs} graphs, not {most}")
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize(("lanes", "pp"), CASES, ids=str)
def test_the_gradients_of_each_sequence_alone(lanes: int, pp: int, is_fuzz: bool) -> None:
    recompute = "blocks" if (lanes, pp) == (4, 2) else "none"
    count = len(CASES[lanes, pp]) if is_fuzz else SAMPLE[lanes, pp]
    for faults in run_ranks(lanes * pp, run_cases, lanes, pp, recompute, count, timeout=200):
        assert faults == []


def random_layout(draw: random.Random, config, *, pp: int, vpp: int):
    """Cuts anywhere between the parts of the model."""
    layers, depths = len(config.layers), len(config.mtp)
    parts = ["t"] * layers + ["m"] * depths + ["L"]
    cuts = sorted(draw.sample(range(1, len(parts)), pp * vpp - 1))
    pieces = ["".join(parts[a:b]) for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    return parse_layout("E" + "|".join(pieces), pp=pp, layers=layers, depths=depths)


def run_random(lanes: int, pp: int, seeds: range) -> list[str]:
    faults = []
    with pipeline_of(lanes, pp) as (topology, groups):
        for seed in seeds:
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            draw = random.Random(seed)
            config = CONFIGS[
                draw.choice(("dense", "tied", "deepseek") if pp == 2 else ("dense",))
            ]()
            most = (len(config.layers) + len(config.mtp) + 1) // pp
            layout = random_layout(draw, config, pp=pp, vpp=draw.randint(2, most))
            lengths = [
                draw.choice((1, 2, 3, draw.randint(4, 60))) for _ in range(draw.randint(1, 9))
            ]
            plan = make_plan(
                lengths,
                lanes=lanes,
                capacity=64,
                policy=draw.choice(("balanced", "dynamic", "mixed")),
                align=draw.choice((1, 8)),
                pp=pp,
                vpp=layout.vpp,
            )
            samples = make_samples(plan, seed)
            choices = exact(
                mode=draw.choice(("zero3", "zero2", "none")),
                recompute=draw.choice(("none", "blocks")),
            )
            result = piped(config, plan, samples, layout, topology, groups, choices)
            if topology.rank == 0:
                error, name = error_of(result, alone(config, samples))
                if not error <= 1e-9:
                    faults.append(f"seed {seed}, {layout}: {name} is off by {error}")
    faulthandler.cancel_dump_traceback_later()
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize(("lanes", "pp"), [(2, 2), (2, 3)])
def test_random_interleaved_batches(lanes: int, pp: int, is_fuzz: bool) -> None:
    """2 of them; 300 in `make fuzz`."""
    if pp == 3 and not is_fuzz:
        pytest.skip("in `make fuzz`")
    seeds = range(150 if is_fuzz else 2)
    for faults in run_ranks(lanes * pp, run_random, lanes, pp, seeds, timeout=60 + 5 * len(seeds)):
        assert faults == []


def run_with_a_lost_message() -> str:
    """What each rank is told where rank 1 does not record its last operation."""
    layout = parse_layout("Ettt|tttL", pp=2, layers=6)
    with pipeline_of(1, 2) as (topology, groups):
        plan = make_plan([5, 9, 30, 2], lanes=1, capacity=32, pp=2)
        model = staged(CONFIGS["dense"](), layout, topology, groups, exact(mode="none"))

        def losing(stepper, *args, **options):
            result = gradients(stepper, *args, **options)
            if topology.rank == 1:
                recording._recordings[0].pop()
            return result

        gradients, Stepper._gradients = Stepper._gradients, losing
        stepper = Stepper(model, None, topology, "none", make_loss(), 0.0, trace=True)
        batches = stage_batches(plan, make_samples(plan), topology, layout)
        with pytest.raises((ValueError, RuntimeError)) as error:
            stepper.gradients(batches, 1.0, plan=plan)
        return str(error.value)


def test_operations_that_do_not_fit_end_all_ranks() -> None:
    for text in run_ranks(2, run_with_a_lost_message):
        assert re.search(r"rank 0 at its operation \d+: receive 1 → 0 of [\d,]+ bytes", text), text
