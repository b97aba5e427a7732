"""The data of the plan page, as compact JSON.

In: the plans of the steps and the other policies' plans for the same steps. Out: a dictionary of
lists. Times inside a step are integer ticks, a millionth of the step's total each, so `cost * unit`
is in seconds. Packs are columns: two packs on lanes 0–1 and on lane 1 of round 0 are

    {"round": [0, 0], "lane": [0, 1], "cp": [2, 1], "tokens": [4, 3], "cost": […], "start": […],
     "count": [1, 1], "sequences": [0, 1]}

where `count` splits `sequences` into packs and `start` is one number, or a list when the pack's
lanes start it at different times. The same holds for `start` and `end` of a round.

The histogram of lengths has bins on a logarithmic scale: the lengths 1, 2, 3, 3 make the bins 1, 2
and 3 with the counts 1, 1, 2 and the tokens 1, 2, 6.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.plan.graph_use import MicroBatchSizes, as_graphed
from longshore.plan.policy import policy_named
from longshore.plan.simulate import simulate
from longshore.plan.types import Plan, PlanSetting, Stats
from longshore.report.graph_caps import cap_rows
from longshore.report.timeline import Floats, Timeline, make_timeline

Ints = NDArray[np.int64]
MOST_BINS = 24


@dataclass(frozen=True, slots=True)
class Histogram:
    """Bin i has the lengths from edges[i] to edges[i + 1] − 1."""

    edges: list[int]
    counts: list[int]
    tokens: list[int]


def length_histogram(lengths: Ints) -> Histogram:
    """Up to 24 bins; a narrow range of lengths gets finer ones."""
    edges = bin_edges(int(lengths.min()), int(lengths.max()))
    bin_index = np.searchsorted(edges, lengths, side="right") - 1
    bins = len(edges) - 1
    counts = np.bincount(bin_index, minlength=bins)
    tokens = np.zeros(bins, dtype=np.int64)
    np.add.at(tokens, bin_index, lengths)
    return Histogram(edges.tolist(), counts.tolist(), tokens.tolist())


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

Json = dict[str, Any]
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
        "caps": [asdict(row) for row in cap_rows(sizes.alone)],
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
    names = [name for name in PlanSetting.__slots__ if name != "stage_costs"]
    data = {name: getattr(setting, name) for name in names}
    return {**data, "profile": setting.profile.as_json(), "cp_sizes": list(setting.cp_sizes)}


def step_data(plan: Plan) -> Json:
    """One step: its figures, its sequences' lengths, its packs in time."""
    timeline = make_timeline(plan)
    unit = timeline.total / TICKS
    lengths = np.array([sequence.length for sequence in plan.sequences], dtype=np.int64)
    return {
        "stats": stats_data(plan.stats),
        "digest": plan.digest,
        "lengths": lengths.tolist(),
        "unit": unit,
        "total": TICKS,
        "overhead": round(plan.setting.profile.round / unit),
        "start": [one_or_many(row, unit) for row in timeline.start],
        "end": [one_or_many(row, unit) for row in timeline.end],
        "busy": [ticks(row, unit) for row in timeline.cost],
        "idle": significant(timeline.idle),
        "packs": pack_columns(plan, timeline, unit),
        "histogram": asdict(length_histogram(lengths)),
        "pipeline": pipeline_columns(plan),
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
    events = list(simulated.walk.events())
    kinds = sorted({event.kind for event in events}, reverse=True)
    tick = simulated.walk.finish / TICKS
    return {
        "unit": tick * simulated.unit,
        "total": TICKS,
        "bubbles": [significant(share) for share in simulated.rank_bubbles],
        "kinds": kinds,
        "rank": [event.rank for event in events],
        "stage": [event.stage for event in events],
        "round": [event.round for event in events],
        "kind": [kinds.index(event.kind) for event in events],
        "start": [round(event.start / tick) for event in events],
        "end": [round(event.end / tick) for event in events],
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
