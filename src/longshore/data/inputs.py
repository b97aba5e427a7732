"""Inputs: files of raw samples, cut into ranges that can be read independently.

In: names of JSONL, JSON and Parquet files or of folders. Out: ranges, and the samples of each with
their lines, counted from 1 at the start of the range (how many come before it is not known yet).

A JSONL file of 10 bytes in ranges of 4, with lines that begin at 0, 3 and 8, gives bytes 0…4 with
two lines, 4…8 with none and 8…10 with one: a line belongs to the range in which it begins. A range
of a Parquet file is a span of row groups, and its lines are rows; one of a JSON list is a span of
records. A .json file with an object a line is read as JSONL.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from longshore.data.json_list import CHUNK, read_elements
from longshore.data.source import SampleError
from longshore.data.store import INDEX

Sample = Mapping[str, Any]

JSONL = (".jsonl", ".ndjson")
SUFFIXES = (*JSONL, ".json", ".parquet")
BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
STORE_FILES = (*INDEX, "prepare.work")
ROWS = 256
MAX_BYTES = 1 << 24
"""The default for the most bytes of one sample: text of some four million tokens."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file of samples, by the name that the user gave it."""

    name: str
    bytes: int
    mtime_ns: int

    @property
    def is_parquet(self) -> bool:
        return self.name.endswith(".parquet")

    @property
    def unit(self) -> str:
        """What its samples are called."""
        return unit_of(self.name)


def unit_of(name: str) -> str:
    return {".parquet": "row", ".json": "record"}.get(Path(name).suffix, "line")


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
    """The named files, and the files in named folders, sorted by name."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        paths += _files_in(path) if path.is_dir() else [path]
    if not paths:
        raise ValueError("no input is given; name files or folders of samples")
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path}: is named more than once; for more weight, use a mixture")
    return tuple(_input(path) for path in paths)


def _files_in(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir())
    if any(is_store_file(name) for name in names):
        raise ValueError(
            f"{folder}: is a prepared folder without its manifest.json, so it is unfinished or "
            "damaged; copy it again, or repeat the 'longshore prepare' command that made it, with "
            "--start-over if that refuses to resume"
        )
    inputs = [folder / name for name in names if Path(name).suffix in SUFFIXES]
    if not inputs:
        raise ValueError(f"{folder}: the folder has no file ending in {', '.join(SUFFIXES)}")
    return inputs


def is_store_file(name: str) -> bool:
    """Whether a file is one that only a prepared folder has."""
    return name in STORE_FILES or (name.startswith("shard-") and name.endswith(".arrow"))


def _input(path: Path) -> Input:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: must end in {', '.join(SUFFIXES)}; unpack or convert it first")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if path.suffix != ".parquet":
                _check_start(path, file)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not status.st_size:
        raise ValueError(f"{path}: the file is empty; leave it out")
    return Input(str(path), status.st_size, status.st_mtime_ns)


def _check_start(path: Path, file: BinaryIO) -> None:
    """Refuses JSON whose form does not match the file's ending."""
    if file.read(2) in UTF16:
        raise ValueError(f"{path}: is UTF-16; convert it to UTF-8, such as with iconv")
    file.seek(0)
    first = _first_byte(file)
    if path.suffix in JSONL and first == b"[":
        raise ValueError(f"{path}: is one JSON list, not one object per line; rename it to .json")
    if path.suffix in JSONL or first in (b"[", b""):
        return
    file.seek(0)
    line = file.readline(MAX_BYTES).removeprefix(BOM)
    if not (isinstance(_value(line), dict) and _first_byte(file)):
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
    if not file.name.endswith(".json"):
        return None
    with open(file.name, "rb") as opened:
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
    if file.is_parquet:
        with _parquet(file) as table:
            return Range(0, file, 0, table.metadata.num_row_groups, file.bytes)
    return Range(0, file, _list_start(file) or 0, file.bytes, file.bytes)


