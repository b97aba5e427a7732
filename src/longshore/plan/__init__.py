"""The planner: lengths in, a plan of packs, lanes and rounds out. NumPy only."""

from longshore.plan.check import check
from longshore.plan.cost import CostProfile, load_profile
from longshore.plan.planner import make_plan
from longshore.plan.types import Pack, Plan, PlanSetting, Round, Sequence, Stats

__all__ = [
    "CostProfile",
    "Pack",
    "Plan",
    "PlanSetting",
    "Round",
    "Sequence",
    "Stats",
    "check",
    "load_profile",
    "make_plan",
]
