import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data import inputs
from longshore.data.inputs import Input, content_digest, cut_ranges, find_inputs, read_range
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
    assert [line for line, _ in read] == [1, 3, 4, 5, 6, 7], "a blank line is no sample"
    assert (read[0][1], read[5][1]) == ({"a": 1}, {"b": 2})
    reasons = [sample.reason for _, sample in read[1:5] if isinstance(sample, SampleError)]
    assert reasons == ["broken JSON"] * 4


def test_ignored_columns_of_parquet_are_not_read(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Hi"], "source": ["web"]}), path)
    (part,) = cut_ranges(find_inputs([path]), 1)
    assert list(read_range(part, leaves_out=lambda name: name == "source")) == [(1, {"text": "Hi"})]


def test_a_damaged_row_group_is_told_with_its_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["Hi" * 500]}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    (part,) = cut_ranges([Input(str(path), len(content), 0)], 1)
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as Parquet"):
        list(read_range(part))


def test_a_flipped_bit_of_parquet_is_found_by_its_checksum(tmp_path):
    path = tmp_path / "a.parquet"
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"text": ["world"]}), path, **plain, write_page_checksum=True)
    assert read_all(path, 1) == [{"text": "world"}]
    at = path.read_bytes().index(b"world")
    content = bytearray(path.read_bytes())
    content[at] ^= 2  # "uorld", which is text too
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a.parquet: cannot be read as Parquet \(.*CRC") as caught:
        read_all(path, 1)
    assert "\n" not in str(caught.value)


def test_text_of_parquet_that_a_small_file_unpacks_to_is_refused_unread(tmp_path):
    path = tmp_path / "a.parquet"
    rows = {"text": ["Hi", "a" * 10**6, "Yo"], "mask": [[0] * 10**5] * 3}
    pq.write_table(pa.table(rows), path, compression="zstd", use_dictionary=False)
    (part,) = cut_ranges(find_inputs([path]), 10**9)
    message = r"a.parquet: its column text unpacks from [\d,]+ to 1,000,0\d\d bytes in 3 rows"
    with pytest.raises(ValueError, match=message):
        list(read_range(part, max_bytes=10**4))
    without = list(read_range(part, max_bytes=10**4, leaves_out=lambda name: name == "text"))
    assert all(isinstance(row, SampleError) for _, row in without), "read, and rejected one by one"
    read = [sample for _, sample in read_range(part, max_bytes=10**5)]
    assert isinstance(read[1], SampleError)


def test_the_digest_of_large_files_is_of_blocks_spread_over_each(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "BLOCK", 10)
    contents = {"a.jsonl": b"{}" * 50, "b.jsonl": b"{}" * 5}

    def digest(most, name="a.jsonl", at=None):
        for file, content in contents.items():
            (tmp_path / file).write_bytes(content)
        if at is not None:
            changed = bytearray(contents[name])
            changed[at] ^= 1
            (tmp_path / name).write_bytes(changed)
        return content_digest(find_inputs([tmp_path]), most)

    assert all(digest(110, at=at) != digest(110) for at in range(100))
    seen = [at for at in range(100) if digest(60, at=at) != digest(60)]
    assert seen == [*range(10), *range(45, 55), *range(90, 100)]  # 30 bytes, in 3 blocks
    assert all(digest(60, "b.jsonl", at) != digest(60) for at in range(10))
    assert digest(1, at=0) != digest(1)


def refusal(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path.name}: ") as caught:
        cut_ranges(find_inputs([path]), 10**6)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b'{"data": [{"text": "Hi"}]}',
            "is one JSON object; a .json file must be a list of samples",
        ),
        (b'{\n "data": [\n{}]\n}\n', "is one JSON object"),
        (b'\xef\xbb\xbf{"data": []}\n\r\n', "is one JSON object"),
        (b'"text"', "is not a JSON list"),
        (b"\x00\x00", "is not a JSON list"),
        ('[{"a": 1}]'.encode("utf-16"), "is UTF-16; convert it to UTF-8"),
        (
            b'[{"a": 1}, {"b": 2}',
            "the list is not closed: the file ends in record 2, which begins at byte 10",
        ),
        (
            b'[{"a": "1}]',
            "the list is not closed: the file ends in record 1, which begins at byte 1",
        ),
        (b"[{}][{}]", "there is more text after the end of the list, at byte 4"),
        (b"", "the file is empty"),
    ],
)
def test_json_files_of_another_form_are_refused(tmp_path, content, message):
    assert refusal(tmp_path / "a.json", content).startswith(message)


def test_json_files_with_an_object_a_line_are_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\n')
    for size in (4, 100):
        assert read_all(path, size) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("size", [1, 12, 10**6])
def test_mixed_records_keep_their_place(tmp_path, size):
    path = tmp_path / "a.json"
    path.write_bytes(b' [\r\n{"a": 1}, 7, {"b": tru}, {"b": "\x00"},\n"x",, {"a": 2}\n, ] \n')
    read = read_all(path, size)
    assert [read[0], read[6]] == [{"a": 1}, {"a": 2}]
    errors = [sample.reason for sample in read if isinstance(sample, SampleError)]
    assert errors == [*["broken JSON"] * 4, "empty", "empty"]


@pytest.mark.parametrize("content", [b"[]", b" [ \n] "])
def test_an_empty_list_has_no_records(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    assert read_all(path, 10) == []


def test_nul_bytes_and_carriage_returns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\x00\x00\r\n{"a": "\x00"}\r\n{"a": 2}\r\n')
    read = read_all(path, 10**6)
    assert [read[0], read[3]] == [{"a": 1}, {"a": 2}]
    assert [sample.reason for sample in read[1:3]] == ["broken JSON"] * 2


@pytest.mark.parametrize("size", [7, 50, 10**6])
def test_a_large_line_is_never_held(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 300 + b'"}\n{"a": 2}\n' + b"x" * 41)
    ranges = cut_ranges(find_inputs([path]), size)
    read = [sample for part in ranges for _, sample in read_range(part, max_bytes=40)]
    assert [read[0], read[2]] == [{"a": 1}, {"a": 2}]
    assert [str(error) for error in (read[1], read[3])] == [
        "the line has 310 bytes; the limit is 40",
        "the line has 41 bytes; the limit is 40",
    ]


@pytest.mark.parametrize("name", ["shard-00000.arrow", "lengths.npy", "prepare.work"])
def test_a_store_without_its_manifest_is_no_folder_of_samples(tmp_path, name):
    (tmp_path / "rejected.jsonl").write_text('{"line": 1}\n')
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"without its manifest.json, .* --start-over"):
        find_inputs([tmp_path])


def test_two_columns_of_one_name_are_refused(tmp_path):
    ids = pa.array([[1, 2]])
    table = pa.table([ids, ids, ids], names=["input_ids", "x", "input_ids"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(ValueError, match=f"{name}: has 2 columns with the name 'input_ids'"):
            read_all(tmp_path / name, 10**9)


def test_null_columns_of_other_forms_are_absent(tmp_path):
    """A table of texts and of token rows has both columns in all rows."""
    rows = [{"text": "Hi", "n": None}, {"input_ids": [1, 2], "n": 1}]
    names = {"text": pa.string(), "input_ids": pa.list_(pa.int32()), "n": pa.int8()}
    table = pa.Table.from_pylist(rows, schema=pa.schema(names.items()))
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "Hi", "input_ids": null, "n": null}')
    assert read_all(tmp_path / "a.parquet", 10**9) == rows
    assert read_all(tmp_path / "a.jsonl", 10**9) == rows[:1]
