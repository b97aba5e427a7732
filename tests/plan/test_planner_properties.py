from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.plan.evaluator import lane_tokens, padded, step_seconds
from tests.plan.samples import CHARGED, FREE, examples

from longshore.plan import CostProfile, Plan, check, make_plan

POLICIES = ("padded", "static", "balanced", "dynamic", "mixed", "given")
ONE_SIZE = ("padded", "static", "balanced")
PROFILES = (
    FREE,
    CHARGED,
    replace(CHARGED, node=2, pack=1000.0),
    replace(CHARGED, round=100.0),
    replace(FREE, linear=0.0, quadratic=1.0),
    CostProfile(linear=1e-6, quadratic=3e-10, gather=(1e-7, 1e-5), node=4, pack=1e-4, round=1e-3),
)
pytestmark = pytest.mark.property


@dataclass(frozen=True)
class Asked:
    """The arguments of make_plan."""

    lengths: list[int]
    lanes: int
    capacity: int
    policy: str = "mixed"
    others: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> Plan:
        return make_plan(
            self.lengths,
            lanes=self.lanes,
            capacity=self.capacity,
            policy=self.policy,
            **self.others,
        )

    def with_policy(self, policy: str, **others: Any) -> "Asked":
        return replace(self, policy=policy, others={**self.others, **others})


LANES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 40]) | st.integers(1, 40)
CAPACITIES = st.integers(1, 64) | st.integers(65, 5000) | st.sampled_from([4096, 16384])


