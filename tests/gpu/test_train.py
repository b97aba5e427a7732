"""Training on a GPU: bf16 follows the CPU's float64, alone and on ranks that share it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECIPE = (
    "data.mock={mode='distribution', type='lognormal', min_seq_len=1, max_seq_len=2048, "
    "mean_seq_len=256, lognormal_sigma=1.3}",
    "data.count=2048",
    "data.batch=32",
    "plan.capacity=2048",
    "model.preset=tiny-llama",
    "train.steps=50",
    "train.lr=1e-3",
    "train.warmup=5",
)


def losses(folder: Path, *words: str) -> list[float]:
    """Of each step of a real run."""
    command = [sys.executable, "-m", "longshore.cli.main", "train", *RECIPE, *words]
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [*command, f"output.folder={folder}", "output.display=plain"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("exact") / "run"
    return losses(folder, "train.device=cpu", "train.dtype=float64", "--ranks", "1")


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "1"),
        ("--ranks", "4"),
        ("--ranks", "4", "parallel.shard=zero3", "train.recompute=blocks"),
        ("--ranks", "4", "parallel.shard=zero2", "plan.sync=step"),
    ],
    ids=["one", "four", "zero3", "step"],
)
def test_bf16_follows_float64(words: tuple[str, ...], exact: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path / "run", *words)
    assert len(found) == len(exact) == 50
    assert exact[-1] < exact[0] - 1
    errors = [abs(a - b) / b for a, b in zip(found, exact, strict=True)]
    assert max(errors) < 0.01


def test_a_step_waits_for_nothing_the_plan_knows(tmp_path: Path) -> None:
    """Under torch's sync debug mode, forward, backward, clipping and update of a mixed step."""
    from functools import partial

    from longshore.arch.presets import preset
    from longshore.data.batches import BatchSize
    from longshore.data.loader import Loader
    from longshore.data.mock import MockSource
    from longshore.data.steps import IndexedSteps
    from longshore.distributed.cp_groups import CPGroups
    from longshore.distributed.process_group import Rendezvous, process_group
    from longshore.distributed.topology import make_topology
    from longshore.model.decoder import Decoder
    from longshore.model.init import initial_rows
    from longshore.parallel.apply import Choices, parallelize
    from longshore.parallel.fsdp import fill
    from longshore.plan import make_plan
    from longshore.train.loss import make_loss
    from longshore.train.optimizer import make_optimizer
    from longshore.train.step import Stepper

    device = torch.device("cuda", 0)
    config = preset("tiny-qwen3")
    where = Rendezvous(0, 1, f"file://{tmp_path}/store")
    mock = {"mode": "distribution", "type": "uniform", "min_seq_len": 1, "max_seq_len": 500}
    with process_group(where, backend="nccl", device=device):
        topology = make_topology(lanes=1, device=device)
        with CPGroups(topology, [1]) as groups:
            with torch.device("meta"):
                model = Decoder(config)
            choices = Choices(mode="none", dtype=torch.bfloat16)
            parallelize(model, topology, groups, choices=choices)
            fill(model, device, partial(initial_rows, config, seed=0))
            optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
            stepper = Stepper(model, optimizer, topology, "none", make_loss(), clip=1.0)
            steps = IndexedSteps(
                MockSource(mock, count=64, vocab_size=config.vocab_size),
                planner=partial(make_plan, lanes=1, capacity=1024),
                batch=BatchSize("sequences", 16),
                seed=0,
                topology=topology,
            )
            with Loader(steps, pin=True) as loader:
                for number in range(4):
                    step = next(loader)
                    torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
                    stepper.step(step.batches, lr=1e-3)
                    torch.cuda.set_sync_debug_mode("default")
