"""The data of the run page, for one or more runs, as compact JSON.

In: RunFolders. Out: a dictionary with curves, figures, cost model and its refinement, pipeline,
experts, graphs, slowest steps and timelines of each run, and the keys in which the runs'
configurations differ:

    {"version": 1, "runs": [{"name": "demo-1", …}], "differences": [], "cp_sizes": [1, 2]}

In a run whose steps take 1 s, one of 3 s that waited 1.8 s for its data has that as its reason:

    {"step": 7, "elapsed": 3.0, "times": 3.0, …, "why": ["waited 1.8 s for data"]}
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from longshore.plan.types import DEFAULT_POLICY, Plan
from longshore.report.plan_page import timeline_data
from longshore.report.run_files import (
    GRAPHED,
    RunFolder,
    cost_data,
    last_change,
    pipeline_data,
    refine_data,
)
from longshore.report.run_journal import (
    MOST_POINTS,
    Floats,
    JournalLine,
    Json,
    curve,
    edges,
    rounded,
    run_curves,
    total,
)

MOST_ROWS = 10
EXPLAINS = 0.25
"""A wait is a reason if it is at least this share of the extra time."""
COLUMNS = ("data_wait_s", "plan_s", "tokens", "rounds", "efficiency", "padding")
UNEXPLAINED = "no reason in the recorded metrics"
FIRST = "the first step: warm-up of memory and kernels"


def slowest_indices(metrics: Mapping[str, Floats], *, most: int = MOST_ROWS) -> list[int]:
    """The indices of the slowest steps, the slowest first; ties go to the earlier step."""
    elapsed = np.nan_to_num(metrics["elapsed_s"], nan=-math.inf)
    order = np.argsort(-elapsed, kind="stable")[:most]
    return [int(index) for index in order if math.isfinite(elapsed[index])]


def slow_steps(run: RunFolder) -> list[Json]:
    metrics = run.metrics
    # The median of each column over the steps that have it; NaN if none has.
    usual = {name: _median(metrics[name]) for name in ("elapsed_s", *COLUMNS)}
    ratio = {
        step: float(line.elapsed.sum() / line.predicted.sum())
        for step, line in run.journal.lines.items()
        if line.measured
    }
    rows = []
    for index in slowest_indices(metrics):
        values = {name: float(metrics[name][index]) for name in ("elapsed_s", *COLUMNS)}
        step = int(run.steps[index])
        reasons = [FIRST] if index == 0 else []
        reasons += why(values, usual, ratio=ratio.get(step), usual_ratio=_median(ratio.values()))
        rows.append(
            {
                "step": step,
                "elapsed": values["elapsed_s"],
                "times": rounded([values["elapsed_s"] / usual["elapsed_s"]], 3)[0],
                **{name: rounded([values[name]])[0] for name in COLUMNS},
                "why": reasons or [UNEXPLAINED],
            }
        )
    return rows


def why(
    values: Mapping[str, float],
    usual: Mapping[str, float],
    *,
    ratio: float | None,
    usual_ratio: float,
) -> list[str]:
    """How the step differs from others; ratio: measured / predicted seconds of its rounds."""
    reasons = [*_waits(values, usual), *_work(values, usual)]
    if ratio is not None and ratio > 1.25 * usual_ratio:
        reasons.append(f"rounds took {ratio / usual_ratio:.1f} × the time the cost model predicts")
    return reasons


def _waits(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Steps are planned ahead, so planning matters only if the step had to wait for it."""
    more = values["elapsed_s"] - usual["elapsed_s"]
    wait = values["data_wait_s"]
    if more > 0 and wait - usual["data_wait_s"] >= EXPLAINS * more:
        planning = values["plan_s"] >= EXPLAINS * wait
        yield f"waited {wait:.3g} s for data" + (
            f" (planning took {values['plan_s']:.3g} s)" if planning else ""
        )


