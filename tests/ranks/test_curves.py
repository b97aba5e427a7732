"""Many steps end alike whatever the plan, the lanes, the sync mode and what is recomputed."""

from functools import cache, partial
from itertools import islice, product

import pytest
import torch
from tests.conftest import PROFILE
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import HYBRIDS
from tests.ranks.spine import MTP_WEIGHT, dense, exact, lanes_of, sharded
from tests.ranks.steps import trained
from tests.ranks.test_deepseek_v4 import tiny

from longshore.data.mock import MockSource
from longshore.data.source import BatchSize
from longshore.data.steps import IndexedSteps, Loader, Packing
from longshore.plan import make_plan
from longshore.train.losses import make_loss
from longshore.train.optimizer import Schedule, make_optimizer
from longshore.train.step import Stepper

Way = tuple[str, str, str]

STEPS = 20 if PROFILE == "fuzz" else 10
POLICIES = ("padded", "static", "balanced", "dynamic", "mixed")
MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 1,
    "max_seq_len": 90,
    "mean_seq_len": 12,
    "lognormal_sigma": 1.3,
}
CONFIGS = {"dense": partial(dense, 4), **HYBRIDS, "deepseek-v4": tiny}


def curve(topology, groups, name: str, way: Way) -> list[tuple[float, ...]]:
    """Gradient norm and every loss of each step."""
    policy, sync, recompute = way
    config, lanes = CONFIGS[name](), topology.lanes
    mode = "zero3" if sync == "round" else ("zero2", "none")[recompute == "none"]
    choices = exact(mode=mode, recompute=recompute)
    model = sharded(config, topology, groups, choices)

    def planner(sequences):
        return make_plan(sequences, lanes=lanes, capacity=120, policy=policy, sync=sync)

    source = MockSource(MOCK, count=30, vocab_size=config.vocab_size, seed=1)
    batch = BatchSize("sequences", 7)
    packing = Packing(depths=len(config.mtp))
    steps = IndexedSteps(
        source, planner=planner, batch=batch, seed=5, topology=topology, packing=packing
    )
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    stepper = Stepper(model, optimizer, topology, mode, make_loss(), 1.0, MTP_WEIGHT)
    schedule = Schedule(kind="cosine", lr=1e-2, warmup=3, updates=STEPS, min_lr=0.1)
    with Loader(steps) as loader:
        return [
            (
                r.loss,
                r.grad_norm,
                *(r.mtp_losses or ()),
                *([r.balance_loss] if r.balance_loss else []),
            )
            for r in trained(stepper, islice(loader, STEPS), schedule)
        ]


def curves(lanes: int, name: str, ways: list[Way]) -> list[list[tuple[float, ...]]]:
    with lanes_of(lanes) as (topology, groups):
        return [curve(topology, groups, name, way) for way in ways]


@cache
def alone(name: str) -> torch.Tensor:
    found = torch.tensor(
        run_ranks(1, curves, 1, name, [("static", "round", "none")])[0][0], dtype=torch.float64
    )
    assert found[-1, 0] < found[0, 0] - 0.5, "the loss must fall, or equal curves say little"
    return found


def check(lanes: int, name: str, ways: list[Way]) -> None:
    results = run_ranks(lanes, curves, lanes, name, ways, timeout=400)
    assert all(result == results[0] for result in results), "lanes must report the same numbers"
    for way, found in zip(ways, results[0], strict=True):
        difference = (torch.tensor(found, dtype=torch.float64) - alone(name)).abs()
        # A step without a token for a depth of prediction has a loss of 0 there, exactly.
        error = (difference / alone(name).clamp(min=1e-6)).max().item()
        assert error <= 1e-9, f"{lanes} lanes, {way}: off by {error:.1e}"


ALL: list[Way] = list(product(POLICIES, ("round", "step"), ("none", "blocks")))


SAMPLED = [("dense", 3), ("hybrid", 4), pytest.param("deepseek", 4, marks=pytest.mark.long)]


@pytest.mark.parametrize(("name", "lanes"), SAMPLED)
def test_a_sample_of_all_ways(name: str, lanes: int) -> None:
    """Two ways for the dense model, one for others; all of them in `make fuzz`."""
    sample = ALL[lanes // 2 % 4 :: 4]
    check(lanes, name, sample[lanes % 5 :][: 2 if name == "dense" else 1])


@pytest.mark.fuzz
@pytest.mark.parametrize("lanes", [1, 2, 4, 6])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_ways(name: str, lanes: int, is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("a sample of these runs above; all of them in `make fuzz`")
    check(lanes, name, ALL)


@pytest.mark.long
def test_two_runs_are_bit_identical() -> None:
    way = ("mixed", "round", "none")
    first, second = (run_ranks(2, curves, 2, "hybrid", [way]) for _ in range(2))
    assert first == second
