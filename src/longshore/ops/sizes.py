"""How large the pieces are that ops work on: read by the ops and by arch/, which counts. No torch.

In: tokens, and the bytes of one token's logits. Out: the tokens of a chunk of logits. 4096 tokens
with a vocabulary of 8192 in float32 have rows of 32 KiB, so the loss takes 4096/16 = 256 of them at
a time; of 32768 tokens with a vocabulary of 152k it takes 882, whose logits are 512 MiB.
"""

CHUNK_ROWS = 64
"""Rows of a scan's chunk; memory is counted with these, also on a CPU, which keeps fewer."""
CPU_CHUNK_ROWS = 32
"""A CPU does the small products that this gives as fast, and half of the rest."""
LOGITS_SHARE = 16
"""Chunks that the loss cuts its tokens into at least."""
LOGITS_BYTES = 512 << 20
"""Logits of such a chunk, unless LOGITS_TOKENS already have more.

Each chunk reads and writes the whole gradient of the weight: with a vocabulary of 152k and 64 MiB
that took three times as long on an H200, and saved nothing beside the gradient's own memory.
"""
LOGITS_TOKENS = 16


def logits_chunk(tokens: int, row_bytes: int) -> int:
    """Tokens whose logits the loss makes at a time, where those of one token are `row_bytes`."""
    most = max(LOGITS_TOKENS, LOGITS_BYTES // row_bytes)
    return max(1, min(tokens // LOGITS_SHARE, most))
