"""Chunk sizes of the ops, which arch/ reads too, to estimate memory. No torch.

In: tokens, and the bytes of one token's logits. Out: the tokens of a chunk of logits. 4096 tokens
with a vocabulary of 8192 in float32 have rows of 32 KiB, so the loss takes 4096/16 = 256 of them at
a time; of 32768 tokens with a vocabulary of 152k it takes 882, whose logits are 512 MiB. With
kernels on a GPU it takes 2048 in both cases.
"""

CHUNK_ROWS = 64
"""Rows of a scan's chunk on a GPU; estimates of memory use it for the CPU too."""
CPU_CHUNK_ROWS = 32
"""On a CPU: half the work inside the chunks, in products that are small but as fast."""
LOGITS_SHARE = 16
"""The loss cuts its tokens into at least this many chunks."""
LOGITS_BYTES = 512 << 20
"""The most bytes of logits in such a chunk, unless LOGITS_TOKENS tokens already have more.

Each chunk reads and writes the whole gradient of the weight: with a vocabulary of 152k and 64 MiB
that took three times as long on an H200, and saved nothing beside the gradient's own memory.
"""
LOGITS_TOKENS = 16

KERNEL_LOGITS_BYTES = 1280 << 20
"""The same with kernels, whose products are fastest with thousands of rows."""
KERNEL_LOGITS_ROWS = 256
"""With kernels more tokens than these are cut into at least two chunks, of multiples of these."""

EXPANDED_BYTES = 4 << 30
"""The most bytes of keys, values and their gradients that MLA makes of latents at a time."""


def expanded_values(key: int, product: int, value: int) -> int:
    """Numbers of a row and head in MLA's backward: product with the weight, keys, gradients."""
    return 2 * product + 2 * key + value


def heads_at_once(rows: int, heads: int, head_bytes: int) -> int:
    """Heads whose keys and values of all rows exist together; head_bytes: of one row and head."""
    return max(1, min(heads, EXPANDED_BYTES // max(rows * head_bytes, 1)))


def most_expanded(rows: int, heads: int, head_bytes: int) -> int:
    """The most bytes of such keys and values over all calls with up to `rows` rows.

    heads_at_once takes a head fewer from some number of rows on, so that fewer rows need more.
    """
    return min(heads * rows * head_bytes, max(EXPANDED_BYTES, rows * head_bytes))


def logits_chunk(tokens: int, row_bytes: int) -> int:
    """Tokens of a chunk of the loss; row_bytes: of one token's logits."""
    most = max(LOGITS_TOKENS, LOGITS_BYTES // row_bytes)
    return max(1, min(tokens // LOGITS_SHARE, most))


def kernel_logits_chunk(tokens: int, row_bytes: int) -> int:
    """The same with kernels; row_bytes: of one token's float32 logits."""
    multiple, most = KERNEL_LOGITS_ROWS, _largest_kernel_chunk(row_bytes)
    if tokens <= multiple or most <= multiple:
        return max(1, min(tokens, most))
    # Chunks of about one size: a small last one would read and write the weight's gradient too.
    chunks = max(2, -(-tokens // most))
    return -(-tokens // (chunks * multiple)) * multiple


def _largest_kernel_chunk(row_bytes: int) -> int:
    most = max(LOGITS_TOKENS, KERNEL_LOGITS_BYTES // row_bytes)
    return most if most <= KERNEL_LOGITS_ROWS else most - most % KERNEL_LOGITS_ROWS


def most_in_kernel_chunk(tokens: int, row_bytes: int) -> int:
    """The most tokens of a chunk with kernels over all calls with up to `tokens` tokens.

    One token more may make chunks smaller: with a vocabulary of 152k, 4096 tokens are cut into two
    of 2048, 4097 into three of 1536. Twice the largest chunk is cut into two of it.
    """
    return kernel_logits_chunk(min(tokens, 2 * _largest_kernel_chunk(row_bytes)), row_bytes)


def loss_bytes(
    tokens: int,
    *,
    vocabulary: int,
    width: int,
    item: int,
    heads: int = 1,
    kernels: bool,
    trains: bool = True,
) -> int:
    """The most memory of the loss: a chunk of logits with its gradient, the weight's gradient.

    tokens: of the fullest round; rounds of fewer count too, whose chunks may be larger. item: bytes
    of a number of the inputs. heads: 1, and 1 for each depth of multi-token prediction. With
    kernels the gradients of all heads wait from forward to backward, those of the hidden states in
    the inputs' dtype; without them one head at a time has them. trains: the weight has a gradient.
    """
    row = vocabulary * max(item, 4)
    if not kernels:
        return 2 * logits_chunk(tokens, row) * row + row * width * trains
    chunk = most_in_kernel_chunk(tokens, row) * vocabulary * (4 + item)
    return chunk + heads * width * (row * trains + tokens * item)
