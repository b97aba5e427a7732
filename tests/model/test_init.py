from itertools import pairwise

import pytest
import torch

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset
from longshore.model.decoder import Decoder
from longshore.model.fill import BLOCK_VALUES, fill_rows
from longshore.model.init import init_decoder, initial_block
from longshore.plan.layout import parse_layout


@pytest.mark.parametrize("shape", [(1000, 700), (5,), (3, BLOCK_VALUES + 1), (64, 4, 9)])
def test_cuts_do_not_show(shape):
    whole = fill_rows("w", shape, slice(0, shape[0]), seed=1, std=1.0)
    assert whole.shape == shape
    for parts in (2, 3, 5):
        step = -(-shape[0] // parts)
        starts = [min(i * step, shape[0]) for i in range(parts + 1)]
        pieces = [fill_rows("w", shape, slice(a, b), seed=1, std=1.0) for a, b in pairwise(starts)]
        assert torch.equal(torch.cat(pieces), whole)


def test_only_the_blocks_of_a_range_are_made(monkeypatch):
    made = []
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *s, **k: made.append(s) or draw(*s, **k))
    got = fill_rows("w", (4096, 4096), slice(100, 200), seed=1, std=1.0)
    assert got.shape == (100, 4096)
    assert made == [(64, 4096)] * 3


def test_name_seed_and_block_matter():
    rows = BLOCK_VALUES // 256

    def of(name, seed):
        return fill_rows(name, (2 * rows, 256), slice(0, 2 * rows), seed=seed, std=1.0)

    base = of("a", 1)
    assert torch.equal(base, of("a", 1))
    assert not torch.equal(base, of("b", 1))
    assert not torch.equal(base, of("a", 2))
    assert not torch.equal(base[:rows], base[rows:])


def test_rows_outside():
    with pytest.raises(ValueError, match="rows 2 to 6 of w do not exist; it has 5"):
        fill_rows("w", (5,), slice(2, 6), seed=0)


def test_sizes_of_the_first_values():
    attention = AttentionConfig(heads=8, kv_heads=8, head_dim=16, qk_norm=True, bias=True)
    layer = LayerConfig(attention, MLPConfig(width=256))
    config = DecoderConfig(vocab_size=512, width=128, layers=(layer,) * 8, init_std=0.03)
    model = Decoder(config)
    init_decoder(model, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            ends = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.0075 if ends else 0.03, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.001


def test_a_stage_begins_as_in_the_whole():
    config = preset("tiny-qwen3", tied=True)
    layout = parse_layout(f"Et|{'t' * (len(config.layers) - 1)}L", pp=2, layers=len(config.layers))
    whole, last = Decoder(config), Decoder(config, layout.stages[1]).double()
    init_decoder(whole, seed=4)
    init_decoder(last, seed=4)
    want = {**dict(whole.named_parameters()), "head.weight": whole.embed.weight}
    for name, parameter in last.named_parameters():
        assert torch.equal(parameter.float(), want[name]), name


def test_blocks_of_a_decoders_parameters():
    config = preset("tiny-llama")
    model = Decoder(config)
    init_decoder(model, seed=9)
    for name, parameter in model.named_parameters():
        half = len(parameter) // 2
        index = (slice(half, len(parameter)), *(slice(1, size - 2) for size in parameter.shape[1:]))
        block = initial_block(config, name, parameter.shape, index, seed=9)
        assert torch.equal(block, parameter[index]), name
    with pytest.raises(ValueError, match=r"no parameter 'layers\.0\.mixer_bias'"):
        initial_block(config, "layers.0.mixer_bias", (4,), (slice(0, 4),), seed=9)
