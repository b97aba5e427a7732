"""Measures training on one GPU: whole steps, beside transformers, attention, and where time goes.

    python bench/gpu.py                                  all sections
    python bench/gpu.py dense train --models qwen3-0.6b  two of them
    python bench/gpu.py --write                          also into bench/RESULTS.md
    python bench/gpu.py --smoke                          tiny models, also without a GPU

In: the names of sections. Out: a JSON line for each result, in gpu.jsonl, and tables. A section
that fails prints its traceback, and the others go on. MFU is the FLOPs of the real lengths (no
padding, only products, none that are recomputed) by the step's time, against the vendor's dense
peak; of_product is the same against the rate of a dense bf16 product in the same run: 60 TFLOP in
0.1 s are an MFU of 61 % on an H200, and 75 % of a product at 800 TFLOP/s.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gpu_cases import CAPACITY, CASES, WANTED_OF_PRODUCT, packs_of_lengths, running, words_of
from gpu_profile import compilations, grouped
from results import machine, one_line, table, write_section

from longshore.arch.costs import step_flops
from longshore.ops.backends import chosen, kernels_line, using_kernels
from longshore.parallel.pipeline import Timestamp
from longshore.run.parts import Parts, TrainingJob
from longshore.settings import Kernels
from longshore.train.device import peak_flops
from longshore.train.step import QueuedStep, StepReport, queue_step, read_step

# Processes share what flash-attn-4 compiles, as those of `longshore train` do.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
RESULTS = Path(__file__).with_name("RESULTS.md")
GIB = 2**30
WARMUP = 3


class Report:
    """Results as they come: to the screen, and as JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        path.write_text("")

    def add(self, section: str, **values: object) -> None:
        row = {"section": section, **values}
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    def value(self, section: str, key: str, **like: object) -> Any:  # noqa: ANN401
        """The newest value of a key in a section's rows with these values, or None."""
        for row in reversed(self.rows):
            if row["section"] == section and key in row and like.items() <= row.items():
                return row[key]
        return None


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], *, times: int, warmup: int = 2) -> float:
    """The median time of a call, with the device's queue empty before and after."""
    for _ in range(warmup):
        function()
    results = []
    for _ in range(times):
        sync()
        start = time.perf_counter()
        function()
        sync()
        results.append(time.perf_counter() - start)
    return statistics.median(results)


