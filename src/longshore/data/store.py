"""The store: sequences on disk, read by memory map, with an index of lengths.

In: TokenizedSamples. Out: a folder, and a Store that reads any sequence by its index:

    manifest.json      counts, extra fields, sizes and SHA-256 of all files below, how it was made,
                       and its own SHA-256; written last, so a folder without it is unfinished
    lengths.npy        int64, what a planner needs; loss_tokens.npy the same
    checksums.npy      uint32, CRC-32 of each sequence's content
    mask_heads.npy     uint64, the first 64 values of each loss mask, as bits
    shard-00000.arrow  one record batch of the first sequences: lists `tokens` (int32), `loss_mask`
                       (uint8) and one for each extra field, numbers `loss_tokens`, `checksum`

All bytes are verified before use, and none are read only for that: manifest and index by SHA-256
when a store is opened, a shard's `frame`, all of it but the sequences, at first use, and each
sequence with its CRC-32 at every read. So a store of 100 GB opens at once. Between reads only
memory maps stay open, so it may be used after a fork; a pickled store opens its folder again.
"""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from longshore.data.source import (
    Array,
    Field,
    TokenizedSample,
    check_declared,
    checked_index,
    parse_field,
)
from longshore.files import open_sealed, parse_json, reason, sealed_json
from longshore.plan.cost import Ints

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


FORMAT = "longshore store"
SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
INDEX = ("lengths.npy", "loss_tokens.npy", "checksums.npy", "mask_heads.npy")
NUMBERS = ("schema_version", "sequences", "tokens", "loss_tokens", "longest")
AGAIN = "copy it again or prepare the store again"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a store."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardInfo(FileInfo):
    """A shard's file and content."""

    sequences: int
    tokens: int
    frame: int
    """CRC-32 of all bytes but the sequences' own."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of manifest.json."""

    schema_version: int
    """Version of the store's format."""
    sequences: int
    """Number of sequences."""
    tokens: int
    """Tokens of all sequences."""
    loss_tokens: int
    """Tokens that are targets of the loss."""
    longest: int
    """Tokens of the longest sequence."""
    fields: tuple[Field, ...]
    """Extra fields of each sequence."""
    shards: tuple[ShardInfo, ...]
    """The files with the sequences, in order."""
    index: tuple[FileInfo, ...]
    """The files of INDEX."""
    about: Mapping[str, Any]
    """How the store was made, as its writer describes it."""


