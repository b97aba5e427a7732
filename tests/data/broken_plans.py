"""Plans that a planner of one's own may make: each way to break a valid one, and what is said."""

from dataclasses import replace

from longshore.plan import Pack, Plan, Round, Sequence
from longshore.plan.shapes import padded_length


def tokens(plan: Plan, sequences, cp_size: int) -> int:
    """Of each lane, as the plan would say it."""
    lengths = [plan.sequences[place].length for place in sequences]
    if plan.setting.policy == "padded":
        lengths = [max(sequence.length for sequence in plan.sequences)] * len(lengths)
    return sum(padded_length(length, cp_size) for length in lengths) // cp_size


def with_pack(plan: Plan, pack: Pack, *more: Pack) -> Plan:
    """The first pack of the first round replaced, by one or more."""
    first, *rounds = plan.rounds
    packs = (pack, *more, *first.packs[1:])
    ordered = sorted(packs, key=lambda pack: (-pack.cp_size, pack.first_lane))
    return replace(plan, rounds=(Round(tuple(ordered)), *rounds))


def first_pack(plan: Plan) -> Pack:
    return plan.rounds[0].packs[0]


def holding(plan: Plan, sequences) -> Plan:
    pack = first_pack(plan)
    size = tokens(plan, sequences, pack.cp_size)
    return with_pack(plan, replace(pack, sequences=tuple(sequences), tokens_per_lane=size))


def dropped(plan: Plan) -> Plan:
    rest = first_pack(plan).sequences[1:]
    if rest:
        return holding(plan, rest)
    packs = plan.rounds[0].packs[1:]
    return replace(plan, rounds=(Round(packs), *plan.rounds[1:]))


def forgotten(plan: Plan) -> Plan:
    """Neither among the packs nor among the sequences: the plan itself looks whole."""
    last = len(plan.sequences) - 1
    rounds = [
        Round(
            tuple(
                replace(
                    pack,
                    sequences=tuple(i for i in pack.sequences if i != last),
                    tokens_per_lane=tokens(
                        plan, [i for i in pack.sequences if i != last], pack.cp_size
                    ),
                )
                for pack in round_.packs
                if pack.sequences != (last,)
            )
        )
        for round_ in plan.rounds
    ]
    return replace(plan, sequences=plan.sequences[:-1], rounds=tuple(rounds))


def longer(plan: Plan) -> Plan:
    first, *others = plan.sequences
    return replace(plan, sequences=(replace(first, length=first.length + 1), *others))


def of_wrong_labels(plan: Plan) -> Plan:
    """As if the planner had been given lengths alone."""
    found = (Sequence(i, s.length, s.length + 1) for i, s in enumerate(plan.sequences))
    return replace(plan, sequences=tuple(found))


def beside_the_lanes(plan: Plan) -> Plan:
    pack = first_pack(plan)
    lanes = plan.setting.lanes
    return with_pack(plan, replace(pack, first_lane=-(-lanes // pack.cp_size) * pack.cp_size))


def over_capacity(plan: Plan) -> Plan:
    most = max(pack.tokens_per_lane for _, pack in plan.packs())
    setting = replace(plan.setting, capacity=most - 1, align=1)
    return replace(plan, setting=setting)


def with_setting(**changes):
    return lambda plan: replace(plan, setting=replace(plan.setting, **changes))


BROKEN = {
    "a sequence is dropped": (dropped, "is in the plan 0 times; it must be there once"),
    "a sequence is forgotten": (forgotten, "sequences, but the step has"),
    "a sequence is trained twice": (
        lambda plan: holding(plan, [first_pack(plan).sequences[0], *first_pack(plan).sequences]),
        "is in the plan 2 times; it must be there once",
    ),
    "a sequence that is not there": (
        lambda plan: holding_as_is(plan, len(plan.sequences)),
        "there is no sequence",
    ),
    "a sequence counted from the end": (lambda plan: holding_as_is(plan, -1), "no sequence -1"),
    "another length": (longer, "sequence 0: the plan has Sequence"),
    "other labels": (of_wrong_labels, "sequence 0: the plan has Sequence"),
    "a lane that is not there": (beside_the_lanes, "does not fit there on .* lanes"),
    "a lane before the first": (
        lambda plan: with_pack(
            plan, replace(first_pack(plan), first_lane=-first_pack(plan).cp_size)
        ),
        "does not fit there on .* lanes",
    ),
    "for more lanes": (
        lambda plan: with_setting(lanes=plan.setting.lanes + 1)(plan),
        "lanes, but the run has",
    ),
    "more than a lane holds": (over_capacity, "tokens, but the capacity is"),
    "other tokens": (
        lambda plan: with_pack(
            plan, replace(first_pack(plan), tokens_per_lane=first_pack(plan).tokens_per_lane + 1)
        ),
        "tokens_per_lane is",
    ),
    "a CP size that is not legal": (with_setting(cp_sizes=(64,)), "is not legal"),
    "no CP size": (with_setting(cp_sizes=()), "the smallest CP size is 0"),
    "nothing in a lane": (with_setting(capacity=0), "capacity is 0; it must be at least 1"),
    "an empty pack": (
        lambda plan: with_pack(plan, first_pack(plan), Pack(0, 1, (), 0)),
        "a pack has no sequences",
    ),
    "no rounds": (lambda plan: replace(plan, rounds=()), "no rounds"),
    "no plan": (lambda plan: None, "returned NoneType; it must return a Plan"),
}


def holding_as_is(plan: Plan, place: int) -> Plan:
    pack = first_pack(plan)
    return with_pack(plan, replace(pack, sequences=(*pack.sequences, place)))
