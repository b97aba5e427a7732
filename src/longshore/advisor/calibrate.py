"""Calibration: measures this machine into a MachineProfile, within a budget of seconds.

In: a device, a dtype, a budget. Out: a MachineProfile after each measurement, the last one
complete: products and copies first, then one part of each kind (calibrate_parts.py), then what is
no part of a layer, then further parts. What the budget does not reach stays arithmetic, and the
profile says so.

    for profile in calibrate(CalibrationOptions(device, torch.bfloat16, budget=240), Clock(240)):
        …

A product is that of nn.Linear, over a grid of rows × k × n: x (rows, k) by a weight (n, k);
backward are dy @ w and dy.T @ x. Rows 256, k 64, n 64 on a CPU: forward 2e-5 s, backward 5e-5 s.

Hooks, rounds, copies of parameters, norm and optimizer are measured by training steps of small
models: of 1 and of 2 rounds, of few and of more layers, of narrow and of wide ones. What their
parts take is subtracted, and the rest is fitted by rounds, blocks, parameters and tokens. 2 and 6
blocks in steps of 1 and 2 rounds: 1.2, 2.0, 2.1 and 3.7 ms on the host.

What lanes gather from each other is measured for each CP size where there are several ranks; with
one it is arithmetic: 360 GB/s inside a node of 8 GPUs, 45 GB/s across nodes, of a CPU's ranks 5.
"""

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product

import torch
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from longshore.advisor.calibrate_parts import Reference, measure_part, references
from longshore.advisor.lone_steps import make_step, make_stepper, one_lane
from longshore.advisor.machine import (
    Coefficient,
    FixedCosts,
    GatherCost,
    MachineProfile,
    ProductTime,
    ProductTimes,
)
from longshore.advisor.step_time import block_works, end_works, fit_nonnegative, part_time
from longshore.advisor.timing import Clock, Timer, free
from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig
from longshore.arch.presets import preset
from longshore.distributed.collectives import gather, sum_over
from longshore.distributed.process_group import Ranks, process_group
from longshore.distributed.topology import CPGroups, Topology, make_topology
from longshore.ops.backends import kernels_line
from longshore.ops.boundaries import chunk_rows
from longshore.plan.shapes import legal_cp_sizes
from longshore.train.device import pick_backend
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
    """Blocks of the model."""
    parameters: int
    """Parameters of the model."""
    tokens: int
    """Tokens of a round."""
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


SHORT = 2e-4
"""Seconds below which several products are timed together."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes to measure."""

    rows: tuple[int, ...]
    """Rows of the first factor."""
    widths: tuple[int, ...]
    """Values of k and of n."""
    copied: int
    """Numbers of the copy that bandwidth is measured with."""


GRIDS = {
    "cuda": Grid((64, 512, 2048, 8192, 32768), (64, 256, 1024, 2048, 4096, 12288), 1 << 28),
    "cuda quick": Grid((64, 1024, 8192, 32768), (64, 1024, 4096, 12288), 1 << 28),
    "cpu": Grid((16, 128, 512, 2048), (16, 64, 256, 1024), 1 << 24),
    "cpu quick": Grid((64, 512), (32, 256), 1 << 20),
}


def measure_products(timer: Timer, dtype: torch.dtype, grid: Grid, clock: Clock) -> ProductTimes:
    """All products of the grid."""
    times = []
    for rows in grid.rows:
        clock.tell(f"products of {rows:,} rows")
        for k, n in product(grid.widths, grid.widths):
            times.append(_measure(timer, dtype, rows, k, n))
        free(timer.device)
    flop = min(each.forward / (2 * each.rows * each.k * each.n) for each in times)
    return ProductTimes(origin="measured", flop=flop, grid=tuple(times))


def measure_copies(timer: Timer, dtype: torch.dtype, grid: Grid) -> float:
    """Seconds of a byte that is read or written."""
    source = torch.ones(grid.copied, dtype=dtype, device=timer.device)
    target = torch.empty_like(source)
    seconds = timer.seconds(lambda: target.copy_(source))
    return seconds / (2 * source.numel() * source.element_size())


