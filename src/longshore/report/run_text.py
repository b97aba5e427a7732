"""Runs in words: the summary that `longshore report` prints.

In: the data of a page. Out: lines, for each run what it did and how good its cost model was:

    demo-1: 100 steps, 268,431 tokens in 31 s; loss 0.42
      8,500 tokens/s, efficiency 91%, padding 0.4%, waiting for data 1.2%
"""

from longshore.report.page_data import Json


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
        if run["cost"]:
            lines.append(f"  the cost model is {_judged(run['cost'])}")
    if len(data["runs"]) > 1:
        keys = ", ".join(row["key"] for row in data["differences"]) or "nothing"
        lines.append(f"the configurations differ in: {keys}")
    return lines


def _speeds(figures: Json) -> list[str]:
    shares = {"efficiency": "efficiency", "padding": "padding", "data_wait": "waiting for data"}
    speed = figures["tokens_per_s"]
    found = [] if speed is None else [f"{speed:,.0f} tokens/s"]
    return found + [
        f"{name} {figures[key]:.1%}" for key, name in shares.items() if figures[key] is not None
    ]


def _judged(cost: Json) -> str:
    error, factor = cost["error"], cost["factor"]
    return f"{cost['verdict']}: typical error {error:.0%} after scaling by {factor:.3g}"
