"""Writes plans and runs as one HTML file that works offline, as JSON, and as lines of text.

In: the plans of one or more steps, with other policies' plans of the same steps for comparison or
the reason why a policy was refused; or the folders of runs. Out: a file that contains its styles,
scripts and data, the dictionary that `longshore plan --json` writes, or what commands print:

    write_plan_page("plan.html", [plan], {"static": [static_plan], "padded": "3 is too long"})
    write_run_page("compare.html", read_runs(["runs/demo-1", "runs/demo-2"]))

The pieces are next to this file; `plan_page.html` and `run_page.html` have placeholders such as
`{{css}}` for the others.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from importlib.resources import files
from pathlib import Path

from longshore.files import write_atomically
from longshore.plan.types import DEFAULT_POLICY, Pack, Plan, PlanSetting, Stats
from longshore.report.plan_page import Comparisons, Json, page_data
from longshore.report.run_files import pipeline_text, read_run
from longshore.report.run_page import graphs_text, run_page_data

PLAN_SCRIPTS = (
    *("plan_page_text.js", "plan_page_view.js", "plan_page_gestures.js", "plan_page_blocks.js"),
    *("plan_page_lanes.js", "plan_page_pipeline.js", "plan_page_charts.js", "plan_page.js"),
)
RUN_STYLES = ("plan_page.css", "run_page.css")
RUN_SCRIPTS = (
    *("plan_page_text.js", "plan_page_view.js", "plan_page_gestures.js", "plan_page_blocks.js"),
    *("plan_page_lanes.js", "plan_page_charts.js", "run_page_text.js", "run_page_curves.js"),
    *("run_page_plots.js", "run_page_cost.js", "run_page_refine.js", "run_page_pipeline.js"),
    *("run_page_experts.js", "run_page_graphs.js", "run_page_step.js", "run_page.js"),
)


def write_plan_page(path: str | Path, steps: Seq[Plan], comparisons: Comparisons) -> None:
    """Writes the page; with a pipeline (pp > 1) it also shows the simulated ranks."""
    data = page_data(steps, comparisons)
    page = page_of("plan_page.html", data, styles=("plan_page.css",), scripts=PLAN_SCRIPTS)
    write_atomically(path, page)


def read_runs(folders: Seq[str | Path]) -> Json:
    """The data of the page of these runs."""
    return run_page_data([read_run(folder) for folder in folders])


def write_run_page(path: str | Path, data: Json) -> None:
    write_atomically(path, run_page(data))


def run_page(data: Json) -> str:
    """The HTML of a run page with its data."""
    return page_of("run_page.html", data, styles=RUN_STYLES, scripts=RUN_SCRIPTS)


def page_of(template: str, data: Json, *, styles: Seq[str], scripts: Seq[str]) -> str:
    parts = {
        "css": "\n".join(map(_piece, styles)),
        "js": "\n".join(map(_piece, scripts)),
        "data": script_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _piece(template))


def script_json(data: Json) -> str:
    """JSON that cannot end the script element around it: "<" becomes "\\u003c"."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _piece(name: str) -> str:
    return files("longshore.report").joinpath(name).read_text(encoding="utf-8")


def plan_summary(plans: Seq[Plan], *, unit: str) -> list[str]:
    """The figures of the plans and advice; `unit` is that of all times.

    One step is a list of figures with explanations, several steps are a table with a line for each:

        predicted       0.5 s (estimated) for the step
        bound           0.4 s (estimated): no plan within these limits is faster
    """
    setting, total = plans[0].setting, total_stats([plan.stats for plan in plans])
    lengths = [sequence.length for plan in plans for sequence in plan.sequences]
    names = [name for name in FIGURES if name != "bubble" or setting.pp > 1]
    sizes = ", ".join(f"{count:,} at {size}" for size, count in total.cp_histogram)
    return [
        f"sequences: {len(lengths):,} with {total.tokens:,} tokens, the longest {max(lengths):,}",
        f"lanes: {setting.lanes:,} of {setting.capacity:,} tokens; policy: {setting.policy}",
        "",
        *(_table(names, plans, unit) if len(plans) > 1 else _list(names, total, unit)),
        f"sequences at each CP size: {sizes}",
        "",
        advice(total, setting),
    ]


