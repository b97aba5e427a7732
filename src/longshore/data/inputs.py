"""Inputs: files of raw samples, cut into ranges that can be read independently.

In: names of JSONL, JSON, Parquet and Arrow files, of folders, or globs (paths.py). Out: ranges, and
the samples of each with their lines, counted from 1 at the start of the range (how many come before
it is not known yet).

A JSONL file of 10 bytes in ranges of 4, with lines that begin at 0, 3 and 8, gives bytes 0…4 with
two lines, 4…8 with none and 8…10 with one: a line belongs to the range in which it begins. A range
of a Parquet or Arrow file is a span of its groups (tables.py), and its lines are rows; one of a
JSON list is a span of records. A .json file with an object a line is read as JSONL. A compressed
file is one range (compressed.py), since it can only be read from its start.

Paths: from what a user names to the files of samples.

In: files, globs and folders, of plain files or saved by Hugging Face `datasets`. Out: the files,
each once, in a fixed order: as they are named, those of a folder or a glob sorted by name.

    files_of(["a.jsonl", "b/*.parquet"])     a.jsonl, b/0.parquet, b/1.parquet
    files_of(["dolly"])                      dolly/data-00000-of-00001.arrow, after save_to_disk

A folder of a DatasetDict has several splits, of which the user names one, dolly/train.

Compressed files, read from their start to their end without unpacking them on disk.

In: the name of a .gz or .zst file. Out: a file object that reads forward only, whose positions are
those of the unpacked bytes. Of chats.jsonl.gz with 1 GB of text at most some MB are in memory. A
file that is cut off or damaged is a ValueError with its name at the place of the damage, so its
rows are never silently fewer. pyarrow unpacks both, with the checksums of gzip and, where the file
has them, of zstd.

    kind_of("chats.jsonl.gz")          ".jsonl"
    with open_input("chats.jsonl.gz") as file: file.readline()

JSON lists: the records of a file `[{…}, {…}, …]`, one at a time, whatever the file's size.

In: an open file, and where its first record begins. Out: each record's bytes, located by counting
brackets outside of strings, so that a broken record does not affect the others. The file

    [{"a": "]"}, 7 ]

has records at bytes 1…11 and 12…15, white space included. At most `limit` bytes of a record are in
memory; of a longer record only the size is returned.
"""

import glob
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from longshore.data.columns import present_columns
from longshore.data.source import SampleError
from longshore.data.store import INDEX
from longshore.data.tables import TABLES, count_groups, cut_table, is_table, read_table, too_large
from longshore.files import parse_json

CODECS = {".gz": "gzip", ".zst": "zstd"}
END = 1 << 62
"""Behind the last unpacked byte, of which nothing is known before all are read."""
BUFFER = 1 << 18


def is_compressed(name: str | Path) -> bool:
    return Path(name).suffix in CODECS


def kind_of(name: str | Path) -> str:
    """The ending that says what is in a file: .jsonl for a.jsonl and for a.jsonl.gz."""
    path = Path(name)
    return Path(path.stem).suffix if is_compressed(path) else path.suffix


def open_input(name: str | Path) -> BinaryIO:
    """The file's bytes, unpacked if need be."""
    return UnpackedFile(name) if is_compressed(name) else open(name, "rb")


class UnpackedFile(io.BufferedReader):
    """The unpacked bytes of a compressed file. `seek` goes forward only, by reading."""

    def __init__(self, name: str | Path) -> None:
        import pyarrow as pa

        self._path = str(name)
        self._at = 0
        codec = CODECS[Path(name).suffix]
        if not pa.Codec.is_available(codec):
            raise ValueError(
                f"{name}: this build of pyarrow cannot unpack {codec}; unpack the file, or install "
                "a pyarrow that has it"
            )
        self._packed = open(name, "rb")  # noqa: SIM115 - closed with this file
        super().__init__(pa.input_stream(self._packed, compression=codec), BUFFER)

    @property
    def packed(self) -> int:
        """How many bytes of the compressed file are read."""
        return self._packed.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            data = super().read(size)
        except OSError as error:
            raise self._damaged(error) from None
        self._at += len(data)
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        try:
            line = super().readline(size)
        except OSError as error:
            raise self._damaged(error) from None
        self._at += len(line)
        return line

    def tell(self) -> int:
        return self._at

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        assert whence == os.SEEK_SET
        assert target >= self._at
        while self._at < target and self.read(min(BUFFER, target - self._at)):
            pass
        return self._at

    def _damaged(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self._path}: cannot be unpacked after {self._at:,} bytes ({error}); it is cut off, "
            f"damaged or not {CODECS[Path(self._path).suffix]}: copy or compress it again"
        )


JSONL = (".jsonl", ".ndjson")
JSON = (*JSONL, ".json")
SUFFIXES = (*JSON, ".parquet")
"""What is taken from a folder."""
STORE_FILES = (*INDEX, "prepare.work")
SAVED_SPLITS = "dataset_dict.json"
SAVED_STATE = "state.json"
SAVED_INFO = "dataset_info.json"


def files_of(names: Sequence[str | Path]) -> list[Path]:
    """All files that the names stand for; a file that two of them stand for is refused."""
    paths = [path for name in names for place in matches(name) for path in _files_at(place)]
    if not paths:
        raise ValueError("no input is given; name files or folders of samples")
    first: dict[Path, Path] = {}
    for path in paths:
        other = first.setdefault(path.resolve(), path)
        if other is not path:
            also = "" if other == path else f", also as {other}"
            raise ValueError(
                f"{path}: is named more than once{also}; for more weight, use a mixture"
            )
    return paths


