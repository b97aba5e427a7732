"""Inputs: files of raw samples, cut into ranges that can be read independently.

In: names of JSONL, JSON, Parquet and Arrow files, of folders (plain, or saved by Hugging Face
`datasets`), or globs. Out: the files in a fixed order, their ranges, and the samples of each range
with their lines, counted from 1 at its start (how many come before it is not known yet).

A JSONL file of 10 bytes in ranges of 4, with lines that begin at 0, 3 and 8, gives bytes 0…4 with
two lines, 4…8 with none and 8…10 with one: a line belongs to the range in which it begins. A range
of a JSON list is a span of records, one of a Parquet file some of its row groups, one of an Arrow
file some of its record batches, and its lines are rows. A .json file with an object a line is read
as JSONL. A compressed file (.gz, .zst) is one range, since it can only be read from its start.

An Arrow stream that is cut off between two batches would look like a shorter one: its end mark is
checked. So are the checksums of Parquet's pages, where its writer added them.
"""

import glob
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from longshore.data.columns import present_columns, without_nulls
from longshore.data.source import SampleError
from longshore.data.store import INDEX
from longshore.files import parse_json

CODECS = {".gz": "gzip", ".zst": "zstd"}
END = 1 << 62
"""Behind the last unpacked byte, whose position is not known before all are read."""
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
    """The unpacked bytes of a compressed file. `seek` goes forward only, by reading.

    A file that is cut off or damaged is a ValueError, so its rows are never silently fewer: pyarrow
    verifies the checksums of gzip and, where the file has them, of zstd.
    """

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
        return self._counted(super().read, size)

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._counted(super().readline, size)

    def _counted(self, read: Callable[[int | None], bytes], size: int | None) -> bytes:
        try:
            data = read(size)
        except OSError as error:
            raise ValueError(
                f"{self._path}: cannot be unpacked after {self._at:,} bytes ({error}); it is cut "
                f"off, damaged or not {CODECS[Path(self._path).suffix]}: copy or compress it again"
            ) from None
        self._at += len(data)
        return data

    def tell(self) -> int:
        return self._at

    def seek(self, target: int, whence: int = os.SEEK_SET, /) -> int:
        assert whence == os.SEEK_SET
        assert target >= self._at
        while self._at < target and self.read(min(BUFFER, target - self._at)):
            pass
        return self._at


JSONL = (".jsonl", ".ndjson")
JSON = (*JSONL, ".json")
SUFFIXES = (*JSON, ".parquet")
"""What is taken from a folder."""
STORE_FILES = (*INDEX, "prepare.work")
SAVED_SPLITS, SAVED_STATE, SAVED_INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def files_of(names: Sequence[str | Path]) -> list[Path]:
    """All files that the names stand for, in their order; those of a folder or glob are sorted.

    A file that two of the names stand for is refused.
    """
    paths = [path for name in names for match in matches(name) for path in _files_at(match)]
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


def _files_at(path: Path) -> list[Path]:
    """A file itself, or the files of a folder."""
    if not path.is_dir():
        return [path]
    if (path / SAVED_SPLITS).is_file():
        splits = _saved(path / SAVED_SPLITS).get("splits")
        if not isinstance(splits, list) or not splits:
            file = path / SAVED_SPLITS
            raise ValueError(f"{file}: is damaged (it lists no splits); save it again")
        raise ValueError(
            f"{path}: is a DatasetDict with the splits {', '.join(map(str, splits))}; name one of "
            f"them, such as {path / str(splits[0])}"
        )
    if (path / SAVED_STATE).is_file() and (path / SAVED_INFO).is_file():
        return _saved_files(path)
    names = sorted(file.name for file in path.iterdir())
    if any(is_store_file(name) for name in names):
        raise ValueError(
            f"{path}: is a prepared folder without its manifest.json, so it is unfinished or "
            "damaged; copy it again, or repeat the 'longshore prepare' command that made it, with "
            "--start-over if that refuses to resume"
        )
    inputs = [path / name for name in names if has_ending(Path(name), SUFFIXES)]
    if not inputs:
        raise ValueError(f"{path}: the folder has no file ending in {', '.join(SUFFIXES)}")
    return inputs


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


