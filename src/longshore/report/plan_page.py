"""The data of the plan page, as compact JSON.

In: the plans of the steps and the other policies' plans for the same steps. Out: a dictionary of
lists. Times inside a step are integer ticks, a millionth of the step's total each, so `cost * unit`
is in seconds. Packs are columns: two packs on lanes 0–1 and on lane 1 of round 0 are

    {"round": [0, 0], "lane": [0, 1], "cp": [2, 1], "tokens": [4, 3], "cost": […], "start": […],
     "count": [1, 1], "sequences": [0, 1]}

where `count` splits `sequences` into packs and `start` is one number, or a list when the pack's
lanes start it at different times. The same holds for `start` and `end` of a round.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.plan.graph_use import MicroBatchSizes, as_graphed
from longshore.plan.simulate import Timeline, make_timeline, simulate
from longshore.plan.types import Plan, PlanSetting, Stats, policy_named

Ints = NDArray[np.int64]
Json = dict[str, Any]
PERCENTILES = (50, 90, 99)


def cap_rows(sizes: Ints) -> list[Json]:
    """How many micro-batches a cap on sequences covers in CUDA graphs, and what its padding costs.

    sizes: sequences of the micro-batches with one pack of CP size 1, as plan/graph_use.py counts
    them. There is a row for 1, 2, 4, … up to the first power that covers all, and for each
    percentile. Micro-batches of 1, 1, 2 and 5 sequences: cap 2 covers 3 of 4, and of its 3 · 2
    slots 2 stay empty, 0.67 on average.
    """
    if not len(sizes):
        return []
    marks = percentile_marks(sizes)
    largest = int(sizes.max())
    powers = [1 << bit for bit in range((largest - 1).bit_length() + 1)]
    return [_cap_row(sizes, cap, marks.get(cap, ())) for cap in sorted({*powers, *marks})]


def percentile_marks(sizes: Ints) -> dict[int, tuple[str, ...]]:
    """The caps that are a percentile (the least that covers this share) or the maximum."""
    ordered = np.sort(sizes)
    marks: dict[int, tuple[str, ...]] = {}
    for percent in PERCENTILES:
        value = int(ordered[-(-len(ordered) * percent // 100) - 1])
        marks[value] = (*marks.get(value, ()), f"P{percent}")
    largest = int(ordered[-1])
    marks[largest] = (*marks.get(largest, ()), "max")
    return marks


def _cap_row(sizes: Ints, cap: int, marks: tuple[str, ...]) -> Json:
    inside = sizes[sizes <= cap]
    empty = float((cap - inside).mean()) if len(inside) else 0.0
    return {
        "cap": cap,
        "marks": marks,
        "covered": len(inside) / len(sizes),
        "empty_slots": empty,
        "empty_share": empty / cap,
    }


Floats = NDArray[np.float64]


MOST_BINS = 24


def length_histogram(lengths: Ints) -> Json:
    """Up to 24 bins on a logarithmic scale; a narrow range of lengths gets finer ones.

    Bin i has the lengths from edges[i] to edges[i + 1] − 1. The lengths 1, 2, 3, 3 make the bins 1,
    2 and 3 with the counts 1, 1, 2 and the tokens 1, 2, 6.
    """
    edges = bin_edges(int(lengths.min()), int(lengths.max()))
    bin_index = np.searchsorted(edges, lengths, side="right") - 1
    bins = len(edges) - 1
    counts = np.bincount(bin_index, minlength=bins)
    tokens = np.zeros(bins, dtype=np.int64)
    np.add.at(tokens, bin_index, lengths)
    return {"edges": edges.tolist(), "counts": counts.tolist(), "tokens": tokens.tolist()}


def bin_edges(low: int, high: int) -> Ints:
    """Edges 2^(i/n) around low … high, n the largest of 8, 4, 2, 1 with few enough bins."""
    for per_octave in (8, 4, 2, 1):
        first = math.floor(math.log2(low) * per_octave)
        last = math.floor(math.log2(high) * per_octave) + 1
        if last - first <= MOST_BINS or per_octave == 1:
            break
    powers = np.exp2(np.arange(first, last + 1) / per_octave)
    edges: Ints = np.unique(np.ceil(powers - 1e-9).astype(np.int64))
    return edges


TICKS = 1_000_000

Comparisons = Mapping[str, Seq[Plan] | str]


def page_data(steps: Seq[Plan], comparisons: Comparisons) -> Json:
    """Everything the page shows."""
    check_input(steps, comparisons)
    sizes = MicroBatchSizes.of(map(as_graphed, steps))
    return {
        "version": 1,
        "setting": setting_data(steps[0].setting),
        "cp_sizes": sorted({pack.cp_size for plan in steps for _, pack in plan.packs()}),
        "steps": [step_data(plan) for plan in steps],
        "policies": policy_data(steps, comparisons),
        "about": {n: policy_named(n).about for n in (steps[0].setting.policy, *comparisons)},
        "micro_batches": {"alone": len(sizes.alone), "others": sizes.others},
        "caps": cap_rows(sizes.alone),
    }


def check_input(steps: Seq[Plan], comparisons: Comparisons) -> None:
    """Raises for plans that cannot be drawn together."""
    if not steps:
        raise ValueError("the page needs at least one step's plan and got none")
    lanes = {plan.setting.lanes for plan in steps}
    if len(lanes) > 1:
        raise ValueError(f"the steps' plans are for different lane counts: {sorted(lanes)}")
    for number, plan in enumerate(steps, start=1):
        if not plan.rounds or not plan.sequences:
            raise ValueError(f"the plan of step {number} has no rounds or no sequences")
    for name, plans in comparisons.items():
        if not isinstance(plans, str) and len(plans) != len(steps):
            raise ValueError(
                f"policy {name!r} has plans for {len(plans)} steps, but there are {len(steps)}"
            )


def setting_data(setting: PlanSetting) -> Json:
    names = [name for name in PlanSetting.__slots__ if name not in ("stage_costs", "cp_size")]
    data = {name: getattr(setting, name) for name in names}
    return {**data, "profile": setting.profile.as_json(), "cp_sizes": list(setting.cp_sizes)}


def step_data(plan: Plan) -> Json:
    """One step: its figures, its sequences' lengths, its packs in time."""
    lengths = np.array([sequence.length for sequence in plan.sequences], dtype=np.int64)
    return {
        "stats": stats_data(plan.stats),
        "digest": plan.digest,
        **timeline_data(plan),
        "histogram": length_histogram(lengths),
        "pipeline": pipeline_columns(plan),
    }


