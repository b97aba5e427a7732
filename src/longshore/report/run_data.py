"""The data of the run page, for one or more runs, as compact JSON.

In: RunFolders. Out: a dictionary with curves, figures, cost model and its refinement, pipeline,
experts, graphs, slowest steps and timelines of each run, and the keys in which the runs'
configurations differ:

    {"version": 1, "runs": [{"name": "demo-1", …}], "differences": [], "cp_sizes": [1, 2]}
"""

import json
import math
from collections.abc import Sequence as Seq

import numpy as np

from longshore.report.page_data import Json
from longshore.report.run_cost import cost_data
from longshore.report.run_curves import rounded, run_curves, total
from longshore.report.run_experts import experts_data
from longshore.report.run_files import Floats, RunFolder
from longshore.report.run_graphs import graphs_data
from longshore.report.run_pipeline import pipeline_data
from longshore.report.run_refine import last_change, refine_data
from longshore.report.run_steps import slow_steps, steps_data

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


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _max(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else math.nan
