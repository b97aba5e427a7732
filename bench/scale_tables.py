"""The section "Scale" of RESULTS.md, and the panels of its drawing.

In: the outcomes of a run. Out: Markdown, targets first; and panels for scale_plots.py.
"""

from collections.abc import Iterator

from outcomes import POLICIES
from planner_checks import Check, Value, at_least, at_most
from planner_tables import check_table
from results import table
from scale_outcomes import ScaleOutcome
from scale_plots import Line, Panel

from longshore.advisor.peak_memory import (
    LARGER_BYTES,
    MIB,
    PAIR_BYTES,
    JoinedGroup,
    communicator_bytes,
    joined_groups,
)
from longshore.plan.types import Axes

WANTED = 1.4
FROM_LANES = 128
MOST_SECONDS = 10.0
MOST_GROUPS = 30
GATHERED_BYTES = 24
LARGEST = (8, 8, 64)
"""tp, pp, ep."""

READING = """\
Long tail (lognormal, median 1024, sigma 1.5, at most 131072), capacity 16384, sync `round`, the
*charged* profile of the planner's benchmark: 0.01 token-equivalents a gathered token inside a node
of 8 lanes, 0.08 across nodes, 64 a pack. Simulated: nothing of this ran on such machines. Scored by
`bench/evaluate.py`, which shares no code with the planner. *Over the bound* is the step's predicted
time / the lower bound that the plan states; 1 is the best possible. *Speed* is tokens per second
relative to the best balanced plan, which has the best CP size for all sequences. With *pp 4* each
lane has four equal stages. With *experts* a round takes the largest mixer part of any lane and the
largest token-wise part of any lane; {share:.3f} of a token's linear cost is the mixer's, as in
{model}'s FLOPs, and plans are made for that. Bounds are not always within reach: with experts
the mixers' bound and the mean lane's tokens are added up, and in a pipeline of few rounds the
bound knows little of how they wait."""

PLANS = """\
CPU seconds of planning, rounds, and the size of the `mixed` plan as JSON. No plan is sent: every
rank gathers {bytes} bytes for each sequence, plans by itself and compares a digest. With experts
plans are the same."""

GROUPS = """\
Computed by `advisor/peak_memory.py` for rank 0, which joins most; a test compares it with what
ranks open, except for experts. There are log2(lanes) + 1 CP groups. Communicator memory is an
assumption, not measured: {pair} MiB for a group of two ranks and {larger} MiB for a larger one once
it is used, as reported for A100s; it grows with the channels that NCCL may use. *Blocks* are the
groups of all ranks together: on the host a rank calls `new_group` for every block, on the GPU one
split makes all blocks of a kind, except for embedding copies."""


