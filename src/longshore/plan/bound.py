"""A time that no plan of a step can beat.

In: a setting and the costs of its sequences. Out: a time in 1/whole quanta, see StageCosts.

Without a pipeline it is the bound of plan/packing.py. With one, plan/bound.py adds how
long the tallest round takes through the stages. Three sequences of cost 6 on 2 lanes, whatever the
CP size: 9 without a pipeline; with two ranks of one stage each, 9 + 6/3 = 11 at CP size 1.

Times that no pipeline can beat: for given rounds in any order, and for any plan at all.

In: the columns of rounds (plan/pipeline_times.py), or a Problem with the items of a step. Out: a
time in the unit of a walk, 1/whole quantum.

Given rounds, in any order:

1. A rank starts after the first round's forwards on the stages before it, ends before the last
   round's backwards there, and works for all rounds in between: fill, work and drain.
2. A tall round runs through all stages and back. Before it the first stage has run every earlier
   round's forward, after it every later round's backward.
3. With one stage a rank, the last rank has done all rounds up to the tall one when it ends that
   round's backward. Then the backward runs through the other stages, and the first rank still has
   the later rounds to do, less the forwards of pp − 1 of them.

Rounds of heights 9, 3 and 3 on two ranks, of which a third is forward, have 15 of work and take at
least 15 + 3 = 18 by 1, 2·9 + 2·1 = 20 by 2, and 15 + 6 − 1 = 20 by 3.

Any plan. Let H be the height of its tallest round. No item costs more, which tells the least area
of its items, and so the least work W of a rank. By 2 the step takes at least pp·H and a third of
W − H, and by 3, as no other forward is longer than the tallest round's, W + (pp − 1)·H/3. It is
more where rounds as tall cannot follow: pp rounds hold limited tokens, so of all items' area only
what is densest, and anything they cost besides makes W larger. The best H is not known, so the
bound is the least for any: low, and long items must be split far; high, and the tallest round
alone takes long. Messages count as free.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from longshore.plan.cost import CostTable, Ints, StageCosts
from longshore.plan.packing import NEVER, PackingLimits, Problem, lower_bound
from longshore.plan.types import PlanSetting

STEPS = 48
"""Heights that are told apart."""


def order_bound(columns: Ints, *, pp: int) -> int:
    """A finish that no order of these rounds can beat."""
    stages = columns.shape[1] // 3
    forward, backward = columns[:, :stages], columns[:, stages : 2 * stages]
    both = forward + backward
    bounds = [_fill_and_drain(forward, backward, rank, pp=pp) for rank in range(pp)]
    least = np.minimum(forward[:, 0], backward[:, 0])
    bounds.append(int((both.sum(axis=1) + int(least.sum()) - least).max()))
    if pp == stages:
        work = int(np.minimum(both[:, 0], both[:, -1]).sum())
        later = int(np.sort(forward[:, 0])[::-1][: pp - 1].sum())
        bounds.append(work + int(backward[:, :-1].sum(axis=1).max()) - later)
    return max(bounds)


def _fill_and_drain(forward: Ints, backward: Ints, rank: int, *, pp: int) -> int:
    work = int(forward[:, rank::pp].sum() + backward[:, rank::pp].sum())
    return work + _two_ends(forward[:, :rank].sum(axis=1), backward[:, :rank].sum(axis=1))


def _two_ends(fill: Ints, drain: Ints) -> int:
    """The least sum of one round's fill and another's drain."""
    if len(fill) == 1:
        return int(fill[0] + drain[0])
    first, second = np.argsort(drain, kind="stable")[:2]
    others = np.full(len(fill), drain[first])
    others[first] = drain[second]
    return int((fill + others).min())


@dataclass(frozen=True, slots=True)
class Capped:
    """What a plan is at least where no round is taller than a height, in quanta."""

    height: int
    """The most that a round costs."""
    work: int
    """The least work of an average rank."""


def capped_works(problem: Problem, *, steps: int = STEPS) -> list[Capped]:
    """For rising heights, from the least that is possible to one that no longer matters."""
    fixed = problem.pack + problem.table.round
    low = int(problem.cost.min(axis=1).max()) + fixed
    high = max(low, int(problem.natural.max()) + fixed)
    grid = np.unique(np.geomspace(max(1, low), max(1, high), steps).astype(np.int64))
    grid[0], grid[-1] = low, high
    tokens = int(problem.least_tokens.sum())
    packs = max(problem.lanes, -(-tokens // problem.capacity))
    works = []
    for height in grid.tolist():
        area = _least_area(problem, height - fixed)
        work = (area + problem.pack * packs) // problem.lanes + problem.table.round
        works.append(Capped(height, work))
    return works


def _least_area(problem: Problem, cost: int) -> int:
    """Of all items, where each costs at most this."""
    tall = problem.natural > cost
    total = int(problem.least_area[~tall].sum())
    if tall.any():
        legal = problem.cost[tall] <= cost
        total += int(np.where(legal, problem.area[tall], NEVER).min(axis=1).sum())
    return total


def densest_area(problem: Problem, *, rounds: int) -> int:
    """An area that the items of so many rounds do not exceed, each at its least."""
    density = problem.least_area / problem.least_tokens
    order = np.argsort(-density, kind="stable")
    tokens = problem.least_tokens[order].cumsum()
    # The item that exceeds the tokens counts too.
    count = int(np.searchsorted(tokens, rounds * problem.lanes * problem.capacity)) + 1
    return int(problem.least_area[order[:count]].sum())


def plan_bound(problem: Problem, shares: StageCosts, *, pp: int, least_work: int) -> int:
    """In units of 1/whole quantum; least_work: quanta that no plan's average rank goes below."""
    ranks = [min(shares.of_rank(rank, pp)) for rank in range(pp)]
    # An average rank has `whole` of the work, so the busiest has at least as much.
    busiest = max(shares.whole, *ranks)
    forward = max(shares.forward_linear[0], shares.forward_quadratic[0])
    backwards = list(map(min, shares.backward_linear, shares.backward_quadratic))
    first = min(shares.forward_linear[0], shares.forward_quadratic[0], backwards[0])
    drain, outer = sum(backwards[:-1]), min(ranks[0], ranks[-1])
    follows = shares.stages == pp and drain >= (pp - 1) * forward and outer >= forward
    dense = densest_area(problem, rounds=pp) // problem.lanes + 1
    least = int(problem.least_area.sum()) // problem.lanes
    works = capped_works(problem)
    times = []
    # Between two heights of the grid: as tall as the lower, and the work at the higher.
    for low, high in (*pairwise(works), (works[-1], works[-1])):
        height, work = low.height, max(least_work, high.work)
        time = max(busiest * work, pp * shares.whole * height + first * max(0, work - height))
        if follows:
            later = min((pp - 1) * height, max(0, dense + work - least - height))
            time = max(time, outer * work + drain * height - forward * later)
        times.append(time)
    return min(times)


UNLIMITED = 1 << 30


def step_bound(setting: PlanSetting, table: CostTable, *, capacity: int) -> int:
    """The bound of every policy with these limits; capacity: after alignment."""
    limits = PackingLimits(
        lanes=setting.lanes,
        capacity=capacity,
        lane_tokens=capacity,
        max_items=UNLIMITED,
        min_rounds=1,
        sole=False,
    )
    problem = Problem(table, limits, alone=True)
    work = work_bound(problem, setting)
    if setting.pp == 1:
        return work * setting.shares.whole
    return plan_bound(problem, setting.shares, pp=setting.pp, least_work=work)


def work_bound(problem: Problem, setting: PlanSetting) -> int:
    """Quanta that the rounds of every plan take together."""
    linear = int(setting.profile.linear * problem.table.scale)
    return lower_bound(problem, sync=setting.sync, linear=linear)
