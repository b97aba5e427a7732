"""The planner's section of RESULTS.md.

In: the outcomes of a run. Out: Markdown, the short answers first and every case after.
"""

import statistics
from collections.abc import Iterator

from cases import KINDS, PROFILES, Case
from outcomes import FITTED, OWN, POLICIES, SYNCS, Outcome, Outcomes
from planner_checks import Check
from results import table

# DESIGN.md's figures of Megatron's newer scheduler: efficiency and planning seconds.
RECORDED = (
    (Case("long tail", 1024, 128, 16384), "0.60", "0.54", "1.2 s"),
    (Case("long tail", 4096, 1024, 16384), "0.27", "0.27", "74 s"),
    (Case("two kinds", 1024, 1024, 16384), "0.12", "0.12", "3.3 s"),
    (Case("two kinds", 1024, 8, 16384), "1.00", "1.00", "0.2 s"),
)

READING = """\
All plans are scored by `bench/evaluate.py`, which shares no code with the planner. A share is lower
bound / predicted time: 1 is the best possible. Profiles: *free* charges no communication, *charged*
0.01 token-equivalents a gathered token inside a node of 8 lanes, 0.08 across nodes, and 64 a pack.

Megatron is `BalancedCPScheduler` of megatron-core {version}, as published. It runs a lane's
sequences of a group one by one and makes all lanes wait after each group, so its capacity holds for
a sequence, not for a round. *Own* reads a group as one round, which favours it: it pays for a pack
once a group and holds more tokens than the capacity where marked †. *Fitted* fills its sequences,
in its order, into rounds within the capacity. Lengths are padded for the CP size really used, which
favours it as well, and so does sync `step`, where its waiting after each group is forgiven. Its
plan does not depend on the profile or the sync mode."""

NO_MEGATRON = """\


**Megatron's columns are empty: megatron-core is not installed**; the extra `bench` has it."""

RECORDED_NOTE = """\
Recorded, not measured in this run: efficiency (arithmetic on real tokens, spread over all lanes, /
predicted time) of Megatron's newer schedulers, from the project's design page; other draws of the
same distributions, free profile, sync `round`. Beside them `mixed`, measured here."""


def report(
    outcomes: Outcomes, growth: Outcomes, found: list[Check], megatron: str | None, about: str
) -> str:
    """The whole section; `about` says where and how it was measured."""
    reading = READING.format(version=megatron or "(not installed)")
    spread = "Smallest / median / largest over the cases."
    parts = [
        f"## Planner\n\n{about}\n\n{reading}{'' if megatron else NO_MEGATRON}\n",
        f"### Targets\n\n{check_table(found)}",
        f"### `mixed` in short\n\n{spread}\n\n{_summary(outcomes)}",
        f"### Growth of the planning time\n\nLong tail, `mixed`, seconds.\n\n{_growth(growth)}",
        f"### Megatron's newer schedulers\n\n{RECORDED_NOTE}\n\n{_recorded(outcomes)}",
    ]
    for profile in PROFILES:
        for sync in SYNCS:
            title = f"### Share of the lower bound: {profile} profile, sync `{sync}`"
            parts.append(f"{title}\n\n{_shares(outcomes, profile, sync)}")
    parts.append(f"### Planning seconds\n\nOne thread, best of 3.\n\n{_seconds(outcomes)}")
    return "\n".join(parts)


def check_table(found: list[Check]) -> str:
    words = {True: "pass", False: "**fail**", None: "–"}
    rows = [[c.target, str(c.cases), c.worst, c.where or "–", words[c.passed]] for c in found]
    return table(["target", "cases", "worst", "where", "met"], rows)


def _spread(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "–"
    return f"{min(known):.2f} / {statistics.median(known):.2f} / {max(known):.2f}"


def _summary(outcomes: Outcomes) -> str:
    header = ["profile, sync", "lengths", "share of the bound", "times as fast as `balanced`"]
    header += ["as Megatron (own)", "as Megatron (fitted)"]
    rows = []
    for profile in PROFILES:
        for sync in SYNCS:
            for kind in KINDS:
                found = [o for o in outcomes.select(profile, sync) if o.case.kind == kind]
                row = [f"{profile}, {sync}", kind, _spread([o.share for o in found])]
                for other in ("balanced", OWN, FITTED):
                    row.append(_spread([outcomes.speed_up(o, other) for o in found]))
                rows.append(row)
    return table(header, rows)


def _growth(growth: Outcomes) -> str:
    header = ["sequences on lanes"]
    header += [f"{profile}, {sync}" for profile in PROFILES for sync in SYNCS]
    header += ["share of the bound (charged, round)", "Megatron"]
    rows = []
    for case in _cases(growth):
        row = [f"{case.sequences} on {case.lanes}"]
        for profile in PROFILES:
            row += [growth.get(case, profile, sync, "mixed").seconds_cell for sync in SYNCS]
        row.append(growth.get(case, "charged", "round", "mixed").share_cell)
        row.append(growth.get(case, "charged", "round", OWN).seconds_cell)
        rows.append(row)
    return table(header, rows)


def _recorded(outcomes: Outcomes) -> str:
    header = ["case", "`dp_balanced` (recorded)", "`default_dynamic_cp` (recorded)"]
    header += ["its planning (recorded)", "`mixed`", "its planning"]
    rows = []
    for case, balanced, dynamic, seconds in RECORDED:
        ours = outcomes.by_key.get((case, "free", "round", "mixed"))
        cells = ["not in this run", "–"] if ours is None else [_efficiency(ours), ours.seconds_cell]
        rows.append([case.name, balanced, dynamic, seconds, *cells])
    return table(header, rows)


def _efficiency(outcome: Outcome) -> str:
    return outcome.note if outcome.efficiency is None else f"{outcome.efficiency:.2f}"


def _shares(outcomes: Outcomes, profile: str, sync: str) -> str:
    header = ["case", *(f"`{policy}`" for policy in POLICIES), "Megatron own", "Megatron fitted"]
    header += ["`mixed` × `balanced`", "× own", "× fitted"]
    rows = []
    for mixed in outcomes.select(profile, sync):
        row = [mixed.case.name]
        row += [outcomes.beside(mixed, policy).share_cell for policy in (*POLICIES, OWN, FITTED)]
        for other in ("balanced", OWN, FITTED):
            times = outcomes.speed_up(mixed, other)
            row.append("–" if times is None else f"{times:.2f}")
        rows.append(row)
    return table(header, rows)


def _seconds(outcomes: Outcomes) -> str:
    """Charged profile, sync `round`; beside it the slowest `mixed` of all profiles and modes."""
    header = ["case", *(f"`{policy}`" for policy in POLICIES), "slowest `mixed`", "Megatron"]
    rows = []
    for case in _cases(outcomes):
        found = [outcomes.get(case, "charged", "round", policy) for policy in (*POLICIES, OWN)]
        cells = [o.seconds_cell for o in found]
        mixed = [outcomes.get(case, p, s, "mixed").seconds for p in PROFILES for s in SYNCS]
        slowest = max((m for m in mixed if m is not None), default=None)
        cells.insert(-1, "–" if slowest is None else f"{slowest:.4f}")
        rows.append([case.name, *cells])
    return table(header, rows)


def _cases(outcomes: Outcomes) -> Iterator[Case]:
    return iter(dict.fromkeys(o.case for o in outcomes.all))