def _measure(timer: Timer, dtype: torch.dtype, rows: int, k: int, n: int) -> ProductTime:
    x, dy, weight = (
        torch.randn(shape, device=timer.device).to(dtype)
        for shape in ((rows, k), (rows, n), (n, k))
    )

    def forward() -> None:
        linear(x, weight)

    def backward() -> None:
        torch.mm(dy, weight)
        torch.mm(dy.t(), x)

    return ProductTime(rows, k, n, _seconds(timer, forward), _seconds(timer, backward))


def _seconds(timer: Timer, function: Callable[[], object]) -> float:
    """Seconds of one call; short ones are timed ten at a time on CUDA."""
    once = timer.seconds(function, warmup=1)
    if not timer.is_cuda or once > SHORT:
        return once

    def ten() -> None:
        for _ in range(10):
            function()

    return timer.seconds(ten, warmup=0) / 10


SHARD_BYTES = 16 << 20
NODE = 8
INSIDE, ACROSS, CPU = 1 / 360e9, 1 / 45e9, 1 / 5e9
"""Seconds of a byte."""


def arithmetic_gathers(device: str) -> tuple[GatherCost, ...]:
    inside, across = (INSIDE, ACROSS) if device == "cuda" else (CPU, CPU)
    return GatherCost(NODE, inside, "arithmetic"), GatherCost(2 * NODE, across, "arithmetic")


def measure_gathers(topology: Topology, timer: Timer, *, node: int) -> tuple[GatherCost, ...]:
    """All ranks call it together; their mean counts. node: ranks of a node."""
    costs = []
    sizes = [size for size in legal_cp_sizes(topology.lanes) if size > 1]
    groups = CPGroups(topology, sizes)
    own = {size: first for first, size in groups.keys}
    shard = torch.ones(SHARD_BYTES, dtype=torch.uint8, device=timer.device)
    for size in sizes:
        seconds = 0.0
        if size in own:
            seconds = _gather_seconds(shard, groups.group(own[size], size), timer)
        each = torch.tensor([seconds, float(size in own)], dtype=torch.float64, device=timer.device)
        total, ranks = sum_over(each, topology.groups.world).tolist()
        costs.append(GatherCost(size, total / ranks / ((size - 1) * SHARD_BYTES), "measured"))
    groups.close()
    known = arithmetic_gathers(timer.device.type)
    inside = [] if any(each.cp_size <= node for each in costs) else [known[0]]
    across = [] if any(each.cp_size > node for each in costs) else [known[1]]
    return *costs, *inside, *across


def _gather_seconds(shard: torch.Tensor, group: ProcessGroup, timer: Timer) -> float:
    """The median of a fixed number of calls: all ranks of the group call it as often."""
    times = []
    for _ in range(2 + timer.repeats):
        timer.sync()
        begin = time.perf_counter()
        gather(shard, group)
        timer.sync()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def gathers_between_ranks(ranks: Ranks, device: torch.device) -> tuple[GatherCost, ...]:
    """Joins the ranks that torchrun started, measures, and leaves them. All ranks call it."""
    backend = pick_backend(device, ranks.local_size)
    with process_group(ranks, backend=backend, device=device):
        topology = make_topology(lanes=ranks.world_size, device=device)
        return measure_gathers(topology, Timer(device, repeats=7), node=ranks.local_size)


