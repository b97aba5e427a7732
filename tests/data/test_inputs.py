import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.inputs import Input, cut_ranges, find_inputs, read_range
from longshore.data.source import SampleError


def read_all(path, size):
    """The samples of all ranges of a file."""
    ranges = cut_ranges(find_inputs([path]), size)
    return [sample for part in ranges for _, sample in read_range(part)]


def test_the_example_of_the_module(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n1234\n{}")
    ranges = cut_ranges(find_inputs([path]), 4)
    assert [(part.start, part.stop) for part in ranges] == [(0, 4), (4, 8), (8, 10)]
    lines = [[line for line, _ in read_range(part)] for part in ranges]
    assert lines == [[1, 2], [], [1]]


@pytest.mark.property
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 60), st.booleans())
def test_every_line_belongs_to_one_range(tmp_path_factory, widths, size, ended):
    samples = [{"text": "é" * width, "n": i} for i, width in enumerate(widths)]
    lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
    path = tmp_path_factory.mktemp("inputs") / "a.jsonl"
    path.write_text("\n".join(lines) + "\n" * ended, encoding="utf-8")
    assert read_all(path, size) == samples


@pytest.mark.property
@given(st.integers(1, 30), st.integers(1, 8), st.integers(1, 2000))
def test_every_row_belongs_to_one_range(tmp_path_factory, rows, group, size):
    samples = [{"text": f"row {i}"} for i in range(rows)]
    path = tmp_path_factory.mktemp("inputs") / "a.parquet"
    pq.write_table(pa.Table.from_pylist(samples), path, row_group_size=group)
    assert read_all(path, size) == samples


def test_ranges_count_on_over_files(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "Hi"}\n')
    ranges = cut_ranges(find_inputs([tmp_path]), 10)
    assert [part.number for part in ranges] == [0, 1, 2, 3]
    assert [part.bytes for part in ranges] == [10, 5, 10, 5]


def test_broken_lines_keep_their_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{\n"x"\n\xff\n' + b"[" * 100_000 + b'\n{"b": 2}')
    (part,) = cut_ranges(find_inputs([path]), 10**9)
    read = list(read_range(part))
    assert [line for line, _ in read] == [1, 2, 3, 4, 5, 6, 7]
    assert (read[0][1], read[6][1]) == ({"a": 1}, {"b": 2})
    reasons = [sample.reason for _, sample in read[1:6] if isinstance(sample, SampleError)]
    assert reasons == ["empty", *["broken JSON"] * 4]


def test_ignored_columns_of_parquet_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Hi"], "source": ["web"]}), path)
    (part,) = cut_ranges(find_inputs([path]), 1)
    assert list(read_range(part, ["source"])) == [(1, {"text": "Hi"})]


def test_a_damaged_row_group_is_told_with_its_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Hi" * 500]}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    (part,) = cut_ranges([Input(str(path), len(content), 0)], 1)
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as Parquet"):
        list(read_range(part))
