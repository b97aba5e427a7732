"""`longshore train` without a recipe: the same on any ranks, under torchrun, and a second time.

Runs take seconds, so each test makes its own and asserts all there is to say of them.
"""

from dataclasses import fields

import pytest
from tests.end_to_end.command import torchrun, trained

from longshore.config.load import load_config
from longshore.train.display import StepMetrics

NAMES = [field.name for field in fields(StepMetrics)]  # experts and a depth are in the demo
TIMES = ("elapsed_s", "tokens_per_s", "tflops", "plan_s", "data_wait_s", "memory_gib")
ABSENT = ("index_loss", "loss_metrics", "graphed", "graph_gib")
"""Of models with an indexer, losses with metrics of their own, and runs with CUDA graphs."""
SMALL = ("data.mock.mean_seq_len=96", "data.mock.max_seq_len=1024", "data.batch=8")
EXACT = (*SMALL, "train.dtype=float64", "train.steps=3")


def without_times(metrics):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in metrics]


def check_sense(metrics, steps):
    """Every line has just the named keys, and numbers that can be."""
    assert [line["step"] for line in metrics] == [*range(1, steps + 1)]
    for line in metrics:
        assert list(line) == [name for name in NAMES if name not in ABSENT]
        assert (line["epoch"], line["sequences"], line["skipped"]) == (0, 8, False)
        assert line["mfu"] is None, "nobody knows the peak of a CPU"
        assert line["loss_tokens"] == line["tokens"] - 8, "all but the first of each sequence"
        assert 0 < line["efficiency"] <= 1
        assert 0 <= line["padding"] < 0.5
        assert 1 <= line["rounds"] <= 8
        for name in ("lr", "grad_norm", *TIMES):
            assert line[name] > 0, name
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["elapsed_s"])
        assert line["data_wait_s"] < line["elapsed_s"]
        assert line["memory_gib"] < 8


@pytest.mark.long
def test_any_ranks_any_plan_the_same_losses(tmp_path):
    """1 rank and 4, whole, in shards or split, with capacities that force other packs on each."""
    one, out = trained(tmp_path, "one", *EXACT, "plan.capacity=auto", "--ranks=1")
    words = ("plan.capacity=512", "parallel.shard=zero3", "parallel.tp=2", "parallel.ep=4")
    two, _ = trained(tmp_path, "two", *EXACT, *words, "--ranks", "4")
    words = ("plan.capacity=256", "plan.sync=step", "parallel.shard=zero2", "--ranks", "4")
    four, _ = trained(tmp_path, "four", *EXACT, *words)

    for metrics in (one, two, four):
        check_sense(metrics, 3)
        for name in ("loss", "grad_norm", "balance_loss"):
            want = [line[name] for line in one]
            assert [line[name] for line in metrics] == pytest.approx(want, rel=1e-9, abs=0)
        for name in ("tokens", "loss_tokens", "lr"):
            assert [line[name] for line in metrics] == [line[name] for line in one]
    assert one[-1]["loss"] < one[0]["loss"] - 0.1
    assert all(line["padding"] == 0 for line in one)
    assert any(line["padding"] > 0 for line in four), "a sequence over 256 tokens was split"

    lines = out.splitlines()
    assert lines[:2] == ["starting 1 rank…", "reading the data…"]
    assert lines[2].startswith("tiny-hybrid: 676,760 parameters; 1,024 sequences of ")
    assert lines[2].endswith("; 1 rank on cpu, float64")
    capacity = load_config(str(tmp_path / "one" / "config.toml")).plan.capacity
    start = lines.index(f"plan.capacity: {capacity:,} tokens per rank and round")
    assert lines[start + 1].startswith("  memory ")
    assert any(line.endswith(f"= {capacity} tokens") for line in lines[start:]), "the arithmetic"
    assert f"loss {one[0]['loss']:.4f}" in out
    assert lines[-1] == "wrote one: config.toml, metrics.jsonl, weights"


@pytest.mark.long
def test_again_the_same_bits_under_torchrun(tmp_path):
    words = (*SMALL, "--ranks", "2", "train.steps=2", "output.display=none")
    first, out = trained(tmp_path, "first", *words)
    assert out == ""
    text = (tmp_path / "first" / "config.toml").read_text()
    config = load_config(str(tmp_path / "first" / "config.toml"))
    assert config.to_toml() == text
    assert (config.train.steps, config.parallel.ranks) == (2, 2)

    under, _ = trained(tmp_path, "under", "first/config.toml", command=torchrun(2))
    want = {p.name: p.read_bytes() for p in (tmp_path / "first" / "weights").iterdir()}
    assert any(name.endswith(".safetensors") for name in want)
    assert without_times(under) == without_times(first)
    assert {p.name: p.read_bytes() for p in (tmp_path / "under" / "weights").iterdir()} == want
    assert load_config(str(tmp_path / "under" / "config.toml")).train == config.train