def matches(name: str | Path) -> list[Path]:
    """The files and folders that a glob matches, sorted; a name without wildcards as it is."""
    if Path(name).exists() or not glob.has_magic(str(name)):
        return [Path(name)]
    paths = sorted(glob.glob(str(name), recursive=True))
    if not paths:
        raise ValueError(f"{name}: nothing matches; check the folder and the pattern")
    return [Path(path) for path in paths]


def has_ending(path: Path, endings: Sequence[str]) -> bool:
    """Whether a file is of one of these kinds; only JSON may be compressed."""
    kind = kind_of(path)
    return kind in endings and (kind == path.suffix or kind in JSON)


def listed_endings() -> str:
    return f"{', '.join(SUFFIXES)} or .arrow; those of JSON also with {' or '.join(CODECS)}"


def _files_at(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    if (place / SAVED_SPLITS).is_file():
        raise ValueError(_name_a_split(place))
    if (place / SAVED_STATE).is_file() and (place / SAVED_INFO).is_file():
        return _saved_files(place)
    return _files_in(place)


def _name_a_split(folder: Path) -> str:
    splits = _saved(folder / SAVED_SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(s, str) for s in splits):
        raise ValueError(f"{folder / SAVED_SPLITS}: is damaged (it lists no splits); save it again")
    return (
        f"{folder}: is a DatasetDict with the splits {', '.join(splits)}; name one of them, such "
        f"as {folder / splits[0]}"
    )


def _saved_files(folder: Path) -> list[Path]:
    """The files of a Dataset that save_to_disk wrote, in the order of its rows."""
    state = _saved(folder / SAVED_STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(
            f"{folder}: was saved with an index over its rows by an old version of datasets; load "
            "it and save it again with flatten_indices().save_to_disk(…)"
        )
    try:
        files = [folder / str(entry["filename"]) for entry in state["_data_files"]]  # type: ignore[attr-defined]
    except (LookupError, TypeError):
        raise ValueError(
            f"{folder / SAVED_STATE}: is damaged (it lists no files); save the dataset again"
        ) from None
    if absent := [path.name for path in files if not path.is_file()]:
        raise ValueError(
            f"{folder}: is incomplete: {SAVED_STATE} lists {absent[0]}, which is missing; copy it "
            "again"
        )
    if not files:
        raise ValueError(f"{folder}: the dataset has no rows; leave it out")
    return files


def _saved(path: Path) -> dict[str, object]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"{path}: is damaged (it is not JSON); save the dataset again") from None
    return data if isinstance(data, dict) else {}


def _files_in(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir())
    if any(is_store_file(name) for name in names):
        raise ValueError(
            f"{folder}: is a prepared folder without its manifest.json, so it is unfinished or "
            "damaged; copy it again, or repeat the 'longshore prepare' command that made it, with "
            "--start-over if that refuses to resume"
        )
    inputs = [folder / name for name in names if has_ending(Path(name), SUFFIXES)]
    if not inputs:
        raise ValueError(f"{folder}: the folder has no file ending in {', '.join(SUFFIXES)}")
    return inputs


def is_store_file(name: str) -> bool:
    """Whether a file is one that only a prepared folder has."""
    return name in STORE_FILES or (name.startswith("shard-") and name.endswith(".arrow"))


CHUNK = 1 << 20
# What can be skipped: whole strings, and everything but brackets and, between records, commas.
IN_RECORD = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
QUOTE, COMMA, LIST_END = b'",]'


@dataclass(frozen=True, slots=True)
class Element:
    """A record in bytes [start, stop) of the file. text: "" if longer than the limit.

    ended_by: "," or "]", or "" where the bytes end.
    """

    start: int
    stop: int
    text: bytes
    ended_by: str

    @property
    def size(self) -> int:
        return self.stop - self.start


def read_elements(file: BinaryIO, start: int, stop: int, *, limit: int) -> Iterator[Element]:
    """The records in bytes [start, stop), where a record begins at `start`; ends after a ]."""
    file.seek(start)
    text, begin, at = bytearray(), start, start
    for kind, data, end in _pieces(file, start, stop):
        if end - begin <= limit:
            text += data
        else:
            text.clear()
        at = end
        if kind:
            yield Element(begin, end, bytes(text), kind)
            text.clear()
            begin = at = end + 1
        if kind == "]":
            return
    yield Element(begin, at, bytes(text), "")


def _pieces(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[str, bytes, int]]:
    """Parts of records: what ends the record there ("" if nothing does), bytes, their end."""
    depth, in_string, first_byte = 0, False, 0
    while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
        begin, here = 0, first_byte
        while (here := _skip(chunk, here, depth, in_string)) < len(chunk):
            mark, here = chunk[here], here + 1
            if in_string:
                in_string = mark != QUOTE
                here += in_string  # a backslash: what it escapes is in the next chunk
            elif mark == QUOTE:
                in_string = True  # of a string that ends in another chunk
            elif mark in b"{[":
                depth += 1
            elif depth:
                depth -= 1
            elif mark in (COMMA, LIST_END):
                yield chr(mark), chunk[begin : here - 1], start + here - 1
                begin = here
        first_byte = here - len(chunk)
        start += len(chunk)
        yield "", chunk[begin:], start


def _skip(chunk: bytes, here: int, depth: int, in_string: bool) -> int:
    """The next byte that opens, closes or ends something, or the chunk's end."""
    pattern = IN_STRING if in_string else IN_RECORD if depth else BETWEEN
    match = pattern.match(chunk, here)
    return max(here, match.end()) if match else here


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
