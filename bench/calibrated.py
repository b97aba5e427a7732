"""Compares predicted with measured times of held-out steps, for dense, experts and hybrid models.

    python bench/calibrated.py --profile machine.json           tiny models, on the CPU
    python bench/calibrated.py --gpu --profile h200.json         qwen3-0.6b, 30b-a3b, nemotron-h
    python bench/calibrated.py --gpu --calibrate 200 --write     measures the machine first
    python bench/calibrated.py --gpu --profile h200.json --parts each part of each model alone

In: a profile of `longshore calibrate`, a file or a name. Out: a JSON line for each step or part in
calibrated.jsonl, tables, and with --write a section of bench/RESULTS.md. Steps are random, of 1 to
4 rounds with long-tailed lengths, and calibration has seen none of them: predicted 0.51 s and
measured 0.50 s is an error of +2 %. Each model has a process of its own, with an empty GPU.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_cases import qwen3_next
from results import machine as machine_line
from results import table, write_section

from longshore.advisor.calibrate import CalibrationOptions, calibrate
from longshore.advisor.calibrate_parts import Case, Reference, make_module, runnable, work_of
from longshore.advisor.lone_steps import Outcome, check_steps, make_stepper, one_lane, random_steps
from longshore.advisor.machine import MachineProfile, load_machine
from longshore.advisor.step_time import (
    Work,
    block_works,
    end_works,
    part_time,
    part_works,
    round_busy,
    update_busy,
)
from longshore.advisor.timing import Clock, Timer, free
from longshore.arch.decoder import DecoderConfig
from longshore.arch.memory import ALONE, ITEM_BYTES
from longshore.arch.presets import preset
from longshore.train.device import pick_device, pick_dtype, prefer_blas

RESULTS = Path(__file__).with_name("RESULTS.md")
WANTED = 0.10
Models = dict[str, Callable[[], DecoderConfig]]
GPU: Models = {
    "qwen3-0.6b": lambda: preset("qwen3-0.6b"),
    "qwen3-30b-a3b, 4 layers": lambda: preset("qwen3-30b-a3b", layers=4),
    "nemotron-h-8b, 8 layers": lambda: preset("nemotron-h-8b", layers=8),
}
MORE_ON_GPU: Models = {
    "qwen3-8b, 8 layers": lambda: preset("qwen3-8b", layers=8),
    "llama-3.2-1b": lambda: preset("llama-3.2-1b"),
    "qwen3-next, 4 layers of 32 experts": qwen3_next,
    "deepseek-v3, 3 dense layers": lambda: preset("deepseek-v3", layers=3, mtp=()),
}
CPU: Models = {
    "tiny-qwen3": lambda: preset("tiny-qwen3"),
    "tiny-qwen3-moe": lambda: preset("tiny-qwen3-moe"),
    "tiny-hybrid": lambda: preset("tiny-hybrid"),
}
MORE_ON_CPU: Models = {
    "tiny-llama, 4 layers": lambda: preset("tiny-llama", layers=4),
    "tiny-nemotron-h": lambda: preset("tiny-nemotron-h"),
    "tiny-deepseek-v3": lambda: preset("tiny-deepseek-v3"),
}
KNOWN = {**GPU, **MORE_ON_GPU, **CPU, **MORE_ON_CPU}


def one_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one model, from this process."""
    name = options.one
    decoder: DecoderConfig = KNOWN[name]()
    device = pick_device("cuda" if options.gpu else "cpu", 0)
    dtype = pick_dtype("auto", device)
    prefer_blas(device, dtype, platform.machine())
    profile = load_machine(options.profile)
    if options.parts:
        timer = Timer(device, repeats=7)
        cases = part_cases(options.capacity)
        outcomes = check_parts(profile, decoder, cases, timer, dtype=dtype)
    else:
        steps = random_steps(
            decoder,
            capacity=options.capacity,
            count=options.steps,
            device=device,
            seed=options.seed,
        )
        with one_lane(device) as topology:
            stepper = make_stepper(decoder, topology, dtype=dtype)
            outcomes = check_steps(profile, stepper, decoder, steps)
        if options.explain:
            explain(profile, decoder, steps[0])
    return [
        {"model": name, "case": each.name, "predicted": each.predicted, "measured": each.measured}
        for each in outcomes
    ]


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
    wanted = [Reference(part.timed_as, decoder, part, part.timed_as) for part in parts]
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


