"""check(plan): every promise a plan makes, verified from the plan alone.

In: a Plan. Out: nothing, or a ValueError that names the first promise broken and where. It shares
no arithmetic with the planner: padding, alignment and legality are computed here again.

check_step(plan, sequences, lanes=…) verifies besides that the plan is of the step that was asked
for. data/steps.py calls it for every plan of any planner: it costs a few percent of make_plan.
"""

from collections.abc import Sequence as Seq

import numpy as np

from longshore.plan.types import Pack, Plan, PlanSetting, Round, Sequence


def check_step(plan: Plan, sequences: Seq[Sequence], *, lanes: int) -> None:
    """Raises ValueError unless the plan trains just these sequences, on just these lanes."""
    if not isinstance(plan, Plan):
        raise ValueError(f"the planner returned {type(plan).__name__}; it must return a Plan")
    if plan.setting.lanes != lanes:
        raise ValueError(
            f"the plan is for {plan.setting.lanes} lanes, but the run has {lanes}; give the "
            "planner the lanes of the topology"
        )
    if len(plan.sequences) != len(sequences):
        raise ValueError(
            f"the plan has {len(plan.sequences)} sequences, but the step has {len(sequences)}; "
            "a planner must keep every sequence"
        )
    for number, (has, given) in enumerate(zip(plan.sequences, sequences, strict=True)):
        if has != given:
            raise ValueError(
                f"sequence {number}: the plan has {has}, but the planner was given {given}; a "
                "planner must not change or reorder sequences"
            )
    check(plan)


def check(plan: Plan) -> None:
    """Raises ValueError unless the plan keeps every promise."""
    setting = plan.setting
    _sane_setting(setting)
    lengths = [sequence.length for sequence in plan.sequences]
    check_rounds(plan.rounds, setting=setting, lengths=lengths)
    if setting.vpp > 1 and len(plan.rounds) % setting.pp:
        raise ValueError(
            f"the plan has {len(plan.rounds)} rounds, but an interleaved pipeline of "
            f"{setting.pp} ranks needs a multiple of {setting.pp}"
        )


def check_rounds(rounds: Seq[Round], *, setting: PlanSetting, lengths: Seq[int]) -> None:
    """Raises ValueError unless the rounds hold each sequence once, within every limit."""
    if not rounds:
        raise ValueError("the plan has no rounds; even a step without work has one")
    if not lengths:
        raise ValueError("the plan has no sequences; a step has at least one")
    _each_sequence_once(rounds, len(lengths))
    sizes = [max(lengths)] * len(lengths) if setting.planned_by.pads_to_longest else lengths
    for number, round_ in enumerate(rounds):
        for pack in round_.packs:
            where = f"round {number}, lane {pack.first_lane}"
            _legal_group(setting, pack, where)
            _honest_tokens(pack, sizes, where)
        _ordered(round_, number)
        _lanes_within_limits(setting, round_, number, sequences=len(lengths))


def _sane_setting(setting: PlanSetting) -> None:
    names = ("lanes", "capacity", "align", "pp", "vpp", "tp", "ep")
    numbers: dict[str, int] = {name: getattr(setting, name) for name in names}
    numbers["the smallest CP size"] = min(setting.cp_sizes, default=0)
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"plan: {name} is {number}; it must be at least 1")
    if setting.align % setting.tp:
        raise ValueError(
            f"plan: align is {setting.align}; it must be a multiple of tp, {setting.tp}"
        )
    if (setting.lanes * setting.tp) % setting.ep:
        raise ValueError(
            f"plan: ep is {setting.ep}; it must divide lanes × tp, {setting.lanes} × {setting.tp}"
        )
    if setting.ep > 1 and setting.sync == "step":
        raise ValueError(f"plan: sync 'step' does not work with ep {setting.ep}; use 'round'")
    buckets, most = setting.buckets, setting.capacity - setting.capacity % setting.align
    if any(size < 1 or size % setting.align for size in buckets):
        raise ValueError(f"plan: buckets are {buckets}; each must be a multiple of {setting.align}")
    if buckets and (sorted(set(buckets)) != list(buckets) or buckets[-1] != most):
        raise ValueError(f"plan: buckets are {buckets}; they must rise, up to the capacity {most}")


