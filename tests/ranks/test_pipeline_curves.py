"""Twenty steps end alike on every layout, also where a run goes on under another one."""

from pathlib import Path

import pytest
import torch
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import HYBRIDS
from tests.ranks.piped import deep, pipeline_of, staged
from tests.ranks.spine import MTP_WEIGHT, exact
from tests.ranks.test_curves import MOCK

from longshore.arch.stages import make_layout
from longshore.data.batches import BatchSize
from longshore.data.data_rank import Packing
from longshore.data.loader import Loader
from longshore.data.mock import MockSource
from longshore.data.steps import IndexedSteps
from longshore.parallel.pipeline.copies import EmbeddingCopies
from longshore.plan import make_plan
from longshore.train.checkpoint import Checkpoints, Position
from longshore.train.evaluation import HeldOut
from longshore.train.loop import Machine, Progress, train
from longshore.train.loss import make_loss
from longshore.train.optimizer import Schedule, make_optimizer
from longshore.train.step import Stepper

STEPS = 20
CONFIGS = {"dense": lambda: deep(4, tied=True), **HYBRIDS}


def make_steps(config, layout, topology, *, seed: int, policy: str) -> IndexedSteps:
    def planner(sequences):
        pipeline = {"pp": layout.pp, "vpp": layout.vpp}
        return make_plan(sequences, lanes=topology.lanes, capacity=90, policy=policy, **pipeline)

    return IndexedSteps(
        MockSource(MOCK, count=30, vocab_size=config.vocab_size, seed=seed),
        planner=planner,
        batch=BatchSize("sequences", 7),
        seed=5,
        topology=topology,
        packing=Packing(depths=len(config.mtp), layout=layout),
    )


def curve(name: str, place: tuple, steps: int, folder: str) -> list[tuple[float, ...]]:
    """Losses and norm of each step up to `steps`, from the newest checkpoint on; then evaluated."""
    lanes, pp, vpp, text, mode, policy = place
    config = CONFIGS[name]()
    layout = make_layout(config, pp=pp, vpp=vpp, text=text)
    with pipeline_of(lanes, pp) as (topology, groups):
        model = staged(config, layout, topology, groups, exact(mode=mode))
        copies = EmbeddingCopies(model, topology)
        optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        stepper = Stepper(
            model, optimizer, topology, mode, make_loss(), 1.0, MTP_WEIGHT, copies=copies
        )
        checkpoints = Checkpoints(
            Path(folder), model, optimizer, topology=topology, keep=2, copies=copies
        )
        held = HeldOut("held", make_steps(config, layout, topology, seed=9, policy=policy))
        data = make_steps(config, layout, topology, seed=1, policy=policy)
        with Loader(data) as loader:
            position, _ = checkpoints.load_newest()
            done = Progress(position.step, position.updates) if position else Progress()
            if position:
                loader.load_state_dict(position.loader)
            reports = train(
                stepper,
                loader,
                steps=steps,
                schedule=Schedule(kind="cosine", lr=1e-2, warmup=3, updates=STEPS, min_lr=0.1),
                flops=sum,
                machine=Machine(ranks=lanes, device=torch.device("cpu"), peak_flops=None),
                start=done,
            )
            numbers = [
                (m.loss, m.grad_norm, *(m.mtp_losses or ()), m.balance_loss or 0.0)
                for m in (report.metrics for report in reports)
            ]
            checkpoints.save(Position(steps, steps, loader.state_dict()))
            checkpoints.confirm(steps)
            checkpoints.wait()
        evaluation = held.evaluate(stepper.executor)
        held.steps.close()
        checkpoints.close()
        copies.close()
    return [*numbers, (evaluation.loss, *evaluation.mtp_losses)]


ALONE = (1, 1, 1, "", "none", "static")
WAYS = {
    "dense": [(2, 2, 2, "", "zero3", "mixed"), (1, 4, 1, "", "none", "balanced")],
    "hybrid": [(2, 2, 1, "Ett|tmL", "zero2", "dynamic"), (1, 2, 2, "Et|tt|m|L", "none", "mixed")],
    "deepseek": [(1, 4, 1, "Et|tm|m|L", "zero3", "mixed"), (2, 2, 1, "", "zero3", "mixed")],
}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_under_another_layout(name: str, tmp_path: Path, is_fuzz: bool) -> None:
    if name == "hybrid" and not is_fuzz:
        pytest.skip("in `make fuzz`")
    middle = STEPS // 2
    want = []
    for steps in (middle, STEPS):
        want += run_ranks(1, curve, name, ALONE, steps, str(tmp_path / "alone"))[0]
    numbers = []
    for place, steps in zip(WAYS[name], (middle, STEPS), strict=True):
        ranks = place[0] * place[1]
        results = run_ranks(ranks, curve, name, place, steps, str(tmp_path / "piped"))
        assert all(result == results[0] for result in results), "all ranks know the same"
        numbers += results[0]
    assert len(numbers) == STEPS + 2
    for number, (ours, theirs) in enumerate(zip(numbers, want, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-9), f"line {number}"
    assert want[-2][0] < want[0][0]
