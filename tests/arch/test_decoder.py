import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from longshore.arch.attention import AttentionConfig, causal_pairs
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)

ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
LONG = LongRopeScaling(short_factor=(1.0,) * 8, long_factor=(2.0,) * 8, original_length=64)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: replace(ATTENTION, heads=0), "AttentionConfig.heads is 0"),
        (lambda: replace(ATTENTION, heads=4.0), "AttentionConfig.heads is 4.0"),
        (lambda: replace(ATTENTION, heads=True), "AttentionConfig.heads is True"),
        (lambda: replace(ATTENTION, head_dim=None), "AttentionConfig.head_dim is None"),
        (lambda: replace(ATTENTION, kv_heads=3), "must divide heads, 4"),
        (lambda: replace(ATTENTION, window=0), "AttentionConfig.window is 0"),
        (lambda: replace(ATTENTION, head_dim=15), "dims rotate in pairs"),
        (lambda: replace(ATTENTION, rope=RopeConfig(rotary_dim=18)), "a head has only 16 dims"),
        (lambda: RopeConfig(theta=1.0), "RopeConfig.theta is 1.0"),
        (lambda: RopeConfig(theta=float("nan")), "RopeConfig.theta is nan"),
        (lambda: RopeConfig(rotary_dim=10, scaling=LONG), "has 8 factors; 10 rotary dims need 5"),
        (lambda: LinearScaling(factor=None), "LinearScaling.factor is None"),
        (lambda: LinearScaling(factor=0), "LinearScaling.factor is 0"),
        (lambda: DynamicScaling(factor=2, original_length=1.5), "original_length is 1.5"),
        (lambda: YarnScaling(factor=2, original_length=8, beta_fast=0.5), "the larger one"),
        (
            lambda: Llama3Scaling(
                factor=8, low_freq_factor=4, high_freq_factor=4, original_length=8192
            ),
            "must be more than low_freq_factor, 4",
        ),
        (lambda: replace(LONG, long_factor=(1.0, -1.0)), "each must be more than 0"),
        (lambda: replace(LONG, original_length=1), "must be 2 or more"),
        (lambda: MLPConfig(width=-1), "MLPConfig.width is -1"),
        (lambda: LayerConfig(None, None), "neither mixer nor mlp"),
        (lambda: DecoderConfig(vocab_size=8, width=8, layers=()), "at least one layer"),
        (
            lambda: DecoderConfig(
                vocab_size=8, width=8, layers=(LayerConfig(ATTENTION, None),), norm_eps=0.0
            ),
            "DecoderConfig.norm_eps is 0.0",
        ),
    ],
)
def test_what_is_wrong_is_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_numpy_integers_are_integers():
    assert replace(ATTENTION, heads=np.int64(8)) == replace(ATTENTION, heads=8)


def test_ropes_know_their_dims_and_come_once():
    wide = replace(ATTENTION, head_dim=32)
    part = replace(ATTENTION, rope=RopeConfig(rotary_dim=8))
    none = replace(ATTENTION, rope=None)
    layers = tuple(LayerConfig(m, None) for m in (ATTENTION, wide, ATTENTION, part, none))
    config = DecoderConfig(vocab_size=8, width=8, layers=layers)
    assert [rope.rotary_dim for rope in config.ropes] == [16, 32, 8]


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
def test_causal_pairs(window):
    for length in (1, 2, 7, 20):
        seen = sum(min(i + 1, window or length) for i in range(length))
        assert causal_pairs(length, window=window) == seen


def test_no_torch():
    code = (
        "import sys, longshore.arch.decoder, longshore.arch.presets, longshore.arch.costs, "
        "longshore.arch.costs; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