def report(outcomes: list[ScaleOutcome], *, about: str, model: str, share: float) -> str:
    """The whole section."""
    parts = [
        f"## Scale\n\n{about}\n\n{READING.format(share=share, model=model)}\n",
        "![Plans on 64 to 16,384 lanes](../docs/drawings/scale.svg)\n",
        f"### Targets\n\n{check_table(list(checks(outcomes)))}",
        f"### Where `mixed` is not {WANTED} times as fast as `balanced`\n\n{_slower(outcomes)}",
    ]
    for pp, experts in _combinations(outcomes):
        title = f"{'pp ' + str(pp) if pp > 1 else 'no pipeline'}, {'' if experts else 'no '}experts"
        cases = [o for o in outcomes if (o.pp, o.experts) == (pp, experts)]
        parts.append(f"### Over the bound, and speed: {title}\n\n{_speeds(cases)}")
    parts.append(f"### Plans\n\n{PLANS.format(bytes=GATHERED_BYTES)}\n\n{_plans(outcomes)}")
    assumed = GROUPS.format(pair=PAIR_BYTES // MIB, larger=LARGER_BYTES // MIB)
    parts.append(f"### Process groups of a rank\n\n{assumed}\n\n{_groups(outcomes)}")
    return "\n".join(parts)


def _combinations(outcomes: list[ScaleOutcome]) -> list[tuple[int, bool]]:
    return list(dict.fromkeys((o.pp, o.experts) for o in outcomes))


def checks(outcomes: list[ScaleOutcome]) -> Iterator[Check]:
    """What is wanted at scale."""
    for pp, experts in _combinations(outcomes):
        mixed = [o for o in _of(outcomes, "mixed") if (o.pp, o.experts) == (pp, experts)]
        able = [o for o in mixed if o.case.lanes >= FROM_LANES and o.most_speed >= WANTED]
        values = [Value(o.name, o.speed) for o in able]
        kind = f"{'' if pp == 1 else f', pp {pp}'}{', experts' if experts else ''}"
        target = (
            f"`mixed` ≥ {WANTED} times as fast as `balanced`, long tail from {FROM_LANES} lanes"
        )
        yield at_least(f"{target}, where the bound allows it{kind}", WANTED, values)
    mixed = _of(outcomes, "mixed")
    never = [Value(o.name, o.speed) for o in mixed if not o.experts]
    yield at_least("`mixed` ≥ 1 times as fast as `balanced`, no experts", 1 - 1e-9, never)
    few = [o for o in mixed if o.case.sequences <= 2 * o.case.lanes]
    for pp in dict.fromkeys(o.pp for o in few):
        values = [Value(o.name, o.seconds) for o in few if o.pp == pp and not o.experts]
        kind = "" if pp == 1 else f", pp {pp}"
        target = f"planning 2 sequences a lane takes ≤ {MOST_SECONDS:g} s{kind}"
        yield at_most(target, MOST_SECONDS, values)
    bad = [f"{o.policy}, {o.name}: {o.faults[0]}" for o in outcomes if o.faults]
    where = bad[0] if bad else ""
    target = "every plan is valid and takes the time it says"
    yield Check(target, len(outcomes), f"{len(bad)} are not", where, not bad)
    counts = [
        Value(f"{lanes} lanes", sum(group.on_gpu for group in largest_job(lanes)))
        for lanes in _lanes(outcomes)
    ]
    yield at_most(f"a rank joins ≤ {MOST_GROUPS} groups on the GPU", MOST_GROUPS, counts)


def _of(outcomes: list[ScaleOutcome], policy: str) -> list[ScaleOutcome]:
    return [o for o in outcomes if o.policy == policy]


def _lanes(outcomes: list[ScaleOutcome]) -> list[int]:
    return list(dict.fromkeys(o.case.lanes for o in outcomes))


def _slower(outcomes: list[ScaleOutcome]) -> str:
    header = ["case", "speed of `mixed`", "most that the bound allows", "why"]
    rows = []
    for o in _of(outcomes, "mixed"):
        if o.case.lanes >= FROM_LANES and o.speed < WANTED:
            rows.append([o.name, f"{o.speed:.2f}", f"{o.most_speed:.2f}", _why(o)])
    return table(header, rows) if rows else f"Nowhere, from {FROM_LANES} lanes.\n"


def _why(outcome: ScaleOutcome) -> str:
    if outcome.most_speed < WANTED:
        return "the bound"
    return "**the plan, not the best, or a bound out of reach**"


def _speeds(outcomes: list[ScaleOutcome]) -> str:
    header = ["sequences on lanes", *(f"`{policy}` / bound" for policy in POLICIES)]
    header += [f"speed of `{policy}`" for policy in POLICIES if policy != "balanced"]
    rows = []
    for case in dict.fromkeys(o.case for o in outcomes):
        by_policy = {o.policy: o for o in outcomes if o.case == case}
        row = [f"{case.sequences} on {case.lanes}"]
        row += [f"{by_policy[policy].over_bound:.2f}" for policy in POLICIES]
        row += [f"{by_policy[policy].speed:.2f}" for policy in POLICIES if policy != "balanced"]
        rows.append(row)
    return table(header, rows)


def _plans(outcomes: list[ScaleOutcome]) -> str:
    header = ["sequences on lanes", "pp", *(f"`{policy}`, s" for policy in POLICIES)]
    header += [*(f"`{policy}`, rounds" for policy in POLICIES), "plan", "gathered"]
    rows = []
    planned = [o for o in outcomes if not o.experts]
    for case, pp in dict.fromkeys((o.case, o.pp) for o in planned):
        by_policy = {o.policy: o for o in planned if (o.case, o.pp) == (case, pp)}
        row = [f"{case.sequences} on {case.lanes}", str(pp)]
        row += [f"{by_policy[policy].seconds:.2f}" for policy in POLICIES]
        row += [str(by_policy[policy].rounds) for policy in POLICIES]
        gathered = GATHERED_BYTES * case.sequences
        rows.append(
            [*row, f"{by_policy['mixed'].bytes / MIB:.2f} MiB", f"{gathered / MIB:.2f} MiB"]
        )
    return table(header, rows)


def largest_job(lanes: int) -> tuple[JoinedGroup, ...]:
    """The groups of a rank where every axis is used and the embedding is tied."""
    tp, pp, ep = LARGEST
    return joined_groups(Axes(lanes=lanes, tp=tp, pp=pp, ep=ep), copies=2)


def _groups(outcomes: list[ScaleOutcome]) -> str:
    header = ["lanes", "tp", "pp", "ep", "groups on the GPU", "on the host", "communicators"]
    header += ["blocks on the GPU", "blocks on the host"]
    rows = []
    for (tp, pp, ep), copies in (((1, 1, 1), 1), (LARGEST, 2)):
        for lanes in _lanes(outcomes):
            groups = joined_groups(Axes(lanes=lanes, tp=tp, pp=pp, ep=ep), copies=copies)
            on_gpu = [group for group in groups if group.on_gpu]
            on_host = [group for group in groups if not group.on_gpu]
            rows.append(
                [
                    f"{lanes:,}",
                    *map(str, (tp, pp, ep)),
                    str(len(on_gpu)),
                    str(len(on_host)),
                    f"{communicator_bytes(groups) / (1 << 30):.1f} GiB",
                    f"{sum(group.blocks for group in on_gpu):,}",
                    f"{sum(group.blocks for group in on_host):,}",
                ]
            )
    return table(header, rows)


def panels(outcomes: list[ScaleOutcome]) -> list[Panel]:
    """With the most sequences a lane: shares of the bound twice, speeds, planning time."""
    each = max(o.case.sequences // o.case.lanes for o in outcomes)
    many = [o for o in outcomes if o.case.sequences == each * o.case.lanes]
    plain = [o for o in many if o.pp == 1 and not o.experts]
    expert = [o for o in many if o.pp == 1 and o.experts]
    piped = [o for o in many if o.pp > 1 and not o.experts]
    over = "step time / lower bound (1 is the best possible)"
    return [
        Panel(f"{each} sequences a lane", over, _lines(plain, "over_bound"), marked=1.0),
        Panel("The same, with experts", over, _lines(expert, "over_bound"), marked=1.0),
        Panel("The same, in a pipeline of 4", over, _lines(piped, "over_bound"), marked=1.0),
        Panel("Planning, no pipeline", "CPU seconds", _lines(plain, "seconds"), log=True),
    ]


def _lines(outcomes: list[ScaleOutcome], field: str) -> tuple[Line, ...]:
    return tuple(
        Line(policy, tuple((o.case.lanes, getattr(o, field)) for o in _of(outcomes, policy)))
        for policy in POLICIES
    )
