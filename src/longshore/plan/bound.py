"""A time that no plan can beat.

In: integer costs of every item at every legal CP size. Out: quanta.

A plan that ends by T gives every item a CP size that fits its lanes and costs at most T, and the
lanes have lanes·T quanta together for the areas (CP size × cost) of those choices. The smallest T
for which the cheapest choices fit is therefore a bound. Two observations make it tighter. A lane
that works pays for at least one pack, and together the lanes pay for one pack for every `capacity`
tokens. And where lanes meet after each round, an item's round is not all of the step: the other
rounds carry at least what one round cannot hold, lanes · capacity tokens, and take their time for
it.

With one item of cost 8 and one of cost 2 on 2 lanes (CP sizes 1 and 2, no exchange, no pack cost) T
is 5: the first must be split to end before 8, and both together have an area of 10.
"""

import numpy as np

from longshore.plan.packing import NEVER, Problem


def lower_bound(problem: Problem, *, sync: str, linear: int) -> int:
    """The bound in quanta. `linear` is the least quanta that a token costs."""
    tokens = int(problem.least_tokens.sum())
    packs = max(problem.lanes, -(-tokens // problem.capacity))
    fixed = problem.table.round + problem.pack
    elsewhere = 0
    if sync == "round":
        beyond = max(0, tokens - problem.lanes * problem.capacity)
        elsewhere = beyond * linear // problem.lanes

    def possible(time: int) -> bool:
        legal = problem.cost <= time - fixed - elsewhere
        area = np.where(legal, problem.area, NEVER).min(axis=1)
        if int(area.max()) >= NEVER:
            return False
        return int(area.sum()) + problem.pack * packs <= problem.lanes * (
            time - problem.table.round
        )

    low = int(problem.cost.min(axis=1).max()) + fixed + elsewhere - 1
    low = max(low, int(problem.least_area.sum()) // problem.lanes + problem.table.round - 1)
    high = max(low + 1, 1)
    while not possible(high):
        low, high = high, 2 * high
    while high - low > max(1, high >> 24):
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low + 1
