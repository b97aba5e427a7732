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
from numpy.typing import NDArray

from longshore.plan.cost import EMPTY_TOKENS, Ints
from longshore.plan.shapes import make_buckets, usable_capacity
from longshore.plan.types import Plan

GraphWay = Literal["whole", "halves", "eager"]
GRAPH_WAYS: tuple[GraphWay, ...] = ("whole", "halves", "eager")

BUCKETS = 8
"""Of a run with graphs that sets none: each number of tokens needs graphs of its own."""
FEW_TOTALS = 16
"""So many token totals of a lane need no buckets."""


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
    """How a micro-batch is served. packs_cp_sizes: of its packs; none, or (1,), for a lane without
    work. sequences: its padding included. setting: None for a run without graphs.
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
            counts = _count(plan)
            sizes.append(counts.sequences[counts.alone & counts.busy])
            others += int(np.count_nonzero(~counts.alone & counts.busy))
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


@dataclass(frozen=True, slots=True, eq=False)
class _Counts:
    """Of all micro-batches of a plan, each (rounds, lanes)."""

    sequences: Ints
    """As kernels see them: padding is one more."""
    alone: NDArray[np.bool_]
    """Whether there is no pack, or one of CP size 1."""
    busy: NDArray[np.bool_]
    """Whether there is a pack."""


def _count(plan: Plan) -> _Counts:
    setting = plan.setting
    change = np.zeros((4, len(plan.rounds), setting.lanes + 1), dtype=np.int64)
    for number, pack in plan.packs():
        more = (1, int(pack.cp_size > 1), len(pack.sequences), pack.tokens_per_lane)
        change[:, number, pack.first_lane] += more
        change[:, number, pack.first_lane + pack.cp_size] -= more
    packs, shared, sequences, tokens = np.cumsum(change, axis=2)[:, :, : setting.lanes]
    totals = _padded_totals(plan, tokens)
    return _Counts(
        sequences=sequences + (totals > tokens),
        alone=(packs <= 1) & (shared == 0),
        busy=packs > 0,
    )


def _padded_totals(plan: Plan, tokens: Ints) -> Ints:
    """What lane_tokens gives, for all micro-batches at once."""
    setting = plan.setting
    most = usable_capacity(setting.capacity, setting.align)
    busy = np.where(tokens > 0, tokens, min(EMPTY_TOKENS, most))
    return setting.padding.totals(busy)
