"""Plans as JSON: the file that `longshore plan --json` writes.

In: the plans of one or more steps with one setting. Out: a dictionary. A pack of sequences 0 and 3
on lanes 2 and 3 reads

    {"first_lane": 2, "cp_size": 2, "sequences": [0, 3], "tokens_per_lane": 1024}

where a sequence is its place in the step. Empty packs are not listed, so an empty round is
{"packs": []}. Times are in the cost profile's unit, for the built-in profile estimated seconds.

The digest of a plan: a name for what was decided, which all ranks compare.

In: a setting, the sequences and the rounds. Out: 64 hex digits. Equal digests mean the same tensors
on every rank in every round, and the same collectives in the same order. With tp 2 instead of 1 the
same rounds have another digest: a rank holds half of a lane's rows.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

from longshore.plan.types import DEFAULT_POLICY, Pack, Plan, PlanSetting, Round, Sequence, Stats

FORMAT_VERSION = 1
WELL_USED = 0.95
WORTH_MENTIONING = 0.05

Json = dict[str, Any]

SETTING_KEYS = (
    *("lanes", "capacity", "policy", "sync", "pp", "vpp", "align", "max_sequences"),
    *("tp", "ep", "layout"),
)
STATS_KEYS = (
    "predicted",
    "lower_bound",
    "gap",
    "efficiency",
    "imbalance",
    "bubble",
    "fill",
    "padding",
    "tokens",
    "sum_squared_lengths",
    "planning_seconds",
)


def plans_as_json(plans: Seq[Plan]) -> Json:
    """The whole file: what was asked for, then each step."""
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


def _pack(pack: Pack) -> Json:
    return {
        "first_lane": pack.first_lane,
        "cp_size": pack.cp_size,
        "sequences": list(pack.sequences),
        "tokens_per_lane": pack.tokens_per_lane,
    }


DIGESTED = ("lanes", "capacity", "align", "sync", "cp_sizes", "pp", "vpp")
"""What of a setting decides how rounds are run: a lane's shapes, the groups, the order of work."""


def plan_digest(setting: PlanSetting, sequences: Seq[Sequence], rounds: Seq[Round]) -> str:
    """It does not tell why rounds were chosen (policy, costs), nor which samples the sequences are.

    Only in a pipeline do costs decide how rounds are run: by them ranks order their messages.
    """
    lines = [f"{name} {getattr(setting, name)}" for name in DIGESTED]
    lines += [f"{name} {value}" for name, value in _parallel(setting).items() if value]
    if setting.planned_by.pads_to_longest:
        lines.append("padded to the longest")
    if setting.pp > 1:
        lines += [f"layout {setting.layout}", f"{setting.profile}", f"{setting.shares}"]
    if setting.pp > 1 and setting.synced:
        lines.append(f"token-wise {setting.shares.tokenwise}")
    lines.append(" ".join(str(sequence.length) for sequence in sequences))
    for round_ in rounds:
        lines.append("round")
        lines += [
            f"{pack.first_lane} {pack.cp_size} {pack.tokens_per_lane}: "
            f"{' '.join(map(str, pack.sequences))}"
            for pack in round_.packs
        ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _parallel(setting: PlanSetting) -> dict[str, str]:
    """What is left out where it is not used."""
    return {
        "tp": f"{setting.tp}" if setting.tp > 1 else "",
        "ep": f"{setting.ep}" if setting.ep > 1 else "",
        "buckets": " ".join(map(str, setting.buckets)),
        "curve": f"{setting.profile.curve or ''}",
    }
