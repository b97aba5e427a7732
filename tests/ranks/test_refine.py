"""A profile that is refined on ranks: the same on all of them, better than before, and resumed."""

import json
from dataclasses import replace
from statistics import mean

import torch.distributed as dist
from tests.ranks.harness import run_ranks
from tests.ranks.test_data_path import RandomSource, packing

from longshore.data.source import BatchSize
from longshore.data.steps import IndexedSteps, Loader
from longshore.distributed.topology import make_topology
from longshore.plan import make_plan
from longshore.plan.cost import CostProfile
from longshore.plan.refine import predicted_seconds, round_parts
from longshore.train.refine import Refiner

TRUE = CostProfile(linear=1.0, quadratic=0.2, gather=(0.1, 0.1), node=8, pack=2.0, round=1.0)
WRONG = replace(TRUE, quadratic=TRUE.quadratic / 10)
LANES, PP = 2, 2
EVERY, STEPS, SAVED_AT = 8, 27, 15


def injected(plan, topology):
    """Seconds of this rank: lane 1 is the slowest, and pipeline rank 1 has most of the work."""
    real = replace(plan, setting=replace(plan.setting, profile=TRUE))
    share = (0.5, 1.5)[topology.pp_rank] * (0.8, 1.0)[topology.lane]
    return [share * predicted_seconds(part.amounts, TRUE) for part in round_parts(real)]


def error(plan):
    """Of the plan's profile: the mean relative error of its rounds."""
    real = replace(plan, setting=replace(plan.setting, profile=TRUE))
    pairs = zip(round_parts(plan), round_parts(real), strict=True)
    return mean(
        abs(predicted_seconds(mine.amounts, plan.setting.profile) / took - 1)
        for mine, other in pairs
        if (took := predicted_seconds(other.amounts, TRUE))
    )


def trained(topology, host, state=None):
    """Digests, profiles and errors of the plans, and a state saved on the way."""
    refiner = Refiner(WRONG, prefetch=2, lane=topology.lane, pp=PP, every=EVERY)
    steps = IndexedSteps(
        RandomSource(60, 60),
        planner=lambda sequences: make_plan(
            sequences, lanes=LANES, capacity=64, pp=PP, policy="static", profile=refiner.profile
        ),
        batch=BatchSize("sequences", 20),
        seed=1,
        topology=topology,
        packing=packing(PP),
        before_plan=refiner.before_plan,
    )
    plans, saved = {}, {}
    with Loader(steps, prefetch=2) as loader:
        if state:
            loader.load_state_dict(state)
            assert refiner.load(state, SAVED_AT) == []
        for number in range(SAVED_AT + 1 if state else 1, STEPS + 1):
            plan = next(loader).plan
            plans[number] = (plan.digest, str(plan.setting.profile), error(plan))
            refiner.measured(number, plan, injected(plan, topology))
            if number == SAVED_AT:
                saved = {**loader.state_dict(), **refiner.saved(number)(host)}
    return plans, json.loads(json.dumps(saved))


def refined():
    topology = make_topology(lanes=LANES, pp=PP, device="cpu")
    host = topology.host_groups()
    plans, state = trained(topology, host)
    resumed, _ = trained(topology, host, state)
    dist.barrier()
    return plans, state, resumed


def test_all_ranks_refine_alike_and_resume_exactly():
    results = run_ranks(LANES * PP, refined)
    plans, state, resumed = results[0]
    assert all(result == results[0] for result in results)
    profiles = {number: profile for number, (_, profile, _) in plans.items()}
    changes = [n for n in range(2, STEPS + 1) if profiles[n] != profiles[n - 1]]
    assert changes == [13, 21], "two windows of 8 steps, each used 5 steps later"
    errors = [error for _, _, error in plans.values()]
    first, second, third = mean(errors[:12]), mean(errors[12:20]), mean(errors[20:])
    assert third < second < first / 3
    assert state["refine"]["window"] == 8
    assert resumed == {number: plans[number] for number in range(SAVED_AT + 1, STEPS + 1)}
