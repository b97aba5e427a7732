"""Compares predictions with measured steps that calibration has not seen.

In: a MachineProfile and a decoder. Out: for random steps their predicted and measured seconds.

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

from longshore.advisor.lone_steps import MadeStep, make_step
from longshore.advisor.machine import MachineProfile
from longshore.advisor.step_time import RunShape, step_seconds
from longshore.arch.decoder import DecoderConfig
from longshore.train.step import Stepper

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
