"""make_plan: lengths in, a Plan out. Pure: no process group, no clock in a decision, no randomness.

>>> plan = make_plan([9000, 300, 200], lanes=2, capacity=8192)
>>> [(pack.cp_size, pack.sequences) for pack in plan.rounds[0].packs]
[(2, (0, 1, 2))]
"""

import math
import operator
import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, SupportsIndex, cast

import numpy as np

import longshore.plan.policies  # noqa: F401 - registers the policies
from longshore.plan.cost import BUILT_IN, NO_PADDING, CostProfile, CostTable, StageCosts
from longshore.plan.layout import Layout
from longshore.plan.policies import Choice, Rounds, Task, load_policy, step_bound
from longshore.plan.shapes import (
    check_buckets,
    legal_cp_sizes,
    sync_refusals,
    usable_capacity,
)
from longshore.plan.simulate import simulate_rounds, table_for, total_lane_tokens
from longshore.plan.types import (
    DEFAULT_POLICY,
    Axes,
    Plan,
    PlanSetting,
    Sequence,
    Stats,
    plan_digest,
    policy_names,
)
from longshore.settings import Sync, names_of

GivenPack = Iterable[int] | tuple[int, Iterable[int]]
"""Indices of a pack's sequences; or the CP size it must have, and these."""
PlacedPack = tuple[int, int, Iterable[int]]
"""The first lane, the CP size, and the indices of the sequences."""
LARGEST = 2**40
"""Limit of lengths, capacities and counts: beyond, sums would not fit into 64 bits."""
KEYS = {
    **{name: name for name in ("lanes", "heads")},
    **{name: f"plan.{name}" for name in ("capacity", "cp_size", "min_cp", "max_cp", "align")},
    **{name: f"plan.{name}" for name in ("max_sequences", "buckets")},
    **{name: f"parallel.{name}" for name in ("tp", "ep", "pp", "vpp")},
}
"""How errors name an argument: by its key in a recipe, where it has one."""


class PlaceError(ValueError):
    """An error about one sequence or given pack, which the caller may know by a better name.

    kind: "sequence" or "pack". problem: the message without its start, ": its length is 0; …".
    """

    def __init__(self, kind: str, number: int, problem: str) -> None:
        super().__init__(kind, number, problem)  # as they are, so that it can be pickled
        self.kind, self.number, self.problem = kind, number, problem

    def __str__(self) -> str:
        return f"{self.kind} {self.number}{self.problem}"


def make_plan(
    lengths: Iterable[int | Sequence],
    *,
    lanes: int,
    capacity: int,
    policy: str = DEFAULT_POLICY,
    sync: str = "round",
    profile: CostProfile = BUILT_IN,
    cp_size: int | None = None,
    min_cp: int = 1,
    max_cp: int | None = None,
    cp_sizes: str = "pow2",
    heads: int | None = None,
    max_sequences: int | None = None,
    align: int = 1,
    buckets: Iterable[int] = (),
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    vpp: int = 1,
    layout: Layout | None = None,
    stage_costs: StageCosts | None = None,
    packs: Iterable[GivenPack] | None = None,
    rounds: Iterable[Iterable[PlacedPack]] | None = None,
) -> Plan:
    """Plans one optimizer step.

    lengths: tokens of each sequence. lanes: DP × CP coordinates. capacity: the most tokens a lane
    holds in a round. policy: a name in POLICIES, or a function of yours as module:function. sync:
    'round' or 'step', when lanes wait for each other. cp_size: for policies of one CP size.
    cp_sizes: 'pow2' or 'any'. heads: where CP shares out heads, those of a rank; only CP sizes that
    divide them are used. max_sequences: of a lane in a round. align: a lane's total is padded to a
    multiple of this, and of tp. buckets: and then to one of these. tp, ep: ranks that heads, and
    that experts are split over. pp, vpp: pipeline ranks, and stages for each. layout: the stages,
    and stage_costs: how they share a round's cost; by default evenly. packs: for policy `given`,
    the indices of each pack's sequences, or (CP size, indices). rounds: instead of packs, whole
    rounds of (first lane, CP size, indices), which become the plan as they are.
    """
    n = _whole_numbers(lanes=lanes, tp=tp, ep=ep, pp=pp, vpp=vpp)
    setting = plan_setting(
        Axes(lanes=n["lanes"], tp=n["tp"], pp=n["pp"], vpp=n["vpp"], ep=n["ep"]),
        capacity=capacity,
        policy=policy,
        sync=sync,
        profile=profile,
        cp_size=cp_size,
        min_cp=min_cp,
        max_cp=max_cp,
        cp_sizes=cp_sizes,
        heads=heads,
        max_sequences=max_sequences,
        align=align,
        buckets=buckets,
        layout=layout,
        stage_costs=stage_costs,
    )
    return plan_step(lengths, setting, packs=packs, rounds=rounds)


