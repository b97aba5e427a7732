"""Compares predictions with measured steps and parts that calibration has not seen.

In: a MachineProfile and a decoder. Out: for random steps their predicted and measured seconds, and
for each of the decoder's parts the same, to find out which part is off.

Steps have long-tailed random lengths (lognormal, median a 20th of the capacity) that fill 1 to 4
rounds. A step is run several times in a row without waiting, as training runs: the median counts.

    12 steps predicted 4 % too slow to 9 % too fast: median error 5 %
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from longshore.arch.decoder import DecoderConfig
from longshore.arch.machine import MachineProfile
from longshore.arch.part_work import Work, part_kind, part_works
from longshore.arch.step_time import RunShape, part_time, step_seconds
from longshore.calibrate.modules import make_module, runnable
from longshore.calibrate.parts import work_of
from longshore.calibrate.references import Case, Reference
from longshore.calibrate.steps import MadeStep, make_step
from longshore.calibrate.timing import Timer, free
from longshore.train.step import Stepper

SIGMA = 1.1
MOST_ROUNDS = 4
LR = 1e-5


@dataclass(frozen=True, slots=True)
class Outcome:
    """A prediction beside what was measured."""

    name: str
    """Of the step or part, in words."""
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
) -> list[MadeStep]:
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
    steps: Sequence[MadeStep],
    *,
    repeats: int = 4,
) -> list[Outcome]:
    """Each step predicted and measured."""
    shape = RunShape(lanes=1, shard="none", dtype=machine.dtype, recompute=False)
    outcomes = []
    for step in steps:
        predicted = step_seconds(machine, decoder, step.rounds, tokens=step.tokens, shape=shape)
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


def check_parts(
    machine: MachineProfile,
    decoder: DecoderConfig,
    cases: Sequence[Case],
    timer: Timer,
    *,
    dtype: torch.dtype,
) -> list[Outcome]:
    """Each kind of part of the decoder alone, on the device: predicted and measured."""
    parts = {part: None for layer in decoder.layers for part in layer.parts}
    wanted = [Reference(part_kind(part), decoder, part, part_kind(part)) for part in parts]
    wanted += [Reference(kind, decoder, None, kind) for kind in ("embedding", "head")]
    outcomes = []
    for reference in wanted:
        module = make_module(reference, device=timer.device, dtype=dtype)
        for lengths in cases:
            run = runnable(reference, module, lengths, device=timer.device, dtype=dtype)
            works = _works(machine, reference, lengths, item=dtype.itemsize)
            times = [part_time(machine, work) for work in works]
            predicted = sum(each.forward + each.backward for each in times)
            name = f"{reference.name}, {sum(lengths):,} tokens in {len(lengths)}"
            outcomes.append(Outcome(name, predicted, timer.seconds(run.both)))
        del module, run
        free(timer.device)
    return outcomes


def _works(
    machine: MachineProfile, reference: Reference, lengths: Case, *, item: int
) -> tuple[Work, ...]:
    chunk, part = machine.scan_chunk, reference.part
    if part is None:
        return (work_of(reference, lengths, item=item, scan_chunk=chunk),)
    return part_works(part, reference.decoder.width, lengths, item=item, scan_chunk=chunk)