def _each_sequence_once(rounds: Seq[Round], sequences: int) -> None:
    times = [0] * sequences
    for number, round_ in enumerate(rounds):
        for sequence in (sequence for pack in round_.packs for sequence in pack.sequences):
            if not 0 <= sequence < sequences:
                raise ValueError(f"round {number}: there is no sequence {sequence}")
            times[sequence] += 1
    for sequence, count in enumerate(times):
        if count != 1:
            raise ValueError(
                f"sequence {sequence}: it is in the plan {count} times; it must be there once"
            )


def _legal_group(setting: PlanSetting, pack: Pack, where: str) -> None:
    if not pack.sequences:
        raise ValueError(f"{where}: a pack has no sequences; leave it out")
    if pack.cp_size not in setting.cp_sizes:
        legal = ", ".join(map(str, setting.cp_sizes))
        raise ValueError(f"{where}: CP size {pack.cp_size} is not legal; legal are {legal}")
    if pack.first_lane % pack.cp_size:
        raise ValueError(
            f"{where}: a pack of CP size {pack.cp_size} must start at a multiple of {pack.cp_size}"
        )
    if pack.first_lane < 0 or pack.first_lane + pack.cp_size > setting.lanes:
        raise ValueError(
            f"{where}: a pack of CP size {pack.cp_size} does not fit there on {setting.lanes} lanes"
        )


def _honest_tokens(pack: Pack, lengths: Seq[int], where: str) -> None:
    total = 0
    chunk = 1 if pack.cp_size == 1 else 2 * pack.cp_size
    for sequence in pack.sequences:
        length = lengths[sequence]
        total += length if length % chunk == 0 else length + chunk - length % chunk
    if total != pack.tokens_per_lane * pack.cp_size:
        raise ValueError(
            f"{where}: tokens_per_lane is {pack.tokens_per_lane}, but the pack has {total} padded "
            f"tokens on {pack.cp_size} lanes"
        )


def _ordered(round_: Round, number: int) -> None:
    keys = [(-pack.cp_size, pack.first_lane) for pack in round_.packs]
    if keys != sorted(keys):
        raise ValueError(f"round {number}: packs must be sorted by CP size, largest first")
    if len(set(keys)) < len(keys):
        raise ValueError(f"round {number}: two packs have the same lanes; join them")


def _lanes_within_limits(
    setting: PlanSetting, round_: Round, number: int, *, sequences: int
) -> None:
    # Differences between neighbouring lanes: a pack adds at its first, subtracts after its last.
    change = np.zeros((setting.lanes + 1, 3), dtype=np.int64)
    rows = [(pack.tokens_per_lane, len(pack.sequences), 1) for pack in round_.packs]
    adds = np.array(rows, dtype=np.int64).reshape(-1, 3)
    first = np.array([pack.first_lane for pack in round_.packs], dtype=np.int64)
    size = np.array([pack.cp_size for pack in round_.packs], dtype=np.int64)
    np.add.at(change, first, adds)
    np.add.at(change, first + size, -adds)
    tokens, count, packs = np.cumsum(change[:-1], axis=0).T
    tokens = tokens + -tokens % setting.align
    most = sequences if setting.max_sequences is None else setting.max_sequences
    too_much = tokens > setting.capacity
    too_many = count > most
    too_mixed = (packs > 1) & setting.planned_by.one_pack_per_lane
    for lane in np.flatnonzero(too_much | too_many | too_mixed).tolist():
        where = f"round {number}, lane {lane}"
        if too_much[lane]:
            raise ValueError(
                f"{where}: {tokens[lane]} tokens, but the capacity is {setting.capacity}"
            )
        if too_many[lane]:
            raise ValueError(f"{where}: {count[lane]} sequences, but at most {most} are allowed")
        raise ValueError(f"{where}: {packs[lane]} packs, but policy {setting.policy} allows one")
