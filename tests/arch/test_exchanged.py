from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.arch.costs import exchanged_by
from longshore.arch.part import Sharing
from longshore.arch.presets import preset
from longshore.model.attention import over_heads
from longshore.ops.sizes import EXPANDED_BYTES
from longshore.plan.shapes import visible_lengths

GATHER, HEADS, AUTO = (Sharing(kind, "auto") for kind in ("gather", "heads", "auto"))


def indices(cp_size):
    return 4 * (3 * cp_size + 1)


def of_token(config, cp_size, *, sharing, item):
    """For each of many tokens, whose half rows are whole ones."""
    total = exchanged_by(config.layers, cp_size, 1000, sharing=sharing, item=item)
    assert total % 1000 == 0
    return total // 1000


def test_gathered_keys_and_values():
    """qwen3-8b: 32 heads, 8 KV heads of 128; the example of the module."""
    config = preset("qwen3-8b")
    assert of_token(config, 8, sharing=GATHER, item=2) == 137_216 + indices(8)
    assert of_token(config, 1, sharing=GATHER, item=2) == 0
    # In float32 2·8.5 rows, and buffers of 8·2.5 rows, which is more than 8.5 + 8.
    assert of_token(config, 8, sharing=GATHER, item=4) == 37 * 8_192 + indices(8)


def test_heads_do_not_grow_with_the_pack():
    config = preset("qwen3-8b")
    for cp_size in (2, 4, 8):
        assert of_token(config, cp_size, sharing=HEADS, item=2) == 36_864 + indices(cp_size)
    # auto: 3·2·8 = 48 is no more than 2·40, so keys and values are gathered at CP size 2.
    assert of_token(config, 2, sharing=AUTO, item=2) == int(9.5 * 4_096) + indices(2)
    assert of_token(config, 4, sharing=AUTO, item=2) == 36_864 + indices(4)


@pytest.mark.parametrize("kind", ["gather", "heads", "auto"])
def test_the_choice_is_the_models(kind):
    config = preset("qwen3-8b")
    for cp_size in (2, 4, 8):
        expected = over_heads(32, 8, cp_size, kind=kind)
        size = of_token(config, cp_size, sharing=Sharing(kind, "auto"), item=2)
        assert (size == 36_864 + indices(cp_size)) == expected


def test_mla_expands_keys_and_values_also_alone():
    """DeepSeek-V3: 128 heads; keys of 192 and their product with values, 256: 114,688 bytes."""
    config = preset("deepseek-v3")
    assert 128 * (192 + 256) * 2 == 114_688
    per_row = 2 * 114_688 + 128 * 128 * 2
    assert of_token(config, 1, sharing=GATHER, item=2) == per_row == 262_144
    latents = int((3 * 8.5 + 8) * 576 * 2)
    expected = latents + int(8.5 * per_row) + indices(8)
    assert of_token(config, 8, sharing=HEADS, item=2) == expected


def test_mla_expands_as_many_heads_as_fit():
    """131,072 rows of 2,048 bytes a head: 16 of the 128 heads make 4 GiB.

    Of the 135,168 rows that a lane sees of 16 shards only 15 heads fit, in less than 4 GiB; of some
    fewer rows they are 4 GiB, and rounds of fewer tokens must have room too.
    """
    config = preset("deepseek-v3")
    assert exchanged_by(config.layers, 1, 131_072, sharing=GATHER, item=2) == EXPANDED_BYTES
    latents = int((3 * 16.5 + 16) * 576 * 2 * 8192)
    expected = latents + EXPANDED_BYTES + indices(16) * 8192
    assert exchanged_by(config.layers, 16, 8192, sharing=GATHER, item=2) == expected


def test_absorbed_mla_has_one_head():
    config = preset("deepseek-v3")
    layers = tuple(replace(la, mixer=replace(la.mixer, form="absorbed")) for la in config.layers)
    config = replace(config, layers=layers, mtp=())
    expected = (576 + 512) * 2 + (576 + 512) * 4
    assert of_token(config, 1, sharing=GATHER, item=2) == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(2, 9))
def test_a_lane_sees_half_a_row_more_than_the_pack_has(chunks, cp_size):
    """c + 1/2 rows for each of its own, on every lane."""
    padded = np.array(chunks) * 2 * cp_size
    own = padded.sum() // cp_size
    for rank in range(cp_size):
        seen = visible_lengths(padded, cp_rank=rank, cp_size=cp_size).sum()
        assert 2 * seen == (2 * cp_size + 1) * own