def part_cases(capacity: int) -> list[tuple[int, ...]]:
    """Lengths that no reference was measured with."""
    tail = (capacity // 3, capacity // 5, *((capacity // 48,) * 16))
    return [(capacity,), (capacity // 8,) * 8, (capacity // 40,) * 40, tail, (capacity // 6,)]


def explain(profile: Any, decoder: DecoderConfig, step: Any) -> None:  # noqa: ANN401
    """What the prediction of the first step is made of, in milliseconds."""
    item = ITEM_BYTES[profile.dtype]
    for lengths, tokens in zip(step.rounds, step.tokens, strict=True):
        padding = [tokens - sum(lengths)] if tokens > sum(lengths) else []
        chunk = profile.scan_chunk
        works = block_works(decoder, [*lengths, *padding], item=item, scan_chunk=chunk)
        works += end_works(decoder, tokens)
        for work, times in works.items():
            each = part_time(profile, work)
            device = 1e3 * times * (each.forward + each.backward)
            host = 1e3 * times * each.host
            print(f"    {work.kind:<10} × {times:<3} device {device:9.3f} ms, host {host:9.3f} ms")
        busy = round_busy(profile, decoder, lengths, tokens=tokens)
        print(f"  round: device {1e3 * busy.device:.3f} ms, host {1e3 * busy.host:.3f} ms")
    busy = update_busy(profile, decoder, ALONE)
    print(f"  update: device {1e3 * busy.device:.3f} ms, host {1e3 * busy.host:.3f} ms", flush=True)


def apart(options: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """The same from a process of its own."""
    words = [sys.executable, __file__, "--one", name, "--profile", str(options.profile)]
    words += ["--capacity", str(options.capacity), "--steps", str(options.steps)]
    words += ["--seed", str(options.seed)]
    words += [f"--{flag}" for flag in ("gpu", "parts", "explain") if getattr(options, flag)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    *lines, last = done.stdout.splitlines() or [""]
    print("\n".join(lines))
    if done.returncode:
        print(last, f"--- {name} ended with status {done.returncode}", sep="\n", flush=True)
        return []
    rows: list[dict[str, Any]] = json.loads(last)
    return rows


def measure_machine(options: argparse.Namespace) -> Path:
    """Calibrates first; the profile is written as it grows."""
    device = pick_device("cuda" if options.gpu else "cpu", 0)
    dtype = pick_dtype("auto", device)
    prefer_blas(device, dtype, platform.machine())
    clock = Clock(options.calibrate, tell=lambda text: print(f"{clock.spent:6.1f} s  {text}"))
    out = Path(options.out).with_name("machine.json")
    for profile in calibrate(CalibrationOptions(device, dtype, options.calibrate), clock):
        out.write_text(json.dumps(profile.as_json(), indent=1) + "\n")
    print(f"profile: {out}, after {clock.spent:.0f} s", flush=True)
    return out


def error(row: dict[str, Any]) -> float:
    return float(row["predicted"] / row["measured"] - 1)


def summary_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each model."""
    cells = []
    for name in dict.fromkeys(row["model"] for row in rows):
        errors = [error(row) for row in rows if row["model"] == name]
        middle = statistics.median(map(abs, errors))
        signed = statistics.median(errors)
        worst = max(errors, key=abs)
        met = "yes" if middle <= WANTED else "**no**"
        cells.append(
            [name, str(len(errors)), f"{middle:.1%}", f"{signed:+.1%}", f"{worst:+.1%}", met]
        )
    return cells


def detail_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["model"],
            row["case"],
            f"{1e3 * row['predicted']:.2f}",
            f"{1e3 * row['measured']:.2f}",
            f"{error(row):+.1%}",
        ]
        for row in rows
    ]


def page(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    profile = load_machine(options.profile)
    what = "parts alone" if options.parts else "held-out steps"
    origins = list(profile.origins().values())
    intro = (
        f"{machine_line(['torch', 'triton', 'flash-attn-4'])}, {torch.get_num_threads()} threads. "
        f"The profile is of "
        f"{profile.device} in {profile.dtype}, {origins.count('measured')} entries measured and "
        f"{origins.count('arithmetic')} arithmetic. Capacity {options.capacity:,}, seed "
        f"{options.seed}; {what} that calibration has not seen; times in ms, medians. Errors are "
        "relative to the measured time, "
        f"above 0 where predicted too slow; a median of {WANTED:.0%} is wanted.\n"
    )
    first = ("model", "cases", "median error", "with its sign", "worst", "within 10 %")
    second = ("model", "case", "predicted", "measured", "error")
    return "\n".join(
        [
            f"## Predicted and measured: {what}, {'one GPU' if options.gpu else 'CPU'}\n",
            intro,
            table(first, summary_rows(rows)),
            table(second, detail_rows(rows)),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", help="a file, or a name such as h200")
    parser.add_argument("--calibrate", type=float, help="measure the machine first: seconds")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--parts", action="store_true", help="each part alone, not steps")
    parser.add_argument("--explain", action="store_true", help="what a prediction is made of")
    parser.add_argument("--models", nargs="+", choices=KNOWN, help="default: three")
    parser.add_argument("--all", action="store_true", help="more models")
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("calibrated.jsonl"))
    parser.add_argument("--write", action="store_true", help="also into bench/RESULTS.md")
    parser.add_argument("--one", choices=KNOWN, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.capacity = options.capacity or (16384 if options.gpu else 512)
    if options.one:
        print(json.dumps(one_model(options)))
        return 0
    if options.calibrate:
        options.profile = measure_machine(options)
    if not options.profile:
        parser.error("give --profile FILE, or --calibrate SECONDS")
    names = options.models or [*(GPU if options.gpu else CPU)]
    if options.all:
        names = [*names, *(MORE_ON_GPU if options.gpu else MORE_ON_CPU)]
    rows: list[dict[str, Any]] = []
    options.out.write_text("")
    for name in names:
        begin = time.perf_counter()
        own = apart(options, name)
        rows += own
        with options.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in own)
        print(f"--- {name} took {time.perf_counter() - begin:.0f} s", flush=True)
    if not rows:
        return 1
    print(page(rows, options))
    if options.write:
        where = "gpu" if options.gpu else "cpu"
        write_section(RESULTS, f"calibrated-{where}{'-parts' * options.parts}", page(rows, options))
    return int(len({row["model"] for row in rows}) < len(names))


if __name__ == "__main__":
    sys.exit(main())
