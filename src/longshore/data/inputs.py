"""Inputs: files of raw samples, cut into ranges that can be read apart from each other.

In: names of JSONL and Parquet files or of folders. Out: ranges, and the samples of each with their
lines, counted from 1 at the start of the range (nobody has counted the lines before it yet).

A JSONL file of 10 bytes in ranges of 4, with lines that begin at 0, 3 and 8, gives bytes 0…4 with
two lines, 4…8 with none and 8…10 with one: a line belongs to the range in which it begins. A range
of a Parquet file is a run of row groups, and its lines are rows.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.data.source import SampleError

Sample = Mapping[str, Any]

JSONL = (".jsonl", ".ndjson")
SUFFIXES = (*JSONL, ".parquet")
ROWS = 256


@dataclass(frozen=True, slots=True)
class Input:
    """A file of samples, by the name that the user gave it."""

    name: str
    bytes: int
    mtime_ns: int

    @property
    def is_parquet(self) -> bool:
        return self.name.endswith(".parquet")


@dataclass(frozen=True, slots=True)
class Range:
    """A part of an input: the lines that begin in bytes [start, stop), or Parquet row groups."""

    number: int
    input: Input
    start: int
    stop: int
    bytes: int


def find_inputs(names: Sequence[str | Path]) -> tuple[Input, ...]:
    """The files behind names of files and folders; a folder stands for its files by name."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
            if not inside:
                raise ValueError(f"{path}: the folder has no file ending in {', '.join(SUFFIXES)}")
            paths += inside
        else:
            paths.append(path)
    if not paths:
        raise ValueError("no input is given; name files or folders of samples")
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"{path}: is named more than once; for more weight, use a mixture")
    return tuple(_input(path) for path in paths)


def _input(path: Path) -> Input:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: must end in {', '.join(SUFFIXES)}; unpack or convert it first")
    try:
        with path.open("rb") as file:
            start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
            status = os.fstat(file.fileno())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    if not status.st_size:
        raise ValueError(f"{path}: the file is empty; leave it out")
    if start.startswith(b"[") and path.suffix in JSONL:
        raise ValueError(f"{path}: is one JSON list; it must hold one object a line")
    return Input(str(path), status.st_size, status.st_mtime_ns)


def cut_ranges(inputs: Sequence[Input], size: int) -> tuple[Range, ...]:
    """The inputs in parts of about `size` bytes, numbered over all of them."""
    ranges: list[Range] = []
    for file in inputs:
        parts = _row_groups(file, size) if file.is_parquet else _byte_ranges(file, size)
        ranges += [Range(len(ranges) + i, file, *part) for i, part in enumerate(parts)]
    return tuple(ranges)


def _byte_ranges(file: Input, size: int) -> list[tuple[int, int, int]]:
    starts = range(0, file.bytes, size)
    stops = (min(start + size, file.bytes) for start in starts)
    return [(start, stop, stop - start) for start, stop in zip(starts, stops, strict=True)]


def _row_groups(file: Input, size: int) -> list[tuple[int, int, int]]:
    parts, start, held = [], 0, 0
    with _parquet(file) as table:
        groups = table.metadata.num_row_groups
        for group in range(groups):
            held += table.metadata.row_group(group).total_byte_size
            if held >= size or group + 1 == groups:
                parts.append((start, group + 1, held))
                start, held = group + 1, 0
    return parts


def read_range(
    part: Range, ignore: Sequence[str] = ()
) -> Iterator[tuple[int, Sample | SampleError]]:
    """The samples of a range with their lines; a line that is no sample gives its error."""
    if part.input.is_parquet:
        yield from _read_rows(part, ignore)
        return
    for number, line in enumerate(_lines(part), start=1):
        try:
            yield number, _parse(line)
        except SampleError as error:
            yield number, error


def _lines(part: Range) -> Iterator[bytes]:
    with open(part.input.name, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the rest of a line that begins before this range
        while file.tell() < part.stop and (line := file.readline()):
            yield line if part.start else line.removeprefix(b"\xef\xbb\xbf")


def _parse(line: bytes) -> Sample:
    if not line.strip():
        raise SampleError("empty", "the line is blank")
    try:
        sample = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SampleError("broken JSON", f"the line is not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise SampleError("broken JSON", str(error)) from None
    if not isinstance(sample, dict):
        raise SampleError("broken JSON", f"the line is {type(sample).__name__}, not an object")
    return sample


def _read_rows(part: Range, ignore: Sequence[str]) -> Iterator[tuple[int, Sample | SampleError]]:
    with _parquet(part.input) as table:
        columns = [name for name in table.schema_arrow.names if name not in set(ignore)]
        groups = list(range(part.start, part.stop))
        batches = table.iter_batches(ROWS, row_groups=groups, columns=columns)
        rows = (row for batch in _told_by_name(batches, part.input) for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield number, {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    """Parquet gives all objects of a column the same keys, and null to those that had none."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parquet(file: Input) -> Any:  # noqa: ANN401 - pyarrow has no types
    from pyarrow.parquet import ParquetFile

    return next(_told_by_name((ParquetFile(name) for name in [file.name]), file))


def _told_by_name(things: Iterator[Any], file: Input) -> Iterator[Any]:
    import pyarrow as pa

    try:
        yield from things
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"{file.name}: cannot be read as Parquet ({error})") from None
