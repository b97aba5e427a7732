"""A plan that is wrong ends the step on all lanes, which learn the reason; none waits."""

import re
from dataclasses import replace

from tests.data.broken_plans import BROKEN
from tests.data.test_steps import LENGTHS, source_of
from tests.ranks.harness import run_ranks

from longshore.data.source import BatchSize, Place
from longshore.data.steps import IndexedSteps, StreamedSteps
from longshore.distributed.topology import make_topology
from longshore.plan import make_plan


def planner(sequences):
    return make_plan(sequences, lanes=2, capacity=32, policy="static", cp_size=2)


def both_kinds(topology, planner):
    source, batch = source_of(LENGTHS), BatchSize("sequences", len(LENGTHS))
    mine = (source[i] for i in range(topology.lane, len(LENGTHS), 2))
    yield IndexedSteps(source, planner=planner, batch=batch, seed=0, topology=topology)
    yield StreamedSteps(mine, planner=planner, batch=batch, topology=topology)


def said(steps) -> str:
    try:
        next(steps.from_place(Place(), lambda: False))
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        steps.close()
    return ""


def swapped(sequences):
    """Valid, and named as the other."""
    plan = planner(sequences)
    (pack,) = plan.rounds[0].packs
    pack = replace(pack, sequences=pack.sequences[::-1])
    return replace(plan, rounds=(replace(plan.rounds[0], packs=(pack,)),))


def all_said() -> dict[str, list[str]]:
    topology = make_topology(lanes=2, device="cpu")
    answers = {
        name: [said(steps) for steps in both_kinds(topology, lambda s, c=change: c(planner(s)))]
        for name, (change, _) in BROKEN.items()
    }
    mine = planner if topology.lane else swapped
    answers["other plans"] = [said(steps) for steps in both_kinds(topology, mine)]
    answers["none"] = [said(steps) for steps in both_kinds(topology, planner)]
    return answers


def test_every_lane_learns_what_is_wrong() -> None:
    for answers in run_ranks(2, all_said, timeout=120):
        for name, (_, message) in BROKEN.items():
            for answer in answers[name]:
                assert re.search(message, answer), (name, answer)
        assert all("2 different versions of the plan" in text for text in answers["other plans"])
        assert answers["none"] == ["", ""]
