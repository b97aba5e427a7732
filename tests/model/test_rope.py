import math

import pytest
import torch

from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from longshore.batch import whole_context
from longshore.model.norm_rope import _on_device, attention_factor, frequencies, rope_tables

DIM = 32
SHORT = tuple(1 + 0.05 * i for i in range(DIM // 2))
LONG = tuple(1.5 + 0.25 * i for i in range(DIM // 2))
ORIGINAL = 64
SCALINGS = {
    "linear": LinearScaling(factor=4.0),
    "dynamic": DynamicScaling(factor=3.0, original_length=ORIGINAL),
    "yarn": YarnScaling(factor=4.0, original_length=ORIGINAL),
    "yarn-all": YarnScaling(
        factor=40.0,
        original_length=ORIGINAL,
        beta_fast=16.0,
        beta_slow=2.0,
        mscale=1.0,
        mscale_all_dim=0.8,
        truncate=False,
    ),
    "yarn-factor": YarnScaling(factor=4.0, original_length=ORIGINAL, attention_factor=1.25),
    "llama3": Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=ORIGINAL
    ),
    "longrope": LongRopeScaling(
        short_factor=SHORT, long_factor=LONG, original_length=ORIGINAL, factor=16.0
    ),
}


def rope(name, theta=10_000.0):
    return RopeConfig(theta=theta, rotary_dim=DIM, scaling=SCALINGS.get(name))


def hugging_face(name, length, theta=10_000.0):
    """(frequencies, attention factor) from transformers."""
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    scaling = SCALINGS[name]
    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": theta}
    for key in scaling.__slots__:
        value = getattr(scaling, key)
        if value is not None and key != "original_length":
            parameters[key] = list(value) if isinstance(value, tuple) else value
    if kind in ("yarn", "llama3", "longrope"):
        parameters["original_max_position_embeddings"] = ORIGINAL
    longest = ORIGINAL if kind == "dynamic" else 16 * ORIGINAL
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=longest,
        rope_parameters=parameters,
    )
    return utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 1000])
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_as_hugging_face(name, length, theta):
    want_R, factor = hugging_face(name, length, theta)
    config = rope(name, theta)
    # Position 1 turns by the frequency itself.
    ctx = whole_context((2, length)) if length > 1 else whole_context((2, 2))
    cos_TR, sin_TR = rope_tables([config], ctx, torch.float64)[config]
    got_R = torch.atan2(sin_TR[3], cos_TR[3])
    assert torch.allclose(got_R, want_R.double(), rtol=1e-6, atol=0)
    assert math.isclose(math.hypot(cos_TR[3, 0], sin_TR[3, 0]), factor, rel_tol=1e-12)


def test_plain():
    config = RopeConfig(theta=100.0, rotary_dim=4)
    assert frequencies(config) == [1.0, 0.1]
    assert attention_factor(config) == 1.0
    cos_TR, sin_TR = rope_tables([config], whole_context((4,)), torch.bfloat16)[config]
    assert cos_TR.dtype == sin_TR.dtype == torch.float32
    assert cos_TR[3].tolist() == pytest.approx([math.cos(3), math.cos(0.3)])
    assert sin_TR[3].tolist() == pytest.approx([math.sin(3), math.sin(0.3)])


@pytest.mark.parametrize("name", ["plain", *SCALINGS])
def test_packing_does_not_show(name):
    lengths = (1, ORIGINAL, 2, 3 * ORIGINAL + 1, ORIGINAL + 1)
    config = rope(name)
    packed = rope_tables([config], whole_context(lengths), torch.float64)[config]
    for at, part in enumerate(zip(*(table.split(lengths) for table in packed), strict=True)):
        alone = rope_tables([config], whole_context((lengths[at],)), torch.float64)[config]
        assert all(torch.equal(a, b) for a, b in zip(part, alone, strict=True))


def test_far_positions_are_not_rounded():
    config = RopeConfig(rotary_dim=2)
    ctx = whole_context((300_000,))
    cos_TR, _ = rope_tables([config], ctx, torch.float32)[config]
    assert abs(cos_TR[299_999, 0].item() - math.cos(299_999)) < 1e-7


def test_several_at_once():
    ropes = [RopeConfig(rotary_dim=8), RopeConfig(rotary_dim=4), RopeConfig(theta=5, rotary_dim=8)]
    tables = rope_tables(ropes, whole_context((3,)), torch.float32)
    assert list(tables) == ropes
    assert [tables[r][0].shape for r in ropes] == [(3, 4), (3, 2), (3, 4)]
    # A block's inputs are flattened as trees, and what is found there is cast.
    from torch.utils import _pytree

    assert len(_pytree.tree_leaves(tables)) == 1


def test_frequencies_are_copied_once_for_each_device():
    ctx = whole_context([5, 3])
    before = _on_device.cache_info().misses
    unusual = rope("longrope", theta=12_345.0)
    first = rope_tables([unusual], ctx, torch.float32)[unusual]
    again = rope_tables([unusual], ctx, torch.float32)[unusual]
    assert _on_device.cache_info().misses == before + 2  # short and long
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
