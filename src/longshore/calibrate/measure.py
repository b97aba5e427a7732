"""Calibration: measures this machine into a MachineProfile, within a budget of seconds.

In: a device, a dtype, a budget. Out: a MachineProfile after each measurement, the last one
complete: products and copies first, then one part of each kind, then overheads of steps, then
further parts. What the budget does not reach stays arithmetic, and the profile says so.

    for profile in calibrate(CalibrationOptions(device, torch.bfloat16, budget=240), Clock(240)):
        …
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch

from longshore.arch.machine import Coefficient, FixedCosts, GatherCost, MachineProfile
from longshore.arch.product_times import ProductTimes
from longshore.calibrate.links import NODE, arithmetic_gathers
from longshore.calibrate.overheads import measure_overheads
from longshore.calibrate.parts import measure_part
from longshore.calibrate.products import GRIDS, measure_copies, measure_products
from longshore.calibrate.references import Reference, references
from longshore.calibrate.timing import Clock, Timer, free
from longshore.ops.backends import kernels_line
from longshore.ops.boundaries import chunk_rows

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
    """Of the arithmetic."""
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
