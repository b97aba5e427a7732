"""CUDA graphs on one GPU: how much faster steps are, and whether they compute the same.

    python bench/gpu_graphs.py speed               steps at several capacities, with and without
    python bench/gpu_graphs.py same                losses and gradients of both, step by step
    python bench/gpu_graphs.py bits                gradients of one step, bit for bit
    python bench/gpu_graphs.py --write             all, and into bench/RESULTS.md

In: the names of parts. Out: a JSON line for each result, and tables. A GPU is busy while any kernel
runs: its time under the profiler, by the time of a step without the profiler. A step at 1,024
tokens that takes 100 ms with 40 ms of kernels is busy 40 %.

The data of a capacity c is lognormal with mean c/4 and sigma 1, clipped to 16 and c, in steps of
about 8 micro-batches.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from gpu import RESULTS, Report, steps_of, sync
from gpu_cases import running
from gpu_profile import grouped
from results import machine, table, write_section
from torch import Tensor

from longshore.parallel.fsdp import local_part
from longshore.train.step import StepReport

MODELS = {
    "qwen3-0.6b": ["model.preset=qwen3-0.6b"],
    "hybrid": ["model.module=gpu_cases:hybrid_half_billion"],
    "qwen3-30b-a3b": ["model.preset=qwen3-30b-a3b", "model.layers=4"],
}
SIX_LAYERS = {
    "qwen3-0.6b": ["model.preset=qwen3-0.6b", "model.layers=6"],
    "hybrid": ["model.module=gpu_cases:hybrid_of_six"],
    "qwen3-30b-a3b": ["model.preset=qwen3-30b-a3b", "model.layers=2"],
}
CAPACITIES = {
    "qwen3-0.6b": (8192, 4096, 2048),
    "hybrid": (16384, 8192, 4096),
    "qwen3-30b-a3b": (4096, 2048),
}
SMOKE = {"qwen3-0.6b": "tiny-qwen3", "hybrid": "tiny-hybrid", "qwen3-30b-a3b": "tiny-qwen3-moe"}
FORMS = {
    "eager": [],
    "compiled": ["train.compile=true"],
    "graphs": ["graph.layers=['all']"],
}
ROUNDS = 8
WARMUP, STEPS = 5, 8


def words(
    name: str, capacity: int, *more: str, smoke: bool, models: dict[str, list[str]] = MODELS
) -> list[str]:
    model = [f"model.preset={SMOKE[name]}"] if smoke else models[name]
    mock = (
        f"{{mode='distribution', type='lognormal', min_seq_len=16, max_seq_len={capacity}, "
        f"mean_seq_len={capacity // 4}, lognormal_sigma=1.0}}"
    )
    return [
        *model,
        f"data.mock={mock}",
        "data.count=8192",
        f"data.batch_tokens={ROUNDS * capacity * 9 // 10}",
        f"plan.capacity={capacity}",
        "plan.buckets=1",
        "train.lr=1e-5",
        "train.steps=400",
        "output.keep=0",
        "output.weights=false",
        "output.display=none",
        *more,
    ]


def measured(form: str, name: str, capacity: int, *, smoke: bool) -> dict[str, Any]:
    """Milliseconds of a step and of its kernels, memory, and what graphs take."""
    with running(words(name, capacity, *FORMS[form], smoke=smoke)) as (job, parts):
        begin = time.perf_counter()
        results = steps_of(job, parts, WARMUP + STEPS)
        sync()
        timed = [each.metrics for each, _ in results[WARMUP:]]
        step = next(parts.loader)
        groups, top = grouped(lambda: parts.stepper.step(step.batches, lr=1e-5))
        layers = parts.stepper.graphs
        # Steps differ in their tokens, so a time is that of a token.
        elapsed = statistics.median(m.elapsed_s / m.tokens for m in timed)
        kernels = groups["wall"] - groups["idle"]
        tokens = sum(batch.ctx.real_tokens for batch in step.batches)
        return {
            "ms": elapsed * tokens * 1e3,
            "kernel_ms": kernels,
            "busy": kernels / (elapsed * tokens * 1e3),
            "launches": sum(count for _, _, count in top),
            "tokens_per_s": 1 / elapsed,
            "rounds": len(step.batches),
            "memory_gib": timed[-1].memory_gib,
            "graph_gib": layers.bytes / 2**30 if layers else 0.0,
            "failed": layers.failed if layers else [],
            "groups": {key: round(value, 2) for key, value in groups.items()},
            "all_s": time.perf_counter() - begin,
        }


def speed(options: argparse.Namespace, report: Report) -> None:
    """At the largest capacity where the GPU is not busy without graphs, or at those given."""
    for name in options.models:
        for capacity in options.capacities or CAPACITIES[name]:
            rows: dict[str, dict[str, Any]] = {}
            for form in options.forms:
                if rows and not options.capacities and min(r["busy"] for r in rows.values()) >= 0.7:
                    break
                with told(f"{name} {capacity} {form}"):
                    rows[form] = measured(form, name, capacity, smoke=options.smoke)
                    report.add("speed", model=name, capacity=capacity, form=form, **rows[form])
            plain = [row for form, row in rows.items() if form != "graphs"]
            if not plain or "graphs" not in rows:
                continue
            best = max(plain, key=lambda row: row["tokens_per_s"])
            times = rows["graphs"]["tokens_per_s"] / best["tokens_per_s"]
            report.add("ratio", model=name, capacity=capacity, busy=best["busy"], times=times)
            if best["busy"] < 0.7 and not options.capacities:
                break


@contextmanager
def told(what: str) -> Iterator[None]:
    """A form that fails is printed, and the others go on."""
    try:
        yield
    except Exception:
        print(f"--- {what} failed", flush=True)
        traceback.print_exc()


VARIANTS = {
    "graphs": [],
    "recomputed": ["train.recompute=blocks"],
    "zero3": ["parallel.shard=zero3"],
    "zero2": ["parallel.shard=zero2"],
}


def host(options: argparse.Namespace, report: Report) -> None:
    """Where the host's time of a step goes, by function."""
    for name in options.models:
        for form in options.forms:
            chosen = words(name, 2048, *FORMS[form], smoke=options.smoke)
            with told(f"host {name} {form}"), running(chosen) as (job, parts):
                steps_of(job, parts, WARMUP)
                step = next(parts.loader)
                sync()
                profiler = cProfile.Profile()
                profiler.enable()
                parts.stepper.step(step.batches, lr=1e-5)
                profiler.disable()
                sync()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
                pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)


