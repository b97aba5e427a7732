"""`longshore calibrate`: measures this machine into a profile for planner, simulator and advice.

In: the options of CALIBRATE_HELP. Out: a JSON file, rewritten after each measurement, and a table
of what was measured and what is arithmetic; with --check a table of predicted and measured steps.

    longshore calibrate --out machine.json      then plan.cost=machine.json in a recipe
"""

import argparse
import json
import platform
import statistics
from typing import TYPE_CHECKING, Any

from longshore.advisor.machine import MachineProfile, load_machine, profile_names
from longshore.arch.presets import preset
from longshore.cli.options import add_command, check_output, count, one_of, say
from longshore.distributed.process_group import ranks_from_environment
from longshore.files import write_atomically
from longshore.settings import DeviceChoice, DTypeChoice, names_of

if TYPE_CHECKING:
    import torch

    from longshore.advisor.calibrate import CalibrationOptions
    from longshore.distributed.process_group import Ranks

CALIBRATE_HELP = """\
Measures how fast this machine computes, and writes it to a file: matrix products, each kind of
layer over lengths, the loss, what launching kernels costs, copies, gradient norm and optimizer.
plan.cost of a recipe and `longshore plan --cost` take that file; shipped ones go by name: NAMES.

  --out FILE         where to write (default: machine.json); rewritten after each measurement, so
                     that a file is there if you stop it
  --budget SECONDS   how long it may take, about (default: 240); less measures fewer parts, and
                     below 60 on a GPU, 20 on a CPU, coarser ones
  --device DEVICE    auto, cpu or cuda (default: auto, the GPU if there is one)
  --dtype DTYPE      of the arithmetic (default: auto, bfloat16 on a GPU and float32 on a CPU)

Under torchrun with several processes the exchange between them is measured first, for each CP size;
with one process it is arithmetic, and the file says so.

  --check PROFILE    instead: trains random steps of a model, and compares their times with those
                     that a profile (a file or a name) predicts
  --model PRESET     with --check: the model (default: qwen3-0.6b, on a CPU tiny-qwen3)
  --layers N         with --check: number of its layers (default: all)
  --capacity C       with --check: most tokens of a round (default: 16384, on a CPU 512)
  --steps N          with --check: how many steps (default: 12)"""


def register_calibrate(commands: "argparse._SubParsersAction[Any]") -> None:
    add_command(
        commands,
        "calibrate",
        summary="measure this machine, for plans and predictions",
        usage="longshore calibrate [--out FILE] [--budget SECONDS] | --check PROFILE [options]",
        text=CALIBRATE_HELP.replace("NAMES", ", ".join(profile_names())),
        options={
            "out check model": str,
            "budget": count(86_400),
            "device": one_of(names_of(DeviceChoice)),
            "dtype": one_of(names_of(DTypeChoice)),
            "layers capacity steps": count(1 << 30),
        },
        run=run_calibrate,
    )


def run_calibrate(args: argparse.Namespace) -> None:
    if args.check is not None:
        _refuse_others(args, ("out", "budget"), "--check writes no profile")
        _check(args)
        return
    _refuse_others(args, ("model", "layers", "capacity", "steps"), "it is for --check PROFILE")
    out = args.out or "machine.json"
    check_output(out)
    place = ranks_from_environment()
    options = _options(args, place)
    if place is None or place.rank == 0:
        _measure(options, out)


def _refuse_others(args: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name}: {why}; leave it out")


def _options(args: argparse.Namespace, place: "Ranks | None") -> "CalibrationOptions":
    from longshore.advisor.calibrate import CalibrationOptions, gathers_between_ranks

    device, dtype = _device(args, place)
    budget = float(args.budget or 240)
    if place is None or place.world_size == 1:
        return CalibrationOptions(device, dtype, budget)
    say(f"exchange between {place.world_size} ranks")
    gathers = gathers_between_ranks(place, device)
    return CalibrationOptions(device, dtype, budget, gathers, node=place.local_size)


def _device(args: argparse.Namespace, place: "Ranks | None") -> "tuple[torch.device, torch.dtype]":
    from longshore.train.device import pick_device, pick_dtype, prefer_blas

    device = pick_device(args.device or "auto", place.local_rank if place else 0)
    dtype = pick_dtype(args.dtype or "auto", device)
    prefer_blas(device, dtype, platform.machine())
    return device, dtype


def _measure(options: "CalibrationOptions", out: str) -> None:
    from longshore.advisor.calibrate import calibrate
    from longshore.advisor.timing import Clock

    clock = Clock(options.budget, tell=lambda text: say(f"{clock.spent:6.1f} s  {text}"))
    for profile in calibrate(options, clock):
        write_atomically(out, json.dumps(profile.as_json(), indent=1) + "\n")
    say("\n".join(summary(profile)))
    say(f"profile: {out} (use it as plan.cost={out}), after {clock.spent:.0f} s")


def summary(profile: MachineProfile) -> list[str]:
    """What the profile says, in lines."""
    by_origin: dict[str, list[str]] = {"measured": [], "arithmetic": []}
    for name, origin in profile.origins().items():
        by_origin.setdefault(origin, []).append(name)
    rate = 1 / profile.products.flop
    of_peak = f" ({rate / profile.peak:.0%} of the vendor's dense peak)" if profile.peak else ""
    return [
        f"{profile.device}, {profile.dtype}, torch {profile.torch}",
        f"fastest product: {rate / 1e12:.3g} TFLOP/s{of_peak}; copies: "
        f"{1e-9 / profile.fixed.byte.seconds:.3g} GB/s read and written",
        *(f"{origin}: {', '.join(names) or 'nothing'}" for origin, names in by_origin.items()),
        *profile.notes,
    ]


def _check(args: argparse.Namespace) -> None:
    from longshore.advisor.lone_steps import (
        check_steps,
        make_stepper,
        median_error,
        one_lane,
        random_steps,
    )

    machine = load_machine(args.check)
    device, dtype = _device(args, None)
    is_cuda = device.type == "cuda"
    if str(dtype).removeprefix("torch.") != machine.dtype:
        raise ValueError(
            f"--check {args.check}: it was measured in {machine.dtype}, not {dtype}; give --dtype "
            f"{machine.dtype}"
        )
    layers = {"layers": args.layers} if args.layers else {}
    decoder = preset(args.model or ("qwen3-0.6b" if is_cuda else "tiny-qwen3"), **layers)
    capacity = args.capacity or (16384 if is_cuda else 512)
    steps = random_steps(decoder, capacity=capacity, count=args.steps or 12, device=device)
    with one_lane(device) as topology:
        stepper = make_stepper(decoder, topology, dtype=dtype)
        outcomes = check_steps(machine, stepper, decoder, steps)
    for each in outcomes:
        say(
            f"{each.name:<48} predicted {each.predicted * 1e3:9.2f} ms, measured "
            f"{each.measured * 1e3:9.2f} ms, {each.error:+.1%}"
        )
    signed = statistics.median(each.error for each in outcomes)
    say(f"median error {median_error(outcomes):.1%}, with its sign {signed:+.1%}")