def is_store_file(name: str) -> bool:
    """Whether a file is one that only a prepared folder has."""
    return name in STORE_FILES or (name.startswith("shard-") and name.endswith(".arrow"))


CHUNK = 1 << 20
# What can be skipped: whole strings, and everything but brackets and, between records, commas.
IN_RECORD = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
QUOTE, COMMA, LIST_END = b'",]'


Element = tuple[int, int, bytes, str]
"""Start and stop of a record, its text (b"" above the limit), and "," or "]", or "" at the end."""


def read_elements(file: BinaryIO, start: int, stop: int, *, limit: int) -> Iterator[Element]:
    """The records of a JSON list in bytes [start, stop), where a record begins at `start`.

    They are located by counting brackets outside of strings, so that a broken record does not
    affect the others: [{"a": "]"}, 7 ] has records at bytes 1…11 and 12…15, white space included.
    At most `limit` bytes of a record are in memory.
    """
    file.seek(start)
    text, begin, at = bytearray(), start, start
    for kind, data, end in _pieces(file, start, stop):
        if end - begin <= limit:
            text += data
        else:
            text.clear()
        at = end
        if kind:
            yield begin, end, bytes(text), kind
            text.clear()
            begin = at = end + 1
        if kind == "]":
            return
    yield begin, at, bytes(text), ""


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
    """Where the next byte is that opens, closes or ends something, or the chunk's end."""
    pattern = IN_STRING if in_string else IN_RECORD if depth else BETWEEN
    match = pattern.match(chunk, here)
    return max(here, match.end()) if match else here


Sample = Mapping[str, Any]

BOM = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
MOST_HASHED, BLOCK = 1 << 26, 1 << 16
MAX_BYTES = 1 << 24
"""The default for the most bytes of one sample: text of some four million tokens."""


Span = tuple[int, int, int]
"""The first group, the one behind the last, and the bytes."""
TABLES = {".parquet": "Parquet", ".arrow": "Arrow"}
ROWS = 256
PACKED = 100
"""Text is packed 3 to 10 times smaller; this often, it is one character again and again."""
LARGE = 16
"""How often the largest row fits into such texts that are still read."""
MAGIC = b"ARROW1"
END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def is_table(name: str) -> bool:
    return Path(name).suffix in TABLES


def count_groups(name: str) -> int:
    """The number of row groups or record batches."""
    return sum(1 for _ in _group_sizes(name))


def cut_table(name: str, size: int) -> list[Span]:
    """The file in spans of about `size` bytes."""
    spans, start, size_so_far, stop = list[Span](), 0, 0, 0
    for stop, nbytes in enumerate(_group_sizes(name), start=1):
        size_so_far += nbytes
        if size_so_far >= size:
            spans.append((start, stop, size_so_far))
            start, size_so_far = stop, 0
    if start < stop:
        spans.append((start, stop, size_so_far))
    return spans


def _group_sizes(name: str) -> Iterator[int]:
    if name.endswith(".parquet"):
        with _parquet(name) as table:
            about = table.metadata
            yield from (about.row_group(i).total_byte_size for i in range(about.num_row_groups))
        return
    yield from (int(batch.nbytes) for batch in _arrow_batches(name))


def read_table(
    name: str, start: int, stop: int, *, leaves_out: Callable[[str], bool], max_bytes: int
) -> Iterator[Sample | SampleError]:
    """The rows of a span; a row of more than `max_bytes` gives an error in its place."""
    if name.endswith(".parquet"):
        with _parquet(name) as table:
            columns = _kept_columns(table.schema_arrow.names, leaves_out, name)
            groups = list(range(start, stop))
            _refuse_packed(table.metadata, groups, columns, name=name, max_bytes=max_bytes)
            batches = table.iter_batches(ROWS, row_groups=groups, columns=columns)
            yield from _rows(_named_errors(batches, name), max_bytes)
        return
    yield from _rows(_arrow_span(name, start, stop, leaves_out), max_bytes)


