import pytest
import torch

from longshore.model.decoder import Decoder
from longshore.model.flops import parameter_count
from longshore.model.presets import PRESETS, preset

PUBLIC = {
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_parameter_counts(name):
    assert parameter_count(preset(name)) == PUBLIC[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_module_has_as_many(name):
    config = preset(name, layers=2)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_tiny_ones_split_by_heads(name):
    attention = preset(name).layers[0].mixer
    assert attention.heads % 4 == attention.kv_heads % 4 == 0


def test_overrides():
    config = preset("tiny-llama", layers=3, vocab_size=300, tied=False, window=16)
    assert len(config.layers) == 3
    assert config.vocab_size == 300
    assert not config.tied
    assert {layer.mixer.window for layer in config.layers} == {16}


def test_unknown_names():
    with pytest.raises(ValueError, match=r"no preset 'qwen3-8B'; did you mean qwen3-8b\?"):
        preset("qwen3-8B")
    with pytest.raises(ValueError, match=r"no 'vocab' to change; did you mean vocab_size\?"):
        preset("tiny-llama", vocab=8)
    with pytest.raises(ValueError, match="layers is 0"):
        preset("tiny-llama", layers=0)
