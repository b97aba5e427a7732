"""A time that no plan of a step can beat.

In: a setting and the costs of its sequences. Out: a time in 1/whole quanta, see StageCosts.

Without a pipeline it is the bound of plan/packing.py. With one, plan/pipeline_bound.py adds how
long the tallest round takes through the stages. Three sequences of cost 6 on 2 lanes, whatever the
CP size: 9 without a pipeline; with two ranks of one stage each, 9 + 6/3 = 11 at CP size 1.
"""

from longshore.plan.cost import CostTable
from longshore.plan.packing import PackingLimits, Problem, lower_bound
from longshore.plan.pipeline_bound import plan_bound
from longshore.plan.types import PlanSetting

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