def _refuse_packed(
    about: Any,  # noqa: ANN401 - pyarrow has no types
    groups: Sequence[int],
    columns: Sequence[str],
    *,
    name: str,
    max_bytes: int,
) -> None:
    """Refuses texts that a small file says to be huge: no row of them could be read by itself."""
    for group in map(about.row_group, groups):
        for column in map(group.column, range(group.num_columns)):
            packed, unpacked = column.total_compressed_size, column.total_uncompressed_size
            is_read = column.path_in_schema.partition(".")[0] in columns
            if not is_read or column.physical_type != "BYTE_ARRAY":
                continue
            if unpacked > LARGE * max_bytes and unpacked > PACKED * packed:
                raise ValueError(
                    f"{name}: its column {column.path_in_schema} unpacks from {packed:,} to "
                    f"{unpacked:,} bytes in {group.num_rows:,} rows, far above "
                    f"data.max_bytes={max_bytes} for one row; leave that text out of the file, or "
                    "raise the limit"
                )


def _arrow_span(
    name: str, start: int, stop: int, leaves_out: Callable[[str], bool]
) -> Iterator[Any]:
    for number, batch in enumerate(_arrow_batches(name)):
        if number >= stop:
            return
        if number >= start:
            with _errors_of(name):
                batch.validate(full=True)
            yield batch.select(_kept_columns(batch.schema.names, leaves_out, name))


def _kept_columns(
    columns: Sequence[str], leaves_out: Callable[[str], bool], name: str
) -> list[str]:
    """The columns to read; of two with one name nobody can tell which one is meant."""
    kept = [column for column in columns if not leaves_out(column)]
    if twice := next((column for column in kept if kept.count(column) > 1), None):
        raise ValueError(
            f"{name}: has {kept.count(twice)} columns with the name {twice!r}; rename or remove "
            "all but one"
        )
    return kept


def _rows(batches: Iterable[Any], limit: int) -> Iterator[Sample | SampleError]:
    for batch in batches:
        step = 1 if batch.nbytes > limit else ROWS
        for first in range(0, batch.num_rows, step):
            rows = batch.slice(first, step)
            if step == 1 and rows.nbytes > limit:
                yield too_large("row", rows.nbytes, limit)
                continue
            for row in rows.to_pylist():
                yield {name: without_nulls(value) for name, value in row.items()}


def too_large(what: str, size: int, limit: int) -> SampleError:
    return SampleError("too large", f"the {what} has {size:,} bytes; the limit is {limit:,}")


def _parquet(name: str) -> Any:  # noqa: ANN401 - pyarrow has no types
    from pyarrow.parquet import ParquetFile

    with _errors_of(name):
        return ParquetFile(name, page_checksum_verification=True)


def _arrow_batches(name: str) -> Iterator[Any]:
    """Record batches of an Arrow stream, or of an Arrow file with a footer."""
    import pyarrow as pa

    with _errors_of(name):
        content = pa.memory_map(name).read_buffer()
        has_footer = content.slice(0, len(MAGIC)).to_pybytes() == MAGIC
    if has_footer:
        with _errors_of(name):
            file = pa.ipc.open_file(content)
        yield from _named_errors(map(file.get_batch, range(file.num_record_batches)), name)
        return
    if content.size < len(END_MARK) or content.slice(content.size - 8).to_pybytes() != END_MARK:
        raise ValueError(
            f"{name}: cannot be read as Arrow (its end mark is missing, so it is cut off, or is no "
            "Arrow stream); copy or save it again"
        )
    with _errors_of(name):
        stream = pa.ipc.open_stream(content)
    yield from _named_errors(stream, name)


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise ValueError(
            f"{name}: cannot be read as {TABLES[Path(name).suffix]} ({error})"
        ) from None


