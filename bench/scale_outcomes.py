"""What plans of a step cost at scale: one ScaleOutcome for each policy of each case.

In: a case, its pipeline and the share of the mixer. Out: outcomes scored by evaluate.py.

A balanced plan is the best of all CP sizes it may take, by the score at hand: with experts another
size may win than without. Planning seconds are CPU time, which a shared machine changes least.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cases import PROFILES, Case, lengths
from evaluate import (
    Setting,
    experts_bound,
    legal_sizes,
    pack_cost,
    pipeline_time,
    round_heights,
    score,
)
from outcomes import POLICIES

from longshore.arch.decoder import DecoderConfig
from longshore.arch.part import Part
from longshore.plan import make_plan
from longshore.plan.cost import StageCosts, parse_profile, share_out
from longshore.plan.types import Plan
from longshore.report.pages import step_as_json

PROFILE = PROFILES["charged"]
AGREES = 1e-6
UNIT = 10**6
"""Of a stage's forward."""


@dataclass(frozen=True, slots=True)
class ScaleOutcome:
    """A policy's plan of a case, scored."""

    case: Case
    """What was planned."""
    pp: int
    """Pipeline ranks of a lane."""
    experts: bool
    """Whether lanes wait for each other between mixers and experts."""
    policy: str
    """Of the plan."""
    time: float
    """Of the step, by the evaluator."""
    bound: float
    """A time that no plan can beat."""
    balanced: float
    """The step's time with the best balanced plan."""
    seconds: float
    """Of planning."""
    bytes: int
    """Of the plan as JSON."""
    rounds: int
    """Of the plan."""
    faults: tuple[str, ...]
    """What is wrong with the plan."""

    @property
    def name(self) -> str:
        """The case with what it is run with."""
        return f"{self.case.name}{f', pp {self.pp}' if self.pp > 1 else ''}{self.with_experts}"

    @property
    def with_experts(self) -> str:
        return ", experts" if self.experts else ""

    @property
    def over_bound(self) -> float:
        """1 is the best possible."""
        return self.time / self.bound

    @property
    def speed(self) -> float:
        """Tokens per second, relative to the best balanced plan."""
        return self.balanced / self.time

    @property
    def most_speed(self) -> float:
        """What the bound allows of it."""
        return self.balanced / self.bound


def mixer_share(decoder: DecoderConfig) -> float:
    """The mixers' part of a token's linear FLOPs; the head is token-wise, as experts are."""
    mixers = sum(_linear(layer.mixer, decoder.width) for layer in decoder.layers if layer.mixer)
    layers = sum(_linear(part, decoder.width) for layer in decoder.layers for part in layer.parts)
    return mixers / (layers + 2 * decoder.width * decoder.vocab_size)


def _linear(part: Part, width: int) -> int:
    """FLOPs of a token, without those of pairs: n tokens have n times these and n(n+1)/2 pairs."""
    return 3 * part.flops(width, 1) - part.flops(width, 2)


def outcomes_of(case: Case, pp: int, share: float) -> Iterator[ScaleOutcome]:
    """Without experts and with them, all policies of each."""
    drawn = lengths(case)
    setting = Setting(drawn, case.lanes, case.capacity, PROFILE, "round")
    bound = 0.0
    for experts in (False, True):
        part = share if experts else 1.0
        plans = {policy: _planned(setting, pp, policy, share=part) for policy in POLICIES}
        bound = max(bound, plans["mixed"][0].stats.lower_bound)
        found = {policy: _faults(plan, setting, pp, part) for policy, (plan, _) in plans.items()}
        times = {p: _time(step_as_json(plan), setting, pp, part) for p, (plan, _) in plans.items()}
        if experts:
            bound = max(bound, experts_bound(setting, mixer_share=share))
            times["balanced"] = min(times["balanced"], _best_balanced(setting, pp, part))
        for policy, (plan, seconds) in plans.items():
            size = len(json.dumps(step_as_json(plan), separators=(",", ":")))
            yield ScaleOutcome(
                case, pp, experts, policy, times[policy], bound, times["balanced"], seconds, size,
                plan.stats.rounds, found[policy],
            )  # fmt: skip


def _planned(
    setting: Setting, pp: int, policy: str, cp_size: int | None = None, *, share: float
) -> tuple[Plan, float]:
    """share: the mixers' of a token's linear cost; below 1 all lanes share the experts."""
    began = time.process_time()
    experts = share < 1
    plan = make_plan(
        setting.lengths,
        lanes=setting.lanes,
        capacity=setting.capacity,
        policy=policy,
        profile=parse_profile(setting.profile, "charged"),
        pp=pp,
        cp_size=cp_size,
        ep=setting.lanes if experts else 1,
        stage_costs=_stage_costs(pp, share) if experts else None,
    )
    return plan, time.process_time() - began


def _stage_costs(pp: int, share: float) -> StageCosts:
    """Equal stages, backward twice the forward, with the part of experts and head apart."""
    apart = round(UNIT * (1 - share))
    each, tokenwise = [(UNIT, 2 * UNIT)] * pp, [(apart, 2 * apart)] * pp
    return share_out(linear=each, quadratic=each, streams=[1] * pp, pp=pp, tokenwise=tokenwise)


def _faults(plan: Plan, setting: Setting, pp: int, share: float) -> tuple[str, ...]:
    """What the evaluator finds wrong, and a time that is not what the plan says of itself."""
    step = step_as_json(plan)
    faults = score(step, setting).faults
    apart = abs(_time(step, setting, pp, share) / plan.stats.predicted - 1)
    return (*faults, f"says another time, by {apart:.1e}") if apart > AGREES else faults


def _time(step: dict[str, Any], setting: Setting, pp: int, share: float) -> float:
    return pipeline_time(round_heights(step, setting, mixer_share=share), pp)


def _best_balanced(setting: Setting, pp: int, share: float) -> float:
    """The least time of all CP sizes; one whose mean over the lanes is above it cannot win."""
    best = float("inf")
    for size in legal_sizes(setting.lanes):
        if max(setting.lengths) > size * setting.capacity:
            continue
        alone = pack_cost(list(range(len(setting.lengths))), size, setting)
        if alone * size / setting.lanes > best:
            break
        plan, _ = _planned(setting, pp, "balanced", size, share=share)
        best = min(best, _time(step_as_json(plan), setting, pp, share))
    return best
