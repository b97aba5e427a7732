"""Inputs: files of raw samples, cut into ranges that can be read independently.

In: names of JSONL, JSON, Parquet and Arrow files, of folders, or globs (paths.py). Out: ranges, and
the samples of each with their lines, counted from 1 at the start of the range (how many come before
it is not known yet).

A JSONL file of 10 bytes in ranges of 4, with lines that begin at 0, 3 and 8, gives bytes 0…4 with
two lines, 4…8 with none and 8…10 with one: a line belongs to the range in which it begins. A range
of a Parquet or Arrow file is a span of its groups (tables.py), and its lines are rows; one of a
JSON list is a span of records. A .json file with an object a line is read as JSONL. A compressed
file is one range (compressed.py), since it can only be read from its start.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from longshore.data.columns import present_columns
from longshore.data.compressed import END, UnpackedFile, is_compressed, kind_of, open_input
from longshore.data.json_list import CHUNK, read_elements
from longshore.data.paths import JSON, JSONL, files_of, has_ending, listed_endings
from longshore.data.source import SampleError
from longshore.data.tables import TABLES, count_groups, cut_table, is_table, read_table, too_large

Sample = Mapping[str, Any]

BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
MOST_HASHED, BLOCK = 1 << 26, 1 << 16
MAX_BYTES = 1 << 24
"""The default for the most bytes of one sample: text of some four million tokens."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file of samples, by the name that the user gave it."""

    name: str
    bytes: int
    mtime_ns: int

    @property
    def is_table(self) -> bool:
        return is_table(self.name)

    @property
    def is_compressed(self) -> bool:
        return is_compressed(self.name)

    @property
    def end(self) -> int:
        """Behind its last byte, unpacked."""
        return END if self.is_compressed else self.bytes

    @property
    def unit(self) -> str:
        """What its samples are called."""
        return unit_of(self.name)


def unit_of(name: str) -> str:
    return {".parquet": "row", ".arrow": "row", ".json": "record"}.get(kind_of(name), "line")


@dataclass(frozen=True, slots=True)
class Range:
    """A part of an input: Parquet row groups, or lines or records in bytes [start, stop)."""

    number: int
    """Over all inputs."""
    input: Input
    """The file."""
    start: int
    """A byte, or a row group."""
    stop: int
    """Behind the last byte or row group."""
    bytes: int
    """Its size, for progress."""


def find_inputs(names: Sequence[str | Path]) -> tuple[Input, ...]:
    """The named files, those that globs match, and those in named folders, sorted by name."""
    return tuple(_input(path) for path in files_of(names))


