"""How long a step of a candidate takes: estimated from its lengths, or predicted from its plan.

In: an AdviceTask and a Candidate. Out: seconds. No torch. advisor/step_time.py has the times of
rounds on one rank; here are added what TP ranks and ranks that share experts send in every layer,
by arithmetic, and the plan, which knows how lanes wait for each other.

A lane of 8,192 tokens at width 4,096 in bfloat16 with tp 2 sends in each of 32 layers 8 times half
of 64 MiB: 8 GiB, 24 ms at 360 GB/s.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from longshore.advisor.candidates import AdviceTask, Candidate
from longshore.advisor.step_time import (
    Busy,
    check_dtype,
    cost_profile,
    round_busy,
    step_seconds,
    update_busy,
)
from longshore.arch.costs import parameter_count, step_flops
from longshore.arch.memory import ITEM_BYTES
from longshore.config.check import planner_setting
from longshore.plan.cost import CostProfile
from longshore.plan.planner import plan_step
from longshore.plan.shapes import lane_packs, lane_tokens, padded_length
from longshore.plan.types import Axes, Pack, Plan, PlanSetting

COMPARED = 24
"""Micro-batches of a plan whose cost is compared with the predicted seconds."""
EP_EXCHANGES = 4
"""Rows go to experts and come back, in both directions."""
TP_EXCHANGES = 8
"""Times that a layer sends a lane's rows: gathered and summed around each of two parts, twice."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A planned step."""

    plan: Plan
    seconds: float
    """Seconds of the whole step, with the optimizer."""
    tokens: int
    """Real ones."""
    flops: int
    """FLOPs of its matrix products."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What an estimate reads of a step."""

    tokens: int
    squares: int
    """The sum of squared lengths."""
    longest: int

    @staticmethod
    def of(lengths: Sequence[int]) -> "StepSize":
        return StepSize(sum(lengths), sum(n * n for n in lengths), max(lengths))


