"""Whole training steps on one lane, built from the library's own parts, for calibration.

In: a decoder and the lengths of each sequence. Out: a Stepper, as `longshore train` builds it, and
micro-batches of a plan. Token ids are random.

    with one_lane(device) as topology:
        stepper = make_stepper(decoder, topology, dtype=torch.float32)
        step = make_step([90, 40, 300], decoder, capacity=320, device=device)
        stepper.step(list(step.batches), 1e-5, plan=step.plan)

`check_steps` compares predictions with steps that calibration has not seen: of long-tailed random
lengths (lognormal, median a 20th of the capacity) that fill 1 to 4 rounds, each run several times
in a row without waiting, as training runs; the median counts.

    12 steps predicted 4 % too slow to 9 % too fast: median error 5 %
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from longshore.advisor.machine import MachineProfile
from longshore.advisor.step_time import step_seconds
from longshore.arch.decoder import DecoderConfig
from longshore.batch import Counts, MicroBatch
from longshore.data.pack import count_targets, cut_shards, lane_cuts, pack_step
from longshore.data.source import TokenizedSample
from longshore.distributed.process_group import alone, process_group
from longshore.distributed.topology import CPGroups, Topology, make_topology
from longshore.model.decoder import Decoder
from longshore.model.fill import Fill
from longshore.model.init import fill_of
from longshore.model.registry import table_makers
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.shards import fill
from longshore.plan.planner import make_plan
from longshore.plan.types import Plan
from longshore.plan.types import Sequence as PlanSequence
from longshore.train.losses import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper

STD = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class LoneStep:
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
        """Tokens of each round, padded."""
        return [batch.ctx.tokens for batch in self.batches]


@contextmanager
def one_lane(device: torch.device) -> Iterator[Topology]:
    """A process group of this process alone, and its topology."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with alone() as ranks, process_group(ranks, backend=backend, device=device):
        yield make_topology(lanes=1, device=device)


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
) -> LoneStep:
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
    return LoneStep(plan, tuple(batches))


SIGMA = 1.1
MOST_ROUNDS = 4
LR = 1e-5


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prediction beside what was measured."""

    name: str
    """The step or part, in words."""
    predicted: float
    """Seconds."""
    measured: float
    """Seconds."""

    @property
    def error(self) -> float:
        """Relative to the measured time; above 0 if predicted too slow."""
        return self.predicted / self.measured - 1


def median_error(outcomes: Sequence[Outcome]) -> float:
    return statistics.median(abs(each.error) for each in outcomes)


def random_steps(
    decoder: DecoderConfig, *, capacity: int, count: int, device: torch.device, seed: int = 1
) -> list[LoneStep]:
    """Steps of 1 to 4 rounds, about as many of each."""
    random = np.random.default_rng(seed)
    steps = []
    for number in range(count):
        wanted = capacity * (number % MOST_ROUNDS + random.uniform(0.5, 0.95))
        lengths: list[int] = []
        while sum(lengths) < wanted:
            length = int(random.lognormal(np.log(capacity / 20), SIGMA))
            lengths.append(min(max(length, 4), capacity))
        step = make_step(lengths, decoder, capacity=capacity, device=device, seed=number)
        steps.append(step)
    return steps


def check_steps(
    machine: MachineProfile,
    stepper: Stepper,
    decoder: DecoderConfig,
    steps: Sequence[LoneStep],
    *,
    repeats: int = 4,
) -> list[Outcome]:
    """Each step predicted and measured."""
    outcomes = []
    for step in steps:
        predicted = step_seconds(machine, decoder, step.rounds, tokens=step.tokens)
        run = partial(stepper.step, list(step.batches), LR, plan=step.plan)
        run()
        sequences = sum(map(len, step.rounds))
        name = f"{len(step.rounds)} rounds, {sum(step.tokens):,} tokens, {sequences} sequences"
        times = _in_a_row(run, stepper.topology.device, repeats)
        outcomes.append(Outcome(name, predicted, statistics.median(times)))
    return outcomes


def _in_a_row(run: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of several calls that are queued one after the other, but for the first."""
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(repeats):
            run()
            times.append(time.perf_counter())
        return [b - a for a, b in pairwise(times)][1:]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize(device)
    pairs = pairwise(events[1:])
    return [a.elapsed_time(b) / 1e3 for a, b in pairs]