def loss_of(report: StepReport) -> float:
    assert report.metrics.loss is not None, "all steps here have loss tokens"
    return report.metrics.loss


def losses(name: str, steps: int, *more: str, smoke: bool) -> tuple[list[float], Any]:
    capacity = 64 if smoke else 2048
    with running(words(name, capacity, *more, smoke=smoke, models=SIX_LAYERS)) as (job, parts):
        reports = steps_of(job, parts, steps)
        served = [each.metrics.graphed for each, _ in reports]
        layers = parts.stepper.graphs
        return [loss_of(each) for each, _ in reports], (
            served,
            layers.failed if layers else [],
        )


def same(options: argparse.Namespace, report: Report) -> None:
    """Losses of varied steps, with a cap that many micro-batches exceed, and four token totals."""
    varied = [
        "graph.max_sequences=6",
        "plan.buckets=4",
        "train.lr=1e-4",
        "data.batch_tokens=6000",
    ]
    for name in options.models:
        eager, _ = losses(name, options.steps, *varied, smoke=options.smoke)
        for form, more in VARIANTS.items():
            if form not in options.variants:
                continue
            with told(f"same {name} {form}"):
                graphed, (served, failed) = losses(
                    name,
                    options.steps,
                    *varied,
                    *more,
                    *FORMS["graphs"],
                    smoke=options.smoke,
                )
                off = max(abs(a / b - 1) for a, b in zip(graphed, eager, strict=True))
                first = [abs(a / b - 1) for a, b in islice(zip(graphed, eager, strict=True), 4)]
                ways = {way: sum(each[way] for each in served) for way in served[0] or ()}
                report.add(
                    "same", model=name, form=form, worst=off, first=first, last=graphed[-1],
                    failed=failed, steps=len(graphed), ways=ways,
                )  # fmt: skip


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in a step"
    return local_part(parameter.grad).cpu().clone()


