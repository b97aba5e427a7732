from dataclasses import replace

import pytest
import torch
from tests.lazy import transformers

from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import parameter_count
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.presets import PRESETS, preset
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.model.decoder import Decoder

PUBLIC = {
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "deepseek-v3": 671_026_404_352,
    "nemotron-h-8b": 8_100_852_736,
}
"""Parameters; of DeepSeek-V3 without multi-token prediction, and without biases of routers."""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_parameter_counts(name):
    more = {"mtp": ()} if name == "deepseek-v3" else {}
    assert parameter_count(preset(name, **more)) == PUBLIC[name]


TRANSFORMERS = {
    "qwen3-30b-a3b": ("Qwen3Moe", {"num_hidden_layers": 48, "head_dim": 128}),
    "qwen3-next-80b-a3b": ("Qwen3Next", {}),
    "deepseek-v3": ("DeepseekV3", {}),
    "nemotron-h-8b": (
        "NemotronH",
        {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_counts_as_many(name):
    kind, keys = TRANSFORMERS[name]
    config = getattr(transformers, f"{kind}Config")(**keys)
    with torch.device("meta"):
        theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert sum(p.numel() for p in theirs.parameters()) == PUBLIC[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_module_has_as_many(name):
    config = preset(name, layers=2)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)


HEADS = ("heads", "kv_heads", "key_heads", "value_heads", "groups")


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny-")])
def test_tiny_ones_split_by_heads(name):
    config = preset(name)
    assert config.vocab_size == 256
    assert config.width == 64
    for layer in (*config.layers, *config.mtp):
        counts = [getattr(layer.mixer, name, 0) for name in HEADS]
        assert all(count % 4 == 0 for count in counts)
        assert any(counts) or layer.mixer is None


def test_tiny_hybrid_has_something_of_everything():
    config = preset("tiny-hybrid")
    kinds = {type(part) for layer in config.layers for part in layer.parts}
    assert {AttentionConfig, DeltaNetConfig, Mamba2Config, MoEConfig} <= kinds
    experts = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoEConfig)]
    assert all(moe.aux_weight > 0 and moe.bias_update > 0 for moe in experts)
    assert len(config.mtp) == 1


def test_patterns():
    kinds = [type(layer.mlp).__name__ for layer in preset("deepseek-v3").layers]
    assert kinds == ["MLPConfig"] * 3 + ["MoEConfig"] * 58
    kinds = [type(layer.mixer).__name__[0] for layer in preset("qwen3-next-80b-a3b").layers]
    assert "".join(kinds) == "DDDA" * 12
    assert len(preset("tiny-deepseek-v3", layers=1).layers) == 1
    assert len(preset("tiny-nemotron-h", layers=9).layers) == 9


def test_overrides():
    config = preset("tiny-llama", layers=3, vocab_size=300, tied=False, window=16)
    assert len(config.layers) == 3
    assert config.vocab_size == 300
    assert not config.tied
    assert {layer.mixer.window for layer in config.layers} == {16}
    assert preset("tiny-hybrid", vocab_size=300).vocab_size == 300


def test_unknown_names():
    with pytest.raises(ValueError, match=r"unknown preset 'qwen3-8B'; did you mean qwen3-8b\?"):
        preset("qwen3-8B")
    with pytest.raises(ValueError, match=r"no 'vocab' to change; did you mean vocab_size\?"):
        preset("tiny-llama", vocab=8)
    with pytest.raises(ValueError, match=r"tiny-hybrid has no 'heads' to change"):
        preset("tiny-hybrid", heads=8)
    for name in ("tiny-llama", "tiny-hybrid"):
        with pytest.raises(ValueError, match="layers is 0"):
            preset(name, layers=0)


def test_deepseek_v4():
    """The kinds of layers of the public model; its parameters are those that transformers has."""
    config = preset("deepseek-v4-flash")
    assert [layer.mixer.ratio for layer in config.layers] == [0, 0, *(4, 128) * 20, 4]
    assert [bool(layer.mlp.hash_rows) for layer in config.layers] == [True] * 3 + [False] * 40
    assert parameter_count(replace(config, mtp=())) == 284_332_230_231
    assert [layer.mixer.ratio for layer in config.mtp] == [0]
    tiny = preset("tiny-deepseek-v4", vocab_size=300)
    assert {layer.mixer.ratio for layer in tiny.layers} == {0, 4, 16}
    assert [layer.mlp.hash_rows for layer in tiny.layers] == [300, 300, 0, 0]
