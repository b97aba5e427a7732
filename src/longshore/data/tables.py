"""Tables of samples: Parquet files, and Arrow files as Hugging Face `datasets` saves them.

In: the name of a file. Out: spans that can be read independently, and the rows of a span. A span of
a Parquet file is some of its row groups, one of an Arrow file some of its record batches: with
batches of 1000, 1000 and 500 rows of 1 kB each and spans of 1.5 MB, the spans are batches 0…2 and
2…3. An Arrow file is read by memory map, so that batches before a span cost next to nothing.

An Arrow stream that is cut off between two batches would look like a shorter one: its end mark is
checked. So are the checksums of Parquet's pages, where its writer added them. A page must be
unpacked whole: texts of which 30 kB unpack to 1 GB are refused before. No package but pyarrow is
needed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longshore.data.source import SampleError
from longshore.settings import SettingError

Span = tuple[int, int, int]
"""The first group, the one behind the last, and the bytes."""
Row = Mapping[str, Any]

TABLES = {".parquet": "Parquet", ".arrow": "Arrow"}
ROWS = 256
PACKED = 100
"""Text is packed 3 to 10 times smaller; this often, it is one character again and again."""
LARGE = 16
"""How often the largest row fits into texts that are packed so much and still read."""
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
) -> Iterator[Row | SampleError]:
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
                raise SettingError(
                    "{file}: its column {column} unpacks from {packed:,} to {unpacked:,} bytes in "
                    "{rows:,} rows, far above {max_bytes:{limit}} for one row; leave that text "
                    "out of the file, or raise the limit",
                    file=name,
                    column=column.path_in_schema,
                    packed=packed,
                    unpacked=unpacked,
                    rows=group.num_rows,
                    limit=max_bytes,
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


def _rows(batches: Iterable[Any], limit: int) -> Iterator[Row | SampleError]:
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


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    """Removes the nulls that tables add: all objects of a column have the same keys there."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


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
        for number in range(file.num_record_batches):
            with _errors_of(name):
                batch = file.get_batch(number)
            yield batch
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
