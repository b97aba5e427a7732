"""The summaries that `longshore plan` and `longshore report` print.

In: the plans of one or more steps, or the data of a run page. Out: lines of text. One step is a
list of figures with explanations, several steps are a table with one line per step:

    predicted       0.5 s (estimated) for the step
    bound           0.4 s (estimated): no plan within these limits is faster

A run is its progress, its speed, the quality of its cost model and the bubbles of its pipeline:

    demo-1: 100 steps, 268,431 tokens in 31 s; loss 0.42
      8,500 tokens/s, efficiency 91%, padding 0.4%, waiting for data 1.2%
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from longshore.plan.as_json import advice, total_stats
from longshore.plan.types import Plan, Stats
from longshore.report.page_data import Json
from longshore.report.run_graphs import graphs_text
from longshore.report.run_pipeline import pipeline_text


def plan_summary(plans: Seq[Plan], *, unit: str) -> list[str]:
    """The figures of the plans and advice; `unit` is that of all times."""
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
        if run["cost"]:
            lines.append(f"  the cost model is {_cost_quality(run['cost'])}")
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


def _cost_quality(cost: Json) -> str:
    error, factor = cost["error"], cost["factor"]
    return f"{cost['verdict']}: typical error {error:.0%} after scaling by {factor:.3g}"
