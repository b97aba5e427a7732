"""Measures what is no part of a layer: hooks, rounds, copies of parameters, norm and optimizer.

In: small models with few tokens, through `parallelize` and the training step itself. Out:
FixedCosts. Steps of 1 and of 2 rounds, of few and of more layers, of narrow and of wide ones are
timed; what their parts, norm and optimizer take is subtracted, and the rest is fitted by rounds,
blocks, parameters and tokens.

    2 and 6 blocks in steps of 1 and 2 rounds: 1.2, 2.0, 2.1 and 3.7 ms on the host
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig
from longshore.arch.machine import Coefficient, FixedCosts, MachineProfile
from longshore.arch.nonnegative import fit_nonnegative
from longshore.arch.part_work import block_works, end_works
from longshore.arch.presets import preset
from longshore.arch.step_time import part_time
from longshore.calibrate.steps import make_step, make_stepper, one_lane
from longshore.calibrate.timing import Clock, Timer, free
from longshore.distributed.topology import Topology
from longshore.train.optimizer import clip
from longshore.train.step import Stepper

ROUNDS = (1, 2)
"""A device queues about a thousand kernels; more rounds would make it wait for the host."""
LR = 1e-5


@dataclass(frozen=True, slots=True)
class StepSample:
    """One timed kind of step."""

    rounds: int
    """In the step."""
    blocks: int
    """Of the model."""
    parameters: int
    """Of the model."""
    tokens: int
    """Of a round."""
    device: float
    """Seconds on the device, without parts, norm and optimizer."""
    total: float
    """Seconds on the device with them."""
    host: float
    """Seconds of the host without those of the parts; 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class UpdateSample:
    """Norm and optimizer of one model."""

    parameters: int
    norm: float
    optimizer: float


def models(device: str) -> list[tuple[DecoderConfig, list[int]]]:
    """Decoders of few and more layers, narrow and wide, and the lengths of a round."""
    if device == "cuda":
        small = preset("qwen3-0.6b", layers=2, vocab_size=4096)
        more = preset("qwen3-0.6b", layers=5, vocab_size=4096)
        wide = preset("qwen3-8b", layers=2, vocab_size=4096)
        return [(small, [128]), (more, [128]), (wide, [128]), (small, [256] * 16)]
    tiny = preset("tiny-qwen3")
    more = preset("tiny-qwen3", layers=6)
    wide = preset("tiny-qwen3", width=256, mlp=768, heads=16)
    return [(tiny, [64]), (more, [64]), (wide, [64]), (tiny, [32] * 16)]


def measure_overheads(
    machine: MachineProfile, timer: Timer, *, dtype: torch.dtype, clock: Clock
) -> FixedCosts:
    """The machine's fixed costs, all but links and graphs; its parts must be measured already."""
    steps: list[StepSample] = []
    updates: list[UpdateSample] = []
    for decoder, lengths in models(timer.device.type):
        blocks = len(decoder.layers)
        clock.tell(f"steps of {blocks} blocks of width {decoder.width}")
        with one_lane(timer.device) as topology:
            update, own = _measure_model(machine, decoder, lengths, topology, timer, dtype)
        updates.append(update)
        steps += own
        free(timer.device)
    return fit_overheads(machine.fixed, steps, updates)


def _measure_model(
    machine: MachineProfile,
    decoder: DecoderConfig,
    lengths: list[int],
    topology: Topology,
    timer: Timer,
    dtype: torch.dtype,
) -> tuple[UpdateSample, list[StepSample]]:
    stepper, count = make_stepper(decoder, topology, dtype=dtype), parameter_count(decoder)
    calls = {rounds: _call(stepper, decoder, lengths, rounds) for rounds in ROUNDS}
    totals = {rounds: timer.seconds(call) for rounds, call in calls.items()}
    hosts = {rounds: timer.host_seconds(call) for rounds, call in calls.items()}
    update = _measure_update(stepper, count, timer)
    chunk, tokens = machine.scan_chunk, sum(lengths)
    works = block_works(decoder, lengths, item=dtype.itemsize, scan_chunk=chunk)
    works += end_works(decoder, tokens)
    times = [(times, part_time(machine, work)) for work, times in works.items()]
    parts = sum(n * (each.forward + each.backward) for n, each in times)
    launched = sum(n * each.host for n, each in times)
    samples = [
        StepSample(
            rounds=rounds,
            blocks=len(decoder.layers),
            parameters=count,
            tokens=tokens,
            device=totals[rounds] - rounds * parts - update.norm - update.optimizer,
            total=totals[rounds],
            host=hosts[rounds] - rounds * launched if timer.is_cuda else 0.0,
        )
        for rounds in ROUNDS
    ]
    return update, samples


def _call(
    stepper: Stepper, decoder: DecoderConfig, lengths: list[int], rounds: int
) -> Callable[[], object]:
    device = stepper.topology.device
    step = make_step(lengths * rounds, decoder, capacity=sum(lengths), device=device)
    assert len(step.batches) == rounds, step.plan
    return partial(stepper.step, list(step.batches), LR, plan=step.plan)


def _measure_update(stepper: Stepper, parameters: int, timer: Timer) -> UpdateSample:
    """Gradients are there, of zeros: neither takes longer with others."""
    for parameter in stepper.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    also = torch.zeros(3, dtype=torch.float64, device=timer.device)
    norm = timer.seconds(lambda: clip(stepper.model, 1.0, stepper.topology, also=also))
    optimizer = timer.seconds(stepper.optimizer.step)
    stepper.optimizer.zero_grad()
    return UpdateSample(parameters, norm, optimizer)


def fit_overheads(
    before: FixedCosts, steps: list[StepSample], updates: list[UpdateSample]
) -> FixedCosts:
    """The costs that these samples show; others stay as they are."""
    amounts = [
        [
            1,
            each.rounds,
            each.rounds * each.blocks,
            each.rounds * each.parameters,
            each.parameters,
            each.rounds * each.tokens,
        ]
        for each in steps
    ]
    device = fit_nonnegative(
        amounts, [each.device for each in steps], totals=[each.total for each in steps]
    )
    names = ("step", "round", "block", "round_parameter", "step_parameter", "round_token")
    named = dict(zip(names, device, strict=True))
    if any(each.host > 0 for each in steps):
        host = fit_nonnegative(
            [row[:3] for row in amounts],
            [each.host for each in steps],
            totals=[max(each.host, 1e-6) for each in steps],
        )
    else:
        host = [0.0, 0.0, 0.0]
    named |= dict(zip(("step_host", "round_host", "block_host"), host, strict=True))
    columns = [[1, each.parameters] for each in updates]
    norm_once, named["norm"] = fit_nonnegative(columns, [each.norm for each in updates])
    update_once, named["optimizer"] = fit_nonnegative(columns, [each.optimizer for each in updates])
    named["step"] += norm_once + update_once
    return replace(before, **{key: Coefficient(each, "measured") for key, each in named.items()})
