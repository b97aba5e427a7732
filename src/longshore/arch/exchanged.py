"""What a layer's core gathers and expands in one forward and backward, in bytes. Pure Python.

In: a decoder, a CP size, a lane's tokens, how lanes share a pack, bytes of a number. Out: bytes, at
the moment of a layer's backward at which they are most. Only one layer has them at a time.

A lane that is full of its shard of a pack at CP size c gathers c rows for each of its own. Its two
chunks of each sequence see c + 1/2 of them: chunk r sees (r + 1)/2c of the sequence, chunk
2c − 1 − r the other (2c − r)/2c. The lane fetches rows in forward, and again in backward:

    gather   the rows seen and their gradients, 2·(c + 1/2); then either the core's buffers, or the
             gradients joined and added up by lane, (c + 1/2) + c
    heads    queries, keys and values of c·T rows in 1/c of the heads: their gradients, and either
             the core's buffers, or their copies by lane and as received
    MLA      latents as by gather; of each row seen, also at CP size 1, keys, values, their product
             and the gradients of all, of as many heads as ops/sizes.py allows at a time

With 8 KV heads of 128 in half precision a row has 2·8·128·2 = 4,096 bytes; at CP size 8 a token of
the lane needs (2·8.5 + 8.5 + 8)·4,096 = 137,216 by gather. With 32 heads by heads 3·48·128·2 =
36,864.
"""

from collections.abc import Iterable

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import LayerConfig
from longshore.arch.part import Part, Sharing
from longshore.ops.sizes import expanded_values, most_expanded

FLOAT32_BYTES = 4
INDEX_BYTES = 4
"""Of each index of a row: to natural order, back, and of the rows that are seen."""


def gathered_rows(tokens: int, cp_size: int) -> int:
    """The rows of a full pack of which a lane holds `tokens`."""
    return tokens * cp_size


def exchanged_by(
    layers: Iterable[LayerConfig], cp_size: int, tokens: int, *, sharing: Sharing, item: int
) -> int:
    """Bytes of a lane full of packs of this CP size, in the layer that needs most."""
    parts = {part for layer in layers for part in layer.parts}
    indices = INDEX_BYTES * (3 * cp_size + 1) * tokens if cp_size > 1 else 0
    each = (_part_bytes(part, cp_size, tokens, sharing=sharing, item=item) for part in parts)
    return indices + max(each, default=0)


def _part_bytes(part: Part, cp_size: int, tokens: int, *, sharing: Sharing, item: int) -> int:
    # A lane that shares nothing sees its own rows, else half a row more than the pack has of them.
    rows = cp_size * tokens
    visible = rows + (tokens + 1) // 2 if cp_size > 1 else rows
    if isinstance(part, MLAConfig):
        return _mla(part, rows=rows, visible=visible, item=item, alone=cp_size == 1)
    if cp_size == 1:
        return 0
    gathered = part.gathered() * item
    if not isinstance(part, AttentionConfig):
        return gathered * (3 * visible + rows)
    width, shared = part.head_dim, part.heads > part.kv_heads
    buffers = part.kv_heads * _buffers(width, width, shared=shared, item=item)
    if _by_heads(part, cp_size, sharing):
        values = (part.heads + 2 * part.kv_heads) * width * item
        return tokens * (values + max(2 * values, buffers))
    return 2 * visible * gathered + max((visible + rows) * gathered, rows * buffers)


def _mla(part: MLAConfig, *, rows: int, visible: int, item: int, alone: bool) -> int:
    """Latents of the rows, and what model/mla.py makes of those that are seen."""
    latents = 0 if alone else part.latent_dim * (3 * visible + rows) * item
    if part.form == "absorbed":
        key, value = part.latent_dim, part.kv_rank
        buffers = _buffers(key, value, shared=True, item=item)
        return latents + visible * (key + value) * item + rows * buffers
    key, value, product = part.head_dim, part.value_dim, part.nope_dim + part.value_dim
    expanded = expanded_values(key, product, value) * item
    together = most_expanded(visible, part.heads, expanded)
    buffers = _buffers(key, value, shared=False, item=item)
    return latents + together + -(-together * rows * buffers // max(visible * expanded, 1))


def _buffers(key: int, value: int, *, shared: bool, item: int) -> int:
    """Bytes of a row and KV head in the core's backward.

    shared: by several query heads. Kernels, which serve half precision, then add up the gradients
    of keys and values in float32; plain torch copies keys twice, values, and the gradients of both.
    """
    if item < FLOAT32_BYTES:
        return (key + value) * FLOAT32_BYTES if shared else 0
    return (3 * key + 2 * value) * item


def _by_heads(part: AttentionConfig, cp_size: int, sharing: Sharing) -> bool:
    """Whether lanes share out the heads: as model/attention.py chooses."""
    if cp_size == 1 or sharing.attention == "gather":
        return False
    fewer = 3 * cp_size * part.kv_heads > 2 * (part.heads + part.kv_heads)
    return sharing.attention == "heads" or (part.kv_heads % cp_size == 0 and fewer)