FIGURES: dict[str, tuple[Callable[[Stats], str], str]] = {
    "predicted": (lambda s: _time(s.predicted), "{unit} for the step"),
    "bound": (lambda s: _time(s.lower_bound), "{unit}: no plan within these limits is faster"),
    "gap": (lambda s: f"{s.gap:.1%}", "above the bound"),
    "efficiency": (lambda s: f"{s.efficiency:.1%}", "of the lanes' time is work on real tokens"),
    "idle": (lambda s: f"{s.imbalance:.1%}", "of the lanes' time is waiting for other lanes"),
    "bubble": (lambda s: f"{s.bubble:.1%}", "of the step is pipeline ranks waiting for each other"),
    "padding": (lambda s: f"{s.padding:.1%}", "of the tokens are padding"),
    "fill": (lambda s: f"{s.fill:.1%}", "of the lanes' capacity is used"),
    "rounds": (lambda s: f"{s.rounds:,}", ""),
    "planned in": (lambda s: f"{s.planning_seconds:.3f} s", "on this machine"),
}


def _time(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _list(names: Seq[str], stats: Stats, unit: str) -> list[str]:
    rows = [(name, *FIGURES[name]) for name in names]
    return [f"{n:<12}{show(stats):>9} {text.format(unit=unit)}".rstrip() for n, show, text in rows]


def _table(names: Seq[str], plans: Seq[Plan], unit: str) -> list[str]:
    steps = [plan.stats for plan in plans]
    rows = {str(number): stats for number, stats in enumerate(steps, start=1)}
    rows["all"] = total_stats(steps)
    cells = [["step", *names]]
    cells += [[name, *(FIGURES[n][0](stats) for n in names)] for name, stats in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return [*lines, f"predicted and bound in {unit}"]


def report_summary(data: Json) -> list[str]:
    """Each run's progress, speed, warnings, cost model, graphs and pipeline.

    demo-1: 100 steps, 268,431 tokens in 31 s; loss 0.42
      8,500 tokens/s, efficiency 91%, padding 0.4%, waiting for data 1.2%
    """
    lines: list[str] = []
    for run in data["runs"]:
        figures = run["figures"]
        loss = figures["loss"]
        trained = f"{figures['steps']:,} steps, {figures['tokens']:,} tokens"
        took = f" in {figures['seconds']:,.0f} s"
        ended = "" if loss is None else f"; loss {loss:.4g}"
        lines.append(f"{run['name']}: {trained}{took}{ended}")
        lines.append("  " + ", ".join(_speeds(figures)))
        lines += [f"  warning: {warning['text']}" for warning in run["warnings"]]
        if cost := run["cost"]:
            quality = f"typical error {cost['error']:.0%} after scaling by {cost['factor']:.3g}"
            lines.append(f"  the cost model is {cost['verdict']}: {quality}")
        if run["graphs"]:
            lines.append(f"  {graphs_text(run['graphs'])}")
        if run["pipeline"]:
            lines.append(f"  {pipeline_text(run['pipeline'])}")
    if len(data["runs"]) > 1:
        keys = ", ".join(row["key"] for row in data["differences"]) or "nothing"
        lines.append(f"the configurations differ in: {keys}")
    return lines


def _speeds(figures: Json) -> list[str]:
    shares = {"efficiency": "efficiency", "padding": "padding", "data_wait": "waiting for data"}
    speed = figures["tokens_per_s"]
    parts = [] if speed is None else [f"{speed:,.0f} tokens/s"]
    return parts + [
        f"{name} {figures[key]:.1%}" for key, name in shares.items() if figures[key] is not None
    ]


FORMAT_VERSION = 1
WELL_USED = 0.95
WORTH_MENTIONING = 0.05
SETTING_KEYS = (
    *("lanes", "capacity", "policy", "sync", "pp", "vpp", "align", "max_sequences"),
    *("tp", "ep", "layout"),
)
STATS_KEYS = (
    *("predicted", "lower_bound", "gap", "efficiency", "imbalance", "bubble", "fill", "padding"),
    *("tokens", "sum_squared_lengths", "planning_seconds"),
)


def plans_as_json(plans: Seq[Plan]) -> Json:
    """The file of `longshore plan --json`: what was asked for, then each step.

    A sequence is its index in the step. Empty packs are not listed, so an empty round is
    {"packs": []}. Times are in the cost profile's unit, for the built-in profile estimated seconds.
    """
    setting, total = plans[0].setting, total_stats([plan.stats for plan in plans])
    return {
        "version": FORMAT_VERSION,
        **{key: getattr(setting, key) for key in SETTING_KEYS},
        "buckets": list(setting.buckets),
        "cp_sizes": list(setting.cp_sizes),
        "profile": setting.profile.as_json(),
        "steps": [step_as_json(plan) for plan in plans],
        "total": stats_as_json(total),
        "advice": advice(total, setting),
    }


def step_as_json(plan: Plan) -> Json:
    return {
        "rounds": [{"packs": [_pack(pack) for pack in round_.packs]} for round_ in plan.rounds],
        **stats_as_json(plan.stats),
        "digest": plan.digest,
    }


def _pack(pack: Pack) -> Json:
    data = {name: getattr(pack, name) for name in Pack.__slots__}
    return {**data, "sequences": list(pack.sequences)}


def stats_as_json(stats: Stats) -> Json:
    histogram = {str(size): count for size, count in stats.cp_histogram}
    return {**{key: getattr(stats, key) for key in STATS_KEYS}, "cp_histogram": histogram}


def total_stats(steps: Seq[Stats]) -> Stats:
    """The figures of several steps run one after the other; shares are shares of the whole."""
    if len(steps) == 1:
        return steps[0]
    predicted = math.fsum(stats.predicted for stats in steps)
    bound = math.fsum(stats.lower_bound for stats in steps)
    spans = [stats.predicted * (1 - stats.bubble) for stats in steps]
    rounds = sum(stats.rounds for stats in steps)
    tokens = sum(stats.tokens for stats in steps)
    padded = math.fsum(stats.tokens / (1 - stats.padding) for stats in steps)
    histogram: Counter[int] = Counter()
    for stats in steps:
        histogram.update(dict(stats.cp_histogram))
    return Stats(
        predicted=predicted,
        lower_bound=bound,
        gap=predicted / bound - 1 if bound else 0.0,
        efficiency=math.fsum(stats.efficiency * stats.predicted for stats in steps) / predicted,
        imbalance=math.fsum(
            stats.imbalance * span for stats, span in zip(steps, spans, strict=True)
        )
        / math.fsum(spans),
        bubble=1 - math.fsum(spans) / predicted,
        fill=math.fsum(stats.fill * stats.rounds for stats in steps) / rounds,
        padding=1 - tokens / padded,
        cp_histogram=tuple(sorted(histogram.items())),
        rounds=rounds,
        tokens=tokens,
        sum_squared_lengths=sum(stats.sum_squared_lengths for stats in steps),
        planning_seconds=math.fsum(stats.planning_seconds for stats in steps),
    )


def advice(stats: Stats, setting: PlanSetting) -> str:
    """One sentence: what costs most, and what would help."""
    idle = stats.imbalance * (1 - stats.bubble)
    saving = 1 - stats.lower_bound / stats.predicted
    if stats.efficiency >= WELL_USED:
        return f"Little is left to gain: {stats.efficiency:.1%} of the time is work on real tokens."
    if setting.policy != DEFAULT_POLICY and saving > WORTH_MENTIONING:
        return (
            f"Look at the gap: another plan could save up to {saving:.0%}; "
            f"try --policy {DEFAULT_POLICY}."
        )
    if max(idle, stats.bubble, stats.padding) < WORTH_MENTIONING:
        if not any(size > 1 for size, _ in stats.cp_histogram):
            return "Look at the packs: each has a fixed cost, and a larger --capacity needs fewer."
        return (
            "Look at the CP sizes: most of the loss is communication between lanes that share a "
            "pack; with more sequences in a step or a larger --capacity fewer are split."
        )
    if stats.bubble >= max(idle, stats.padding):
        return "Look at the bubble: more sequences in a step or a smaller --pp would shrink it."
    if idle >= stats.padding:
        return "Look at idle: more sequences in a step or fewer lanes would keep the lanes busy."
    return "Look at padding: a smaller --align or fewer split sequences (--max-cp) would shrink it."