class StepTimer:
    """Times of candidates; keeps what several of them share."""

    def __init__(self, task: AdviceTask) -> None:
        check_dtype(task.machine, task.dtype)
        self.task = task
        self._busy = partial(round_busy, task.machine, task.decoder)
        self._profile = cache(partial(cost_profile, task.machine, task.decoder))
        self._full = cache(self._full_round)
        self._of_rank = cache(self._rank_profile)
        self._travel = cache(self._travelling)
        self.update = cache(partial(update_busy, task.machine, task.decoder))
        """What follows the rounds of a step, by axes."""

    def profile(self, candidate: Candidate) -> CostProfile:
        """The planner's cost model of a rank, with what TP and EP exchange."""
        axes = replace(candidate.axes, vpp=1)
        return self._of_rank(axes, candidate.recompute, candidate.capacity, candidate.graph)

    def _rank_profile(self, axes: Axes, recompute: bool, capacity: int, graph: bool) -> CostProfile:
        whole = self._profile(capacity=capacity, recompute=recompute, graph=graph)
        profile = whole.on_ranks(tp=axes.tp, pp=axes.pp)
        if axes.shard == "zero3":
            # Weights travel while the device works; what takes longer than a full round is left.
            full = profile.linear * capacity + profile.pack + profile.round
            late = max(0.0, self._travel(axes) - full)
            profile = replace(profile, round=profile.round + late)
        return replace(profile, linear=profile.linear + self.exchange(axes))

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Whether the host launches even a full round slower than the device runs it."""
        busy = self._full(candidate.recompute, candidate.capacity, candidate.graph)
        return busy.host > busy.device

    def _full_round(self, recompute: bool, capacity: int, graph: bool) -> Busy:
        return self._busy([capacity], tokens=capacity, recompute=recompute, graph=graph)

    def _travelling(self, axes: Axes) -> float:
        """Seconds that weights and gradients of a round travel between lanes, under zero3."""
        busy, decoder = self._busy([1], tokens=1, axes=replace(axes, ep=1)), self.task.decoder
        experts = sum(part.expert_parameters(decoder.width) for part in decoder.parts)
        common, replicas = parameter_count(decoder) - experts, axes.expert_replicas
        all_lanes = (axes.lanes - 1) / axes.lanes if axes.lanes > 1 else 1.0
        own = experts / axes.ep * (replicas - 1) / replicas
        return busy.exchange * (common * all_lanes + own) / ((common + experts) * all_lanes)

    def exchange(self, axes: Axes) -> float:
        """Seconds of a lane's token that its ranks spend on exchanges inside layers."""
        machine, decoder = self.task.machine, self.task.decoder
        row = decoder.width * ITEM_BYTES[self.task.dtype]
        layers = (*decoder.layers, *decoder.mtp)
        inside = machine.byte_gathered(across=False)
        sent = TP_EXCHANGES * row * len(layers) * (axes.tp - 1) / axes.tp * inside
        if axes.ep > 1:
            # Ranks of a stage that share experts are neighbours.
            byte = machine.byte_gathered(across=axes.ep > machine.node)
            rows = sum(part.dispatched(axes.ep) for part in decoder.parts) / axes.tp
            sent += EP_EXCHANGES * row * rows * (axes.ep - 1) / axes.ep * byte
        return sent / axes.pp

    def estimate(self, candidate: Candidate, step: StepSize) -> float:
        """Seconds of a step without a plan: even lanes, full rounds, the longest sequence apart."""
        axes, profile = candidate.axes, self.profile(candidate)
        sizes = [size for size in (1 << bit for bit in range(30)) if size <= candidate.max_cp]
        critical = min(
            profile.sequence_cost(step.longest, padded_length(step.longest, size), size)
            for size in {*sizes, candidate.max_cp}
        )
        ideal = profile.linear * step.tokens + profile.quadratic * step.squares
        rounds = -(-step.tokens // (axes.lanes * candidate.capacity))
        bubble = 1 + (axes.pp - 1) / (axes.vpp * rounds)
        fixed = rounds * (profile.pack + profile.round)
        return (max(ideal / axes.lanes, critical) + fixed) * bubble + self.update(axes).seconds

    def planned(self, candidate: Candidate, lengths: Sequence[int], *, of: int = 0) -> StepTime:
        """A step with its plan; of: tokens of the whole step, of which these lengths are a part."""
        profile = self.profile(candidate)
        plan = plan_step(lengths, self._setting(candidate, profile))
        rounds = self._rounds_seconds(candidate, plan, profile)
        tokens = sum(lengths)
        flops = step_flops(self.task.decoder, list(lengths))
        if not of or of == tokens:
            return StepTime(plan, self._step_seconds(candidate, plan, rounds), tokens, flops)
        share = of / tokens
        seconds = rounds * share + self.update(candidate.axes).seconds
        return StepTime(plan, seconds, of, round(flops * share))

    def _setting(self, candidate: Candidate, profile: CostProfile) -> PlanSetting:
        task = self.task
        setting = planner_setting(
            task.config(candidate),
            lanes=candidate.axes.lanes,
            capacity=candidate.capacity,
            decoder=task.decoder,
        )
        return replace(setting, profile=profile)

    def _step_seconds(self, candidate: Candidate, plan: Plan, rounds: float) -> float:
        """One lane's rounds are known one by one: over a step the host runs ahead."""
        axes = candidate.axes
        if axes.lanes == 1 and axes.tp * axes.pp == 1:
            batches = [micro_batch(plan, number, 0) for number in range(len(plan.rounds))]
            return step_seconds(
                self.task.machine,
                self.task.decoder,
                [lengths for lengths, _ in batches],
                tokens=[tokens for _, tokens in batches],
                recompute=candidate.recompute,
                graph=candidate.graph,
            )
        return rounds + self.update(axes).seconds

    def _rounds_seconds(self, candidate: Candidate, plan: Plan, profile: CostProfile) -> float:
        """The plan's time, corrected by how far its linear cost model is off for its rounds."""
        axes, cost, predicted = candidate.axes, 0.0, 0.0
        for lengths, tokens in unshared(plan):
            busy = self._busy(
                lengths,
                tokens=tokens,
                axes=axes,
                recompute=candidate.recompute,
                graph=candidate.graph,
            )
            if axes.ep > 1:  # weights of experts travel less where ranks share them
                busy = replace(busy, exchange=self._travel(axes))
            predicted += busy.seconds + tokens * self.exchange(axes)
            cost += profile.pack + profile.round
            cost += sum(profile.sequence_cost(length, length, 1) for length in lengths)
        return plan.stats.predicted * (predicted / cost if cost else 1.0)

    def launched(self, candidate: Candidate) -> Busy:
        """A full round without graphs."""
        return self._full(candidate.recompute, candidate.capacity, False)


def micro_batch(plan: Plan, number: int, lane: int) -> tuple[list[int], int]:
    """The lengths of a lane's sequences in a round, and its tokens with padding."""
    packs = lane_packs(plan, number, lane)
    lengths = [plan.sequences[place].length for pack in packs for place in pack.sequences]
    return lengths, lane_tokens(plan, number, lane)


def unshared(plan: Plan) -> list[tuple[list[int], int]]:
    """Some micro-batches of one pack of CP size 1, evenly spread over the plan."""
    alone = []
    for number, round_ in enumerate(plan.rounds):
        packs = Counter(lane for pack in round_.packs for lane in _lanes(pack))
        places = [pack.first_lane for pack in round_.packs if pack.cp_size == 1]
        alone += [(number, lane) for lane in places if packs[lane] == 1]
    step = max(1, -(-len(alone) // COMPARED))
    return [micro_batch(plan, number, lane) for number, lane in alone[::step]]


def _lanes(pack: Pack) -> range:
    return range(pack.first_lane, pack.first_lane + pack.cp_size)