def _work(values: Mapping[str, float], usual: Mapping[str, float]) -> Iterator[str]:
    """Comparisons with NaN are false, so an unknown value is never a reason."""
    if values["tokens"] > 1.25 * usual["tokens"]:
        yield f"{values['tokens'] / usual['tokens']:.1f} × the usual tokens"
    if values["rounds"] > usual["rounds"]:
        yield f"{values['rounds']:.0f} rounds (usually {usual['rounds']:.0f})"
    if values["efficiency"] < usual["efficiency"] - 0.05:
        yield f"plan efficiency {values['efficiency']:.0%} (usually {usual['efficiency']:.0%})"
    if values["padding"] > usual["padding"] + 0.03:
        yield f"padding {values['padding']:.0%} (usually {usual['padding']:.0%})"


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.median(known)) if known else math.nan


MOST_STEPS = 200
MOST_BYTES = 4_000_000
SWELL = 2.5
"""Bytes of a step on the page, relative to its line in steps.jsonl, roughly."""


def steps_data(run: RunFolder, *, share: float = 1.0) -> list[Json]:
    """Timelines of the chosen steps; `share` is the run's share of the page's bytes."""
    policy = str(run.config.get("plan.policy", DEFAULT_POLICY))
    lines = run.journal.lines
    return [
        measured_step(step, run.journal.plan(step, policy=policy), lines[step])
        for step in choose_steps(run, share=share)
    ]


def choose_steps(run: RunFolder, *, share: float = 1.0) -> list[int]:
    """All steps of steps.jsonl if they are few, else the first, last, slowest and evenly spaced."""
    lines = run.journal.lines
    steps = list(lines)
    if not steps:
        return []
    mean = sum(line.size for line in lines.values()) / len(lines)
    most = int(min(MOST_STEPS, share * MOST_BYTES / (SWELL * mean)))
    if len(steps) <= most:
        return steps
    slowest = {int(run.steps[index]) for index in slowest_indices(run.metrics)}
    chosen = {steps[0], steps[-1], *(slowest & lines.keys())}
    if (more := most - len(chosen)) > 0:
        chosen |= {steps[index] for index in edges(len(steps), most=more)[:-1]}
    return sorted(chosen)


def measured_step(step: int, plan: Plan, line: JournalLine) -> Json:
    return {
        "step": step,
        "lanes": plan.setting.lanes,
        "capacity": plan.setting.capacity,
        "sync": plan.setting.sync,
        **timeline_data(plan),
        "predicted": rounded(line.predicted),
        "elapsed": rounded(line.elapsed),
    }


MOST_CELLS = 100_000
MOST_COLUMNS = 100
STARVED = 0.1


