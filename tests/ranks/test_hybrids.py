"""Whole models of many kinds of layers: any plan gives what each sequence alone gives."""

from itertools import product

import pytest
import torch
from tests.ranks.exchanged import count
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import HYBRIDS
from tests.ranks.spine import batches_of, exact, lanes_of, make_samples, sharded
from tests.ranks.test_exactness import check, several_packs

from longshore.parallel.fsdp import begin_round
from longshore.plan import make_plan

LENGTHS = [1, 2, 3, 7, 33, 150, 5, 9, 64, 18]


@pytest.mark.fuzz
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(("lanes", "kinds"), [(1, "pow2"), (3, "any"), (4, "pow2")])
def test_any_plan_is_each_sequence_alone(name: str, lanes: int, kinds: str, is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("in `make fuzz`; a sample of all axes is in test_composed.py")
    cases = []
    ways = product(("auto", "states"), (("zero3", "blocks"), ("zero2", "none"), ("none", "none")))
    for (scan, (mode, recompute)), policy in zip(
        ways, ("mixed", "static", "dynamic", "balanced", "padded", "mixed"), strict=True
    ):
        plan = make_plan(
            LENGTHS, lanes=lanes, capacity=200 // lanes + 12, policy=policy, cp_sizes=kinds
        )
        choices = exact(mode=mode, recompute=recompute, scan=scan)
        cases.append((HYBRIDS[name](), plan, choices))
    check(lanes, cases)


@pytest.mark.long
@pytest.mark.parametrize("name", HYBRIDS)
def test_several_packs_and_lanes_without_work(name: str) -> None:
    cases = [
        (HYBRIDS[name](), several_packs(), exact(mode=mode, recompute=recompute, scan=scan))
        for mode, recompute, scan in [("zero3", "blocks", "states"), ("zero2", "none", "heads")]
    ]
    check(4, cases)


def exchanged(with_depths: bool) -> list[tuple[str, int]]:
    """The calls of a forward and backward, with and without multi-token prediction."""
    config = HYBRIDS["deepseek"]()
    if not with_depths:
        from dataclasses import replace

        config = replace(config, mtp=())
    plan = make_plan([50, 3], lanes=2, capacity=64, policy="static", cp_size=2)
    with lanes_of(2) as (topology, groups):
        model = sharded(config, topology, groups, exact(mode="none"))
        (batch,) = batches_of(plan, make_samples(plan), topology.lane, len(config.mtp))
        begin_round(model, mode="none", is_last=False)  # FSDP sums no gradients
        with count() as counts:
            out = model(batch.token_ids, batch.ctx, batch.targets.labels, batch.mtp)
            sum(part.sum() for part in (out.values, *out.mtp)).backward()
        return counts.log


def layer_calls(config) -> int:
    """Of a layer of latent attention: a gather, and in backward a gather and a reduce_scatter."""
    return 3 * len(config.layers)


def test_no_float_is_exchanged_for_multi_token_prediction() -> None:
    """Its blocks exchange what their attention and balance must; tokens and labels do not move."""
    config = HYBRIDS["deepseek"]()
    plain = run_ranks(2, exchanged, False)[0]
    with_depths = run_ranks(2, exchanged, True)[0]
    floats = [call for call in plain if call[0] != "all_reduce"]
    assert len(floats) == layer_calls(config)
    more = [call for call in with_depths if call[0] != "all_reduce"]
    assert set(more) == set(floats), "nothing but the latents of its blocks' attention"
    assert len(more) == len(floats) + 3 * len(config.mtp)
    assert torch.get_default_dtype() == torch.float32
