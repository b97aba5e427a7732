"""A step makes no call that waits for the GPU, for every kind of layer but experts.

Experts' dispatch may wait: how many tokens each expert takes is known to the device alone. So the
models are the tiny presets with their experts replaced by an MLP.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.presets import preset
from longshore.data.mock import MockSource
from longshore.data.source import BatchSize
from longshore.data.steps import IndexedSteps, Loader, Packing
from longshore.distributed.process_group import Ranks, process_group
from longshore.distributed.topology import CPGroups, Topology, make_topology
from longshore.model.decoder import Decoder
from longshore.model.init import initial_block
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.shards import fill
from longshore.plan import make_plan
from longshore.train.losses import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper

HAS_GPU = torch.cuda.is_available()
WARMUP, STEPS = 3, 6
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")


def without_experts(config: DecoderConfig) -> DecoderConfig:
    def dense(layer: LayerConfig) -> LayerConfig:
        is_moe = isinstance(layer.mlp, MoEConfig)
        return replace(layer, mlp=MLPConfig(width=128)) if is_moe else layer

    return replace(
        config,
        layers=tuple(dense(layer) for layer in config.layers),
        mtp=tuple(dense(layer) for layer in config.mtp),
    )


@contextmanager
def waits_are_errors(*, on: bool) -> Iterator[None]:
    if not (on and HAS_GPU):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_stepper(config: DecoderConfig, topology: Topology, groups: CPGroups) -> Stepper:
    with torch.device("meta"):
        model = Decoder(config)
    choices = Choices(mode="none", dtype=torch.bfloat16)
    parallelize(model, topology, groups, choices=choices)
    fill(model, topology.device, partial(initial_block, config, seed=0))
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
    return Stepper(model, optimizer, topology, "none", make_loss(), clip=1.0, mtp_weight=0.1)


def train_steps(config: DecoderConfig, folder: Path, *, device: torch.device) -> None:
    """Steps of varied lengths; after the warm-up a call that waits raises."""
    ranks = Ranks(0, 1, 0, 1, f"file://{folder}/store")
    mock = {"mode": "distribution", "type": "uniform", "min_seq_len": 1, "max_seq_len": 500}
    backend = "nccl" if device.type == "cuda" else "gloo"
    with process_group(ranks, backend=backend, device=device):
        topology = make_topology(lanes=1, device=device)
        with CPGroups(topology, [1]) as groups:
            stepper = make_stepper(config, topology, groups)
            steps = IndexedSteps(
                MockSource(mock, count=96, vocab_size=config.vocab_size),
                planner=partial(make_plan, lanes=1, capacity=1024),
                batch=BatchSize("sequences", 16),
                seed=0,
                topology=topology,
                packing=Packing(depths=len(config.mtp)),
            )
            with Loader(steps, pin=device.type == "cuda") as loader:
                for number in range(STEPS if device.type == "cuda" else 1):
                    step = next(loader)
                    with waits_are_errors(on=number >= WARMUP):
                        stepper.step(step.batches, lr=1e-3)


@needs_gpu
@pytest.mark.parametrize(
    "name",
    ["tiny-qwen3", "tiny-llama", "tiny-deepseek-v3", "tiny-nemotron-h", "tiny-qwen3-next",
     "tiny-hybrid"],
)  # fmt: skip
def test_a_step_waits_for_nothing_the_plan_knows(name: str, tmp_path: Path) -> None:
    train_steps(without_experts(preset(name)), tmp_path, device=torch.device("cuda", 0))
