"""Which micro-batches a CUDA graph serves, decided from the plan alone, alike on all ranks.

In: plans, and what a run decided about graphs. Out: for each lane and round the way it is served,
and the cap on sequences that serves a wanted share. A graph replays one shape, so the boundaries of
a micro-batch's sequences are padded to cap + 1 entries, by repeating the last. Three ways:

    whole    whole layers are replayed: one pack of CP size 1 with at most `cap` sequences
    halves   what works on single tokens (norms, projections, MLP) is replayed, the rest is not
    eager    no graph

The padding that rounds a lane's tokens up to a bucket is one more sequence for every kernel. With
buckets of 8 a lane of sequences of 3 and 2 tokens counts 3 sequences: they and 3 tokens of padding;
one of 5 and 3 tokens is full and counts 2. Cap 2 serves the second whole, and the first by halves.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from longshore.plan.cost import Ints
from longshore.plan.shapes import make_buckets, usable_capacity
from longshore.plan.types import Plan

GraphWay = Literal["whole", "halves", "eager"]
GRAPH_WAYS: tuple[GraphWay, ...] = ("whole", "halves", "eager")

BUCKETS = 8
"""Buckets of a run with graphs that sets none: each number of tokens needs its own graphs."""
FEW_TOTALS = 16
"""Up to this many token totals of a lane need no buckets."""


@dataclass(frozen=True, slots=True)
class GraphSetting:
    """What a run decided about graphs. halves: whether the second way is allowed."""

    max_sequences: int
    halves: bool


def needs_buckets(capacity: int, align: int) -> bool:
    """Whether a lane's tokens, without buckets, would have too many different totals."""
    return usable_capacity(capacity, align) // align > FEW_TOTALS


def as_graphed(plan: Plan) -> Plan:
    """The plan with the buckets that a run with graphs would have: its own, or BUCKETS."""
    setting = plan.setting
    if setting.buckets or not needs_buckets(setting.capacity, setting.align):
        return plan
    buckets = make_buckets(setting.capacity, align=setting.align, count=BUCKETS)
    return replace(plan, setting=replace(setting, buckets=buckets))


def graph_way(packs_cp_sizes: Seq[int], sequences: int, setting: GraphSetting | None) -> GraphWay:
    """How a micro-batch is served.

    packs_cp_sizes: none, or (1,), for a lane without work. sequences: its padding included.
    setting: None for a run without graphs.
    """
    if setting is None:
        return "eager"
    alone = not packs_cp_sizes or tuple(packs_cp_sizes) == (1,)
    if alone and sequences <= setting.max_sequences:
        return "whole"
    return "halves" if setting.halves else "eager"


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchSizes:
    """The micro-batches of plans that have sequences, by whether whole layers can be replayed."""

    alone: Ints
    """Sequences, padding included, of each that has one pack of CP size 1."""
    others: int
    """How many have several packs, or one that lanes share."""

    @staticmethod
    def of(plans: Iterable[Plan]) -> "MicroBatchSizes":
        sizes: list[Ints] = [np.zeros(0, dtype=np.int64)]
        others = 0
        for plan in plans:
            packs, shared, sequences, tokens = _lane_sums(plan)
            is_alone = (packs == 1) & (shared == 0)
            # For kernels, the padding that fills a bucket is one more sequence.
            is_padded = plan.setting.padding.totals(tokens) > tokens
            sizes.append((sequences + is_padded)[is_alone])
            others += int(np.count_nonzero((packs > 0) & ~is_alone))
        return MicroBatchSizes(np.concatenate(sizes), others)

    def cap(self, coverage: float) -> int:
        """The least cap that serves this share of `alone`; 1 if there are none."""
        if not 0 < coverage <= 1:
            raise ValueError(f"graph.coverage is {coverage:g}; it must be above 0 and at most 1")
        count = len(self.alone)
        if not count:
            return 1
        shares = np.arange(1, count + 1) / count
        return int(np.sort(self.alone)[np.searchsorted(shares, coverage)])

    def covered(self, cap: int) -> float:
        """The share of `alone` that a cap serves; 1 if there are none."""
        return float(np.mean(self.alone <= cap)) if len(self.alone) else 1.0

    def empty_share(self, cap: int) -> float:
        """The share of slots that stay empty in the micro-batches that a cap serves."""
        inside = self.alone[self.alone <= cap]
        return float((cap - inside).mean()) / cap if len(inside) else 0.0


def choose_cap(plans: Iterable[Plan], coverage: float) -> int:
    """The least cap that serves this share of the micro-batches with one pack of CP size 1.

    Lanes without work always fit, and are not counted.
    """
    return MicroBatchSizes.of(plans).cap(coverage)


def steady_cap(plans: Seq[Plan], coverage: float) -> int:
    """A cap that serves this share in each quarter of the steps, for steps that are not planned.

    The planner decides about a step as a whole, so micro-batches of a step are alike, and a few
    steps say less than their many micro-batches seem to. So an eighth more is added, at least 1.
    plans: in no particular order.
    """
    quarters = [plans[first::4] for first in range(4)]
    cap = max(choose_cap(quarter, coverage) for quarter in quarters)
    return cap + max(1, cap // 8) if len(MicroBatchSizes.of(plans).alone) else cap


def _lane_sums(plan: Plan) -> Ints:
    """Packs, packs that lanes share, sequences and tokens, each [round, lane]."""
    change = np.zeros((4, len(plan.rounds), plan.setting.lanes + 1), dtype=np.int64)
    for number, pack in plan.packs():
        more = (1, int(pack.cp_size > 1), len(pack.sequences), pack.tokens_per_lane)
        change[:, number, pack.first_lane] += more
        change[:, number, pack.first_lane + pack.cp_size] -= more
    sums: Ints = np.cumsum(change, axis=2)[:, :, :-1]
    return sums
