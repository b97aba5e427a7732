"""Runs that are killed at a chosen moment, in ranks forked from this process's server."""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.metrics_file import read_metrics

from longshore.cli.main import main

LOSS = """\
import json, os, pathlib, signal, threading, time
import torch.distributed as dist
from longshore.train import checkpoint

ORDER = pathlib.Path({order!r})
calls = 0
honest = checkpoint.write_safetensors


def half(path, tensors):
    order = json.loads(ORDER.read_text()) if ORDER.exists() else dict(saving=0, ranks=[])
    saving = path.parent.name == f".step-{{order['saving']:08}}.partial"
    if saving and dist.get_rank() in order["ranks"]:
        path.write_bytes(b"half of it")
        kill(0)
    return honest(path, tensors)


checkpoint.write_safetensors = half


def dies(nll, batch):
    global calls
    if batch.round == 0:
        calls += 1
        if ORDER.exists():
            order = json.loads(ORDER.read_text())
            if dist.get_rank() in order["ranks"] and calls == order["step"]:
                threading.Thread(target=kill, args=(order["delay"],), daemon=True).start()
    return nll


def refuses(nll, batch):
    raise ValueError("this loss takes no batch")


def kill(delay):
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGKILL)
"""
DATA = (
    'data.mock={mode="distribution",type="lognormal",min_seq_len=4,max_seq_len=256,'
    "mean_seq_len=48,lognormal_sigma=1.2}",
    "data.count=64",
    "data.batch=6",
)
REST = (
    "plan.capacity=128",
    "model.preset=tiny-llama",
    "train.steps=8",
    "train.dtype=float64",
    "train.device=cpu",
    "output.save_every=2",
    "output.display=none",
)
SMALL = (*DATA, *REST)


@dataclass(frozen=True)
class Kill:
    """ranks: those that die. step: counted from where the run goes on. delay: seconds into it.

    saving: instead, in the middle of writing the checkpoint of this step.
    """

    ranks: list[int]
    step: int = 0
    delay: float = 0.0
    saving: int = 0


class Runs:
    """Runs in a folder, by absolute paths: ranks do not start in the folder of this process."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        self.order = folder / "order.json"
        self.module = f"mine_{random.getrandbits(64):x}"
        (folder / f"{self.module}.py").write_text(LOSS.format(order=str(self.order)))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)

    def train(self, name, *words, ranks=4, kill: Kill | None = None, data=DATA) -> int:
        """The exit code of `longshore train` into folder/name."""
        self.order.unlink(missing_ok=True)
        if kill:
            self.order.write_text(json.dumps(asdict(kill)))
        given = ["train", *data, *REST, f"train.loss={self.module}:dies", "--ranks", str(ranks)]
        given += ["plan.capacity=256"] if ranks == 1 else []
        return main([*given, f"output.folder={self.folder / name}", *words])

    def losses(self, name: str) -> list[float]:
        lines = read_metrics(self.folder / name / "metrics.jsonl")
        assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)], "each step once"
        return [line["loss"] for line in lines]

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "weights" / "weights.safetensors")
