from dataclasses import replace

import pytest

from longshore.arch.costs import RATE, flops_cost, forward_flops, needs_curve
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig
from longshore.plan import make_plan

COMMON = {"heads": 4, "head_dim": 64, "rope_dim": 16, "q_rank": 64, "window": 128, "o_rank": 64}
FEW = SparseAttentionConfig(**COMMON, ratio=128)
CHOSEN = replace(FEW, ratio=4, index=IndexConfig(heads=4, head_dim=32, top_k=64))


def decoder(*mixers):
    layers = tuple(LayerConfig(mixer, MLPConfig(width=512)) for mixer in mixers)
    return DecoderConfig(vocab_size=1000, width=256, layers=layers)


@pytest.mark.parametrize("mixers", [(FEW,), (CHOSEN,), (CHOSEN, FEW)])
def test_a_sequence_costs_its_flops(mixers):
    config = decoder(*mixers)
    profile = flops_cost(config)
    for length in (1, 5, 100, 129, 3000, 65_536, 1_000_001):
        wanted = 3 * forward_flops(config, length) / RATE
        assert profile.sequence_cost(length, length, 1) == pytest.approx(wanted, rel=0.01)


def test_plans_change_with_what_sequences_cost():
    """A long sequence costs little more than short ones of as many tokens, so it is split less."""
    lengths = [32_768, *[1024] * 1024]
    sizes = {}
    for name, profile in {"curve": flops_cost(decoder(FEW)), "squares": None}.items():
        options = {} if profile is None else {"profile": profile}
        plan = make_plan(lengths, lanes=8, capacity=65_536, **options)
        sizes[name] = [pack.cp_size for _, pack in plan.packs() if 0 in pack.sequences]
    assert sizes == {"curve": [1], "squares": [2]}


def test_only_models_that_need_it():
    assert needs_curve(decoder(FEW))
    assert not needs_curve(preset("tiny-llama"))
