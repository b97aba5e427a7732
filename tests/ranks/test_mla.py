"""Latent and gated attention over lanes: exact, nothing leaks, and only latents travel."""

from dataclasses import replace

import pytest
from tests.data.plans import Sample
from tests.ranks.harness import run_ranks
from tests.ranks.spine import VOCAB, batches_of, exact, lanes_of, make_samples, sharded
from tests.ranks.test_exactness import check, several_packs
from tests.ranks.test_perturbation import mixer_outputs

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.rope import DynamicScaling, RopeConfig
from longshore.distributed.collectives import count
from longshore.plan import make_plan

LENGTHS = [1, 2, 7, 33, 90, 5]
FLOAT = 8
ROPE = RopeConfig(scaling=DynamicScaling(factor=2.0, original_length=16))
EXPANDED = MLAConfig(heads=3, kv_rank=5, nope_dim=4, rope_dim=6, value_dim=7, q_rank=8, rope=ROPE)
ABSORBED = replace(EXPANDED, q_rank=None, bias=True, form="absorbed")
GATED = AttentionConfig(
    heads=4, kv_heads=2, head_dim=8, rope=RopeConfig(rotary_dim=2), qk_norm=True, gate=True
)


def of(*mixers) -> DecoderConfig:
    layers = tuple(LayerConfig(mixer, MLPConfig(width=16)) for mixer in mixers)
    return DecoderConfig(
        vocab_size=VOCAB, width=24, layers=layers, zero_centred=GATED in mixers, init_std=0.3
    )


LATENT, MIXED = of(EXPANDED, ABSORBED), of(GATED, EXPANDED)


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_any_plan_as_alone(lanes: int) -> None:
    static = make_plan(
        LENGTHS, lanes=lanes, capacity=240, policy="static", cp_size=lanes, cp_sizes="any"
    )
    mixed = make_plan(LENGTHS, lanes=lanes, capacity=120 // lanes + 8, cp_sizes="any")
    assert {pack.cp_size for _, pack in static.packs()} == {lanes}
    check(
        lanes,
        [
            (LATENT, static, exact(mode="zero3")),
            (MIXED, static, exact(mode="none", attention="gather")),
            (LATENT, mixed, exact(mode="zero2", recompute="blocks")),
            (MIXED, mixed, exact(mode="zero3", attention="heads" if lanes < 3 else "gather")),
        ],
    )


def test_several_packs_in_a_micro_batch_and_lanes_without_work() -> None:
    check(
        4,
        [
            (LATENT, several_packs(), exact(mode="zero3", recompute="blocks")),
            (MIXED, several_packs(), exact(mode="zero3")),
        ],
    )


def perturb(lanes: int) -> list[str]:
    """Which changes of a token showed in another sequence, or in what came before it."""
    lengths = [5, 40, 1, 17, 2]
    plan = make_plan(lengths, lanes=lanes, capacity=128, policy="static", cp_size=lanes)
    samples = make_samples(plan)
    faults = []
    with lanes_of(lanes) as (topology, groups):
        for config in (LATENT, MIXED):
            model = sharded(config, topology, groups, exact(mode="none"))
            before = mixer_outputs(model, plan, samples, topology)
            for place, position in [(0, 0), (1, 13), (1, 39), (2, 0), (3, 16), (4, 1)]:
                tokens = samples[place].tokens.copy()
                tokens[position] = (tokens[position] + 1) % VOCAB
                changed = {**samples, place: Sample(tokens, samples[place].loss_mask)}
                after = mixer_outputs(model, plan, changed, topology)
                for layer, (a, b) in enumerate(zip(before, after, strict=True)):
                    same = {i for i in a if a[i].equal(b[i])}
                    past = a[place][:position].equal(b[place][:position])
                    if same != set(range(len(lengths))) - {place} or not past:
                        faults.append(f"{place}:{position} in layer {layer}: {same}, {past}")
    return faults


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_nothing_leaks(lanes: int) -> None:
    assert run_ranks(lanes, perturb, lanes, timeout=120)[0] == []


def exchanged(lanes: int, cp_size: int) -> tuple[int, list, list]:
    plan = make_plan(
        [50, 3], lanes=lanes, capacity=128, policy="static", cp_size=cp_size, cp_sizes="any"
    )
    with lanes_of(lanes) as (topology, groups):
        model = sharded(LATENT, topology, groups, exact(mode="none"))
        (batch,) = batches_of(plan, make_samples(plan), topology.lane)
        with count() as forward:
            nll = model(batch.token_ids, batch.ctx, batch.targets.labels).values
        with count() as backward:
            nll.sum().backward()
        rows = sum(pack.stop - pack.start for pack in batch.ctx.packs if pack.group.cp_size > 1)
        logs = [[(call.name, call.bytes) for call in c.log] for c in (forward, backward)]
        return rows, *logs


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_only_latents_travel(cp_size: int) -> None:
    for rows, forward, backward in run_ranks(cp_size, exchanged, cp_size, cp_size):
        assert rows > 0
        others = (cp_size - 1) * rows * (5 + 6) * FLOAT
        assert forward == [("gather", others)] * 2
        assert backward == [("gather", others), ("reduce_scatter", others)] * 2


def test_nothing_is_exchanged_at_cp_size_1() -> None:
    assert [found[1:] for found in run_ranks(2, exchanged, 2, 1)] == [([], [])] * 2