def gradients_of(name: str, calls: int, *more: str, smoke: bool) -> list[dict[str, Tensor]]:
    """Of one step's micro-batches, computed so many times from the same weights, on the host."""
    chosen = words(name, 64 if smoke else 2048, *more, smoke=smoke, models=SIX_LAYERS)
    results = []
    with running(chosen) as (_, parts):
        step, model = next(parts.loader), parts.stepper.model
        for _ in range(calls):
            parts.stepper.gradients(step.batches, step.batches[0].counts.main, plan=step.plan)
            results.append({key: gradient_of(p) for key, p in model.named_parameters()})
            model.zero_grad()
    return results


def bits(options: argparse.Namespace, report: Report) -> None:
    """How many parameters have the same gradient bit for bit, and how far the others are off."""
    for name in options.models:
        once, again = gradients_of(name, 2, smoke=options.smoke)
        # The first call runs eagerly, the second records, the third replays.
        layers = ["graph.max_sequences=64", *FORMS["graphs"]]
        graphed = gradients_of(name, 3, *([] if options.smoke else layers), smoke=options.smoke)[2]
        mlp = ["graph.max_sequences=64", "graph.layers=['mlp']"]
        only = gradients_of(name, 3, *([] if options.smoke else mlp), smoke=options.smoke)[2]
        for form, other in {"eager": again, "graphs": graphed, "graphs of MLPs": only}.items():
            equal = sum(torch.equal(once[key], other[key]) for key in once)
            worst = max(float((once[k] - other[k]).norm() / once[k].norm()) for k in once)
            report.add("bits", model=name, form=form, equal=equal, of=len(once), worst=worst)


def write(report: Report) -> None:
    ratios = [row for row in report.rows if row["section"] == "ratio"]
    speeds = [row for row in report.rows if row["section"] == "speed"]
    rows = [
        [
            row["model"], f"{row['capacity']:,}", row["form"], f"{row['ms']:.1f} ms",
            f"{row['busy']:.0%}", f"{row['tokens_per_s']:,.0f}", f"{row['memory_gib']:.1f} GiB",
            f"{row['graph_gib']:.2f} GiB",
        ]
        for row in speeds
    ]  # fmt: skip
    header = ["model", "capacity", "form", "a step", "GPU busy", "tokens/s", "peak", "graphs"]
    short = [
        [r["model"], f"{r['capacity']:,}", f"{r['busy']:.0%}", f"{r['times']:.2f}"] for r in ratios
    ]
    alike = [
        [r["model"], r["form"], f"{r['steps']}", f"{r['worst']:.2%}"]
        for r in report.rows
        if r["section"] == "same"
    ]
    exact = [
        [r["model"], f"eager and {r['form']}", f"{r['equal']} of {r['of']}", f"{r['worst']:.1e}"]
        for r in report.rows
        if r["section"] == "bits"
    ]
    bits_header = ["model", "form", "equal bit for bit", "worst difference of the others"]
    text = "\n\n".join(
        [
            "## CUDA graphs",
            "Steps of about 8 micro-batches on one lane; the data of a capacity c is lognormal\n"
            "with mean c/4 and sigma 1, clipped to 16 and c. Busy: time of kernels under the\n"
            "profiler by a step's time without it.",
            table(header, rows),
            table(["model", "capacity", "fastest without graphs busy", "times as fast"], short),
            table(["model", "form", "steps", "worst difference of a loss to eager"], alike),
            *([table(bits_header, exact)] if exact else []),
            f"Machine: {machine(['torch', 'triton', 'flash-attn-4'])}. "
            "Made by `python bench/gpu_graphs.py`.",
        ]
    )
    write_section(RESULTS, "graphs", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["speed", "same", "bits"])
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "hybrid"])
    parser.add_argument("--capacities", nargs="+", type=int, default=[])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", default="graphs.jsonl")
    parser.add_argument("--also", nargs="*", default=[], help="results of parts run before")
    options = parser.parse_args()
    report = Report(Path(options.out))
    for path in options.also:
        report.rows += map(json.loads, Path(path).read_text().splitlines())
    for part in options.parts:
        {"speed": speed, "same": same, "bits": bits, "host": host}[part](options, report)
    if options.write:
        write(report)


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
