"""A mixer of the user's own in one file: trained, resumed, exported and read, by commands alone.

The file is what CONTRIBUTING.md shows. What is refused is in tests/cli/test_export.py; a loss of
one's own is in test_fine_tuning.py.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.end_to_end.command import call, trained
from tests.end_to_end.killed import DATA
from tests.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
OWN = ("model.module=mine:decoder", "--ranks", "2")
RUN = (*DATA, "plan.capacity=256", "train.dtype=float64", "train.schedule=constant")
WEIGHTS = "weights/weights.safetensors"


@pytest.fixture
def folder(tmp_path):
    """With mine.py alone: the mixer and the decoder of CONTRIBUTING.md, as a user copies them."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## A new mixer")[2]
    mixer, decoder = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(f"{mixer}\n\n{decoder}")
    return tmp_path


def losses(lines):
    return [line["loss"] for line in lines]


def same_tensors(first, second):
    one, other = map(load_file, (first, second))
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.long
def test_its_run_resumes(folder):
    whole, _ = trained(folder, "whole", *RUN, *OWN, "train.steps=2")
    trained(folder, "run", *RUN, *OWN, "train.steps=1")
    code, _, err = call(folder, "train", "--resume", "run", "train.steps=2", "--ranks", "2")
    assert code == 0, err
    assert losses(read_metrics(folder / "run" / "metrics.jsonl")) == losses(whole)
    assert same_tensors(folder / "run" / WEIGHTS, folder / "whole" / WEIGHTS)


@pytest.mark.long
def test_a_mixer_is_one_file(folder):
    (folder / "lengths.csv").write_text("length\n900\n77\n")
    words = ["advise", "lengths.csv", "--gpus", "2", "--model", "mine:decoder"]
    code, out, err = call(folder, *words)
    assert (code, err) == (0, "")
    assert out.startswith("mine:decoder on 2 × h200")
    _, out = trained(folder, "run", *RUN, *OWN, "train.steps=1", "parallel.tp=2")
    assert "\nmine:decoder: " in out
    words = ["export", "run", "out", "--format", "longshore", "--module", "mine"]
    assert call(folder, *words) == (0, "wrote out\n", "")
    assert same_tensors(folder / "out/model.safetensors", folder / "run" / WEIGHTS)

    # A step this small changes no bit, so what is written is what was read.
    still = ["train.steps=1", "train.lr=1e-30", "model.from_hf=out", "model.module=mine"]
    _, out = trained(folder, "tuned", *RUN, *still, "--ranks", "1")
    assert "\nout: " in out
    assert same_tensors(folder / "tuned" / WEIGHTS, folder / "out/model.safetensors")
