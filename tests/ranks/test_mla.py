"""Latent and gated attention over lanes: exact, nothing leaks, and only latents travel."""

from dataclasses import replace

import pytest
from tests.ranks.exchanged import exchanged
from tests.ranks.harness import run_ranks
from tests.ranks.spine import VOCAB, exact
from tests.ranks.test_exactness import check, several_packs

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.rope import DynamicScaling, RopeConfig
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


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_only_latents_travel(cp_size: int) -> None:
    for rows, forward, backward in run_ranks(cp_size, exchanged, LATENT, cp_size):
        assert rows > 0
        others = (cp_size - 1) * rows * (5 + 6) * FLOAT
        assert forward == [("gather", others)] * 2
        assert backward == [("gather", others), ("reduce_scatter", others)] * 2