@st.composite
def limits(draw: st.DrawFn, lanes: int, capacity: int) -> dict[str, Any]:
    """CP sizes, alignment, buckets, the cap on sequences: each left out about every other time."""
    asked: dict[str, Any] = {}
    if draw(st.booleans()):
        asked["cp_sizes"] = draw(st.sampled_from(["pow2", "any"]))
    if draw(st.booleans()):
        asked["min_cp"], asked["max_cp"] = sorted(draw(st.tuples(*[st.integers(1, lanes)] * 2)))
    if draw(st.booleans()):
        asked["align"] = draw(st.integers(1, min(capacity, 128)))
    if draw(st.booleans()):
        align = asked.get("align", 1)
        steps = st.sets(st.integers(1, capacity // align), max_size=4)
        asked["buckets"] = [align * size for size in draw(steps)]
    if draw(st.booleans()):
        asked["max_sequences"] = draw(st.integers(1, 8))
    assume(legal_sizes(lanes, asked))
    return asked


@st.composite
def lengths_for(draw: st.DrawFn, lanes: int, capacity: int, *, most: int) -> list[int]:
    """Lengths of which most fit one lane, some only all lanes, and a few none at all."""
    short = st.integers(1, capacity)
    widest = max(1, lanes * capacity * draw(st.sampled_from([4, 4, 4, 4, 5])) // 4)
    count = draw(st.integers(1, most))
    entry = draw(st.sampled_from([short, short | st.integers(1, widest), st.just(capacity)]))
    return draw(st.lists(entry, min_size=count, max_size=count))


@st.composite
def problems(draw: st.DrawFn, *, most: int = 60, policies: tuple[str, ...] = POLICIES) -> Asked:
    policy, sync = draw(st.sampled_from(policies)), draw(st.sampled_from(["round", "step"]))
    lanes, capacity = draw(LANES), draw(CAPACITIES)
    others = {"sync": sync, "profile": draw(st.sampled_from(PROFILES))}
    others |= draw(limits(lanes, capacity))
    if sync == "round" and draw(st.integers(0, 3)) == 0:
        others |= {"pp": draw(st.integers(2, 4)), "vpp": draw(st.integers(1, 3))}
        most = min(most, 8)
    lengths = draw(lengths_for(lanes, capacity, most=most))
    if policy in ONE_SIZE and draw(st.booleans()):
        others["cp_size"] = draw(st.sampled_from(legal_sizes(lanes, others)))
    if policy == "given":
        others["packs"] = draw(packs_of(len(lengths)))
    return Asked(lengths, lanes, capacity, policy, others)


@st.composite
def packs_of(draw: st.DrawFn, sequences: int) -> list[list[int]]:
    """All sequences in random packs, mostly small ones."""
    order = draw(st.permutations(range(sequences)))
    packs: list[list[int]] = []
    while order:
        count = draw(st.integers(1, 3))
        packs.append(list(order[:count]))
        order = order[count:]
    return packs


def legal_sizes(lanes: int, asked: dict[str, Any]) -> list[int]:
    sizes = range(1, lanes + 1)
    if asked.get("cp_sizes", "pow2") == "pow2":
        sizes = sorted({2**power for power in range(6) if 2**power <= lanes} | {lanes})
    return [k for k in sizes if asked.get("min_cp", 1) <= k <= asked.get("max_cp", lanes)]


def is_possible(asked: Asked) -> bool:
    """Whether any plan keeps the limits, by the rules alone."""
    sizes, groups = legal_sizes(asked.lanes, asked.others), [[n] for n in asked.lengths]
    if "cp_size" in asked.others:
        sizes = [asked.others["cp_size"]]
    if asked.policy == "given":
        groups = [[asked.lengths[i] for i in pack] for pack in asked.others["packs"]]
    align = asked.others.get("align", 1)
    room = asked.capacity // align * align
    fits = [[sum(padded(n, k) for n in group) // k <= room for k in sizes] for group in groups]
    if asked.policy in ONE_SIZE:
        return any(all(column) for column in zip(*fits, strict=True))
    cap = asked.others.get("max_sequences", len(asked.lengths))
    return all(map(any, fits)) and max(map(len, groups)) <= cap


def check_policy(asked: Asked, plan: Plan) -> None:
    """What a policy promises beyond what check() can see."""
    packs = [pack for _, pack in plan.packs()]
    used = {pack.cp_size for pack in packs}
    assert used <= set(legal_sizes(asked.lanes, asked.others))
    if asked.policy in ONE_SIZE:
        assert len(used) == 1
        assert used <= {asked.others.get("cp_size", pack.cp_size) for pack in packs}
    if asked.policy == "padded":
        assert {len(pack.sequences) for pack in packs} == {1}
    if asked.policy == "given":
        wanted = sorted(sorted(pack) for pack in asked.others["packs"])
        assert sorted(sorted(pack.sequences) for pack in packs) == wanted


def check_stats(asked: Asked, plan: Plan) -> None:
    """The figures of a plan, computed again from its rounds."""
    stats, profile = plan.stats, asked.others["profile"]
    assert stats.predicted == pytest.approx(step_seconds(plan), rel=1e-9)
    assert 0 < stats.lower_bound <= stats.predicted * (1 + 1e-9)
    assert stats.gap == pytest.approx(stats.predicted / stats.lower_bound - 1, abs=1e-12)
    ideal = sum(profile.linear * n + profile.quadratic * n * n for n in asked.lengths)
    assert stats.efficiency == pytest.approx(ideal / asked.lanes / stats.predicted, rel=1e-9)
    held = sum(pack.tokens_per_lane * pack.cp_size for _, pack in plan.packs())
    room = asked.lanes * len(plan.rounds) * asked.capacity
    assert stats.fill == pytest.approx(held / room, rel=1e-12)
    assert sum(count for _, count in stats.cp_histogram) == len(asked.lengths)
    assert (stats.rounds, stats.tokens) == (len(plan.rounds), sum(asked.lengths))
    assert stats.sum_squared_lengths == sum(n * n for n in asked.lengths)
    assert 0 <= stats.imbalance < 1
    assert 0 <= stats.bubble < 1
    totals = [total for round_ in plan.rounds for _, total in lane_tokens(plan, round_)]
    assert stats.padding == pytest.approx(1 - sum(asked.lengths) / sum(totals), abs=1e-12)


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(problems())
def test_a_plan_is_valid_and_costs_what_it_says_or_is_impossible(asked: Asked):
    if not is_possible(asked):
        with pytest.raises(ValueError, match=r"sequence \d+|pack \d+"):
            asked.plan()
        return
    plan = asked.plan()
    check(plan)
    check_policy(asked, plan)
    check_stats(asked, plan)


@pytest.mark.slow
@settings(max_examples=examples(60, fuzz=2_000))
@given(problems(most=30))
def test_equal_input_gives_the_equal_plan(asked: Asked):
    assume(is_possible(asked))
    plan, again = asked.plan(), asked.plan()
    numpy = replace(
        asked,
        lengths=np.array(asked.lengths, dtype=np.int32),
        lanes=np.int64(asked.lanes),
        capacity=np.uint16(asked.capacity),
    ).plan()
    assert plan.digest == again.digest == numpy.digest
    assert plan.rounds == again.rounds == numpy.rounds
    assert plan.setting == numpy.setting
    assert plan.sequences == numpy.sequences


@pytest.mark.slow
@settings(max_examples=examples(40, fuzz=2_000))
@given(problems(most=40, policies=("mixed",)))
def test_mixed_is_never_slower_than_another_policy(asked: Asked):
    assume(is_possible(asked))
    mixed = asked.plan().stats.predicted
    rivals = [asked.with_policy("dynamic"), asked.with_policy("balanced")]
    for size in legal_sizes(asked.lanes, asked.others):
        rivals += [asked.with_policy(name, cp_size=size) for name in ("balanced", "static")]
    for rival in filter(is_possible, rivals):
        seconds = rival.plan().stats.predicted
        assert mixed <= seconds * (1 + 1e-9), (rival.policy, rival.others.get("cp_size"))
