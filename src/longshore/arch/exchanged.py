"""What a layer's core gathers and expands in one forward and backward, in bytes. Pure Python.

In: a decoder, a CP size, how lanes share a pack, bytes of a number. Out: bytes for each token that
a lane holds, at the moment of a layer's backward at which they are most. Only one layer has them.

A lane that is full of its shard of a pack at CP size c gathers c rows for each of its own. Its two
chunks of each sequence see c + 1/2 of them: chunk r sees (r + 1)/2c of the sequence, chunk
2c − 1 − r the other (2c − r)/2c. The lane fetches rows in forward, and again in backward:

    gather   the rows seen and their gradients, 2·(c + 1/2); then either the core's buffers, or the
             gradients joined and added up by lane, (c + 1/2) + c
    heads    queries, keys and values of c·T rows in 1/c of the heads: their gradients, and either
             the core's buffers, or their copies by lane and as received
    MLA      latents as by gather; of each row seen, also at CP size 1, keys and values of all heads
             and their gradients, and either the core's buffers or the gradient of both joined

The core's buffers are those of plain torch, which copies to float32 the keys, once more transposed,
the values and the gradients of both, one sequence at a time; kernels need less.

With 8 KV heads of 128 in half precision a row has 2·8·128·2 = 4,096 bytes; at CP size 8 a token of
the lane needs (2·8.5 + 8·5)·4,096 = 233,472 by gather. With 32 heads by heads 3·48·128·2 = 36,864.
"""

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig
from longshore.arch.part import Part, Sharing

INDEX_BYTES = 4
"""Of each index of a row: to natural order, back, and of the rows that are seen."""


def gathered_rows(tokens: int, cp_size: int) -> int:
    """The rows of a full pack of which a lane holds `tokens`."""
    return tokens * cp_size


def exchanged_bytes(config: DecoderConfig, cp_size: int, *, sharing: Sharing, item: int) -> int:
    """For each token of a lane full of packs of this CP size, in the layer that needs most."""
    layers = (*config.layers, *config.mtp)
    parts = {part for layer in layers for part in layer.parts}
    wide = max(item, 4) // item
    halves = max(_half_values(part, cp_size, sharing=sharing, wide=wide) for part in parts)
    indices = INDEX_BYTES * (3 * cp_size + 1) if cp_size > 1 else 0
    return -(-halves * item // 2) + indices


def _half_values(part: Part, cp_size: int, *, sharing: Sharing, wide: int) -> int:
    """Twice the values, because a lane sees c + 1/2 rows; wide: values that a float32 takes."""
    rows, visible = 2 * cp_size, 2 * cp_size + 1 if cp_size > 1 else 2
    if isinstance(part, MLAConfig):
        return _mla(part, rows=rows, visible=visible, wide=wide)
    if cp_size == 1:
        return 0
    gathered = part.gathered()
    if not isinstance(part, AttentionConfig):
        return gathered * (3 * visible + rows)
    buffers = wide * _buffers(part.kv_heads, part.head_dim, part.head_dim)
    if _by_heads(part, cp_size, sharing):
        values = (part.heads + 2 * part.kv_heads) * part.head_dim
        return 2 * (values + max(2 * values, buffers))
    return 2 * visible * gathered + max((visible + rows) * gathered, rows * buffers)


def _mla(part: MLAConfig, *, rows: int, visible: int, wide: int) -> int:
    """Latents of the rows, and what model/mla.py makes of those that are seen."""
    latents = part.latent_dim * (3 * visible + rows) if rows > 2 else 0
    if part.form == "absorbed":
        key, value = part.latent_dim, part.kv_rank
        return latents + visible * (key + value) + rows * wide * _buffers(1, key, value)
    key, value, product = part.head_dim, part.value_dim, part.nope_dim + part.value_dim
    # Values are views of the product of latents and weight.
    expanded = visible * part.heads * (key + product + key + value)
    buffers = rows * wide * _buffers(part.heads, key, value)
    return latents + expanded + max(visible * part.heads * product, buffers)


def _buffers(heads: int, key: int, value: int) -> int:
    """Values of a row in the core's backward: keys twice, values, the gradients of both."""
    return heads * (3 * key + 2 * value)


def _by_heads(part: AttentionConfig, cp_size: int, sharing: Sharing) -> bool:
    """Whether lanes share out the heads: as model/attention.py chooses."""
    if cp_size == 1 or sharing.attention == "gather":
        return False
    fewer = 3 * cp_size * part.kv_heads > 2 * (part.heads + part.kv_heads)
    return sharing.attention == "heads" or (part.kv_heads % cp_size == 0 and fewer)