class Store:
    """An indexed source over a folder. `digest` identifies its content."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        for info in (*self.manifest.index, *self.manifest.shards):
            _check_size(self.folder / info.file, info.bytes)
        for info in self.manifest.index:
            _check_sha256(self.folder / info.file, info)
        self.fields = self.manifest.fields
        index = [np.load(self.folder / name, mmap_mode="r") for name in INDEX]
        self.lengths: Ints
        self.loss_tokens: Ints
        self.lengths, self.loss_tokens, self._checksums, self._heads = index
        counts = [shard.sequences for shard in self.manifest.shards]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._columns: dict[int, dict[str, tuple[Array, Ints]]] = {}

    def __reduce__(self) -> tuple[type["Store"], tuple[Path]]:
        return Store, (self.folder,)

    @property
    def digest(self) -> str:
        """Identifies the sequences in their order, however they are split into shards."""
        fields = [str(field) for field in self.fields]
        content = json.dumps([fields, [info.sha256 for info in self.manifest.index]])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def tokenizer_digest(self) -> str:
        """Identifies the tokenizer, as `prepare` recorded it, or ""."""
        return str(self.manifest.about.get("settings", {}).get("tokenizer", ""))

    def __len__(self) -> int:
        return self.manifest.sequences

    def __getitem__(self, index: int) -> TokenizedSample:
        i = checked_index(index, len(self))
        shard = int(np.searchsorted(self._starts, i, side="right")) - 1
        row, columns = i - int(self._starts[shard]), self._open(shard)
        length = int(self.lengths[i])
        flat = {name: a[at[row] : at[row + 1]] for name, (a, at) in columns.items()}
        sizes = {"tokens": length, "loss_mask": length}
        sizes |= {f.name: f.width * (1 if f.per == "sequence" else length) for f in self.fields}
        fits = all(len(flat[name]) == size for name, size in sizes.items())
        if not fits or checksum(flat.values()) != self._checksums[i]:
            raise self._damaged(shard, f"sequence {i} does not match its checksum")
        tokens, mask = flat["tokens"], flat["loss_mask"].view(np.bool_)
        extra = {
            f.name: flat[f.name].view(f.dtype).reshape(f.array_shape(length)) for f in self.fields
        }
        return TokenizedSample(i, tokens, mask, extra)

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        """The first values of a loss mask, from the index: a lane needs those of all sequences."""
        i = checked_index(index, len(self))
        if count > HEAD:
            return self[i].loss_mask[:count]
        head, size = int(self._heads[i]), min(count, int(self.lengths[i]))
        return np.array([head >> bit & 1 for bit in range(size)], dtype=np.bool_)

    def sequence_values(self, name: str) -> Ints:
        """A field of one number for each sequence, of all of them; each is verified when read."""
        parts = [self._open(shard)[name][0] for shard in range(len(self.manifest.shards))]
        return np.concatenate(parts).astype(np.int64)

    def verify(self) -> None:
        """Reads all bytes of every file and compares them with the manifest."""
        for info in (*self.manifest.index, *self.manifest.shards):
            _check_sha256(self.folder / info.file, info)

    def _open(self, shard: int) -> dict[str, tuple[Array, Ints]]:
        """The flat values and offsets of each column; these keep the memory map alive."""
        if shard in self._columns:
            return self._columns[shard]
        info = self.manifest.shards[shard]
        path = self.folder / info.file
        _check_size(path, info.bytes)
        names = ("tokens", "loss_mask", *(field.name for field in self.fields))
        try:
            with pa.memory_map(str(path)) as file:
                content = file.read_buffer()
            batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
            batch.validate()
            columns = {name: flat_values(batch.column(name)) for name in names}
            frame = frame_checksum(content, batch, names)
        except (OSError, ValueError, LookupError, AttributeError, pa.ArrowException) as error:
            raise self._damaged(shard, str(error)) from None
        if frame != info.frame:
            raise self._damaged(shard, "the bytes around its sequences do not match their checksum")
        self._columns[shard] = columns
        return columns

    def _damaged(self, shard: int, why: str) -> ValueError:
        path = self.folder / self.manifest.shards[shard].file
        return ValueError(f"{path}: is damaged ({why}); {AGAIN}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a store; a ValueError that says what to do where there is none."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: is not a prepared folder, or is unfinished (it has no {MANIFEST}); "
            "repeat the 'longshore prepare' command that made it, which resumes where it stopped"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        data = parse_json(raw)
        version = (data["format"], data["schema_version"])
        if version == (FORMAT, SCHEMA_VERSION):
            return _parse_manifest(open_sealed(raw))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: is damaged ({error}); {AGAIN}") from None
    raise ValueError(
        f"{path}: is {version[0]!r}, version {version[1]}; this Longshore reads {FORMAT!r}, "
        f"version {SCHEMA_VERSION}, so {AGAIN}"
    )


def write_store(
    folder: str | Path,
    samples: Iterable[TokenizedSample],
    *,
    fields: Sequence[Field] = (),
    shard_sequences: int = 4096,
    about: Mapping[str, Any] | None = None,
) -> Store:
    """Writes samples as a store into an empty or new folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder}: is not empty; a store needs a folder of its own")
    iterator = iter(samples)
    shards: list[ShardInfo] = []
    while batch := list(islice(iterator, shard_sequences)):
        path = folder / shard_name(len(shards))
        shards.append(write_shard(path, batch, fields=fields, scratch=folder))
    finish_store(folder, shards, fields=fields, about=about or {}, scratch=folder)
    return Store(folder)