def timeline_data(plan: Plan) -> Json:
    """Lengths, and when lanes and packs work, in ticks."""
    timeline = make_timeline(plan)
    unit = timeline.total / TICKS
    return {
        "lengths": [sequence.length for sequence in plan.sequences],
        "unit": unit,
        "total": TICKS,
        "overhead": round(plan.setting.profile.round / unit),
        "start": [one_or_many(row, unit) for row in timeline.start],
        "end": [one_or_many(row, unit) for row in timeline.end],
        "busy": [ticks(row, unit) for row in timeline.cost],
        "idle": significant(timeline.idle),
        "packs": pack_columns(plan, timeline, unit),
    }


def pack_columns(plan: Plan, timeline: Timeline, unit: float) -> Json:
    packs = list(plan.packs())
    return {
        "round": [number for number, _ in packs],
        "lane": [pack.first_lane for _, pack in packs],
        "cp": [pack.cp_size for _, pack in packs],
        "tokens": [pack.tokens_per_lane for _, pack in packs],
        "cost": [round(seconds / unit) for seconds in timeline.pack_cost],
        "start": [one_or_many(starts, unit) for starts in timeline.pack_start],
        "count": [len(pack.sequences) for _, pack in packs],
        "sequences": [i for _, pack in packs for i in pack.sequences],
    }


def pipeline_columns(plan: Plan) -> Json | None:
    """The simulated events of the pipeline ranks, as columns; None without a pipeline."""
    simulated = simulate(plan) if plan.setting.pp > 1 else None
    if simulated is None or simulated.walk is None:
        return None
    ranks, actions, starts, ends = zip(*simulated.walk.events(), strict=True)
    kinds = sorted({action.kind for action in actions}, reverse=True)
    tick = simulated.walk.finish / TICKS
    return {
        "unit": tick * simulated.unit,
        "total": TICKS,
        "bubbles": [significant(share) for share in simulated.rank_bubbles],
        "kinds": kinds,
        "rank": list(ranks),
        "stage": [action.stage for action in actions],
        "round": [action.round for action in actions],
        "kind": [kinds.index(action.kind) for action in actions],
        "start": [round(start / tick) for start in starts],
        "end": [round(end / tick) for end in ends],
    }


def policy_data(steps: Seq[Plan], comparisons: Comparisons) -> list[Json]:
    """A row for each policy, the page's own first: its stats per step, or why it was refused."""
    own = steps[0].setting.policy
    others = {name: plans for name, plans in comparisons.items() if name != own}
    rows: list[Json] = []
    for name, plans in {own: steps, **others}.items():
        if isinstance(plans, str):
            rows.append({"name": name, "refused": plans})
        else:
            rows.append({"name": name, "steps": [stats_data(plan.stats) for plan in plans]})
    return rows


def stats_data(stats: Stats) -> Json:
    """The figures with six digits; values that are not finite become None, for JSON."""
    data = {name: getattr(stats, name) for name in Stats.__slots__}
    return {
        name: significant(value) if isinstance(value, float) else value
        for name, value in data.items()
    }


def significant(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def one_or_many(seconds: Floats, unit: float) -> int | list[int]:
    """One tick count when all lanes agree, else one for each lane."""
    values = ticks(seconds, unit)
    return values[0] if len(set(values)) == 1 else values


def ticks(seconds: Floats, unit: float) -> list[int]:
    counts: list[int] = np.rint(seconds / unit).astype(np.int64).tolist()
    return counts