def _parts(file: Input, size: int) -> list[tuple[int, int, int]]:
    if file.is_parquet:
        return _row_groups(file, size)
    start = _list_start(file)
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
                raise ValueError(
                    f"{file.name}: the list is not closed: the file ends in record {number}, which "
                    f"begins at byte {part.start:,}; copy the file again, or fix that record"
                )
            if stop - first >= size:
                parts.append((first, stop, stop - first))
                first = stop + 1
        opened.seek(stop + 1)
        if _first_byte(opened):
            raise ValueError(
                f"{file.name}: there is more text after the end of the list, at byte "
                f"{stop + 1:,}; a .json file must be one list"
            )
        opened.seek(start)
        is_empty = number == 1 and not opened.read(min(stop - start, CHUNK)).strip()
    if first <= stop and not is_empty:
        parts.append((first, stop, stop - first))
    return parts


def _row_groups(file: Input, size: int) -> list[tuple[int, int, int]]:
    parts, start, size_so_far = [], 0, 0
    with _parquet(file) as table:
        groups = table.metadata.num_row_groups
        for group in range(groups):
            size_so_far += table.metadata.row_group(group).total_byte_size
            if size_so_far >= size or group + 1 == groups:
                parts.append((start, group + 1, size_so_far))
                start, size_so_far = group + 1, 0
    return parts


def _keep_all(name: str) -> bool:
    return False


def read_range(
    part: Range, *, leaves_out: Callable[[str], bool] = _keep_all, max_bytes: int = MAX_BYTES
) -> Iterator[tuple[int, Sample | SampleError]]:
    """The samples of a range with their lines; a line that is no sample gives its error.

    One of more than `max_bytes` is an error too, and is neither parsed nor read into memory.
    """
    if part.input.is_parquet:
        rows: Iterator[Sample | SampleError] = _read_rows(part, leaves_out, max_bytes)
    elif _list_start(part.input) is None:
        rows = map(_parse, _lines(part, max_bytes))
    else:
        rows = map(_parse, _records(part, max_bytes))
    yield from enumerate(rows, start=1)


def _lines(part: Range, limit: int) -> Iterator[bytes | SampleError]:
    with open(part.input.name, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            _skip_line(file, part.stop)  # the rest of a line that begins before this range
        while (at := file.tell()) < part.stop and (line := file.readline(limit + 1)):
            if len(line) > limit:
                rest = 0 if line.endswith(b"\n") else _skip_line(file, part.input.bytes)
                yield _too_large("line", len(line) + rest, limit)
            else:
                yield line if at else line.removeprefix(BOM)


def _skip_line(file: BinaryIO, stop: int) -> int:
    """Skips to the end of the line, or past `stop`; returns the number of bytes skipped."""
    skipped = 0
    while file.tell() < stop and (part := file.readline(CHUNK)):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _records(part: Range, limit: int) -> Iterator[bytes | SampleError]:
    with open(part.input.name, "rb") as file:
        for record in read_elements(file, part.start, part.stop, limit=limit):
            is_large = record.size > limit
            yield _too_large("record", record.size, limit) if is_large else record.text


def _too_large(what: str, size: int, limit: int) -> SampleError:
    return SampleError("too large", f"the {what} has {size:,} bytes; the limit is {limit:,}")


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


def _read_rows(
    part: Range, leaves_out: Callable[[str], bool], limit: int
) -> Iterator[Sample | SampleError]:
    with _parquet(part.input) as table:
        columns = [name for name in table.schema_arrow.names if not leaves_out(name)]
        groups = list(range(part.start, part.stop))
        batches = table.iter_batches(ROWS, row_groups=groups, columns=columns)
        for batch in _named_errors(batches, part.input):
            step = 1 if batch.nbytes > limit else ROWS
            for first in range(0, batch.num_rows, step):
                rows = batch.slice(first, step)
                if step == 1 and rows.nbytes > limit:
                    yield _too_large("row", rows.nbytes, limit)
                    continue
                for row in rows.to_pylist():
                    yield {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    """Removes the nulls that Parquet adds: all objects of a column have the same keys there."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parquet(file: Input) -> Any:  # noqa: ANN401 - pyarrow has no types
    from pyarrow.parquet import ParquetFile

    return next(_named_errors((ParquetFile(name) for name in [file.name]), file))


def _named_errors(things: Iterator[Any], file: Input) -> Iterator[Any]:
    import pyarrow as pa

    try:
        yield from things
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file.name}: cannot be read as Parquet ({error})") from None
