"""Depths of prediction with experts: what lies past a sequence's end counts in no plan."""

from dataclasses import replace

import pytest
import torch
from tests.data.plans import Sample
from tests.ranks.depths_by_hand import ByHand, by_hand
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.spine import MTP_WEIGHT, PAD, batches_of, exact, lanes_of, make_samples, sharded

from longshore.plan import make_plan
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

LIMIT = 1e-9


def two_depths():
    config = deepseek()
    return replace(config, mtp=(config.layers[1], config.layers[1]))


def without_padding_id(samples: dict[int, Sample]) -> dict[int, Sample]:
    """No token is the one that stands for padding."""
    return {i: replace(s, tokens=s.tokens + (s.tokens == PAD)) for i, s in samples.items()}


KNOWN: dict[tuple, ByHand] = {}
"""By hand, which is slow; the same for every plan."""


def wanted(config, samples: dict[int, Sample]) -> ByHand:
    key = (config, tuple(tuple(sample.tokens) for sample in samples.values()))
    if key not in KNOWN:
        KNOWN[key] = by_hand(config, samples)
    return KNOWN[key]


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative to the largest value; what is 0 but for rounding (keys of one token) is left out."""
    difference, size = (got - want).abs().max().item(), want.abs().max().item()
    return difference if size < 1e-12 else difference / size


def faults_of(config, plan, samples, choices, lanes) -> list[str]:
    """What differs from the model by hand; on lane 0, the others help."""
    topology, groups = lanes
    model = sharded(config, topology, groups, choices)
    stepper = Stepper(model, None, topology, choices.mode, make_loss(), 0.0, MTP_WEIGHT)
    batches = batches_of(plan, samples, topology.lane, len(config.mtp))
    losses, counts, _ = stepper.gradients(batches, max(1, batches[0].counts.main))
    counted = [layer.tolist() for layer in counts.over_lanes(topology)]
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    both = torch.stack([stepper.weighted(losses), losses[1]])
    torch.distributed.all_reduce(both)
    if topology.lane:
        return []
    want = wanted(config, samples)
    errors = {name: off(gradients[name], value) for name, value in want.gradients.items()}
    errors["loss"] = abs(both[0].item() - want.loss) / want.loss
    errors["balance"] = abs(both[1].item() - want.balance) / want.balance
    faults = [f"{name} is off by {error:.1e}" for name, error in errors.items() if error > LIMIT]
    if counted != want.counts:
        faults.append(f"experts got {counted}, by hand {want.counts}")
    if gradients["embed.weight"][PAD].any():
        faults.append("the embedding of padding has a gradient")
    where = f"{len(config.mtp)} depths, {plan.rounds}: "
    return [where + fault for fault in faults]


def compare(cases: list) -> list[str]:
    faults = []
    ways = {1: ("zero3", "blocks"), 2: ("zero2", "none"), 4: ("none", "none")}
    with lanes_of(4) as lanes:
        for config, sizes in cases:
            for cp_size, (mode, recompute) in ways.items():
                plan = make_plan(sizes, lanes=4, capacity=64, policy="static", cp_size=cp_size)
                samples = without_padding_id(make_samples(plan))
                choices = exact(mode=mode, recompute=recompute)
                faults += faults_of(config, plan, samples, choices, lanes)
    return faults


@pytest.mark.long
def test_positions_past_the_end_count_nowhere() -> None:
    """At CP sizes 1, 2 and 4; in the second step depth 2 sees no token."""
    lengths = [1, 2, 3, 9, 2, 1]
    cases = [(hybrid(), lengths), (two_depths(), lengths), (two_depths(), [1, 2, 1])]
    assert run_ranks(4, compare, cases, timeout=300)[0] == []
