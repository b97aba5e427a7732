"""CONTRIBUTING.md shows how a mixer is added; this follows it."""

from pathlib import Path

import pytest
from tests.parallel.my_mixer import Mean, MeanConfig
from tests.ranks.spine import VOCAB, exact
from tests.ranks.test_exactness import check, several_packs

from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.model.decoder import Decoder
from longshore.model.registry import register_mixer
from longshore.plan import make_plan

ROOT = Path(__file__).parents[2]


def config() -> DecoderConfig:
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=4)
    mlp = MLPConfig(width=16)
    layers = (LayerConfig(MeanConfig(), mlp), LayerConfig(attention, mlp))
    return DecoderConfig(vocab_size=VOCAB, width=16, layers=layers, init_std=0.3)


def test_contributing_shows_this_very_file() -> None:
    shown = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = (ROOT / "tests/parallel/my_mixer.py").read_text(encoding="utf-8")
    assert f"```python\n{code}```" in shown


def test_it_is_counted() -> None:
    model = Decoder(config())
    assert parameter_count(config()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_any_plan_is_each_sequence_alone(lanes: int) -> None:
    plans = [make_plan([1, 2, 7, 90, 5], lanes=lanes, capacity=128 // lanes, policy="dynamic")]
    plans += [several_packs()] if lanes == 4 else []
    cases = [(config(), plan, exact(mode="zero3", recompute="blocks")) for plan in plans]
    check(lanes, cases)


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(ValueError, match="MeanConfig is already registered, with Mean"):
        register_mixer(MeanConfig, Mean)
