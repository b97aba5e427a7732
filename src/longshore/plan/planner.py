"""make_plan: lengths in, a Plan out. Pure: no process group, no clock in a decision, no randomness.

>>> plan = make_plan([9000, 300, 200], lanes=2, capacity=8192)
>>> [(pack.cp_size, pack.sequences) for pack in plan.rounds[0].packs]
[(2, (0, 1, 2))]
"""

import hashlib
import operator
import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import SupportsIndex

import numpy as np

from longshore.plan.cost import BUILT_IN, CostProfile, CostTable
from longshore.plan.cp_size import legal_cp_sizes, usable_capacity
from longshore.plan.packing import Limits, Problem
from longshore.plan.policies import POLICIES, UNLIMITED, Choice, Rounds, Task, bound_of
from longshore.plan.simulate import held_tokens, simulate_rounds, table_for
from longshore.plan.types import Plan, Sequence, Setting, Stats

ONE_SIZE = ("padded", "static", "balanced")
FIXED_PACKS = ("padded", "static", "given")

LARGEST = 2**40
"""Of lengths, capacities and counts: beyond, sums would not fit into 64 bits."""


def make_plan(
    lengths: Iterable[int | Sequence],
    *,
    lanes: int,
    capacity: int,
    policy: str = "mixed",
    sync: str = "round",
    profile: CostProfile = BUILT_IN,
    cp_size: int | None = None,
    min_cp: int = 1,
    max_cp: int | None = None,
    cp_sizes: str = "pow2",
    heads: int | None = None,
    max_sequences: int | None = None,
    align: int = 1,
    pp: int = 1,
    vpp: int = 1,
    packs: Iterable[Iterable[int]] | None = None,
) -> Plan:
    """Plans one optimizer step.

    lengths: tokens of each sequence. lanes: DP × CP coordinates. capacity: the most tokens a lane
    holds in a round. policy, sync: see docs/planning.md. cp_size: of `padded`, `static`
    and `balanced`. cp_sizes: 'pow2' or 'any'. heads: where CP shares out heads, those of a rank;
    only CP sizes that divide them are used. max_sequences: of a lane in a round. align: a lane's
    total is padded to a multiple of this. pp, vpp: pipeline ranks, and stages for each. packs: for
    policy `given`, the places of each pack's sequences.
    """
    started = time.perf_counter()
    sequences = tuple(_sequence(place, entry) for place, entry in enumerate(lengths))
    counts = _whole_numbers(
        lanes=lanes,
        capacity=capacity,
        cp_size=cp_size,
        min_cp=min_cp,
        max_cp=max_cp,
        heads=heads,
        max_sequences=max_sequences,
        align=align,
        pp=pp,
        vpp=vpp,
    )
    setting = _setting(counts, policy=policy, sync=sync, profile=profile, kind=cp_sizes)
    task = _task(setting, sequences, counts.get("cp_size", 0), packs)
    choice = Choice(task, may_split=policy not in FIXED_PACKS)
    POLICIES[policy](task, choice)
    stats = _stats(task, sequences, choice.rounds, started)
    digest = _digest(setting, sequences, choice.rounds)
    return Plan(setting, sequences, choice.rounds, stats, digest)


def _setting(
    counts: dict[str, int], *, policy: str, sync: str, profile: CostProfile, kind: str
) -> Setting:
    """kind: of the legal CP sizes."""
    return Setting(
        lanes=counts["lanes"],
        capacity=counts["capacity"],
        policy=policy,
        sync=sync,
        cp_sizes=legal_cp_sizes(
            counts["lanes"],
            kind=kind,
            min_cp=counts["min_cp"],
            max_cp=counts.get("max_cp"),
            heads=counts.get("heads"),
        ),
        profile=profile,
        align=counts["align"],
        max_sequences=counts.get("max_sequences"),
        pp=counts["pp"],
        vpp=counts["vpp"],
    )


def _sequence(place: int, entry: int | Sequence) -> Sequence:
    given = entry.length if isinstance(entry, Sequence) else entry
    length = _index(given)
    if length is None:
        raise ValueError(
            f"sequence {place}: its length is {given!r}, which is not a whole number of tokens"
        )
    if length > LARGEST:
        raise ValueError(f"sequence {place}: its length is {length}, more than {LARGEST}")
    if length < 1:
        raise ValueError(
            f"sequence {place}: its length is {length}; a sequence has at least 1 token, "
            "so leave empty ones out"
        )
    return entry if isinstance(entry, Sequence) else Sequence(place, length, length)