def plan_setting(
    axes: Axes,
    *,
    capacity: int,
    policy: str = DEFAULT_POLICY,
    sync: str = "round",
    profile: CostProfile = BUILT_IN,
    cp_size: int | None = None,
    min_cp: int = 1,
    max_cp: int | None = None,
    cp_sizes: str = "pow2",
    heads: int | None = None,
    max_sequences: int | None = None,
    align: int = 1,
    buckets: Iterable[int] = (),
    layout: Layout | None = None,
    stage_costs: StageCosts | None = None,
) -> PlanSetting:
    """The setting that make_plan's keywords ask for; raises where no step could be planned."""
    counts = _whole_numbers(capacity=capacity, cp_size=cp_size, min_cp=min_cp, max_cp=max_cp)
    counts |= _whole_numbers(heads=heads, max_sequences=max_sequences, align=align)
    setting = PlanSetting(
        lanes=axes.lanes,
        capacity=counts["capacity"],
        policy=policy,
        sync=sync,
        cp_sizes=legal_cp_sizes(
            axes.lanes,
            kind=cp_sizes,
            min_cp=counts["min_cp"],
            max_cp=counts.get("max_cp"),
            heads=counts.get("heads"),
        ),
        profile=profile,
        align=math.lcm(counts["align"], axes.tp),
        max_sequences=counts.get("max_sequences"),
        pp=axes.pp,
        vpp=axes.vpp,
        tp=axes.tp,
        ep=axes.ep,
        cp_size=counts.get("cp_size", 0),
    )
    sizes = [_whole_numbers(buckets=size)["buckets"] for size in buckets]
    rising = check_buckets(sizes, capacity=setting.capacity, align=setting.align)
    setting = _with_stages(replace(setting, buckets=rising), layout, stage_costs)
    load_policy(policy)
    _check_setting(setting)
    return setting


def plan_step(
    lengths: Iterable[int | Sequence],
    setting: PlanSetting,
    *,
    packs: Iterable[GivenPack] | None = None,
    rounds: Iterable[Iterable[PlacedPack]] | None = None,
) -> Plan:
    """make_plan with a setting that plan_setting has checked."""
    started = time.perf_counter()
    sequences = tuple(_sequence(number, entry) for number, entry in enumerate(lengths))
    policy = load_policy(setting.policy)
    task = _task(setting, sequences, packs, rounds)
    choice = Choice(task, may_split=not policy.fixed_packs)
    policy.run(task, choice)
    settled = choice.settle()
    stats = _stats(task, sequences, settled, started)
    return Plan(setting, sequences, settled, stats, plan_digest(setting, sequences, settled))


def _with_stages(
    setting: PlanSetting, layout: Layout | None, stage_costs: StageCosts | None
) -> PlanSetting:
    pp, vpp = setting.pp, setting.vpp
    if layout is not None and (layout.pp, layout.vpp) != (pp, vpp):
        raise ValueError(
            f"parallel.layout has {layout.pp} ranks of {layout.vpp} stages, but parallel.pp is "
            f"{pp} and parallel.vpp is {vpp}"
        )
    if stage_costs is not None and stage_costs.stages != pp * vpp:
        raise ValueError(
            f"the stage costs are of {stage_costs.stages} stages, but parallel.pp {pp} x "
            f"parallel.vpp {vpp} = {pp * vpp}"
        )
    # Without a pipeline there is one stage, whoever says so, and one plan; of its costs only the
    # token-wise part matters.
    if pp == 1 and not setting.synced:
        return setting
    text = str(layout or "") if pp > 1 else ""
    return replace(setting, layout=text, stage_costs=stage_costs)


def _sequence(number: int, entry: int | Sequence) -> Sequence:
    given = entry.length if isinstance(entry, Sequence) else entry
    length = _index(given)
    if length is None:
        problem = f"{given!r}, which is not a whole number of tokens"
    elif length > LARGEST:
        problem = f"{length}, more than {LARGEST}"
    elif length < 1:
        problem = f"{length}; a sequence has at least 1 token, so leave empty ones out"
    else:
        return entry if isinstance(entry, Sequence) else Sequence(number, length, length)
    raise PlaceError("sequence", number, f": its length is {problem}")


