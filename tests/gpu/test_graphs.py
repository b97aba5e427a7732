"""CUDA graphs in real runs: they follow the run without them, with fallbacks, on all lanes."""

import json
from pathlib import Path

import pytest
import torch
from tests.gpu.test_train import SMALL, finished, start

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GRAPHS = ("graph.layers=['all']", "graph.max_sequences=5", "plan.buckets=2")
WAYS = {
    "one rank": ("--ranks", "1"),
    "recomputed": ("--ranks", "1", "train.recompute=blocks"),
    "zero3": ("--ranks", "1", "parallel.shard=zero3"),
    "2 lanes": ("--ranks", "2"),
    "2 lanes, zero3": ("--ranks", "2", "parallel.shard=zero3"),
}


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-nemotron-h", "tiny-qwen3-next"])
def test_graphs_follow_eager_steps(name: str, tmp_path: Path) -> None:
    """All runs at once: most of their time is the start."""
    words = (*SMALL, f"model.preset={name}", "train.steps=30")
    # The tiny delta net is computed by plain torch, which is not replayed.
    graphs = GRAPHS if name != "tiny-qwen3-next" else ("graph.layers=['attention']", *GRAPHS[1:])
    runs = {way: start(tmp_path / way, *words, *graphs, *more) for way, more in WAYS.items()}
    runs["eager"] = start(tmp_path / "eager", *words, "plan.buckets=2", "--ranks", "1")
    losses = {way: finished(process, tmp_path / way) for way, process in runs.items()}
    eager = losses.pop("eager")
    for way, values in losses.items():
        errors = [abs(a - b) / b for a, b in zip(values, eager, strict=True)]
        assert max(errors) < 0.01, way
        lines = (tmp_path / way / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        served = last["graphed"]
        assert served["whole"] > 0, way
        assert last["graph_gib"] > 0, f"{way}: nothing was recorded"
