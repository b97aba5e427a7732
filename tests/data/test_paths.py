"""What a user names, and the files that it stands for."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from tests.lazy import datasets

from longshore.data.inputs import cut_ranges, files_of, find_inputs, read_range, unit_of

ROWS = [{"messages": [{"role": "user", "content": f"Hi {i}"}]} for i in range(7)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A Dataset in two files, and a DatasetDict, as save_to_disk writes them."""
    place = tmp_path_factory.mktemp("saved")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.select(range(6, -1, -1)).save_to_disk(place / "one", num_shards=2)
    splits = {"train": dataset, "test": dataset.select([0])}
    datasets.DatasetDict(splits).save_to_disk(place / "both")
    return place


def copy(saved):
    for path in saved.rglob("*"):
        target = Path(path.relative_to(saved))
        if path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def read(*names, size=1):
    return [row for part in cut_ranges(find_inputs(names), size) for _, row in read_range(part)]


def test_names_globs_and_folders_in_their_order():
    for name in ("b/2.jsonl", "b/10.jsonl", "b/no.txt", "a.jsonl", "c/d/e.json.gz", "[x].jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    found = files_of(["b/*.jsonl", "a.jsonl", "c/d", "[x].jsonl"])
    assert list(map(str, found)) == [
        "b/10.jsonl",
        "b/2.jsonl",
        "a.jsonl",
        "c/d/e.json.gz",
        "[x].jsonl",
    ]
    assert list(map(str, files_of(["**/*.gz"]))) == ["c/d/e.json.gz"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["b/*.parquet"], r"b/\*.parquet: nothing matches"),
        (["a.jsonl", "*.jsonl"], "a.jsonl: is named more than once; for more weight, use a"),
        (["a.jsonl", "link.jsonl"], "link.jsonl: is named more than once, also as a.jsonl"),
        (["."], "made.arrow|is a prepared folder"),
        ([], "no input is given"),
    ],
)
def test_what_is_refused(names, message):
    Path("a.jsonl").write_text("{}\n")
    if "." in names:
        Path("lengths.npy").touch()
    elif "link.jsonl" in names:
        Path("link.jsonl").symlink_to("a.jsonl")
    with pytest.raises(ValueError, match=message):
        find_inputs(names)


@pytest.mark.parametrize("size", [1, 10**6])
def test_a_saved_dataset_has_its_rows_in_order(saved, size):
    assert read(saved / "one", size=size) == ROWS[::-1]
    assert read(saved / "both" / "train", size=size) == ROWS
    (part, *_) = cut_ranges(find_inputs([saved / "one"]), 1)
    assert [line for line, _ in read_range(part, leaves_out=lambda name: True)] == [1, 2, 3, 4]


def test_several_splits_are_listed(saved):
    with pytest.raises(ValueError, match=r"both: is a DatasetDict with the splits train, test; na"):
        find_inputs([saved / "both"])


def test_batches_of_one_file_are_spans(saved):
    schema = pa.schema([("text", pa.string())])
    with pa.OSFile("a.arrow", "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for number in range(5):
            writer.write_batch(pa.record_batch([[f"{number}a", f"{number}b"]], schema=schema))
    ranges = cut_ranges(find_inputs(["a.arrow"]), 40)
    assert [(part.start, part.stop) for part in ranges] == [(0, 3), (3, 5)] or len(ranges) > 1
    texts = [row["text"] for part in ranges for _, row in read_range(part)]
    assert texts == [f"{n}{c}" for n in range(5) for c in "ab"]
    table = pa.table({"text": ["x"]})
    with pa.OSFile("b.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert read("b.arrow") == [{"text": "x"}]
    assert unit_of("b.arrow") == "row"


def test_a_damaged_dataset_is_refused_by_its_file(saved):
    copy(saved)
    path = Path("one/data-00001-of-00002.arrow")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        ValueError, match=r"data-00001-of-00002.arrow: cannot be read as Arrow \(it"
    ):
        read("one")
    damaged = content.replace(b"user", b"\xff\xfe\xfd\xfc")
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"data-00001-of-00002.arrow: cannot be read as Arrow"):
        read("one")
    path.unlink()
    with pytest.raises(ValueError, match=r"state.json lists data-00001-of-00002.arrow, which is"):
        read("one")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("one/state.json", "{", "is damaged .it is not JSON"),
        ("one/state.json", "{}", "is damaged .it lists no files"),
        ("one/state.json", '{"_data_files": []}', "the dataset has no rows"),
        (
            "one/state.json",
            json.dumps({"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}),
            "was saved with an index over its rows",
        ),
        ("both/dataset_dict.json", "{}", "is damaged .it lists no splits"),
    ],
)
def test_broken_descriptions(saved, file, text, message):
    copy(saved)
    Path(file).write_text(text)
    with pytest.raises(ValueError, match=message):
        find_inputs([Path(file).parent])
