"""Evaluation: the same number from every plan, and training goes on as if it had not been."""

import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import HYBRIDS
from tests.ranks.spine import batches_of, dense, exact, lanes_of, make_samples, sharded

from longshore.data.source import BatchSize, MemorySource, TokenizedSample
from longshore.data.steps import IndexedSteps, Packing
from longshore.parallel.pipeline import Executor
from longshore.plan import make_plan
from longshore.train.evaluation import evaluate
from longshore.train.losses import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper
from longshore.train.supervision import RankStatus

LENGTHS = [40, 3, 1, 17, 2, 60, 5, 9]
CONFIGS = {"dense": dense, "hybrid": HYBRIDS["hybrid"]}


def held_out(topology, depths: int, policy: str, batch: int) -> IndexedSteps:
    plan = make_plan(LENGTHS, lanes=1, capacity=200)
    samples = make_samples(plan, seed=7)
    source = MemorySource(TokenizedSample(0, s.tokens, s.loss_mask) for s in samples.values())

    def planner(sequences):
        return make_plan(sequences, lanes=topology.lanes, capacity=64, policy=policy)

    return IndexedSteps(
        source,
        planner=planner,
        batch=BatchSize("sequences", batch),
        seed=0,
        shuffle=False,
        topology=topology,
        packing=Packing(depths=depths),
    )


def losses(lanes: int, name: str) -> list[tuple]:
    found = []
    config = CONFIGS[name]()
    # By turns, and on 2 lanes the other way round than on 1 and 4.
    turns = (("zero3", 3), ("zero2", 8))
    with lanes_of(lanes) as (topology, groups):
        for number, policy in enumerate(("padded", "static", "balanced", "dynamic", "mixed")):
            mode, batch = turns[(number + lanes // 2) % 2]
            model = sharded(config, topology, groups, exact(mode=mode))
            held = held_out(topology, len(config.mtp), policy, batch)
            result = evaluate(held, Executor(model, topology, mode=mode))
            found.append((result.loss, result.loss_tokens, *result.mtp_losses))
            held.close()
    return found


@pytest.mark.parametrize("name", ["dense", pytest.param("hybrid", marks=pytest.mark.long)])
def test_all_policies_agree(name: str) -> None:
    (one,) = run_ranks(1, losses, 1, name)
    want = one[0]
    assert want[1] == sum(int(s.loss_mask[1:].sum()) for s in samples().values())
    for lanes, results in (
        (1, [one]),
        (4, run_ranks(4, losses, 4, name)),
    ):
        for result in results:
            assert result == results[0], f"{lanes} lanes must say the same"
            for found in result:
                assert found == pytest.approx(want, rel=1e-12)


def samples():
    return make_samples(make_plan(LENGTHS, lanes=1, capacity=200), seed=7)


def steps_with_and_without(mode: str) -> tuple:
    """Two steps, with evaluations between them or not, one stopped early; the second loss."""
    second = []
    plan = make_plan(LENGTHS, lanes=2, capacity=64)
    with lanes_of(2) as (topology, groups):
        for evaluates in (False, True):
            model = sharded(dense(), topology, groups, exact(mode=mode))
            optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
            stepper = Stepper(model, optimizer, topology, mode, make_loss(), 1.0)
            batches = batches_of(plan, make_samples(plan), topology.lane)
            for number in range(3):
                done = stepper.step(batches, lr=0.01)
                if evaluates and number < 2:
                    held = held_out(topology, 0, "mixed", 4)
                    executor, status = Executor(model, topology, mode=mode), RankStatus()
                    first = evaluate(held, executor)
                    asked = iter([False, True])
                    assert evaluate(held, executor, status, stops=asked.__next__) is None
                    assert (list(asked), status.round) == ([], 1), "stopped after one round"
                    assert evaluate(held, executor) == first
                    held.close()
            second.append((done.losses.tolist(), done.grad_norm.item()))
    return tuple(second)


@pytest.mark.parametrize("mode", ["zero3", "zero2", "none"])
def test_training_goes_on_as_if_it_had_not_been(mode: str) -> None:
    for without, with_evaluation in run_ranks(2, steps_with_and_without, mode):
        assert without == with_evaluation