def _named_errors(things: Iterable[Any], name: str) -> Iterator[Any]:
    iterator = iter(things)
    while True:
        with _errors_of(name):
            thing = next(iterator, None)
        if thing is None:
            return
        yield thing


@dataclass(frozen=True, slots=True)
class Input:
    """A file of samples, by the name that the user gave it."""

    name: str
    bytes: int
    mtime_ns: int

    @property
    def end(self) -> int:
        """Behind its last byte, unpacked."""
        return END if is_compressed(self.name) else self.bytes


def unit_of(name: str) -> str:
    """What the samples of a file are called."""
    return {".parquet": "row", ".arrow": "row", ".json": "record"}.get(kind_of(name), "line")


@dataclass(frozen=True, slots=True)
class Range:
    """A part of an input: Parquet row groups, or lines or records in bytes [start, stop)."""

    number: int
    """Counted over all inputs."""
    input: Input
    """The file."""
    start: int
    """The first byte or row group."""
    stop: int
    """Behind the last byte or row group."""
    bytes: int
    """The size, for progress."""


def find_inputs(names: Sequence[str | Path]) -> tuple[Input, ...]:
    """The named files, those that globs match, and those in named folders, sorted by name."""
    return tuple(_input(path) for path in files_of(names))


def _input(path: Path) -> Input:
    if not has_ending(path, (*JSON, *TABLES)):
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder")
        endings = f"{', '.join(SUFFIXES)} or .arrow; those of JSON also with .gz or .zst"
        raise ValueError(f"{path}: must end in {endings}; unpack or convert it first")
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

    It covers all text up to `most` bytes in total; of more data, each file's even share of that in
    blocks, spread over the file. So it is cheap, and misses small changes of large files.
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
        first, _ = _first_byte(file)
    if kind in JSONL and first == b"[":
        raise ValueError(f"{path}: is one JSON list, not one object per line; rename it to .json")
    if kind in JSONL or first in (b"[", b""):
        return
    with open_input(path) as file:
        line = file.readline(MAX_BYTES).removeprefix(BOM)
        is_jsonl = isinstance(_parse(line), dict) and _first_byte(file)[0]
    if not is_jsonl:
        what = "one JSON object" if first == b"{" else "not a JSON list"
        raise ValueError(
            f"{path}: is {what}; a .json file must be a list of samples, [{{…}}, {{…}}], or one "
            "object per line. If the list is inside the object, save it as a file of its own; if "
            "the object is a sample, rename the file to .jsonl; if it is no data, move it away"
        )


def _first_byte(file: BinaryIO) -> tuple[bytes, int]:
    """The next byte that is not white space, after a byte order mark, and the position behind it.

    The byte is b"" if there is none.
    """
    start = file.tell()
    while chunk := file.read(CHUNK):
        rest = chunk if start else chunk.removeprefix(BOM)
        if text := rest.lstrip():
            return text[:1], start + len(chunk) - len(text) + 1
        start += len(chunk)
    return b"", start


def _list_start(file: Input) -> int | None:
    """Where the first record of a JSON list begins; None for other files."""
    if kind_of(file.name) != ".json":
        return None
    with open_input(file.name) as opened:
        first, start = _first_byte(opened)
    return start if first == b"[" else None


def cut_ranges(inputs: Sequence[Input], size: int) -> tuple[Range, ...]:
    """The inputs in parts of about `size` bytes, numbered over all of them."""
    ranges: list[Range] = []
    for file in inputs:
        parts = _parts(file, size)
        ranges += [Range(len(ranges) + i, file, *part) for i, part in enumerate(parts)]
    return tuple(ranges)


def whole_range(file: Input) -> Range:
    """All of an input, uncut."""
    if is_table(file.name):
        return Range(0, file, 0, count_groups(file.name), file.bytes)
    return Range(0, file, _list_start(file) or 0, file.end, file.bytes)


