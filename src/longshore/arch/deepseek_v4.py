"""The layers of DeepSeek-V4, from the few numbers in which its sizes differ. Pure Python.

In: attention with a window alone, an index, experts. Out: the first layers, the pattern that
follows them, and the layer of a depth. Two layers have a window alone; then entries of 4 tokens,
some of which an index chooses, and entries of `ratio` tokens take turns. Experts of the first
layers are chosen by token ids. With 3 such layers:

    first    window #, window #, chosen #, pooled        # by token ids
    pattern  chosen, pooled
"""

from dataclasses import replace
from typing import NamedTuple

from longshore.arch.decoder import LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig

FLASH_WINDOW = SparseAttentionConfig(
    heads=64, head_dim=512, rope_dim=64, q_rank=1024, window=128, o_groups=8, o_rank=1024
)
FLASH_INDEX = IndexConfig(heads=64, head_dim=128, top_k=512)
FLASH_MOE = MoEConfig(
    experts=256,
    top_k=6,
    width=2048,
    score="sqrt-softplus",
    scale=1.5,
    shared_width=2048,
    bias_update=1e-3,
    aux_weight=1e-4,
    limit=10.0,
)
TINY_WINDOW = replace(
    FLASH_WINDOW, heads=4, head_dim=16, rope_dim=8, q_rank=24, window=8, o_groups=2, o_rank=16
)
TINY_INDEX = IndexConfig(heads=4, head_dim=16, top_k=4)
TINY_MOE = replace(FLASH_MOE, experts=4, top_k=2, width=32, shared_width=32)


class V4Layers(NamedTuple):
    """As arch/presets.py:Patterned takes them."""

    first: tuple[LayerConfig, ...]
    pattern: tuple[LayerConfig, ...]
    mtp: tuple[LayerConfig, ...]


def deepseek_v4(
    window: SparseAttentionConfig,
    index: IndexConfig,
    moe: MoEConfig,
    *,
    hashed: int,
    vocab_size: int,
    ratio: int,
    trained: int,
) -> V4Layers:
    """hashed: layers whose experts are chosen by token ids. trained: the length before YaRN."""
    yarn = YarnScaling(factor=16.0, original_length=trained, attention_factor=1.0)
    far = RopeConfig(theta=160_000.0, scaling=yarn)
    chosen = replace(window, ratio=4, index=index, rope=far)
    pooled = replace(window, ratio=ratio, rope=far)
    table = replace(moe, bias=False, bias_update=0.0, aux_weight=0.0, hash_rows=vocab_size)
    # An even number, so that the pattern begins where it would without them.
    mixers = (window, window, *(chosen, pooled) * hashed)[: hashed + hashed % 2]
    first = tuple(
        LayerConfig(mixer, table if n < hashed else moe) for n, mixer in enumerate(mixers)
    )
    pattern = LayerConfig(chosen, moe), LayerConfig(pooled, moe)
    return V4Layers(first, pattern, (LayerConfig(window, moe),))
