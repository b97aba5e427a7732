from dataclasses import replace

import pytest

from longshore.arch.costs import (
    embed_flops,
    forward_flops,
    head_flops,
    layer_flops,
    make_layout,
    stage_costs,
)
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.presets import preset
from longshore.plan.cost import FINE

MLP = LayerConfig(None, MLPConfig(width=8))


def decoder(layers: int, *, vocab_size: int, depths: int = 0) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size, width=4, layers=(MLP,) * layers, mtp=(MLP,) * depths
    )


def test_the_head_counts():
    # A layer takes 2·3·4·8 = 192 FLOPs a token, a head of 48 rows 2·4·48 = 384.
    assert str(make_layout(decoder(4, vocab_size=48), pp=2, vpp=1)) == "Ettt|tL"
    assert str(make_layout(decoder(4, vocab_size=1), pp=2, vpp=1)) == "Ett|ttL"
    assert str(make_layout(decoder(6, vocab_size=96), pp=2, vpp=2)) == "Ett|tt|tt|L"


def test_depths_count_and_make_the_head_more_expensive():
    # A depth takes 192 + 2·2·4·4 = 256 a token, the head of 24 rows 192 for each of two streams.
    assert str(make_layout(decoder(3, vocab_size=24, depths=1), pp=3, vpp=1)) == "Ett|tm|L"


@pytest.mark.parametrize("name", ["qwen3-8b", "tiny-llama"])
def test_parts_make_up_the_whole(name: str):
    config = preset(name)
    parts = [*layer_flops(config, 100), head_flops(config, 100)]
    assert sum(parts) == forward_flops(config, 100)
    assert 0 < embed_flops(config, 100) < min(parts)


def test_by_hand():
    config = decoder(4, vocab_size=48)
    assert str(make_layout(config, pp=2, vpp=2, text="Et|t|tt|L")) == "Et|t|tt|L"
    with pytest.raises(ValueError, match=r"2 stages for each of 2 .* set parallel.vpp to 2"):
        make_layout(config, pp=2, vpp=1, text="Et|t|tt|L")


def test_stage_costs_by_hand():
    """Layers alone, 192 FLOPs a token each, a head of 384 and an embedding of 8: no squares."""
    config = decoder(4, vocab_size=48)
    costs = stage_costs(config, make_layout(config, pp=2, vpp=1), recompute=False)
    total = 4 * 192 + 384 + 8
    first, last = (3 * 192 + 8) / total, (192 + 384) / total
    assert [part / (2 * FINE) for part in costs.forward_linear] == pytest.approx(
        [first / 3, last / 3], abs=1e-6
    )
    assert [part / (2 * FINE) for part in costs.backward_linear] == pytest.approx(
        [first * 2 / 3, last * 2 / 3], abs=1e-6
    )
    assert costs.forward_quadratic[0] == pytest.approx(costs.forward_quadratic[1], abs=2)
    assert costs.streams == (1, 1)


def test_recomputed_blocks_take_three_forwards_and_the_head_two():
    config = decoder(4, vocab_size=48)
    layout = make_layout(config, pp=3, vpp=1, text="Ett|tt|L")
    costs = stage_costs(config, layout, recompute=True)
    ratios = [b / f for f, b in zip(costs.forward_linear, costs.backward_linear, strict=True)]
    assert ratios[1:] == pytest.approx([3, 2], rel=1e-5)
    assert 2.9 < ratios[0] < 3


@pytest.mark.parametrize("name", ["qwen3-8b", "tiny-hybrid", "deepseek-v3"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2)])
def test_stage_costs_add_up(name: str, pp: int, vpp: int):
    config = preset(name)
    layout = make_layout(config, pp=pp, vpp=vpp)
    costs = stage_costs(config, layout, recompute=True)
    assert costs.whole == FINE
    for forward, backward in (
        (costs.forward_linear, costs.backward_linear),
        (costs.forward_quadratic, costs.backward_quadratic),
    ):
        assert sum(forward) + sum(backward) == pp * FINE
    ranks = [costs.of_rank(rank, pp) for rank in range(pp)]
    assert max(linear for linear, _ in ranks) < 1.6 * FINE
    assert costs.streams == tuple(layout.streams(i) for i in range(pp * vpp))


def test_what_lies_between_the_meetings_of_experts():
    """A layer of experts takes 2·3·4·8 + 2·4·2 = 208 FLOPs a token, an MLP 192, the head 384."""
    moe = LayerConfig(None, MoEConfig(experts=2, top_k=1, width=8))
    config = replace(decoder(4, vocab_size=48), layers=(moe, MLP, MLP, MLP))
    layout = make_layout(config, pp=2, vpp=1, text="Ettt|tL")
    costs = stage_costs(config, layout, recompute=True)
    first = costs.forward_tokenwise[0] / costs.forward_linear[0]
    assert first == pytest.approx(208 / (208 + 2 * 192 + 8), rel=1e-5)
    assert costs.backward_tokenwise[0] / costs.backward_linear[0] == pytest.approx(
        3 * 208 / (3 * 208 + 6 * 192 + 2 * 8), rel=1e-5
    )
    assert costs.tokenwise[1::2] == (0, 0), "a stage without experts does not meet"
    whole = replace(config, layers=(moe,) * 4)
    costs = stage_costs(whole, make_layout(whole, pp=1, vpp=1), recompute=False)
    assert sum(costs.tokenwise) / FINE == pytest.approx(1 - 8 / (4 * 208 + 384 + 8), abs=1e-5)


def test_a_stage_of_attention_has_the_squares():
    config = preset("qwen3-8b", layers=4)
    layout = make_layout(config, pp=2, vpp=1, text="Etttt|L")
    costs = stage_costs(config, layout, recompute=False)
    assert costs.forward_quadratic[1] == costs.backward_quadratic[1] == 0
    assert costs.forward_linear[1] > 0
