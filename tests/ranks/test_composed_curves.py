"""Twenty steps end alike on every layout and axis, also where a run resumes under another one."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from tests.ranks.composed import ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import staged
from tests.ranks.spine import MTP_WEIGHT, exact
from tests.ranks.steps import trained
from tests.ranks.test_curves import MOCK

from longshore.arch.costs import make_layout
from longshore.arch.presets import preset
from longshore.data.mock import MockSource
from longshore.data.source import BatchSize
from longshore.data.steps import IndexedSteps, Loader, Packing
from longshore.hf.checkpoint import write_checkpoint, write_own_checkpoint
from longshore.parallel.gathered import gathered_tensors
from longshore.parallel.pipeline import EmbeddingCopies
from longshore.plan import make_plan
from longshore.train.checkpoint import Checkpoints, Position
from longshore.train.evaluation import evaluate
from longshore.train.losses import make_loss
from longshore.train.optimizer import Schedule, make_optimizer
from longshore.train.step import Stepper

STEPS = 20


@dataclass(frozen=True)
class Way:
    """How a run is spread over ranks."""

    lanes: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1
    layout: str = ""
    mode: str = "none"
    policy: str = "mixed"

    @property
    def ranks(self) -> int:
        return self.lanes * self.tp * self.pp


def make_steps(config, layout, topology, *, seed: int, policy: str) -> IndexedSteps:
    def planner(sequences):
        return make_plan(
            sequences,
            lanes=topology.lanes,
            capacity=90 + 90 % topology.tp,
            policy=policy,
            align=topology.tp,
            pp=layout.pp,
            vpp=layout.vpp,
        )

    return IndexedSteps(
        MockSource(MOCK, count=30, vocab_size=config.vocab_size, seed=seed),
        planner=planner,
        batch=BatchSize("sequences", 7),
        seed=5,
        topology=topology,
        packing=Packing(depths=len(config.mtp), layout=layout),
    )


def curve(name: str, way: Way, steps: int, folder: str) -> list[tuple[float, ...]]:
    """Losses and norm of each step up to `steps`, from the newest checkpoint on; then evaluated.

    The weights that were loaded and the last ones are exported, as folder/N-loaded and N-trained.
    """
    config = preset(name)
    layout = make_layout(config, pp=way.pp, vpp=way.vpp, text=way.layout)
    with ranks_of(lanes=way.lanes, tp=way.tp, pp=way.pp, ep=way.ep) as (topology, groups):
        model = staged(config, layout, topology, groups, exact(mode=way.mode))
        copies = EmbeddingCopies(model, topology) if way.pp > 1 else None
        optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        stepper = Stepper(
            model, optimizer, topology, way.mode, make_loss(), 1.0, MTP_WEIGHT, copies=copies
        )
        checkpoints = Checkpoints(
            Path(folder), model, optimizer, topology=topology, keep=2, copies=copies
        )

        # No architecture of transformers has all layers of the hybrid.
        write = write_own_checkpoint if name == "tiny-hybrid" else write_checkpoint

        def export(step: int, what: str) -> None:
            tensors = gathered_tensors(model, topology)
            if topology.rank == 0:
                write(Path(folder) / f"{step}-{what}", config, tensors, base=None)
            else:
                list(tensors)

        held = make_steps(config, layout, topology, seed=9, policy=way.policy)
        data = make_steps(config, layout, topology, seed=1, policy=way.policy)
        with Loader(data) as loader:
            position, _ = checkpoints.load_newest()
            done = position.step if position else 0
            if position:
                loader.load_state_dict(position.loader)
                export(position.step, "loaded")
            schedule = Schedule(kind="cosine", lr=1e-2, warmup=3, updates=STEPS, min_lr=0.1)
            updates = position.updates if position else 0
            numbers = [
                (m.loss, m.grad_norm, *(m.mtp_losses or ()), m.balance_loss or 0.0)
                for m in trained(stepper, islice(loader, steps - done), schedule, updates=updates)
            ]
            export(steps, "trained")
            checkpoints.save(Position(steps, steps, loader.state_dict()))
            checkpoints.confirm(steps)
            checkpoints.wait()
        evaluation = evaluate(held, stepper.executor)
        held.close()
        checkpoints.close()
        if copies is not None:
            copies.close()
    return [*numbers, (evaluation.loss, *evaluation.mtp_losses)]


# Of each model the ways that one run takes, one after the other.
WAYS = {
    "tiny-llama": [
        Way(tp=2, policy="balanced"),
        Way(lanes=2, pp=2, mode="zero3"),
        Way(lanes=4, tp=2, mode="zero3"),
        Way(lanes=2, tp=2, pp=2, mode="zero2", policy="dynamic"),
    ],
    "tiny-deepseek-v3": [
        Way(lanes=2, tp=2, ep=4, mode="zero3"),
        Way(lanes=2, pp=2, vpp=2, ep=2, mode="zero2"),
        Way(lanes=4, ep=2, mode="zero3"),
        Way(lanes=2, tp=2, pp=2, mode="zero3"),
        Way(lanes=4, ep=4),
        Way(tp=2),
        Way(lanes=4, tp=2, mode="zero3", policy="dynamic"),
        Way(lanes=2, ep=2, mode="zero2"),
    ],
    "tiny-hybrid": [
        Way(lanes=2, tp=2, pp=2, mode="zero2"),
        Way(tp=2),
        Way(lanes=4, tp=2, mode="zero3"),
        Way(lanes=2, pp=2, mode="zero3", policy="dynamic"),
    ],
    "tiny-qwen3-next": [
        Way(lanes=4, tp=2, mode="zero3", policy="dynamic"),
        Way(lanes=2, tp=2, ep=4),
        Way(lanes=4, ep=2, mode="zero2"),
        Way(lanes=2, pp=2, vpp=2, ep=2, mode="zero3"),
    ],
}


# In each test run: a pipeline trains a step, is evaluated, and lanes read its checkpoint.
SAMPLE = {"tiny-llama": [Way(pp=2), Way(lanes=2, mode="zero3")]}


@pytest.mark.fuzz
@pytest.mark.parametrize("name", WAYS)
def test_a_run_resumes_under_other_axes(name: str, tmp_path: Path, is_fuzz: bool) -> None:
    """The same losses to 1e-9, and what is saved under one way is exported alike under the next."""
    if not is_fuzz and name not in SAMPLE:
        pytest.skip("minutes; in `make fuzz`")
    ways = (WAYS if is_fuzz else SAMPLE)[name]
    last = STEPS if is_fuzz else len(ways)
    stops = [last * (number + 1) // len(ways) for number in range(len(ways))]
    want = []
    for steps in stops:
        want += run_ranks(1, curve, name, Way(policy="static"), steps, str(tmp_path / "alone"))[0]
    numbers = []
    for way, steps in zip(ways, stops, strict=True):
        results = run_ranks(way.ranks, curve, name, way, steps, str(tmp_path / "run"), timeout=200)
        assert all(result == results[0] for result in results), "all ranks know the same"
        numbers += results[0]
    for number, (ours, theirs) in enumerate(zip(numbers, want, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-9), f"line {number}"
    assert want[-2][0] < want[0][0] or not is_fuzz
    for steps in stops[:-1]:
        trained, loaded = (tmp_path / "run" / f"{steps}-{what}" for what in ("trained", "loaded"))
        files = sorted(path.name for path in trained.iterdir())
        assert files == sorted(path.name for path in loaded.iterdir())
        for file in files:
            assert (trained / file).read_bytes() == (loaded / file).read_bytes(), file


EACH = [
    ("tiny-llama", Way(tp=2)),
    ("tiny-llama", Way(lanes=4, tp=2, mode="zero3")),
    ("tiny-qwen3-moe", Way(lanes=2, ep=2)),
    ("tiny-deepseek-v3", Way(lanes=4, ep=4, mode="zero3")),
    ("tiny-qwen3-next", Way(lanes=4, ep=2, mode="zero2")),
    ("tiny-deepseek-v3", Way(lanes=2, tp=2, ep=4, mode="zero3")),
    ("tiny-hybrid", Way(lanes=2, tp=2, pp=2, mode="zero3")),
    ("tiny-qwen3-next", Way(lanes=2, pp=2, vpp=2, ep=2, mode="zero2")),
]


@pytest.mark.fuzz
@pytest.mark.parametrize(("name", "way"), EACH, ids=str)
def test_twenty_steps(name: str, way: Way, tmp_path: Path, is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("minutes; in `make fuzz`")
    alone, spread = (str(tmp_path / each) for each in ("alone", "spread"))
    want = run_ranks(1, curve, name, Way(policy="static"), STEPS, alone)[0]
    numbers = run_ranks(way.ranks, curve, name, way, STEPS, spread, timeout=300)[0]
    for number, (ours, theirs) in enumerate(zip(numbers, want, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-9), f"line {number}"
