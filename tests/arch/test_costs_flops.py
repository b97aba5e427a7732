from collections.abc import Sequence

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longshore.arch.costs import forward_flops, parameter_count, step_flops
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset
from longshore.batch import whole_context
from longshore.model.decoder import Decoder

LENGTHS = (1, 2, 7, 30)


def dense(ctx, apart, q_THD, k_TKD, v_TKD):
    """All n² pairs of each sequence, as two products a head."""
    scale = q_THD.shape[2] ** -0.5
    made = []
    group = q_THD.shape[1] // k_TKD.shape[1]
    k_THD, v_THD = (x.repeat_interleave(group, dim=1) for x in (k_TKD, v_TKD))
    for start, stop in ctx.packs[0].padded.pairs():
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
    attention = config.layers[0].mixer
    extra = 0
    for length in LENGTHS:
        seen = sum(min(i + 1, window or length) for i in range(length))
        products = 2 * 2 * attention.heads * attention.head_dim
        extra += 3 * len(config.layers) * products * (length**2 - seen)
    assert counted(config, LENGTHS) == step_flops(config, LENGTHS) + extra


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
