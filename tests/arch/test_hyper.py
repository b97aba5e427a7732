"""Hyper-connections as data: sizes, FLOPs, messages, layouts, and what is refused."""

from dataclasses import replace

import pytest

from longshore.advisor.peak_memory import expected_peak
from longshore.advisor.step_time import block_works
from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import forward_flops, make_layout
from longshore.arch.decoder import DecoderConfig, HyperConfig, LayerConfig, with_balance
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.memory import RankSetting, sent_width

MOE = MoEConfig(experts=4, top_k=2, width=8, bias_update=0.01)
HASHED = MoEConfig(experts=4, top_k=2, width=8, hash_rows=10)
ATTENTION = AttentionConfig(heads=2, kv_heads=1, head_dim=8)


def config(residuals: HyperConfig | None = None, **changes) -> DecoderConfig:
    layers = (LayerConfig(ATTENTION, MOE), LayerConfig(None, HASHED), LayerConfig(ATTENTION, MOE))
    whole = DecoderConfig(vocab_size=10, width=16, layers=layers, residuals=residuals)
    return replace(whole, **changes)


def test_flops_are_those_of_weights_and_mixing():
    plain, hyper = config(), config(HyperConfig(count=4))
    each = 2 * 64 * 24 + 2 * 16 * (4 + 4 + 16)  # the projection; collapse, expand and mix
    last = 2 * 64 * 4 + 2 * 16 * 4
    assert forward_flops(hyper, 7) - forward_flops(plain, 7) == 7 * (5 * each + last)


def test_works_have_all_flops():
    lengths, hyper = [7, 3], HyperConfig(count=4)

    def flops(decoder):
        works = block_works(decoder, lengths, item=2).items()
        return sum(
            n * (work.core + work.rows * sum(p.flops for p in work.products)) for work, n in works
        )

    each = 5 * hyper.flops(16) + hyper.collapse_flops(16)
    assert flops(config(hyper)) - flops(config()) == 10 * each


def test_rows_between_stages_are_wider_until_the_last_norm():
    depth = LayerConfig(ATTENTION, MLPConfig(width=8))
    decoder = config(HyperConfig(count=4), mtp=(depth,))
    layout = make_layout(decoder, pp=2, vpp=2, text="Et|tt|m|L")
    assert [sent_width(decoder, layout, stage) for stage in (0, 1, 2)] == [64, 64, 32]
    assert [sent_width(config(mtp=(depth,)), layout, stage) for stage in (0, 1, 2)] == [16, 16, 32]


def test_a_rank_reads_token_ids_where_a_layer_chooses_experts_by_them():
    layout = make_layout(config(), pp=3, vpp=1, text="Et|t|tL")
    assert [layout.inputs(rank).token_ids for rank in range(3)] == [True, True, False]
    balanced = make_layout(config(), pp=3, vpp=1)
    assert balanced.id_layers == (1,)


def test_memory_grows_with_the_rows():
    plain, hyper = (
        expected_peak(config(residuals), RankSetting(), tokens=4096)
        for residuals in (None, HyperConfig(count=4))
    )
    assert hyper.activations > plain.activations + 4096 * 5 * 64 * (2 + 4)


def test_json():
    decoder = config(HyperConfig(count=4, iterations=7, eps=1e-5))
    assert config_from_json(config_to_json(decoder)) == decoder
    assert all(layer.residuals == decoder.residuals for layer in decoder.layers)
    assert replace(decoder, residuals=None) == config()


def test_balance_leaves_hashed_experts_alone():
    balanced = with_balance(config(), aux_weight=0.5, bias_update=0.1)
    assert [layer.mlp.aux_weight for layer in balanced.layers] == [0.5, 0.0, 0.5]
    assert not balanced.layers[1].mlp.bias


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: HyperConfig(count=0), r"HyperConfig\.count is 0"),
        (lambda: HyperConfig(count=2, eps=0.0), r"HyperConfig\.eps is 0"),
        (lambda: replace(HASHED, aux_weight=0.1), "no bias, no bias_update, no aux_weight"),
        (lambda: replace(HASHED, groups=2, top_groups=2), "no groups"),
        (lambda: config(vocab_size=11), r"hash_rows of layer 1 is 10; .* must be vocab_size, 11"),
        (lambda: config(mtp=(LayerConfig(None, HASHED),)), "leave out hash_rows"),
        (lambda: MLPConfig(width=4, activation="relu2", limit=1.0), "relu2 has none"),
        (lambda: MLPConfig(width=4, limit=-1.0), r"MLPConfig\.limit is -1"),
    ],
)
def test_what_is_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