def dense(options: argparse.Namespace, report: Report) -> None:
    """The rate of a product, and of a copy."""
    n = 256 if options.smoke else 8192
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls = 4 if options.smoke else 10

    def products() -> None:
        for _ in range(calls):
            torch.mm(a, b, out=out)

    product = seconds(products, times=15, warmup=3) / calls
    x = torch.empty(n * n * 4, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    copy = seconds(lambda: y.copy_(x), times=20)
    report.add(
        "dense",
        tflops=2 * n**3 / product / 1e12,
        copy_gb_s=2 * x.numel() * x.element_size() / copy / 1e9,
    )


def steps_of(job: TrainingJob, parts: Parts, steps: int) -> list[tuple[StepReport, float]]:
    """Steps as the Trainer's loop queues and reads them, with the host's time between reports."""
    results, before = [], time.perf_counter()
    for each in _reports(job, parts, steps):
        now = time.perf_counter()
        results.append((each, now - before))
        before = now
    return results


def _reports(job: TrainingJob, parts: Parts, steps: int) -> Iterator[StepReport]:
    """A step's numbers are read once the next is queued, but for the first."""
    waiting, begin = deque[QueuedStep](), Timestamp(job.topology.device)
    for number, step in enumerate(islice(parts.loader, steps)):
        waiting.append(queue_step(parts.stepper, step, job.config.train.lr, begin=begin))
        if number != 1:
            yield _read(job, parts, waiting.popleft())
        begin = Timestamp(job.topology.device)
    if waiting:
        yield _read(job, parts, waiting.popleft())


def _read(job: TrainingJob, parts: Parts, queued: QueuedStep) -> StepReport:
    flops = step_flops(job.decoder, [sequence.length for sequence in queued.step.plan.sequences])
    return read_step(queued, parts.stepper, flops=flops)


def apart(name: str, *args: object) -> Any:  # noqa: ANN401
    """What a function of APART returns, from a process of its own, with its own memory."""
    command = [sys.executable, __file__, "--call", json.dumps([name, *args])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"it ended with status {done.returncode}; see its output above")
    return json.loads(done.stdout.splitlines()[-1])


def measure(words: list[str], *, steps: int) -> dict[str, Any]:
    """What `measure_here` returns."""
    result: dict[str, Any] = apart("measure", words, steps)
    return result


def measure_here(words: list[str], steps: int) -> dict[str, Any]:
    """tokens/s, TFLOP/s and memory of a run's steps after its warm-up."""
    begin = time.perf_counter()
    with running([*words, f"train.steps={WARMUP + steps}"]) as (job, parts):
        results = steps_of(job, parts, WARMUP + steps)
        used = kernels_line()
        sync()
    timed = results[WARMUP:]
    metrics = [each.metrics for each, _ in timed]
    by_host = statistics.median(host for _, host in timed)
    elapsed = statistics.median(m.elapsed_s for m in metrics)
    last = metrics[-1]
    return {
        "tokens": last.tokens,
        "rounds": last.rounds,
        "padding": last.padding,
        "ms": elapsed * 1e3,
        "host_ms": by_host * 1e3,
        "slowest_ms": max(m.elapsed_s for m in metrics) * 1e3,
        "tokens_per_s": last.tokens / elapsed,
        "tflops": statistics.median(m.tflops for m in metrics if m.tflops is not None),
        "memory_gib": last.memory_gib,
        "losses": [results[0][0].metrics.loss, last.loss],
        "wait_ms": max(m.data_wait_s or 0.0 for m in metrics) * 1e3,
        "first_step_s": results[0][0].metrics.elapsed_s,
        "all_s": time.perf_counter() - begin,
        "kernels": used,
    }


def overrides(options: argparse.Namespace) -> list[str]:
    words = [f"train.kernels={options.kernels}", *options.set]
    if options.compile is not None:
        words.append(f"train.compile={options.compile}")
    if options.capacity:
        words.append(f"plan.capacity={options.capacity}")
    return words


def train(options: argparse.Namespace, report: Report) -> None:
    """Whole optimizer steps of each model."""
    for name in options.models:
        with guarded(f"train {name}", report):
            words = [*words_of(name, smoke=options.smoke), *overrides(options)]
            result = measure(words, steps=options.steps)
            shares = shares_of(result["tflops"], report)
            report.add("train", model=name, **shares, wanted=WANTED_OF_PRODUCT[name], **result)


def shares_of(tflops: float, report: Report) -> dict[str, float | None]:
    """TFLOP/s as a share of the vendor's peak, and of a dense product in this run."""
    cuda = torch.cuda.is_available()
    peak = peak_flops(torch.device("cuda"), torch.bfloat16) if cuda else None
    product = report.value("dense", "tflops")
    return {
        "mfu": tflops * 1e12 / peak if peak else None,
        "of_product": tflops / product if product else None,
    }


def padded(options: argparse.Namespace, report: Report) -> None:
    """Our padded policy against packed, with the same kernels."""
    words = [*words_of("qwen3-0.6b", smoke=options.smoke), *overrides(options)]
    packed = report.value("train", "tokens_per_s", model="qwen3-0.6b")
    if packed is None:
        packed = measure(words, steps=options.steps)["tokens_per_s"]
    other = measure([*words, "plan.policy=padded"], steps=max(2, options.steps // 2))
    # The share of rows that are padding: real / (real + padding) = 1 − padding.
    ratio = 1 / (1 - other["padding"])
    speedup = packed / other["tokens_per_s"]
    report.add("padded", **other, packed=packed, ratio=ratio, speedup=speedup, of=speedup / ratio)


def attention(options: argparse.Namespace, report: Report) -> None:
    """Our attention against flash-attn-4 called directly."""
    packs = packs_of_lengths(options.capacity or CAPACITY, smoke=options.smoke)
    for shape in ((16, 8, 128, 128), (32, 8, 128, 128), (32, 32, 192, 128), (128, 128, 192, 128)):
        with guarded(f"attention {shape}", report):
            small = (4, 2, 16, 16) if options.smoke else shape
            result = apart("attention", small, packs, options.kernels)
            report.add("attention", shape=list(shape), **result)


def attention_here(shape: list[int], packs: list[list[int]], kernels: Kernels) -> dict[str, Any]:
    from gpu_attention import compare

    heads, kv_heads, width, value_width = shape
    with using_kernels(kernels):
        return compare((heads, kv_heads, width, value_width), packs)


def transformers(options: argparse.Namespace, report: Report) -> None:
    """Hugging Face transformers on the same packs, forward and backward only."""
    packs = packs_of_lengths(options.capacity or CAPACITY, smoke=options.smoke)
    report.add("transformers", **apart("transformers", packs, options.smoke))


def transformers_here(packs: list[list[int]], smoke: bool) -> dict[str, Any]:
    from gpu_transformers import measure_transformers

    return measure_transformers(packs, smoke=smoke)


def profile(options: argparse.Namespace, report: Report) -> None:
    """GPU time of one step by groups of kernels."""
    for name in options.models:
        with guarded(f"profile {name}", report):
            words = [*words_of(name, smoke=options.smoke), *overrides(options)]
            groups, top = apart("profile", words)
            report.add("profile", model=name, groups=groups, top=top)


def profile_here(words: list[str]) -> tuple[Any, Any]:
    with running([*words, "train.steps=5"]) as (job, parts):
        steps_of(job, parts, 3)
        step = next(parts.loader)
        return grouped(partial(parts.stepper.step, step.batches, lr=1e-5))


def compiles(options: argparse.Namespace, report: Report) -> None:
    """Compilations over 100 varied steps of tiny models."""
    for preset in ("tiny-qwen3", "tiny-hybrid", "tiny-deepseek-v3"):
        with guarded(f"compiles {preset}", report):
            steps = 12 if options.smoke else 100
            report.add(
                "compiles", model=preset, **apart("compiles", preset, steps, overrides(options))
            )


def compiles_here(preset: str, steps: int, more: list[str]) -> dict[str, Any]:
    words = [
        f"model.preset={preset}",
        "data.mock={mode='distribution', type='uniform', min_seq_len=1, max_seq_len=500}",
        "data.count=4096",
        "data.batch=16",
        "plan.capacity=1024",
        f"train.steps={steps}",
        "output.display=plain",
        *more,
    ]
    with compilations() as counts, running(words) as (job, parts):
        steps_of(job, parts, 10)
        first, begin = counts(), time.perf_counter()
        steps_of(job, parts, steps - 10)
        return {
            "first_10_steps": first,
            "all": counts(),
            "seconds": time.perf_counter() - begin,
        }


APART: dict[str, Callable[..., Any]] = {
    "measure": measure_here,
    "profile": profile_here,
    "compiles": compiles_here,
    "attention": attention_here,
    "transformers": transformers_here,
}


SECTIONS: dict[str, Callable[[argparse.Namespace, Report], None]] = {
    "dense": dense,
    "train": train,
    "transformers": transformers,
    "attention": attention,
    "padded": padded,
    "profile": profile,
    "compiles": compiles,
}


class guarded:  # noqa: N801 - used as a function
    """A block whose failure is reported and does not end the others."""

    def __init__(self, what: str, report: Report) -> None:
        self.what, self.report = what, report

    def __enter__(self) -> None:
        print(f"--- {self.what}", flush=True)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        traceback.print_exception(error)
        self.report.add("failed", what=self.what, error=one_line(error))
        return True


def page(report: Report) -> str:
    """The results as Markdown."""
    packages = ["torch", "triton", "flash-attn-4", "fla-core", "transformers"]
    parts = ["## Speed on one GPU\n", f"{machine(packages)}.\n"]
    for section, header in (
        ("dense", ("tflops", "copy_gb_s")),
        ("train", ("model", "tokens_per_s", "mfu", "of_product", "wanted", "tflops", "ms",
                   "host_ms", "memory_gib", "first_step_s", "kernels")),
        ("transformers", ("tokens_per_s", "memory_gib", "ms", "largest_pack")),
        ("against", ("speedup", "memory")),
        ("attention", ("shape", "ours_tflops", "direct_tflops", "ratio", "backend")),
        ("padded", ("packed", "tokens_per_s", "ratio", "speedup", "of")),
        ("compiles", ("model", "first_10_steps", "all")),
        ("failed", ("what", "error")),
    ):  # fmt: skip
        rows = [row for row in report.rows if row["section"] == section]
        if rows:
            parts.append(f"### {section}\n")
            parts.append(table(header, [[_cell(row.get(key)) for key in header] for row in rows]))
    for row in report.rows:
        if row["section"] == "profile":
            parts.append(f"### profile of {row['model']}\n")
            cells = [[name, f"{ms:.2f}"] for name, ms in row["groups"].items()]
            parts.append(table(("group", "ms"), cells))
            top = [[name[:100], f"{ms:.2f}", str(count)] for name, ms, count in row["top"]]
            parts.append(table(("kernel", "ms", "calls"), top))
    return "\n".join(parts)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def against(report: Report) -> None:
    """Our 0.6B beside transformers' of the same run."""
    theirs = report.value("transformers", "tokens_per_s")
    ours = report.value("train", "tokens_per_s", model="qwen3-0.6b")
    if theirs and ours:
        memory = report.value("train", "memory_gib", model="qwen3-0.6b")
        theirs_memory = report.value("transformers", "memory_gib")
        report.add(
            "against",
            speedup=ours / theirs,
            memory=memory / theirs_memory if theirs_memory else None,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="default: all")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kernels", choices=["auto", "plain"], default="auto")
    parser.add_argument("--compile", help="value of train.compile, such as true, false or auto")
    parser.add_argument("--capacity", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each model")
    parser.add_argument("--set", action="append", default=[], help="another section.key=value")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--page", type=Path, default=RESULTS, help="where --write writes")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--call", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        name, *args = options.call
        print(json.dumps(APART[name](*args)))
        return 0
    options.steps = 2 if options.smoke else options.steps
    report = Report(options.out)
    names = options.sections or list(SECTIONS)
    for name in names:
        with guarded(name, report), using_kernels(options.kernels):
            begin = time.perf_counter()
            SECTIONS[name](options, report)
            print(f"--- {name} took {time.perf_counter() - begin:.0f} s; {chosen()}", flush=True)
    against(report)
    print(page(report))
    if options.write:
        write_section(options.page, "gpu-speed", page(report))
    return int(any(row["section"] == "failed" for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