def shard_name(number: int, piece: int = 0) -> str:
    """The file of a range; a large range is several pieces, from 0."""
    return f"shard-{number:05}-{piece:05}.arrow" if piece else f"shard-{number:05}.arrow"


def write_shard(
    path: Path, samples: Sequence[TokenizedSample], *, fields: Sequence[Field], scratch: Path
) -> ShardInfo:
    """Writes one shard; the same samples give the same bytes."""
    columns: dict[str, Any] = {
        "tokens": list_column([sample.tokens for sample in samples], "int32"),
        "loss_mask": list_column([sample.loss_mask for sample in samples], "bool"),
    }
    for field in check_declared(fields):
        columns[field.name] = list_column([s.fields[field.name] for s in samples], field.dtype)
    columns["loss_tokens"] = pa.array([sample.loss_tokens for sample in samples], pa.int64())
    checksums = [
        checksum([s.tokens, s.loss_mask, *(s.fields[field.name] for field in fields)])
        for s in samples
    ]
    columns["checksum"] = pa.array(checksums, pa.uint32())
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = sink.getvalue()
    info = write_durably(path, memoryview(content), scratch=scratch)
    tokens = sum(sample.length for sample in samples)
    written = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
    frame = frame_checksum(content, written, [*columns][:-2])
    return ShardInfo(**asdict(info), sequences=len(samples), tokens=tokens, frame=frame)


def finish_store(
    folder: Path,
    shards: Sequence[ShardInfo],
    *,
    fields: Sequence[Field],
    about: Mapping[str, Any],
    scratch: Path,
) -> None:
    """Writes the index of all shards, then the manifest, which completes the store."""
    if not shards:
        raise ValueError(f"{folder}: there are no sequences to store")
    again = "delete it and run the same command again"
    for shard in shards:  # a resumed `prepare` may have written it days ago
        _check_sha256(folder / shard.file, shard, way_out=again)
    parts = [index_of(folder / shard.file) for shard in shards]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    index = []
    for name, column in zip(INDEX, columns, strict=True):
        buffer = io.BytesIO()
        np.save(buffer, column)
        index.append(write_durably(folder / name, buffer.getbuffer(), scratch=scratch))
    lengths, loss_tokens, *_ = columns
    manifest = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "loss_tokens": int(loss_tokens.sum()),
        "longest": int(lengths.max()),
        "fields": [str(field) for field in fields],
        "about": about,
        "index": [asdict(info) for info in index],
        "shards": [asdict(shard) for shard in shards],
    }
    write_durably(folder / MANIFEST, sealed_json(manifest, indent=1), scratch=scratch)


def write_durably(path: Path, data: bytes | memoryview, *, scratch: Path) -> FileInfo:
    """Writes a file so that after any crash it is complete or absent."""
    temporary = scratch / f"{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, reason(error), str(path)) from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return FileInfo(path.name, len(data), hashlib.sha256(data).hexdigest())


def _parse_manifest(data: Mapping[str, Any]) -> Manifest:
    return Manifest(
        **{name: int(data[name]) for name in NUMBERS},
        fields=tuple(parse_field(text) for text in data["fields"]),
        shards=tuple(ShardInfo(**shard) for shard in data["shards"]),
        index=tuple(FileInfo(**info) for info in data["index"]),
        about=data["about"],
    )


def _check_size(path: Path, size: int) -> None:
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); the store needs it") from None
    if actual != size:
        raise ValueError(
            f"{path}: has {actual} bytes and should have {size}, so it is damaged; {AGAIN}"
        )


def _check_sha256(path: Path, info: FileInfo, *, way_out: str = AGAIN) -> None:
    """Reads a file and compares it with its SHA-256."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {way_out}") from None
    if digest.hexdigest() != info.sha256:
        raise ValueError(f"{path}: is damaged (its SHA-256 does not match); {way_out}")