def experts_data(lines: Mapping[int, JournalLine], *, cells: int = MOST_CELLS) -> Json | None:
    """How evenly experts are used: maps, peaks and a row for each layer; None without experts.

    Four experts that got 10, 10, 20 and 0 tokens in a step have shares of 100, 100, 200 and 0
    hundredths of an even share, and a peak of 2.
    `maps` has a list for each layer, in it one for each expert, in it a number for each column.
    """
    shape = next((_shape(line) for line in lines.values() if line.experts), ())
    kept = {step: line for step, line in lines.items() if shape and _shape(line) == shape}
    if not kept:
        return None
    steps = np.array(list(kept), dtype=np.int64)
    columns = max(4, min(MOST_COLUMNS, cells // sum(shape)))
    at = edges(len(steps), most=columns)
    layers = [
        np.stack([line.experts[layer] for line in kept.values()]) for layer in range(len(shape))
    ]
    summed = [np.add.reduceat(tokens, at[:-1], axis=0) for tokens in layers]
    return {
        "experts": list(shape),
        "step": steps[at[1:] - 1].tolist(),
        "first": int(steps[0]),
        "maps": [np.rint(relative(tokens) * 100).astype(int).T.tolist() for tokens in summed],
        "peak": peak_curve(steps, [relative(tokens).max(axis=1) for tokens in layers]),
        "rows": [layer_row(tokens.sum(axis=0)) for tokens in layers],
    }


def relative(tokens: NDArray[np.int64]) -> Floats:
    """Tokens [step, expert] as multiples of an even share; 1 where no expert had any."""
    mean = tokens.mean(axis=-1, keepdims=True)
    return np.where(mean > 0, tokens / np.where(mean > 0, mean, 1.0), 1.0)


def peak_curve(steps: NDArray[np.int64], peaks: list[Floats]) -> Json:
    """The busiest expert relative to the mean: mean, minimum and maximum over the layers."""
    each = np.stack(peaks)
    at = edges(len(steps), most=MOST_POINTS)
    low, high = (curve(extreme, at) for extreme in (each.min(axis=0), each.max(axis=0)))
    return {
        "step": steps[at[1:] - 1].tolist(),
        "y": curve(each.mean(axis=0), at)["y"],
        "low": low.get("low", low["y"]),
        "high": high.get("high", high["y"]),
    }


def layer_row(tokens: NDArray[np.int64]) -> Json:
    """A layer over all steps: its busiest and idlest experts, and how many are starved."""
    shares = relative(tokens)
    return {
        "busiest": int(shares.argmax()),
        "most": rounded([shares.max()], 4)[0],
        "idlest": int(shares.argmin()),
        "least": rounded([shares.min()], 4)[0],
        "starved": int((shares < STARVED).sum()),
    }


def _shape(line: JournalLine) -> tuple[int, ...]:
    return tuple(len(layer) for layer in line.experts)


def graphs_data(metrics: Mapping[str, Floats], *, most: int = MOST_POINTS) -> Json | None:
    """How CUDA graphs served a run's layers, in all and as curves; None for a run without graphs.

    Steps of 6, 2, 0 and of 8, 0, 0 layers, whole, by halves and eagerly, give the shares
    {"whole": 0.875, "halves": 0.125, "eager": 0, …}.
    """
    counts = np.stack([metrics[f"graphed_{way}"] for way in GRAPHED])
    known = np.isfinite(counts).all(axis=0) & (counts.sum(axis=0) > 0)
    if not known.any():
        return None
    counts, steps = counts[:, known], metrics["step"][known].astype(np.int64)
    shares, at = counts / counts.sum(axis=0), edges(len(steps), most=most)
    in_all = rounded(counts.sum(axis=1) / counts.sum(), 4)
    memory = metrics["graph_gib"][np.isfinite(metrics["graph_gib"])]
    return {
        **dict(zip(GRAPHED, in_all, strict=True)),
        "layers": int(counts.sum()),
        "memory_gib": rounded([float(memory.max()) if len(memory) else math.nan])[0],
        "step": steps[at[1:] - 1].tolist(),
        "curves": {way: curve(shares[row], at) for row, way in enumerate(GRAPHED)},
    }


def graphs_text(graphs: Json) -> str:
    """One line for people."""
    memory = graphs["memory_gib"]
    return (
        f"CUDA graphs: layers ran {graphs['whole']:.1%} whole, "
        f"{graphs['halves']:.1%} by halves, {graphs['eager']:.1%} eagerly"
        + ("" if memory is None else f"; {memory:.3g} GiB")
    )


MOST_RUNS = 8
PER_RUN = ("output.folder", "output.export")
"""Keys in which any two runs differ."""
ABSENT = "–"


def run_page_data(runs: Seq[RunFolder]) -> Json:
    """Everything the page shows."""
    if not 1 <= len(runs) <= MOST_RUNS:
        raise ValueError(f"{len(runs)} runs were given; a page shows 1 to {MOST_RUNS}")
    named = zip(runs, names(runs), strict=True)
    shown = [run_data(run, name, share=1 / len(runs)) for run, name in named]
    sizes = {size for run in shown for step in run["steps"] for size in step["packs"]["cp"]}
    return {
        "version": 1,
        "runs": shown,
        "differences": differences(runs),
        "cp_sizes": sorted(sizes),
    }


def names(runs: Seq[RunFolder]) -> list[str]:
    """The name of each run's folder; if two are the same, the paths."""
    short = [run.name for run in runs]
    if len(set(short)) == len(short):
        return short
    paths = [str(run.folder) for run in runs]
    if len(set(paths)) < len(paths):
        twice = next(name for name in paths if paths.count(name) > 1)
        raise ValueError(f"{twice} is given twice; give each run once")
    return paths


def run_data(run: RunFolder, name: str, *, share: float = 1.0) -> Json:
    lines = run.journal.lines
    return {
        "name": name,
        "config": {key: text(value) for key, value in run.config.items()},
        "figures": figures(run),
        "warnings": [{"step": step, "text": warning} for step, warning in run.warnings],
        "points": run_curves(run.metrics),
        "evals": evals_data(run),
        "cost": cost_data(lines, refined=last_change(run.refined)),
        "refined": refine_data(run.refined),
        "pipeline": pipeline_data(run.pipeline, run.config),
        "experts": experts_data(lines),
        "graphs": graphs_data(run.metrics),
        "slowest": slow_steps(run),
        "journal": len(lines),
        "steps": steps_data(run, share=share),
    }


def figures(run: RunFolder) -> Json:
    """The key figures of a run, None if unknown. Speeds are medians, shares are means."""
    m = run.metrics
    finite = np.flatnonzero(np.isfinite(m["loss"]))
    elapsed = float(np.nansum(m["elapsed_s"]))
    evaluated = [loss for losses in run.evals.values() for _, loss in losses]
    tail = m["loss"][finite[-max(1, min(50, len(finite) // 10)) :]]
    values = {
        "steps": float(len(run.steps)),
        "last_step": float(run.steps[-1]),
        "loss": float(m["loss"][finite[-1]]) if len(finite) else math.nan,
        "recent_loss": _mean(tail),
        "least_loss": float(m["loss"][finite].min()) if len(finite) else math.nan,
        "eval_loss": min(evaluated, default=math.nan),
        "tokens": float(np.nansum(m["tokens"])),
        "sequences": float(np.nansum(m["sequences"])),
        "epochs": float(np.nanmax(m["epoch"])) if np.isfinite(m["epoch"]).any() else math.nan,
        "seconds": elapsed,
        "tokens_per_s": _median(m["tokens_per_s"]),
        "step_s": _median(m["elapsed_s"]),
        "mfu": _median(m["mfu"]),
        "tflops": _median(m["tflops"]),
        "efficiency": _mean(m["efficiency"]),
        "padding": _mean(m["padding"]),
        "rounds": _mean(m["rounds"]),
        "data_wait": float(np.nansum(m["data_wait_s"])) / elapsed if elapsed else math.nan,
        "planning": _median(m["plan_s"]),
        "memory_gib": _max(m["memory_gib"]),
        "grad_norm": _median(m["grad_norm"]),
        "skipped": float(np.nansum(m["skipped"])),
        "no_loss": float(len(run.steps) - len(finite) - np.nansum(m["skipped"])),
    }
    return dict(zip(values, rounded(values.values(), 12), strict=True))


def evals_data(run: RunFolder) -> list[Json]:
    """The losses of each held-out set, with the step, and the tokens and seconds until then."""
    tokens, seconds = total(run.metrics["tokens"]), total(run.metrics["elapsed_s"])
    rows = []
    for name, losses in run.evals.items():
        steps = np.array([step for step, _ in losses], dtype=np.int64)
        trained = np.searchsorted(run.steps, steps, side="right")
        rows.append(
            {
                "name": name,
                "step": steps.tolist(),
                "tokens": rounded(np.concatenate([[0.0], tokens])[trained], 9),
                "seconds": rounded(np.concatenate([[0.0], seconds])[trained], 6),
                "y": rounded(loss for _, loss in losses),
            }
        )
    return rows


def differences(runs: Seq[RunFolder]) -> list[Json]:
    """The keys whose values are not the same in all runs, with each run's value as text."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key not in PER_RUN)
    rows = [(key, [text(run.config.get(key, ABSENT)) for run in runs]) for key in keys]
    return [
        {"key": key, "values": values, "everywhere": all(key in run.config for run in runs)}
        for key, values in rows
        if len(set(values)) > 1
    ]


def text(value: object) -> str:
    """A value of a configuration as a person would write it."""
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value, default=str)


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _max(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else math.nan