def _input(path: Path) -> Input:
    if not has_ending(path, (*JSON, *TABLES)):
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder")
        raise ValueError(f"{path}: must end in {listed_endings()}; unpack or convert it first")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
        if status.st_size and not is_table(path.name):
            _check_start(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not status.st_size:
        raise ValueError(f"{path}: the file is empty; leave it out")
    return Input(str(path), status.st_size, status.st_mtime_ns)


def content_digest(inputs: Sequence[Input], most: int = MOST_HASHED) -> str:
    """Identifies the text of files that may have changed without another size or time.

    All of it up to `most` bytes in total; of more data, each file's even share of that in blocks,
    spread over the file. So it is cheap, and of large files it misses small changes.
    """
    digest = hashlib.sha256()
    fits = sum(file.bytes for file in inputs) <= most
    share = max(most // max(len(inputs), 1), 1)
    for file in inputs:
        whole = fits or file.bytes <= share
        count = 1 if whole else max(share // BLOCK, 1)
        size = file.bytes if whole else min(share, BLOCK)
        with open(file.name, "rb") as opened:
            for block in range(count):
                opened.seek((file.bytes - size) * block // max(count - 1, 1))
                digest.update(opened.read(size))
    return digest.hexdigest()


def _check_start(path: Path) -> None:
    """Refuses JSON whose form does not match the file's ending."""
    kind = kind_of(path)
    with open_input(path) as file:
        if file.read(2) in UTF16:
            raise ValueError(f"{path}: is UTF-16; convert it to UTF-8, such as with iconv")
    with open_input(path) as file:
        first = _first_byte(file)
    if kind in JSONL and first == b"[":
        raise ValueError(f"{path}: is one JSON list, not one object per line; rename it to .json")
    if kind in JSONL or first in (b"[", b""):
        return
    with open_input(path) as file:
        line = file.readline(MAX_BYTES).removeprefix(BOM)
        is_jsonl = isinstance(_value(line), dict) and _first_byte(file)
    if not is_jsonl:
        what = "one JSON object" if first == b"{" else "not a JSON list"
        raise ValueError(
            f"{path}: is {what}; a .json file must be a list of samples, [{{…}}, {{…}}], or one "
            "object per line. If the list is inside the object, save it as a file of its own; if "
            "the object is a sample, rename the file to .jsonl; if it is no data, move it away"
        )


def _first_byte(file: BinaryIO) -> bytes:
    """The next byte that is not white space, after a byte order mark."""
    is_start = file.tell() == 0
    while chunk := file.read(CHUNK):
        chunk = chunk.removeprefix(BOM) if is_start else chunk
        if text := chunk.lstrip():
            return text[:1]
        is_start = False
    return b""


def _value(line: bytes) -> Any:  # noqa: ANN401 - any value of JSON
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _list_start(file: Input) -> int | None:
    """Where the first record of a JSON list begins; None for other files."""
    if kind_of(file.name) != ".json":
        return None
    with open_input(file.name) as opened:
        start = 0
        while chunk := opened.read(CHUNK):
            rest = chunk.removeprefix(BOM) if not start else chunk
            if text := rest.lstrip():
                return start + len(chunk) - len(text) + 1 if text[:1] == b"[" else None
            start += len(chunk)
    return None


def cut_ranges(inputs: Sequence[Input], size: int) -> tuple[Range, ...]:
    """The inputs in parts of about `size` bytes, numbered over all of them."""
    ranges: list[Range] = []
    for file in inputs:
        parts = _parts(file, size)
        ranges += [Range(len(ranges) + i, file, *part) for i, part in enumerate(parts)]
    return tuple(ranges)


def whole_range(file: Input) -> Range:
    """All of an input, uncut."""
    if file.is_table:
        return Range(0, file, 0, count_groups(file.name), file.bytes)
    return Range(0, file, _list_start(file) or 0, file.end, file.bytes)


def _parts(file: Input, size: int) -> list[tuple[int, int, int]]:
    if file.is_table:
        return cut_table(file.name, size)
    start = _list_start(file)
    if file.is_compressed:
        return [(start or 0, file.end, file.bytes)]
    return _byte_ranges(file, size) if start is None else _record_spans(file, start, size)


def _byte_ranges(file: Input, size: int) -> list[tuple[int, int, int]]:
    starts = range(0, file.bytes, size)
    stops = (min(start + size, file.bytes) for start in starts)
    return [(start, stop, stop - start) for start, stop in zip(starts, stops, strict=True)]


def _record_spans(file: Input, start: int, size: int) -> list[tuple[int, int, int]]:
    """Reads the list once; it must be closed, and nothing may follow it."""
    parts: list[tuple[int, int, int]] = []
    number, first, stop = 0, start, start
    with open(file.name, "rb") as opened:
        for number, part in enumerate(read_elements(opened, start, file.bytes, limit=0), start=1):
            stop = part.stop
            if not part.ended_by:
                raise _not_closed(file, number, part.start)
            if stop - first >= size:
                parts.append((first, stop, stop - first))
                first = stop + 1
        opened.seek(stop + 1)
        if _first_byte(opened):
            raise _more_text(file, stop + 1)
        opened.seek(start)
        is_empty = number == 1 and not opened.read(min(stop - start, CHUNK)).strip()
    if first <= stop and not is_empty:
        parts.append((first, stop, stop - first))
    return parts


def _not_closed(file: Input, number: int, start: int) -> ValueError:
    return ValueError(
        f"{file.name}: the list is not closed: the file ends in record {number}, which begins at "
        f"byte {start:,}; copy the file again, or fix that record"
    )


def _more_text(file: Input, at: int) -> ValueError:
    return ValueError(
        f"{file.name}: there is more text after the end of the list, at byte {at:,}; a .json file "
        "must be one list"
    )


@dataclass(slots=True)
class PackedBytes:
    """How much of a compressed file is read, while it is."""

    read: int = 0


def _keep_all(name: str) -> bool:
    return False


def read_range(
    part: Range,
    *,
    leaves_out: Callable[[str], bool] = _keep_all,
    max_bytes: int = MAX_BYTES,
    packed: PackedBytes | None = None,
) -> Iterator[tuple[int, Sample | SampleError]]:
    """The samples of a range with their lines; a line that is no sample gives its error.

    Blank lines count as lines, but are left out.
    One of more than `max_bytes` is an error too, and is neither parsed nor read into memory; a row
    of a table is read, because its page is, but stays as bytes.
    packed: gets how much of a compressed file is read.
    """
    if part.input.is_table:
        rows: Iterator[Sample | SampleError | None] = read_table(
            part.input.name, part.start, part.stop, leaves_out=leaves_out, max_bytes=max_bytes
        )
    elif _list_start(part.input) is None:
        rows = map(_parse_line, _lines(part, max_bytes, packed))
    else:
        rows = map(_parse, _records(part, max_bytes, packed))
    for line, row in enumerate(rows, start=1):
        if row is not None:
            yield line, row if isinstance(row, SampleError) else present_columns(row)


def _lines(part: Range, limit: int, packed: PackedBytes | None) -> Iterator[bytes | SampleError]:
    with open_input(part.input.name) as file:
        if part.start:
            file.seek(part.start - 1)
            _skip_line(file, part.stop)  # the rest of a line that begins before this range
        while (at := file.tell()) < part.stop and (line := file.readline(limit + 1)):
            _count(packed, file)
            if len(line) > limit:
                rest = 0 if line.endswith(b"\n") else _skip_line(file, part.input.end)
                yield too_large("line", len(line) + rest, limit)
            else:
                yield line if at else line.removeprefix(BOM)


def _count(packed: PackedBytes | None, file: BinaryIO) -> None:
    if packed is not None and isinstance(file, UnpackedFile):
        packed.read = file.packed


def _skip_line(file: BinaryIO, stop: int) -> int:
    """Skips to the end of the line, or past `stop`; returns the number of bytes skipped."""
    skipped = 0
    while file.tell() < stop and (part := file.readline(CHUNK)):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _records(part: Range, limit: int, packed: PackedBytes | None) -> Iterator[bytes | SampleError]:
    with open_input(part.input.name) as file:
        elements = read_elements(file, part.start, part.stop, limit=limit)
        for number, record in enumerate(elements, start=1):
            _count(packed, file)
            if part.input.is_compressed and not record.ended_by:  # others are checked when cut
                raise _not_closed(part.input, number, record.start)
            is_large = record.size > limit
            if number == 1 and record.ended_by == "]" and not (is_large or record.text.strip()):
                continue  # an empty list
            yield too_large("record", record.size, limit) if is_large else record.text
    if part.input.is_compressed:
        with open_input(part.input.name) as again:
            again.seek(record.stop + 1)
            if _first_byte(again):
                raise _more_text(part.input, record.stop + 1)


def _parse_line(line: bytes | SampleError) -> Sample | SampleError | None:
    """None for a blank line."""
    return None if isinstance(line, bytes) and not line.strip() else _parse(line)


def _parse(line: bytes | SampleError) -> Sample | SampleError:
    if isinstance(line, SampleError):
        return line
    if not line.strip():
        return SampleError("empty", "it is blank")
    try:
        sample = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return SampleError("broken JSON", f"it is not UTF-8 ({error.reason})")
    except (ValueError, RecursionError) as error:
        return SampleError("broken JSON", str(error))
    if not isinstance(sample, dict):
        return SampleError("broken JSON", f"it is {type(sample).__name__}, not an object")
    return sample
