"""Twenty steps end alike whatever the plan, the lanes, the sync mode and what is recomputed."""

from itertools import product

import pytest
import torch
from tests.ranks.harness import run_ranks
from tests.ranks.spine import dense, exact, lanes_of, sharded

from longshore.data.batches import BatchSize
from longshore.data.loader import Loader
from longshore.data.mock import MockSource
from longshore.data.steps import IndexedSteps
from longshore.plan import make_plan
from longshore.train.loop import Machine, train
from longshore.train.loss import make_loss
from longshore.train.optim import Schedule, make_optimizer
from longshore.train.step import Stepper

STEPS = 20
POLICIES = ("padded", "static", "balanced", "dynamic", "mixed")
MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 1,
    "max_seq_len": 90,
    "mean_seq_len": 12,
    "lognormal_sigma": 1.3,
}
CONFIG = dense(4)


def curve(topology, groups, policy: str, sync: str, recompute: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    lanes = topology.lanes
    mode = "zero3" if sync == "round" else ("zero2", "none")[recompute == "none"]
    choices = exact(mode=mode, recompute=recompute)
    model = sharded(CONFIG, topology, groups, choices)

    def planner(sequences):
        return make_plan(sequences, lanes=lanes, capacity=120, policy=policy, sync=sync)

    source = MockSource(MOCK, count=30, vocab_size=CONFIG.vocab_size, seed=1)
    batch = BatchSize("sequences", 7)
    steps = IndexedSteps(source, planner=planner, batch=batch, seed=5, topology=topology)
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    stepper = Stepper(model, optimizer, topology, mode, make_loss(), clip=1.0)
    schedule = Schedule(kind="cosine", lr=1e-2, warmup=3, updates=STEPS, min_lr=0.1)
    machine = Machine(ranks=lanes, device=torch.device("cpu"), peak_flops=None)
    with Loader(steps) as loader:
        reports = train(stepper, loader, steps=STEPS, schedule=schedule, flops=sum, machine=machine)
        return [(report.loss, report.grad_norm) for report in reports]


def curves(lanes: int, ways: list[tuple[str, str, str]]) -> list[list[tuple[float, float]]]:
    with lanes_of(lanes) as (topology, groups):
        return [curve(topology, groups, *way) for way in ways]


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    found = torch.tensor(run_ranks(1, curves, 1, [("static", "round", "none")])[0][0])
    assert found[-1, 0] < found[0, 0] - 0.5, "the loss must fall, or equal curves say little"
    return found


def check(lanes: int, ways: list[tuple[str, str, str]], alone: torch.Tensor) -> None:
    results = run_ranks(lanes, curves, lanes, ways, timeout=300)
    assert all(result == results[0] for result in results), "lanes must report the same numbers"
    for way, found in zip(ways, results[0], strict=True):
        error = ((torch.tensor(found) - alone).abs() / alone).max().item()
        assert error <= 1e-9, f"{lanes} lanes, {way}: off by {error:.1e}"


ALL = list(product(POLICIES, ("round", "step"), ("none", "blocks")))


@pytest.mark.parametrize("lanes", [1, 2, 4, 6])
def test_a_sample_of_all_ways(lanes: int, alone: torch.Tensor) -> None:
    """Over the four numbers of lanes every way comes up."""
    check(lanes, ALL[lanes // 2 % 4 :: 4], alone)


@pytest.mark.fuzz
@pytest.mark.parametrize("lanes", [1, 2, 4, 6])
def test_all_ways(lanes: int, alone: torch.Tensor, is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("a sample of these runs above; all of them in `make fuzz`")
    check(lanes, ALL, alone)


def test_two_runs_are_bit_identical() -> None:
    first, second = (run_ranks(4, curves, 4, [("mixed", "round", "none")]) for _ in range(2))
    assert first == second
