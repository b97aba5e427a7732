"""Training on a GPU: bf16 follows the CPU's float64, alone and on ranks that share it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from longshore.arch.decoder import has_experts
from longshore.arch.presets import preset

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
    with start(folder, *words) as process:
        return finished(process, folder)


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    """A real run in processes of its own, with the recipe's words where none replace them."""
    keys = {word.partition("=")[0] for word in words}
    recipe = [word for word in RECIPE if word.partition("=")[0] not in keys]
    command = [sys.executable, "-m", "longshore.cli.main", "train", *recipe, *words]
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [*command, f"output.folder={folder}", "output.display=plain"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: "subprocess.Popen[str]", folder: Path) -> list[float]:
    """Waits for a run; its losses."""
    try:
        output, _ = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, output
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


MODELS = ("tiny-hybrid", "tiny-deepseek-v3", "tiny-qwen3-next")
SMALL = (
    "data.mock={mode='distribution', type='lognormal', min_seq_len=1, max_seq_len=512, "
    "mean_seq_len=96, lognormal_sigma=1.2}",
    "data.batch=16",
    "plan.capacity=512",
    "output.weights=false",
    "output.keep=0",
)


@pytest.fixture(scope="module")
def exact_run(tmp_path_factory) -> Iterator[Callable[[str], Callable[[], list[float]]]]:
    """Starts float64 on the CPU, once for each model, and waits for its losses where asked."""
    folder = tmp_path_factory.mktemp("exact")
    words = ("train.device=cpu", "train.dtype=float64", "--ranks", "1", *SMALL)
    processes = []

    @cache
    def begin(name: str) -> Callable[[], list[float]]:
        process = start(folder / name, f"model.preset={name}", *words)
        processes.append(process)
        return cache(lambda: finished(process, folder / name))

    yield begin
    for process in processes:
        process.kill()
        process.wait()


WAYS = {
    "one rank": ("--ranks", "1"),
    "4 lanes": ("--ranks", "4"),
    "tp 2": ("--ranks", "4", "parallel.tp=2"),
    "ep 4": ("--ranks", "4", "parallel.ep=4"),
    "tp 2, ep 4, zero3": ("--ranks", "4", "parallel.tp=2", "parallel.ep=4", "parallel.shard=zero3"),
    "pp 2": ("--ranks", "4", "parallel.pp=2"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in MODELS
        for way in WAYS
        if "ep" not in way or has_experts(preset(name))
    ],
)
def test_layers_of_every_kind_follow_float64(
    name: str, way: str, exact_run: Callable[[str], Callable[[], list[float]]], tmp_path: Path
) -> None:
    words = (f"model.preset={name}", *WAYS[way], *SMALL)
    exact_losses = exact_run(name)
    curve = losses(tmp_path / "run", *words)
    exact = exact_losses()
    assert len(curve) == len(exact) == 50
    assert exact[-1] < exact[0] - 1
    errors = [abs(a - b) / b for a, b in zip(curve, exact, strict=True)]
    worst = max(errors)
    assert worst < 0.01, f"{worst:.3%} at step {errors.index(worst) + 1}"