def _parts(file: Input, size: int) -> list[tuple[int, int, int]]:
    """Start, stop and bytes of each range of a file."""
    if is_table(file.name):
        return cut_table(file.name, size)
    first = _list_start(file)
    if is_compressed(file.name):
        return [(first or 0, file.end, file.bytes)]
    if first is not None:
        return _record_spans(file, first, size)
    starts = range(0, file.bytes, size)
    return [
        (start, min(start + size, file.bytes), min(size, file.bytes - start)) for start in starts
    ]


def _record_spans(file: Input, start: int, size: int) -> list[tuple[int, int, int]]:
    """Reads the list once; it must be closed, and nothing may follow it."""
    parts: list[tuple[int, int, int]] = []
    number, first, stop = 0, start, start
    with open(file.name, "rb") as opened:
        elements = read_elements(opened, start, file.bytes, limit=0)
        for number, (begin, stop, _, ended_by) in enumerate(elements, start=1):
            if not ended_by:
                raise _not_closed(file, number, begin)
            if stop - first >= size:
                parts.append((first, stop, stop - first))
                first = stop + 1
        opened.seek(stop + 1)
        if _first_byte(opened)[0]:
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


def read_range(
    part: Range,
    *,
    leaves_out: Callable[[str], bool] = lambda name: False,
    max_bytes: int = MAX_BYTES,
    on_packed: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[tuple[int, Sample | SampleError]]:
    """The samples of a range with their lines; a line that is no sample gives its error.

    Blank lines count as lines, but are left out. A line of more than `max_bytes` is an error too,
    and is neither parsed nor read into memory; a row of a table is read, because its page is, but
    stays as bytes. on_packed: called with how much of a compressed file is read.
    """
    rows: Iterator[Sample | SampleError | None]
    if is_table(part.input.name):
        rows = read_table(
            part.input.name, part.start, part.stop, leaves_out=leaves_out, max_bytes=max_bytes
        )
    elif _list_start(part.input) is None:
        rows = map(_parse_line, _lines(part, max_bytes, on_packed))
    else:
        rows = map(_parse, _records(part, max_bytes, on_packed))
    for line, row in enumerate(rows, start=1):
        if row is not None:
            yield line, row if isinstance(row, SampleError) else present_columns(row)


def _lines(
    part: Range, limit: int, on_packed: Callable[[int], None]
) -> Iterator[bytes | SampleError]:
    with open_input(part.input.name) as file:
        if part.start:
            file.seek(part.start - 1)
            _skip_line(file, part.stop)  # the rest of a line that begins before this range
        while (at := file.tell()) < part.stop and (line := file.readline(limit + 1)):
            if isinstance(file, UnpackedFile):
                on_packed(file.packed)
            if len(line) > limit:
                rest = 0 if line.endswith(b"\n") else _skip_line(file, part.input.end)
                yield too_large("line", len(line) + rest, limit)
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


def _records(
    part: Range, limit: int, on_packed: Callable[[int], None]
) -> Iterator[bytes | SampleError]:
    stop = 0
    with open_input(part.input.name) as file:
        elements = read_elements(file, part.start, part.stop, limit=limit)
        for number, (start, stop, text, ended_by) in enumerate(elements, start=1):
            if isinstance(file, UnpackedFile):
                on_packed(file.packed)
                if not ended_by:  # other files are checked when they are cut
                    raise _not_closed(part.input, number, start)
            is_large = stop - start > limit
            if number == 1 and ended_by == "]" and not (is_large or text.strip()):
                continue  # an empty list
            yield too_large("record", stop - start, limit) if is_large else text
    if is_compressed(part.input.name):
        with open_input(part.input.name) as again:
            again.seek(stop + 1)
            if _first_byte(again)[0]:
                raise _more_text(part.input, stop + 1)


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
