"""Plans of fixed inputs, kept in golden_plans.json: a change of any of them must be meant.

    python -m tests.plan.test_golden --write

writes them anew, from the root of the checkout.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.plan.samples import CHARGED, FREE

from longshore.plan import Plan, check, make_plan

GOLDEN = Path(__file__).with_name("golden_plans.json")
Json = dict[str, Any]


def spread_lengths(count: int, most: int) -> list[int]:
    """A long tail without a random number generator, the same everywhere and for ever."""
    ranks = [place * 13 % count + 1 for place in range(count)]
    return [most * 9 // (rank * (rank + 8)) for rank in ranks]


TAIL = spread_lengths(40, 60000)
CASES: dict[str, Json] = {
    "mixed, free, lanes that meet": {"profile": FREE},
    "mixed, charged, lanes that meet": {"profile": CHARGED},
    "mixed, charged, lanes that run free": {"profile": CHARGED, "sync": "step"},
    "mixed, charged, one node": {"profile": CHARGED, "lanes": 4, "capacity": 32768},
    "mixed, charged, six lanes": {"profile": CHARGED, "lanes": 6, "capacity": 16384},
    "mixed, charged, any size": {"profile": CHARGED, "lanes": 12, "cp_sizes": "any"},
    "mixed, charged, caps": {"profile": CHARGED, "max_sequences": 2, "align": 128, "min_cp": 2},
    "mixed, charged, pipeline": {"profile": CHARGED, "pp": 4, "vpp": 2},
    "dynamic, charged": {"profile": CHARGED, "policy": "dynamic"},
    "balanced, charged": {"profile": CHARGED, "policy": "balanced"},
    "static": {"profile": FREE, "policy": "static"},
    "given": {
        "profile": CHARGED,
        "policy": "given",
        "packs": [[i, i + 1] for i in range(0, len(TAIL), 2)],
    },
}


def planned(case: str) -> Plan:
    return make_plan(TAIL, **{"lanes": 16, "capacity": 8192, **CASES[case]})


def recorded(plan: Plan) -> Json:
    """What is kept of a plan: each pack is its first lane, its CP size and its sequences."""
    rounds = [
        [[pack.first_lane, pack.cp_size, list(pack.sequences)] for pack in round_.packs]
        for round_ in plan.rounds
    ]
    return {"digest": plan.digest, "predicted": plan.stats.predicted, "rounds": rounds}


def test_the_lengths_are_those_the_plans_were_made_for():
    assert json.loads(GOLDEN.read_text())["lengths"] == TAIL


def test_every_case_is_recorded():
    assert list(json.loads(GOLDEN.read_text())["plans"]) == list(CASES)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_the_golden_one(case: str):
    plan = planned(case)
    check(plan)
    assert recorded(plan) == json.loads(GOLDEN.read_text())["plans"][case]


def write() -> None:
    """One line for each case, so that a change shows which plans it touched."""
    lines = [f"{json.dumps(case)}: {json.dumps(recorded(planned(case)))}" for case in CASES]
    body = ",\n  ".join(lines)
    GOLDEN.write_text(f'{{"lengths": {json.dumps(TAIL)}, "plans": {{\n  {body}\n}}}}\n')


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
