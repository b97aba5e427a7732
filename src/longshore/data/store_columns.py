"""A shard of a store as Arrow columns: sequences of any length in flat arrays, with checksums.

In: samples, or a shard's bytes. Out: columns, or the index and the checksums of the shard.
Sequences [7, 8, 9] and [5] become the values 7 8 9 5 with the offsets 0 3 4.
"""

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longshore.data.fields import Array, Field
from longshore.data.source import Ints, TokenizedSample

HEAD = 64
"""Values of a loss mask that the index has."""


def list_column(arrays: Sequence[Array], dtype: str) -> Any:  # noqa: ANN401 - pyarrow has no types
    """A column with the flat numbers of each array; bool as uint8, which maps without a copy."""
    offsets = np.concatenate([[0], np.cumsum([array.size for array in arrays])])
    values = np.concatenate([array.ravel() for array in arrays]).astype(dtype, copy=False)
    values = values.view(np.uint8) if dtype == "bool" else values
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def flat_values(column: Any) -> tuple[Array, Ints]:  # noqa: ANN401 - pyarrow has no types
    return column.values.to_numpy(), column.offsets.to_numpy()


def in_shape(values: Array, field: Field, length: int) -> Array:
    return values.view(field.dtype).reshape(field.array_shape(length))


def sample_arrays(sample: TokenizedSample, fields: Sequence[Field]) -> list[Array]:
    return [sample.tokens, sample.loss_mask, *(sample.fields[field.name] for field in fields)]


def checksum(arrays: Iterable[Array]) -> int:
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).data, total)
    return total


def frame_checksum(content: Any, batch: Any, names: Iterable[str]) -> int:  # noqa: ANN401 - pyarrow
    """CRC-32 of a shard without the values of these columns: each sequence has its own."""
    spans = []
    for name in names:
        values = batch.column(name).values
        start = values.buffers()[1].address - content.address
        spans.append((start, start + values.nbytes))
    data, at, total = memoryview(content), 0, 0
    for start, stop in sorted(spans):
        total = zlib.crc32(data[at:start], total)
        at = stop
    return zlib.crc32(data[at:], total)


def index_of(path: Path) -> tuple[Ints, Ints, NDArray[np.uint32], NDArray[np.uint64]]:
    """Lengths, loss tokens, checksums and mask heads of a shard's sequences."""
    with pa.memory_map(str(path)) as file:
        batch = pa.ipc.open_file(file).get_batch(0)
    mask, offsets = flat_values(batch.column("loss_mask"))
    numbers = [batch.column(name).to_numpy() for name in ("loss_tokens", "checksum")]
    return np.diff(offsets), numbers[0], numbers[1], mask_heads(mask, offsets)


def mask_heads(mask: Array, offsets: Ints) -> NDArray[np.uint64]:
    """The first HEAD values of each sequence's mask as bits: 1 0 1 1 is 0b1101."""
    lengths = np.diff(offsets)
    heads = np.zeros(len(lengths), dtype=np.uint64)
    for position in range(min(HEAD, int(lengths.max()))):
        has = lengths > position
        values = mask[offsets[:-1][has] + position].astype(np.uint64)
        heads[has] |= values << np.uint64(position)
    return heads


def head_values(head: int, count: int) -> NDArray[np.bool_]:
    """The first values of a mask, back from its bits."""
    return np.array([head >> bit & 1 for bit in range(count)], dtype=np.bool_)
