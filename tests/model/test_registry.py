"""A feed-forward part of the user's own: registered, made, and saved with its decoder."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from longshore.arch.as_json import REGISTERED, config_from_json, config_to_json
from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.part import Part, Saved
from longshore.model.decoder import Decoder
from longshore.model.registry import FEED_FORWARDS, register_feed_forward


@dataclass(frozen=True, slots=True)
class LinearConfig(Part):
    def parameters(self, width):
        return width * width

    def flops(self, width, length):
        return 2 * length * width * width

    def saved(self, width):
        return Saved(0)


class Linear(nn.Module):
    def __init__(self, config, width, *, norm):
        super().__init__()
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x_TC, ctx):
        return self.proj(x_TC), None


def test_a_feed_forward_part_of_ones_own(monkeypatch):
    monkeypatch.setattr("longshore.arch.as_json.REGISTERED", {**REGISTERED})
    monkeypatch.setattr("longshore.model.registry.FEED_FORWARDS", {**FEED_FORWARDS})
    register_feed_forward(LinearConfig, Linear)
    attention = AttentionConfig(heads=2, kv_heads=1, head_dim=4)
    layers = (LayerConfig(attention, LinearConfig()),)
    config = DecoderConfig(vocab_size=7, width=8, layers=layers)
    assert config_from_json(config_to_json(config)) == config
    model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert model(torch.arange(5)).values.shape == (5, 7)
    with pytest.raises(ValueError, match="LinearConfig is already registered, with Linear"):
        register_feed_forward(LinearConfig, Linear)
