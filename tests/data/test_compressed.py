"""Compressed files: the same samples as unpacked, and never silently fewer."""

import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.samples import run, write_lines

from longshore.data.inputs import cut_ranges, find_inputs, open_input, read_range
from longshore.data.store import Store


def compress(text, ending, *, has_checksum=False):
    """As gzip and zstd would; the command zstd adds a checksum, pyarrow does not."""
    if ending == ".gz":
        return gzip.compress(text)
    if has_checksum:
        zstandard = pytest.importorskip("zstandard")
        return zstandard.ZstdCompressor(write_checksum=True).compress(text)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(text)
    return sink.getvalue().to_pybytes()


def samples_in(path):
    return [
        sample for part in cut_ranges(find_inputs([path]), 10) for _, sample in read_range(part)
    ]


@pytest.mark.property
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.sampled_from([".gz", ".zst"]),
    st.sampled_from([".jsonl", ".json", "list.json"]),
    st.integers(0, 3),
)
def test_samples_are_those_of_the_unpacked_file(tmp_path_factory, widths, ending, form, cut):
    folder = tmp_path_factory.mktemp("compressed")
    samples = [{"text": "é" * width, "n": i} for i, width in enumerate(widths)]
    lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
    text = f"[{', '.join(lines)}]" if "list" in form else "\n".join([*lines, "{}"])
    samples += [] if "list" in form else [{}]
    content = text.encode()
    members = [content[: cut * 7], content[cut * 7 :]]  # several, as files that were appended to
    path = folder / f"a{form}{ending}"
    path.write_bytes(b"".join(compress(member, ending) for member in members if member))
    assert samples_in(path) == samples
    assert [part.bytes for part in cut_ranges(find_inputs([path]), 1)] == [path.stat().st_size]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "more", "other"])
def test_damage_is_an_error_with_the_name(tmp_path, ending, damage):
    text = b"".join(b'{"text": "%d"}\n' % (i * i) for i in range(20_000))
    content = compress(text, ending, has_checksum=damage == "flipped")
    half = len(content) // 2
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(
        {
            "cut": content[:-3],
            "flipped": content[:half] + bytes([content[half] ^ 255]) + content[half + 1 :],
            "more": content + b"garbage",
            "other": text,
        }[damage]
    )
    with pytest.raises(ValueError, match=rf"a.jsonl{ending}: cannot be unpacked after .* bytes"):
        samples_in(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'[{"text": "a"}, {"text', "the list is not closed: the file ends in record 2"),
        (b'[{"text": "a"}] x', "more text after the end of the list"),
        (b'{"text": "a"}', "is one JSON object"),
        (b"\xff\xfe{", "is UTF-16"),
    ],
)
def test_a_compressed_list_is_whole(tmp_path, text, message):
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(text))
    with pytest.raises(ValueError, match=message):
        samples_in(path)


def test_an_empty_list_has_no_samples(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b" [ ] "))
    assert samples_in(tmp_path / "a.json.gz") == []


def test_tables_are_not_compressed_again(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a.parquet.gz: must end in .* those of JSON also with"):
        find_inputs([tmp_path / "a.parquet.gz"])


def test_a_large_file_is_never_whole_in_memory(tmp_path):
    line = b'{"text": "%s"}\n' % (b"x" * 10_000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 4000))
    tracemalloc.start()
    (part,) = cut_ranges(find_inputs([tmp_path / "a.jsonl.gz"]), 10)
    assert sum(1 for _ in read_range(part)) == 4000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20  # of 40 MB


def test_a_position_is_one_of_the_unpacked_bytes(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"0123456789"))
    with open_input(tmp_path / "a.gz") as file:
        assert (file.read(2), file.tell()) == (b"01", 2)
        assert (file.seek(7), file.readline(), file.tell()) == (7, b"789", 10)


def test_a_compressed_file_becomes_several_shards(here):
    """They bound the memory of a worker; the sequences are those of the plain file."""
    write_lines(here / "chats.jsonl", count=60, bad={2: ("broken JSON", "{")})
    plain = run("plain", shard_bytes=10**6)
    (here / "chats.jsonl.gz").write_bytes(gzip.compress((here / "chats.jsonl").read_bytes()))
    told = []
    packed = run(
        "packed",
        inputs="chats.jsonl.gz",
        shard_bytes=4000,
        progress=lambda done, total: told.append((done, total)),
    )
    total = (here / "chats.jsonl.gz").stat().st_size
    assert {each for _, each in told} == {total}
    assert len(told) >= len(packed.manifest.shards)  # also while it is read
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert (len(packed.manifest.shards) > 3, len(plain.manifest.shards)) == (True, 1)
    stores = Store("plain"), Store("packed")
    stores[1].verify()
    one, other = ([store[i] for i in range(len(store))] for store in stores)
    assert one == other
    assert packed.manifest.about["samples"] == 60
    assert packed.rejections.reasons == {"broken JSON": 1}