def _whole_numbers(**values: object) -> dict[str, int]:
    """Those that were given, as integers of at least 1."""
    numbers = {}
    for name, value in values.items():
        if value is None:
            continue
        number = _index(value)
        if number is None:
            raise ValueError(f"{KEYS[name]} is {value!r}; it must be a whole number")
        if not 1 <= number <= LARGEST:
            raise ValueError(f"{KEYS[name]} is {number}; it must be between 1 and {LARGEST}")
        numbers[name] = number
    return numbers


def _index(value: object) -> int | None:
    """The integer that a value is, NumPy's included; bool and float are none."""
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def _sized_pack(pack: GivenPack) -> tuple[int, tuple[int, ...]]:
    """A pack's CP size, 0 if it may have any, and the numbers of its sequences."""
    size, entries = 0, tuple(cast(Iterable[Any], pack))
    if len(entries) == 2 and isinstance(entries[1], Iterable) and not isinstance(entries[1], str):
        size, entries = _whole_numbers(cp_size=entries[0])["cp_size"], tuple(entries[1])
    numbers = []
    for entry in entries:
        if (number := _index(entry)) is None:
            raise ValueError(f"packs: {entry!r} is not the number of a sequence")
        numbers.append(number)
    return size, tuple(numbers)


def _task(
    setting: PlanSetting,
    sequences: tuple[Sequence, ...],
    packs: Iterable[GivenPack] | None,
    rounds: Iterable[Iterable[PlacedPack]] | None,
) -> Task:
    if not sequences:
        raise ValueError("there are no sequences to plan; give at least one length")
    _check_given(setting, packs, rounds)
    sized = [_sized_pack(pack) for pack in (() if packs is None else packs)]
    pack_sizes, own_packs = tuple(size for size, _ in sized), tuple(pack for _, pack in sized)
    if setting.planned_by.needs_packs and rounds is None:
        _check_packs(setting, own_packs, pack_sizes, sequences=len(sequences))
    lengths = tuple(sequence.length for sequence in sequences)
    task = Task(
        setting=setting,
        lengths=lengths,
        table=table_for(setting, lengths),
        capacity=usable_capacity(setting.capacity, setting.align),
        packs=own_packs,
        pack_sizes=pack_sizes,
        rounds=None if rounds is None else [list(round_) for round_ in rounds],
    )
    _check_fit(task, sequences)
    return task


def _check_setting(setting: PlanSetting) -> None:
    cp_size = setting.cp_size
    if setting.sync not in names_of(Sync):
        raise ValueError(f"plan.sync is {setting.sync!r}; it may be 'round' or 'step'")
    for why in sync_refusals(setting.sync, pp=setting.pp, ep=setting.ep):
        raise ValueError(why)
    if setting.vpp > 1 and setting.pp == 1:
        raise ValueError(
            f"parallel.vpp is {setting.vpp}, but without a pipeline (parallel.pp 1) it must be 1"
        )
    if setting.align > setting.capacity:
        raise ValueError(
            f"plan.align is {setting.align}, more than the capacity of {setting.capacity} tokens; "
            "lower plan.align or raise plan.capacity"
        )
    if cp_size and not setting.planned_by.one_cp_size:
        names = ", ".join(policy_names(lambda policy: policy.one_cp_size))
        raise ValueError(
            f"plan.cp_size works only with the policies {names}; with {setting.policy!r} use "
            "plan.min_cp and plan.max_cp"
        )
    if cp_size and cp_size not in setting.cp_sizes:
        raise ValueError(f"plan.cp_size is {cp_size}; legal are {_listed(setting.cp_sizes)}")


def _check_given(setting: PlanSetting, packs: object, rounds: object) -> None:
    """Policy `given` has packs or rounds, and no other has."""
    if not setting.planned_by.needs_packs:
        if packs is not None or rounds is not None:
            names = " or ".join(map(repr, policy_names(lambda policy: policy.needs_packs)))
            raise ValueError(
                f"packs work only with policy {names}, but plan.policy is {setting.policy!r}"
            )
    elif packs is not None and rounds is not None:
        raise ValueError("packs and rounds are both given; leave one out")


