"""Chunk sizes of the ops, which arch/ reads too, to estimate memory. No torch.

In: tokens, and the bytes of one token's logits. Out: the tokens of a chunk of logits. 4096 tokens
with a vocabulary of 8192 in float32 have rows of 32 KiB, so the loss takes 4096/16 = 256 of them at
a time; of 32768 tokens with a vocabulary of 152k it takes 882, whose logits are 512 MiB.
"""

CHUNK_ROWS = 64
"""Rows of a scan's chunk on a GPU; estimates of memory use it for the CPU too."""
CPU_CHUNK_ROWS = 32
"""On a CPU: half the work inside the chunks, in products that are small but as fast."""
LOGITS_SHARE = 16
"""The loss cuts its tokens into at least so many chunks."""
LOGITS_BYTES = 512 << 20
"""The most bytes of logits in such a chunk, unless LOGITS_TOKENS tokens already have more.

Each chunk reads and writes the whole gradient of the weight: with a vocabulary of 152k and 64 MiB
that took three times as long on an H200, and saved nothing beside the gradient's own memory.
"""
LOGITS_TOKENS = 16


def logits_chunk(tokens: int, row_bytes: int) -> int:
    """Tokens of a chunk of the loss; row_bytes: of one token's logits."""
    most = max(LOGITS_TOKENS, LOGITS_BYTES // row_bytes)
    return max(1, min(tokens // LOGITS_SHARE, most))
