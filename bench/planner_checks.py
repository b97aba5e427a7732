"""The planner's targets, each held against a run's worst case.

In: the outcomes of a run. Out: one Check for each target, with the worst case named.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cases import Case, lengths
from outcomes import POLICIES, SYNCS, Outcome, Outcomes

EQUAL = 1e-9
AGREES = 1e-6


@dataclass(frozen=True, slots=True)
class Check:
    """A target, the worst value met and where; `passed` is None where no case of the run tells."""

    target: str
    cases: int
    worst: str
    where: str
    passed: bool | None


@dataclass(frozen=True, slots=True)
class Value:
    """A measured value, None where there was no plan to measure, and where it was met."""

    where: str
    value: float | None


def checks(outcomes: Outcomes, growth: Outcomes) -> list[Check]:
    """All targets that a run can tell something about."""
    return [
        *_free_checks(outcomes),
        *_never_slower(outcomes),
        *_charged_checks(outcomes),
        *_time_checks(outcomes, growth),
        _valid_check(outcomes),
        *_own_word_checks(outcomes),
    ]


def at_least(target: str, limit: float, values: Iterable[Value]) -> Check:
    """The smallest value, which must reach the limit; a missing one fails."""
    found = [(-math.inf if v.value is None else v.value, v.where) for v in values]
    if not found:
        return Check(target, 0, "–", "no such case in this run", None)
    worst, where = min(found)
    said = "no plan" if worst == -math.inf else f"{worst:.3f}"
    return Check(target, len(found), said, where, worst >= limit)


def at_most(target: str, limit: float, values: Iterable[Value]) -> Check:
    """The largest value, which must not pass the limit; a missing one fails."""
    found = [(math.inf if v.value is None else v.value, v.where) for v in values]
    if not found:
        return Check(target, 0, "–", "no such case in this run", None)
    worst, where = max(found)
    said = "no plan" if worst == math.inf else f"{worst:.3g}"
    return Check(target, len(found), said, where, worst <= limit)


def _shares(outcomes: Iterable[Outcome]) -> Iterator[Value]:
    return (Value(o.case.name, o.share) for o in outcomes)


def _free_checks(outcomes: Outcomes) -> Iterator[Check]:
    found = outcomes.select("free", "round")
    many = [o for o in found if o.case.sequences >= 4 * o.case.lanes]
    few = [o for o in found if o.case.sequences < 4 * o.case.lanes]
    text = "free, round: `mixed` reaches {} of the bound, {} 4 sequences a lane"
    yield at_least(text.format("≥ 0.97", "at least"), 0.97, _shares(many))
    yield at_least(text.format("≥ 0.90", "fewer than"), 0.90, _shares(few))


def _never_slower(outcomes: Outcomes) -> Iterator[Check]:
    for sync in SYNCS:
        found = outcomes.select("charged", sync)
        for policy in ("balanced", "dynamic", "static"):
            values = [Value(o.case.name, outcomes.speed_up(o, policy)) for o in found]
            target = f"charged, {sync}: `mixed` ≥ 1 times as fast as `{policy}`"
            yield at_least(target, 1 - EQUAL, values)


def one_round(case: Case) -> bool:
    """Whether all tokens fit into one round and there is at least one sequence a lane."""
    return case.sequences >= case.lanes and sum(lengths(case)) <= case.lanes * case.capacity


def _charged_checks(outcomes: Outcomes) -> Iterator[Check]:
    found = outcomes.select("charged", "round")
    tail = [o for o in found if o.case.kind == "long tail"]
    wide = [o for o in tail if o.case.lanes >= 128]
    values = [Value(o.case.name, outcomes.speed_up(o, "balanced")) for o in wide]
    target = "charged, round: `mixed` ≥ 1.4 times as fast as `balanced`, long tail from 128 lanes"
    yield at_least(target, 1.4, values)
    able = [o for o in wide if _most_gain(outcomes, o) >= 1.4]
    values = [Value(o.case.name, outcomes.speed_up(o, "balanced")) for o in able]
    yield at_least(f"{target}, where the stated bound allows as much", 1.4, values)
    text = "charged, round: `mixed` reaches {} of the bound, {}"
    eight = [o for o in found if o.case.lanes == 8]
    yield at_least(text.format("≥ 0.95", "8 lanes"), 0.95, _shares(eight))
    single = [o for o in found if one_round(o.case)]
    where = "where one round holds all tokens and each lane has a sequence"
    yield at_least(text.format("≥ 0.95", where), 0.95, _shares(single))
    stated = [Value(o.case.name, _stated_share(o)) for o in single]
    yield at_least(f"{text.format('≥ 0.95', where)}, as longshore states it", 0.95, stated)
    rest = [o for o in tail if o not in eight and o not in single]
    yield at_least(text.format("≥ 0.85", "long tail elsewhere"), 0.85, _shares(rest))


def _most_gain(outcomes: Outcomes, mixed: Outcome) -> float:
    """How many times as fast as `balanced` a plan could be that takes no longer than the bound."""
    balanced = outcomes.by_key[(mixed.case, mixed.profile, mixed.sync, "balanced")]
    if balanced.predicted is None or not mixed.said_bound:
        return math.inf
    return balanced.predicted / mixed.said_bound


def _stated_share(outcome: Outcome) -> float | None:
    """The share of the bound that the plan itself states, which also counts packs and rounds."""
    if outcome.predicted is None or outcome.said_bound is None:
        return None
    return outcome.said_bound / outcome.predicted


def _time_checks(outcomes: Outcomes, growth: Outcomes) -> Iterator[Check]:
    everything = [o for o in outcomes.all + growth.all if o.policy == "mixed"]
    for sequences, lanes, limit in ((4096, 1024, 0.5), (1024, 128, 0.1), (65536, 16384, 10.0)):
        shape = (sequences, lanes)
        found = [o for o in everything if (o.case.sequences, o.case.lanes) == shape]
        values = [Value(f"{o.case.name}, {o.profile}, {o.sync}", o.seconds) for o in found]
        text = f"planning {sequences} on {lanes} takes ≤ {{}} s"
        yield at_most(text.format(limit), limit, values)
        if limit < 10:
            yield at_most(f"{text.format(limit / 5)} (the aim)", limit / 5, values)


def _valid_check(outcomes: Outcomes) -> Check:
    ours = [o for o in outcomes.all if o.policy in POLICIES]
    bad = [o for o in ours if o.faults or o.predicted is None]
    where = ""
    if bad:
        why = bad[0].faults[0] if bad[0].faults else bad[0].note
        where = f"{bad[0].policy}, {bad[0].case.name}, {bad[0].profile}, {bad[0].sync}: {why}"
    return Check("every plan is valid", len(ours), f"{len(bad)} are not", where, not bad)


def _own_word_checks(outcomes: Outcomes) -> Iterator[Check]:
    """What longshore says of its plans must be what the evaluator finds."""
    ours = [o for o in outcomes.all if o.policy in POLICIES and o.predicted is not None]
    apart, gain = [], []
    for o in ours:
        where = f"{o.policy}, {o.case.name}, {o.profile}, {o.sync}"
        if o.predicted is not None and o.said_predicted is not None and o.said_bound is not None:
            apart.append(Value(where, abs(o.said_predicted / o.predicted - 1)))
            gain.append(Value(where, o.said_bound / o.predicted))
    yield at_most("longshore's predicted time is the evaluator's, to 1e-6", AGREES, apart)
    yield at_most("no plan beats the bound that longshore states", 1 + AGREES, gain)
    beaten = [Value(f"{o.policy}, {o.case.name}, {o.profile}, {o.sync}", o.share) for o in ours]
    yield at_most("no plan beats the evaluator's bound", 1 + EQUAL, beaten)
