"""Safetensors files, read in blocks and written tensor by tensor: one tensor in memory at a time.

In: a file and a block of one of its tensors; or tensors, one after another. Out: the block, read
into memory of its own; or the file. The package safetensors maps whole files into memory, and every
page that was read once stays in the process: a checkpoint of 3 GB then looks like 3 GB of memory.
Its writer wants all tensors of a file at once.

    BlockFile("model.safetensors").block("embed.weight", (slice(0, 2),))     reads two rows
    CheckpointTensors(Path("runs/x-1/checkpoints/step-00000040"), names)["embed.weight"]

The latter is put together from the blocks in the ranks' files: rows 0…128 from rank-00000, ….
"""

import json
import os
import weakref
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longshore.files import parse_json, reason
from longshore.train.checkpoint_files import SavedFile, check_files, read_index

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 24
ALIGN = 8
ENTRY = 160
"""More bytes than an entry of the header has besides its name."""
POLYNOMIAL = 0xEDB88320


class BlockFile:
    """A safetensors file whose tensors are read in blocks; the caller has checked its header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number)
        size = int.from_bytes(os.pread(self._number, 8, 0), "little")
        self._start = 8 + size
        header = parse_json(os.pread(self._number, size, 8))
        self._entries: dict[str, Any] = {n: e for n, e in header.items() if n != "__metadata__"}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def block(self, name: str, index: Sequence[slice]) -> Tensor:
        """A range of each dim of a tensor, or of the first dims alone.

        Whole rows are read, some at a time where only a part of each is wanted.
        """
        shape, entry = self.shape(name), self._entries[name]
        dtype = OF_NAME[entry["dtype"]]
        at = self._start + entry["data_offsets"][0]
        if not shape:
            return self._read(at, shape, dtype)
        ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
        ends += [(0, size) for size in shape[len(ends) :]]
        (first, stop), *rest = ends
        row = prod(shape[1:]) * dtype.itemsize
        if all(end == (0, size) for end, size in zip(rest, shape[1:], strict=True)):
            return self._read(at + first * row, (max(stop - first, 0), *shape[1:]), dtype)
        block = torch.empty([max(b - a, 0) for a, b in ends], dtype=dtype)
        some = max(BLOCK // max(row, 1), 1)
        columns = (slice(None), *(slice(a, b) for a, b in rest))
        for begin in range(first, stop, some):
            rows = min(some, stop - begin)
            read = self._read(at + begin * row, (rows, *shape[1:]), dtype)
            block[begin - first : begin - first + rows] = read[columns]
        return block

    def _read(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        memory = _bytes_of(tensor)
        while memory:
            count = os.preadv(self._number, [memory[:BLOCK]], at)
            if not count:
                raise ValueError(f"{self.path} is cut off; copy it again")
            memory, at = memory[count:], at + count
        return tensor


def checked_file(path: Path) -> BlockFile:
    """A file whose header is checked first; a ValueError if it is damaged."""
    try:
        safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None
    return BlockFile(path)


def read_block(file: BlockFile, key: str, offsets: Sequence[int], target: Tensor) -> None:
    """Fills `target` with the block of its shape at these offsets of a tensor."""
    pairs = zip(offsets, target.shape, strict=True)
    block = file.block(key, tuple(slice(start, start + size) for start, size in pairs))
    if block.shape != target.shape:
        raise ValueError(f"the file of {key} is damaged: its shape is {tuple(block.shape)}")
    target.copy_(block)


class FileWriter:
    """Writes a safetensors file from one tensor at a time. names: those that may still come.

    A file begins with a header that names every tensor, so its size is known only at the end. The
    writer reserves bytes for all names and fills the rest with spaces, which the format allows. A
    tensor must begin at a multiple of its number's size, without gaps: those whose bytes are no
    multiple of 8 are kept back, and written last.
    """

    def __init__(self, path: Path, names: Collection[str] = ()) -> None:
        self.path = path
        self.names: list[str] = []
        self.nbytes = 0
        self._header_bytes = _aligned(sum(len(json.dumps(name)) + ENTRY for name in names))
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._kept: list[tuple[str, Tensor]] = []
        self._at = 0
        self._crc32 = 0
        try:
            self._file = path.open("w+b", buffering=0)
            self._file.seek(8 + self._header_bytes)
        except OSError as error:
            raise self._named(error) from None

    def add(self, name: str, tensor: Tensor) -> None:
        """tensor: on the CPU, contiguous."""
        self.names.append(name)
        self.nbytes += tensor.nbytes
        if tensor.nbytes % ALIGN:
            self._kept.append((name, tensor))
        else:
            self._write(name, tensor)

    def finish(self) -> SavedFile:
        """Writes what was kept back and the header, and waits until all is on the disk."""
        for name, tensor in sorted(self._kept, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        text = json.dumps(self._header).encode()
        try:
            if len(text) > self._header_bytes:
                self._move(_aligned(len(text)))
            text += b" " * (self._header_bytes - len(text))
            head = self._header_bytes.to_bytes(8, "little") + text
            self._file.seek(0)
            _write_all(self._file, memoryview(head))
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._named(error) from None
        return SavedFile(
            len(head) + self._at, joined_crc32(zlib.crc32(head), self._crc32, self._at)
        )

    def close(self) -> None:
        """Gives up; what was written stays."""
        self._file.close()

    def _write(self, name: str, tensor: Tensor) -> None:
        about = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        self._header[name] = {**about, "data_offsets": [self._at, self._at + tensor.nbytes]}
        memory = _bytes_of(tensor)
        try:
            for start in range(0, len(memory), BLOCK):
                block = memory[start : start + BLOCK]
                self._crc32 = zlib.crc32(block, self._crc32)
                _write_all(self._file, block)
        except OSError as error:
            raise self._named(error) from None
        self._at += tensor.nbytes

    def _move(self, header_bytes: int) -> None:
        """Moves all tensors back, for a longer header than was expected."""
        number, start = self._file.fileno(), 8 + self._header_bytes
        for begin in reversed(range(0, self._at, BLOCK)):
            block = os.pread(number, min(BLOCK, self._at - begin), start + begin)
            self._file.seek(8 + header_bytes + begin)
            _write_all(self._file, memoryview(block))
        self._header_bytes = header_bytes

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, reason(error), str(self.path))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> SavedFile:
    """Writes CPU tensors without a copy, and waits until they are on the disk."""
    writer = FileWriter(path, tensors)
    try:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish()
    finally:
        writer.close()


def joined_crc32(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two byte strings together, from that of each and the length of the second.

    Appending n zero bytes multiplies a CRC by x^(8n), modulo the polynomial.
    """
    power, square, left = 1 << 31, 1 << 23, second_bytes  # 1, and x^8
    while left:
        if left & 1:
            power = _product(power, square)
        square, left = _product(square, square), left >> 1
    return _product(power, first) ^ second