def _whole_numbers(**values: object) -> dict[str, int]:
    """Those that were given, as integers of at least 1."""
    numbers = {}
    for name, value in values.items():
        if value is None:
            continue
        number = _index(value)
        if number is None:
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
        if not 1 <= number <= LARGEST:
            raise ValueError(f"{name} is {number}; it must lie between 1 and {LARGEST}")
        numbers[name] = number
    return numbers


def _index(value: object) -> int | None:
    """The integer that a value is, NumPy's included; bool and float are none."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def _place(value: object) -> int:
    place = _index(value)
    if place is None:
        raise ValueError(f"packs: {value!r} is not the place of a sequence")
    return place


def _task(
    setting: Setting,
    sequences: tuple[Sequence, ...],
    cp_size: int,
    packs: Iterable[Iterable[int]] | None,
) -> Task:
    _check_setting(setting, sequences, cp_size)
    own_packs = tuple(tuple(map(_place, pack)) for pack in (() if packs is None else packs))
    _check_packs(setting, own_packs, has_packs=packs is not None, sequences=len(sequences))
    table = table_for(setting, [sequence.length for sequence in sequences])
    task = Task(
        setting=setting,
        table=table,
        capacity=usable_capacity(setting.capacity, setting.align),
        cp_size=cp_size,
        packs=own_packs,
    )
    _check_fit(task, sequences)
    return task


def _check_setting(setting: Setting, sequences: tuple[Sequence, ...], cp_size: int) -> None:
    if not sequences:
        raise ValueError("there are no sequences to plan")
    if setting.policy not in POLICIES:
        raise ValueError(f"policy is {setting.policy!r}; it may be {', '.join(POLICIES)}")
    if setting.sync not in ("round", "step"):
        raise ValueError(f"sync is {setting.sync!r}; it may be 'round' or 'step'")
    if setting.sync == "step" and setting.pp > 1:
        raise ValueError(
            f"sync 'step' does not work with a pipeline (pp {setting.pp}), whose ranks meet in "
            "every round; use sync 'round'"
        )
    if setting.vpp > 1 and setting.pp == 1:
        raise ValueError(f"vpp is {setting.vpp}, but without a pipeline (pp 1) it must be 1")
    if setting.align > setting.capacity:
        raise ValueError(
            f"align is {setting.align}, more than the capacity of {setting.capacity} tokens; "
            "lower align or raise the capacity"
        )
    if cp_size and setting.policy not in ONE_SIZE:
        raise ValueError(
            f"cp_size is for the policies {', '.join(ONE_SIZE)}; with {setting.policy!r} "
            "limit the sizes with min_cp and max_cp"
        )
    if cp_size and cp_size not in setting.cp_sizes:
        raise ValueError(f"cp_size is {cp_size}; legal here are {_listed(setting.cp_sizes)}")


def _check_packs(
    setting: Setting, packs: tuple[tuple[int, ...], ...], *, has_packs: bool, sequences: int
) -> None:
    if setting.policy != "given":
        if has_packs:
            raise ValueError(f"packs are for policy 'given', and the policy is {setting.policy!r}")
        return
    seen = Counter(place for pack in packs for place in pack)
    for place in range(sequences):
        if seen[place] != 1:
            raise ValueError(f"packs: sequence {place} is in {seen[place]} packs, not in one")
    if strange := sorted(set(seen) - set(range(sequences))):
        raise ValueError(
            f"packs: there is no sequence {strange[0]}; they go from 0 to {sequences - 1}"
        )
    for number, pack in enumerate(packs):
        if not pack:
            raise ValueError(f"packs: pack {number} is empty")
        if setting.max_sequences is not None and len(pack) > setting.max_sequences:
            raise ValueError(
                f"packs: pack {number} has {len(pack)} sequences, and max_sequences is "
                f"{setting.max_sequences}"
            )


def _check_fit(task: Task, sequences: tuple[Sequence, ...]) -> None:
    """Every sequence, or given pack, must fit at a CP size that the policy may use."""
    table = task.table.joined(task.packs) if task.packs else task.table
    sizes = (task.cp_size,) if task.cp_size else table.sizes
    columns = [table.sizes.index(size) for size in sizes]
    least = table.tokens[:, columns].min(axis=1)
    needed = int(least.max())
    if needed > task.capacity:
        alone = [(i,) for i in range(len(sequences))]
        tokens = [sum(sequences[i].length for i in pack) for pack in task.packs or alone]
        equals = [i for i, count in enumerate(least.tolist()) if count == needed]
        longest = max(equals, key=lambda i: (tokens[i], -i))
        raise ValueError(_too_long(task, sizes, longest, sequences, needed=needed))


def _too_long(
    task: Task, sizes: tuple[int, ...], worst: int, sequences: tuple[Sequence, ...], *, needed: int
) -> str:
    setting = task.setting
    if task.packs:
        tokens = sum(sequences[i].length for i in task.packs[worst])
        what = f"pack {worst}: its {tokens} tokens do"
    else:
        what = f"sequence {worst}: its {sequences[worst].length} tokens do"
    at = f"CP size {sizes[-1]}" if len(sizes) == 1 else f"any CP size (up to {sizes[-1]})"
    aligned = -(-needed // setting.align) * setting.align
    ways = [f"raise the capacity to {aligned}"]
    if task.cp_size:
        larger = task.cp_size < setting.cp_sizes[-1]
        ways.append("choose a larger cp_size" if larger else "raise lanes and cp_size together")
    elif sizes[-1] < setting.lanes:
        ways.append("raise max_cp")
    else:
        ways.append("use more lanes")
    return (
        f"{what} not fit at {at} into {setting.lanes} lanes of {task.capacity} tokens; "
        f"{', '.join(ways)}, or shorten the sequence"
    )


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
    held = held_tokens(rounds, lanes=setting.lanes, align=1)
    return Stats(
        predicted=timeline.predicted,
        lower_bound=bound,
        gap=timeline.predicted / bound - 1 if bound else 0.0,
        efficiency=setting.profile.ideal(lengths) / setting.lanes / timeline.predicted,
        imbalance=timeline.imbalance,
        bubble=timeline.bubble,
        fill=held / (setting.lanes * len(rounds) * setting.capacity),
        padding=timeline.padding,
        cp_histogram=tuple(sorted(histogram.items())),
        rounds=len(rounds),
        tokens=sum(lengths),
        sum_squared_lengths=sum(n * n for n in lengths),
        planning_seconds=time.perf_counter() - started,
    )


def _lower_bound(task: Task, lengths: list[int]) -> float:
    """The bound of every policy with these limits, in seconds, from real lengths."""
    setting = task.setting
    table = CostTable(
        np.array(lengths, dtype=np.int64), sizes=setting.cp_sizes, profile=setting.profile
    )
    limits = Limits(
        lanes=setting.lanes,
        capacity=task.capacity,
        lane_tokens=task.capacity,
        max_items=UNLIMITED,
        min_rounds=1,
        sole=False,
        bubble=0.0,
    )
    problem = Problem(table, limits)
    # A pipeline of pp ranks takes a round through all of them, one after the other.
    through = setting.pp * (int(problem.cost.min(axis=1).max()) + table.pack + table.round)
    return table.seconds(max(bound_of(problem, setting), through))


DIGESTED = ("lanes", "capacity", "align", "sync", "cp_sizes", "pp", "vpp")
"""What of a setting decides how rounds are run: a lane's shapes, the groups, the order of work."""


def _digest(setting: Setting, sequences: tuple[Sequence, ...], rounds: Rounds) -> str:
    """A name for what was decided: equal digests, the same tensors on every lane in every round.

    It does not tell why it was decided (policy, costs), nor which samples the sequences are.
    """
    lines = [f"{name} {getattr(setting, name)}" for name in DIGESTED]
    lines.append(" ".join(str(sequence.length) for sequence in sequences))
    for round_ in rounds:
        lines.append("round")
        lines += [
            f"{pack.first_lane} {pack.cp_size} {pack.tokens_per_lane}: "
            f"{' '.join(map(str, pack.sequences))}"
            for pack in round_.packs
        ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