QUICK = {"cuda": 60.0, "cpu": 20.0}
"""Budgets below these get coarser grids."""
LAUNCH = {"cuda": 6e-6, "cpu": 0.0}
"""Host seconds of a kernel, where nothing was measured."""
MESSAGE = 1 / 50e9


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What to measure."""

    device: torch.device
    """Where."""
    dtype: torch.dtype
    """Dtype of the arithmetic."""
    budget: float
    """Seconds; the last measurement may end a little later."""
    gathers: tuple[GatherCost, ...] = ()
    """Measured between ranks before; () for arithmetic."""
    node: int = NODE
    """Ranks that are connected fast."""

    @property
    def quick(self) -> bool:
        return self.budget < QUICK[self.device.type]


def calibrate(options: CalibrationOptions, clock: Clock) -> Iterator[MachineProfile]:
    """The profile so far, after each measurement."""
    timer = Timer(options.device, repeats=5 if options.quick else 9)
    kind, quick = options.device.type, options.quick
    grid = GRIDS[f"{kind} quick" if quick else kind]
    profile = first_profile(options)
    byte = measure_copies(timer, options.dtype, grid)
    profile = replace(profile, fixed=arithmetic_costs(kind, byte, measured=True))
    profile = replace(profile, products=measure_products(timer, options.dtype, grid, clock))
    yield profile
    known = references(kind)
    kinds = list(dict.fromkeys(each.kind for each in known))
    first = [next(each for each in known if each.kind == name) for name in kinds]
    later = [each for each in known if each not in first]
    skipped: list[str] = []
    yield from (profile := each for each in _parts(profile, first, timer, options, clock, skipped))
    if clock.is_over(1.5):
        skipped.append("overheads of steps")
    else:
        fixed = measure_overheads(profile, timer, dtype=options.dtype, clock=clock)
        profile = replace(profile, fixed=fixed)
        yield profile
    yield from (profile := each for each in _parts(profile, later, timer, options, clock, skipped))
    notes = [f"not measured, the budget was spent: {', '.join(skipped)}"] if skipped else []
    if kind == "cuda" and (served := kernels_line()):
        notes.append(f"last served by: {served}")
    yield replace(profile, notes=(*profile.notes, *notes))


def _parts(
    profile: MachineProfile,
    wanted: list[Reference],
    timer: Timer,
    options: CalibrationOptions,
    clock: Clock,
    skipped: list[str],
) -> Iterator[MachineProfile]:
    """The profile with one more part each time."""
    for number, reference in enumerate(wanted):
        if clock.is_over(0.85):
            skipped += [each.name for each in islice(wanted, number, None)]
            return
        try:
            fitted = measure_part(
                reference,
                profile.products,
                timer,
                dtype=options.dtype,
                clock=clock,
                quick=options.quick,
            )
        except torch.OutOfMemoryError:
            skipped.append(f"{reference.name} (out of memory)")
            free(timer.device)
            continue
        clock.tell(f"  fits its own micro-batches within {fitted.error:.1%} (median)")
        profile = replace(profile, parts=(*profile.parts, fitted.cost))
        yield profile


def first_profile(options: CalibrationOptions) -> MachineProfile:
    """Nothing measured yet."""
    kind = options.device.type
    return MachineProfile(
        device=device_name(options.device),
        dtype=str(options.dtype).removeprefix("torch."),
        torch=str(torch.__version__),
        notes=(),
        node=options.node,
        scan_chunk=chunk_rows(options.device),
        products=ProductTimes(origin="arithmetic", flop=1e-11),
        parts=(),
        fixed=arithmetic_costs(kind, 1e-10, measured=False),
        gather=options.gathers or arithmetic_gathers(kind),
    )


def arithmetic_costs(kind: str, byte: float, *, measured: bool) -> FixedCosts:
    """What follows from the bytes that are moved; measured: whether `byte` was."""
    launch = LAUNCH[kind]

    def of(seconds: float) -> Coefficient:
        return Coefficient(seconds, "arithmetic")

    return FixedCosts(
        byte=Coefficient(byte, "measured" if measured else "arithmetic"),
        block=of(0.0),
        block_host=of(50 * launch),
        graph_host=of(8 * launch),
        round=of(0.0),
        round_host=of(200 * launch),
        round_token=of(0.0),
        # float32 gradients are read and written, those of the round read; and so on.
        round_parameter=of(14 * byte),
        step_parameter=of(24 * byte),
        norm=of(12 * byte),
        optimizer=of(28 * byte),
        step=of(0.0),
        step_host=of(500 * launch),
        message=of(MESSAGE),
    )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU {platform.machine()}, {threads} thread{'s' * (threads > 1)}"