def _product(a: int, b: int) -> int:
    """The product of two polynomials, with the coefficient of x^0 in the highest bit."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return product


def _aligned(size: int) -> int:
    return size + -size % ALIGN


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    if not tensor.numel():
        return memoryview(b"")
    # A contiguous tensor of one number may have any stride, but a view as bytes must have 1.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(file: Any, block: memoryview) -> None:  # noqa: ANN401
    while block:
        block = block[file.write(block) :]


class CheckpointTensors(Mapping[str, Tensor]):
    """A model's tensors in the order of `names`; each is read when asked for, and not kept.

    Raises DamagedError for a checkpoint that cannot be read; all checksums are verified first.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = names
        self.index = read_index(folder)
        self._files: dict[str, BlockFile] = {}
        if missing := [name for name in names if f"model.{name}" not in self.index.tensors]:
            raise ValueError(f"{folder} has no tensor {missing[0]}; it is of another model")
        check_files(folder, self.index, part=0, parts=1)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.index.tensors[f"model.{name}"] for name in self.names)
        return sum(prod(tensor.shape) * OF_NAME[tensor.dtype].itemsize for tensor in tensors)

    def __getitem__(self, name: str) -> Tensor:
        saved = self.index.tensors[f"model.{name}"]
        whole = torch.empty(saved.shape, dtype=OF_NAME[saved.dtype])
        for chunk in saved.chunks:
            target = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, start, size)
            try:
                read_block(self._file(chunk.file), chunk.key, (0,) * target.dim(), target)
            except (LookupError, OSError, ValueError) as error:
                raise ValueError(f"{self.folder / chunk.file} is damaged: {error}") from None
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _file(self, name: str) -> BlockFile:
        if name not in self._files:
            self._files[name] = BlockFile(self.folder / name)
        return self._files[name]
