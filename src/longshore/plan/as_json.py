"""Plans as JSON: the file that `longshore plan --json` writes.

In: the plans of one or more steps with one setting. Out: a dictionary. A pack of sequences 0 and 3 on
lanes 2 and 3 reads

    {"first_lane": 2, "cp_size": 2, "sequences": [0, 3], "tokens_per_lane": 1024}

where a sequence is its place in the step. Empty packs are not listed; an empty round is {"packs": []}.
Times are in seconds, or in the unit of the caller's cost profile.
"""

from collections.abc import Sequence as Seq
from typing import Any

from longshore.plan.types import Pack, Plan

FORMAT_VERSION = 1

Json = dict[str, Any]

SETTING_KEYS = ("lanes", "capacity", "policy", "sync", "pp", "vpp", "align", "max_sequences")
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
    setting = plans[0].setting
    return {
        "version": FORMAT_VERSION,
        **{key: getattr(setting, key) for key in SETTING_KEYS},
        "cp_sizes": list(setting.cp_sizes),
        "profile": setting.profile.as_json(),
        "steps": [step_as_json(plan) for plan in plans],
    }


def step_as_json(plan: Plan) -> Json:
    return {
        "rounds": [{"packs": [_pack(pack) for pack in round_.packs]} for round_ in plan.rounds],
        **{key: getattr(plan.stats, key) for key in STATS_KEYS},
        "cp_histogram": {str(size): count for size, count in plan.stats.cp_histogram},
        "digest": plan.digest,
    }


def _pack(pack: Pack) -> Json:
    return {
        "first_lane": pack.first_lane,
        "cp_size": pack.cp_size,
        "sequences": list(pack.sequences),
        "tokens_per_lane": pack.tokens_per_lane,
    }
