from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longshore.arch.costs import forward_flops, parameter_count, step_flops
from longshore.arch.decoder import DecoderConfig, LayerConfig, LoRAConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.presets import preset
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.lora import _names_in

LENGTHS = (1, 2, 7, 30)


def dense(ctx, apart, q_THD, k_TKD, v_TKD):
    """All n² pairs of each sequence, as two products a head."""
    scale = q_THD.shape[2] ** -0.5
    made = []
    group = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    for start, stop in pairwise(ctx.packs[0].padded.offsets):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (q_THD, k_THD, v_THD))
        made.append((torch.softmax(q @ k.mT * scale, -1) @ v).transpose(0, 1))
    return torch.cat(made)


def counted(config: DecoderConfig, lengths: Sequence[int]) -> int:
    """What torch counts for a forward and backward with dense attention and all logits."""
    model = Decoder(config)
    for block in model.layers.values():
        block.mixer.core = dense
    ctx = whole_context(lengths)
    ids = torch.zeros(ctx.tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids, ctx).values.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_as_torch_counts(name, window):
    """The difference is what dense attention computes beyond the pairs that count."""
    config = preset(name, window=window)
    assert counted(config, LENGTHS) == step_flops(config, LENGTHS) + dense_extra(config, window)


def dense_extra(config, window=None):
    """FLOPs of dense attention beyond the pairs that count."""
    attention, extra = config.layers[0].mixer, 0
    for length in LENGTHS:
        seen = sum(min(i + 1, window or length) for i in range(length))
        products = 2 * 2 * attention.heads * attention.head_dim
        extra += 3 * len(config.layers) * products * (length**2 - seen)
    return extra


@pytest.mark.parametrize(
    "targets", [("all-linear",), ("q_proj", "k_proj", "v_proj", "mlp.down_proj")]
)
def test_with_factors_as_torch_counts(targets):
    """No gradient of a frozen weight; the first projections' rows need none either."""
    config = replace(preset("tiny-qwen3"), lora=LoRAConfig(3, 6.0, targets))
    attention, width, tokens = config.layers[0].mixer, config.width, sum(LENGTHS)
    first = [each for each in attention.products(width) if each.name != "o_proj"]
    unread = tokens * sum(each.flops for each in first)  # gradients of the embedding's rows
    factored = [each for each in first if config.lora.adapts(each.name)]
    unread += tokens * sum(2 * width * config.lora.rank for _ in factored)
    expected = step_flops(config, LENGTHS) + dense_extra(config) - unread
    assert counted(config, LENGTHS) == expected
    assert expected < 0.72 * step_flops(config.merged(), LENGTHS) + dense_extra(config)


@pytest.mark.parametrize(
    "name", ["tiny-hybrid", "tiny-qwen3-next", "tiny-deepseek-v3", "tiny-deepseek-v4"]
)
def test_products_have_the_names_of_their_modules(name):
    config = preset(name)
    for layer in {*config.layers, *config.mtp}:
        modules = [each.partition(".")[2] for each in _names_in(layer, config)]
        products = [each for part in layer.parts for each in part.products(config.width)]
        assert {each.name for each in products if each.name} == set(modules)


def test_experts_and_head_are_frozen():
    moe = MoEConfig(experts=4, top_k=2, width=8)
    config = DecoderConfig(
        vocab_size=10,
        width=4,
        layers=(LayerConfig(None, moe), LayerConfig(None, MLPConfig(width=8))),
        lora=LoRAConfig(2, 2.0, ("up_proj",)),
    )
    frozen = 2 * forward_flops(config, 3)  # all products, and the gradients of their rows
    assert step_flops(config, [3]) == frozen + 3 * 3 * 2 * 2 * (4 + 8)


def test_example():
    config = DecoderConfig(vocab_size=10, width=4, layers=(LayerConfig(None, MLPConfig(width=8)),))
    assert forward_flops(config, 3) == 816
    assert step_flops(config, [3]) == 2448


def test_packing_does_not_show():
    config = preset("tiny-llama")
    assert step_flops(config, [5, 9, 5]) == sum(step_flops(config, [n]) for n in (5, 5, 9))
    assert step_flops(config, []) == 0


def test_bias_and_norms_are_counted():
    config = preset("tiny-qwen3", bias=True)
    assert parameter_count(config) == sum(p.numel() for p in Decoder(config).parameters())
