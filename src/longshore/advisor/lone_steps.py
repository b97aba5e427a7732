"""Whole training steps on one lane, built from the library's own parts, for calibration.

In: a decoder and the lengths of each sequence. Out: a Stepper, as `longshore train` builds it, and
micro-batches of a plan. Token ids are random.

    with one_lane(device) as topology:
        stepper = make_stepper(decoder, topology, dtype=torch.float32)
        step = make_step([90, 40, 300], decoder, capacity=320, device=device)
        stepper.step(list(step.batches), 1e-5, plan=step.plan)
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longshore.arch.decoder import DecoderConfig
from longshore.batch import Counts, MicroBatch
from longshore.data.pack import pack_step
from longshore.data.shard import count_targets, cut_shards, lane_cuts
from longshore.data.source import TokenizedSample
from longshore.distributed.process_group import Rendezvous, process_group
from longshore.distributed.topology import CPGroups, Topology, make_topology
from longshore.model.decoder import Decoder
from longshore.model.fill import Fill
from longshore.model.host_tables import table_makers
from longshore.model.init import fill_of
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.shards import fill
from longshore.plan.planner import make_plan
from longshore.plan.types import Plan
from longshore.plan.types import Sequence as PlanSequence
from longshore.train.loss import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper

STD = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class MadeStep:
    """A step of one lane."""

    plan: Plan
    batches: tuple[MicroBatch, ...]

    @property
    def rounds(self) -> list[list[int]]:
        """The real lengths of each round's sequences."""
        return [
            [length for pack in batch.ctx.packs for length in pack.lengths if length]
            for batch in self.batches
        ]

    @property
    def tokens(self) -> list[int]:
        """Of each round, padded."""
        return [batch.ctx.tokens for batch in self.batches]


@contextmanager
def one_lane(device: torch.device) -> Iterator[Topology]:
    """A process group of this process alone, and its topology."""
    with tempfile.TemporaryDirectory() as folder:
        where = Rendezvous(0, 1, f"file://{folder}/store")
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            with process_group(where, backend=backend, device=device):
                yield make_topology(lanes=1, device=device)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def make_stepper(decoder: DecoderConfig, topology: Topology, *, dtype: torch.dtype) -> Stepper:
    """The model through `parallelize`, mode none, with its optimizer and loss."""
    with torch.device("meta"):
        model = Decoder(decoder).to(torch.promote_types(dtype, torch.float32))
    groups = CPGroups(topology, [1])
    parallelize(model, topology, groups, choices=Choices(mode="none", dtype=dtype))
    generator = torch.Generator().manual_seed(0)

    def block(name: str, shape: torch.Size, index: tuple[slice, ...]) -> Tensor:
        sizes = [part.stop - part.start for part in index]
        sizes += list(shape[len(index) :])
        return _first_values(fill_of(decoder, name), sizes, generator, topology.device)

    fill(model, topology.device, block)
    return Stepper(
        model=model,
        optimizer=make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8),
        topology=topology,
        mode="none",
        loss=make_loss("", "tokens"),
        clip=1.0,
        mtp_weight=0.1,
    )


def _first_values(
    how: Fill, sizes: Sequence[int], generator: torch.Generator, device: torch.device
) -> Tensor:
    if how.constant is not None:
        return torch.full(sizes, how.constant)
    if how.by_row is not None:
        return how.by_row(torch.arange(sizes[0], dtype=torch.float64), sizes[0]).float()
    if device.type == "cuda":
        return torch.randn(sizes, device=device) * STD
    return torch.randn(sizes, generator=generator) * STD


def make_step(
    lengths: Sequence[int],
    decoder: DecoderConfig,
    *,
    capacity: int,
    device: torch.device,
    seed: int = 0,
    buckets: Sequence[int] = (),
) -> MadeStep:
    """A planned step of these lengths on one lane, its micro-batches on the host."""
    random, depths = np.random.default_rng(seed), len(decoder.mtp)
    sequences = [PlanSequence(i, n, max(n - 1, 1)) for i, n in enumerate(lengths)]
    plan = make_plan(sequences, lanes=1, capacity=capacity)
    samples = {
        place: TokenizedSample(
            place,
            random.integers(0, decoder.vocab_size, each.length, dtype=np.int32),
            np.ones(each.length, dtype=bool),
        )
        for place, each in enumerate(plan.sequences)
    }
    labels = np.array([count_targets(each.loss_mask, depths) for each in samples.values()])
    counts = Counts.of(labels.sum(axis=0).tolist(), list(lengths))
    shards = cut_shards(plan, samples, lane_cuts(plan, 0), depths=depths)
    tables = table_makers(decoder, scan="auto", device=device)
    batches = pack_step(plan, 0, shards, counts=counts, buckets=buckets, tables=tables)
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    return MadeStep(plan, tuple(batches))
