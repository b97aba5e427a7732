"""Random plans and sequences for the tests of packing, and a slow, obvious twin of the layout."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from longshore.batch import Counts, MicroBatch
from longshore.data.pack import count_targets, cut_shards, lane_cuts, pack_step
from longshore.data.source import Field
from longshore.plan import Pack, Plan, PlanSetting, Round, Sequence, Stats, check, make_plan
from longshore.plan.cost import BUILT_IN
from longshore.plan.shapes import legal_cp_sizes, padded_length

NO_STATS = Stats(0, 0, 0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0)
PAD = 7
POLICIES = ("padded", "static", "balanced", "dynamic", "mixed", "given")


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    loss_mask: np.ndarray
    fields: dict[str, Any] = field(default_factory=dict)


FIELDS = (
    Field("weight", "token", "float64", (2,)),
    Field("advantage", "target", "float32"),
    Field("sample_id", "sequence", "int64"),
)


def make_samples(plan: Plan, seed: int = 0) -> dict[int, Sample]:
    """Random content for every sequence of a plan, with a value for each of FIELDS."""
    random = np.random.default_rng(seed)
    return {
        place: Sample(
            random.integers(10, 1000, sequence.length, dtype=np.int32),
            random.random(sequence.length) < 0.6,
            {
                "weight": random.random((sequence.length, 2)),
                "advantage": random.random(sequence.length).astype(np.float32),
                "sample_id": sequence.id,
            },
        )
        for place, sequence in enumerate(plan.sequences)
    }


def counts_of(samples: dict[int, Sample], depths: int) -> Counts:
    each = np.array([count_targets(s.loss_mask, depths) for s in samples.values()])
    main, *mtp = each.sum(axis=0).tolist()
    tokens, ahead = 0, [0] * depths
    for sample in samples.values():
        tokens += len(sample.tokens)
        for d in range(depths):
            ahead[d] += len(sample.tokens[d + 1 :])
    return Counts(main, tuple(mtp), tokens, len(samples), tuple(ahead))


def pack_all(
    plan: Plan, samples: dict[int, Sample], *, depths: int = 0, buckets: tuple[int, ...] = ()
) -> list[list[MicroBatch]]:
    """The micro-batches of every lane."""
    counts = counts_of(samples, depths)
    return [
        pack_step(
            plan,
            lane,
            cut_shards(plan, samples, lane_cuts(plan, lane), depths=depths, fields=FIELDS),
            counts=counts,
            buckets=buckets,
            pad_id=PAD,
        )
        for lane in range(plan.setting.lanes)
    ]


def plan_of(
    lengths: list[int],
    rounds: list[Round],
    *,
    lanes: int,
    capacity: int = 10_000,
    align: int = 1,
    policy: str = "mixed",
) -> Plan:
    setting = PlanSetting(
        lanes=lanes,
        capacity=capacity,
        policy=policy,
        sync="round",
        cp_sizes=tuple(range(1, lanes + 1)),
        profile=BUILT_IN,
        align=align,
        max_sequences=None,
        pp=1,
        vpp=1,
    )
    sequences = tuple(Sequence(100 + i, n, n) for i, n in enumerate(lengths))
    return Plan(setting, sequences, tuple(rounds), NO_STATS, "")


def lengths_of_all_kinds() -> st.SearchStrategy[int]:
    return st.one_of(st.sampled_from([1, 2, 3, 17]), st.integers(1, 40), st.integers(1, 200))


@st.composite
def made_plans(draw: st.DrawFn) -> Plan:
    """A plan of any policy by make_plan, on 1 to 8 lanes."""
    lengths = draw(st.lists(lengths_of_all_kinds(), min_size=1, max_size=12))
    lanes, policy = draw(st.integers(1, 8)), draw(st.sampled_from(POLICIES))
    kind, align = draw(st.sampled_from(["pow2", "any"])), draw(st.sampled_from([1, 2, 8]))
    size = draw(st.sampled_from(legal_cp_sizes(lanes, kind=kind)))
    needed = [padded_length(n, size) // size for n in lengths]
    options: dict[str, Any] = {}
    if policy in ("padded", "static", "balanced"):
        options["cp_size"] = size
    if policy == "given":
        cut = draw(st.integers(0, len(lengths)))
        places = list(range(len(lengths)))
        options["packs"] = [pack for pack in (places[cut:], places[:cut]) if pack]
        needed = [sum(needed)]
    capacity = max(2, *needed) + draw(st.integers(0, 100))
    plan = make_plan(
        lengths,
        lanes=lanes,
        capacity=-(-capacity // align) * align,
        policy=policy,
        sync=draw(st.sampled_from(["round", "step"])),
        cp_sizes=kind,
        align=align,
        **options,
    )
    check(plan)
    return plan


@st.composite
def drawn_plans(draw: st.DrawFn) -> Plan:
    """Packs drawn at random, of CP sizes that a planner would seldom choose side by side."""
    lanes, padded = draw(st.integers(1, 8)), draw(st.booleans())
    groups = [(first, k) for k in range(1, lanes + 1) for first in range(0, lanes - k + 1, k)]
    chosen = [
        sorted(groups_here, key=lambda group: (-group[1], group[0]))
        for groups_here in draw(st.lists(st.sets(st.sampled_from(groups)), min_size=1, max_size=3))
    ]
    contents = [
        [draw(st.lists(lengths_of_all_kinds(), min_size=1, max_size=3)) for _ in here]
        for here in chosen
    ]
    lengths = [n for here in contents for pack in here for n in pack] or [1]
    longest = max(lengths)
    rounds, place = [], 0
    for groups_here, packs_here in zip(chosen, contents, strict=True):
        packs = []
        for (first, k), pack in zip(groups_here, packs_here, strict=True):
            tokens = sum(padded_length(longest if padded else n, k) // k for n in pack)
            packs.append(Pack(first, k, tuple(range(place, place + len(pack))), tokens))
            place += len(pack)
        rounds.append(Round(tuple(packs)))
    if not place:
        rounds.append(Round((Pack(0, 1, (0,), 1),)))
    policy = "padded" if padded else "mixed"
    return plan_of(lengths, rounds, lanes=lanes, align=draw(st.integers(1, 9)), policy=policy)


def any_plans() -> st.SearchStrategy[Plan]:
    return st.one_of(made_plans(), drawn_plans())


def twin_layout(plan: Plan, number: int, lane: int) -> list[tuple[int, int]]:
    """(place, position) of each token that a lane holds in a round, before its own padding."""
    longest = max(sequence.length for sequence in plan.sequences)
    held = []
    for pack in plan.rounds[number].packs:
        if lane not in pack.lanes:
            continue
        k, r = pack.cp_size, lane - pack.first_lane
        for place in pack.sequences:
            length = longest if plan.setting.policy == "padded" else plan.sequences[place].length
            while k > 1 and length % (2 * k):
                length += 1
            positions = list(range(length))
            if k > 1:
                chunk = length // (2 * k)
                chunks = [positions[i * chunk : (i + 1) * chunk] for i in range(2 * k)]
                positions = chunks[r] + chunks[2 * k - 1 - r]
            held += [(place, position) for position in positions]
    return held