def _check_packs(
    setting: PlanSetting,
    packs: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    *,
    sequences: int,
) -> None:
    uses = Counter(sequence for pack in packs for sequence in pack)
    for sequence in range(sequences):
        if uses[sequence] != 1:
            problem = f" is in {uses[sequence]} packs; it must be in one"
            raise PlaceError("sequence", sequence, problem)
    if unknown := sorted(set(uses) - set(range(sequences))):
        raise ValueError(f"packs: there is no sequence {unknown[0]}; the last is {sequences - 1}")
    for number, (pack, size) in enumerate(zip(packs, sizes, strict=True)):
        if not pack:
            raise ValueError(f"packs: pack {number} is empty")
        if size and size not in setting.cp_sizes:
            problem = f" has CP size {size}; legal are {_listed(setting.cp_sizes)}"
            raise PlaceError("pack", number, problem)
        if setting.max_sequences is not None and len(pack) > setting.max_sequences:
            limit = f"plan.max_sequences is {setting.max_sequences}"
            raise PlaceError("pack", number, f" has {len(pack)} sequences, but {limit}")


def _check_fit(task: Task, sequences: tuple[Sequence, ...]) -> None:
    """Every sequence, or given pack, must fit at a CP size that the policy may use."""
    table = task.given_table() if task.packs else task.table
    sizes = (task.cp_size,) if task.cp_size else table.sizes
    columns = [table.sizes.index(size) for size in sizes]
    least = table.tokens[:, columns].min(axis=1)
    needed = int(least.max())
    if needed > task.capacity:
        alone = [(i,) for i in range(len(sequences))]
        tokens = [sum(sequences[i].length for i in pack) for pack in task.packs or alone]
        equals = [i for i, count in enumerate(least.tolist()) if count == needed]
        longest = max(equals, key=lambda i: (tokens[i], -i))
        if task.packs and task.pack_sizes[longest]:
            sizes = (task.pack_sizes[longest],)
        raise _too_long(task, sizes, longest, tokens=tokens[longest], needed=needed)


def _too_long(
    task: Task, sizes: tuple[int, ...], longest: int, *, tokens: int, needed: int
) -> PlaceError:
    """The error about a sequence, or a given pack, with the index `longest`."""
    setting, kind = task.setting, "pack" if task.packs else "sequence"
    at = f"CP size {sizes[-1]}" if len(sizes) == 1 else f"any CP size (up to {sizes[-1]})"
    aligned = -(-needed // setting.align) * setting.align
    ways = [f"raise plan.capacity to {aligned}"]
    if task.cp_size:
        larger = task.cp_size < setting.cp_sizes[-1]
        more = "choose a larger plan.cp_size"
        ways.append(more if larger else "raise lanes and plan.cp_size together")
    elif len(sizes) < len(setting.cp_sizes):
        ways.append("give it a larger CP size")
    elif sizes[-1] < setting.lanes:
        ways.append("raise plan.max_cp")
    else:
        ways.append("use more lanes")
    problem = (
        f": its {tokens} tokens do not fit at {at} into {setting.lanes} lanes of {task.capacity} "
        f"tokens; {', '.join(ways)}, or shorten the sequence"
    )
    return PlaceError(kind, longest, problem)


def _listed(sizes: Seq[int]) -> str:
    return ", ".join(map(str, sizes))


def _stats(task: Task, sequences: tuple[Sequence, ...], rounds: Rounds, started: float) -> Stats:
    setting = task.setting
    lengths = [sequence.length for sequence in sequences]
    timeline = simulate_rounds(rounds, setting=setting, lengths=lengths, table=task.table)
    bound = _lower_bound(task, lengths)
    histogram: Counter[int] = Counter()
    for round_ in rounds:
        for pack in round_.packs:
            histogram[pack.cp_size] += len(pack.sequences)
    lane_tokens = total_lane_tokens(rounds, lanes=setting.lanes, padding=NO_PADDING)
    return Stats(
        predicted=timeline.predicted,
        lower_bound=bound,
        gap=timeline.predicted / bound - 1 if bound else 0.0,
        efficiency=setting.profile.ideal(lengths) / setting.lanes / timeline.predicted,
        imbalance=timeline.imbalance,
        bubble=timeline.bubble,
        fill=lane_tokens / (setting.lanes * len(rounds) * setting.capacity),
        padding=timeline.padding,
        cp_histogram=tuple(sorted(histogram.items())),
        rounds=len(rounds),
        tokens=sum(lengths),
        sum_squared_lengths=sum(n * n for n in lengths),
        planning_seconds=time.perf_counter() - started,
    )


def _lower_bound(task: Task, lengths: list[int]) -> float:
    """The bound of every policy with these limits, in seconds, from real lengths."""
    setting, table, bound = task.setting, task.table, task.bound
    if setting.planned_by.pads_to_longest:
        array = np.array(lengths, dtype=np.int64)
        table = CostTable(
            array, sizes=setting.cp_sizes, profile=setting.profile, padding=setting.padding
        )
        bound = step_bound(setting, table, capacity=task.capacity)
    return bound / setting.shares.whole / table.scale
