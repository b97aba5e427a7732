"""Changing any token of one sequence leaves every mixer output of all others bit-identical."""

import numpy as np
import pytest
import torch
from tests.data.plans import Sample
from tests.ranks.harness import run_ranks
from tests.ranks.spine import VOCAB, batches_of, dense, exact, lanes_of, make_samples, sharded

from longshore.data.pack import merge, unpack
from longshore.plan import make_plan


def mixer_outputs(model, plan, samples, topology) -> list[dict[int, torch.Tensor]]:
    """Of each layer, by sequence, from all lanes."""
    seen: list[tuple] = []
    hooks = [
        block.mixer.register_forward_hook(lambda _, args, out, i=i: seen.append((i, args[1], out)))
        for i, block in enumerate(model.layers.values())
    ]
    with torch.no_grad():
        for batch in batches_of(plan, samples, topology.lane):
            model(batch.token_ids, batch.ctx, batch.targets.labels)
    for hook in hooks:
        hook.remove()
    pieces = [
        [p for i, ctx, out in seen if i == layer for p in unpack(ctx, out)] for layer in (0, 1)
    ]
    everything = [None] * topology.lanes
    torch.distributed.all_gather_object(everything, pieces)
    return [merge(plan, [p for part in everything for p in part[layer]]) for layer in (0, 1)]


def perturb(lanes: int, cp_size: int, attention: str) -> list[str]:
    lengths = [5, 40, 1, 17, 2]
    plan = make_plan(lengths, lanes=lanes, capacity=128, policy="static", cp_size=cp_size)
    samples = make_samples(plan)
    faults = []
    with lanes_of(lanes) as (topology, groups):
        choices = exact(mode="none", attention=attention)
        model = sharded(dense(8), topology, groups, choices)
        before = mixer_outputs(model, plan, samples, topology)
        for place, position in [(0, 0), (1, 13), (1, 39), (2, 0), (3, 16), (4, 1)]:
            tokens = samples[place].tokens.copy()
            tokens[position] = (tokens[position] + 1) % VOCAB
            changed = {**samples, place: Sample(tokens, samples[place].loss_mask)}
            after = mixer_outputs(model, plan, changed, topology)
            for layer, (a, b) in enumerate(zip(before, after, strict=True)):
                same = {i for i in a if torch.equal(a[i], b[i])}
                if same != set(range(len(lengths))) - {place}:
                    faults.append(f"{place}:{position} in layer {layer} left only {same}")
                head = slice(0, position)
                if not torch.equal(a[place][head], b[place][head]):
                    faults.append(f"{place}:{position} in layer {layer} changed the past")
    return faults


@pytest.mark.parametrize(
    ("lanes", "cp_size", "attention"),
    [
        (1, 1, "gather"),
        (2, 2, "gather"),
        (2, 2, "heads"),
        (4, 4, "gather"),
        (4, 4, "heads"),
        (8, 8, "gather"),
        (8, 8, "heads"),
    ],
)
def test_nothing_leaks(lanes: int, cp_size: int, attention: str) -> None:
    assert run_ranks(lanes, perturb, lanes, cp_size, attention, timeout=120)[0] == []


def test_samples_differ() -> None:
    plan = make_plan([5, 40], lanes=1, capacity=128)
    assert not np.array_equal(make_samples(plan)[0].tokens, make_samples(plan, seed=1)[0].tokens)
