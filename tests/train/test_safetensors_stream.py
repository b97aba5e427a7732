"""Safetensors files written tensor by tensor and read block by block."""

import os
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from longshore.train.safetensors_stream import BlockFile, FileWriter, joined_crc32

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)
shapes = st.lists(st.integers(0, 5), max_size=3)


@pytest.mark.property
@given(st.binary(max_size=99), st.binary(max_size=99))
def test_checksums_of_two_parts(first, second):
    joined = joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


def test_one_number_of_an_expanded_tensor(tmp_path):
    writer = FileWriter(tmp_path / "a.safetensors", ())
    writer.add("one", torch.full((), 7.0).expand(1, 1).clone())
    writer.finish()
    assert load_file(tmp_path / "a.safetensors")["one"].tolist() == [[7.0]]


@pytest.mark.property
@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6), st.booleans())
def test_what_is_written_is_read_by_safetensors(tmp_path_factory, kinds, are_announced):
    path = tmp_path_factory.mktemp("stream") / "a.safetensors"
    tensors = {
        f"t{i}": (torch.arange(int(np.prod(shape))) + i).reshape(shape).to(dtype)
        for i, (shape, dtype) in enumerate(kinds)
    }
    writer = FileWriter(path, [*tensors, "another"] if are_announced else ())
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    file = writer.finish()
    content = path.read_bytes()
    assert (file.bytes, file.crc32) == (len(content), zlib.crc32(content))
    assert writer.names == list(tensors)
    blocks = BlockFile(path)
    for name, tensor in load_file(path).items():
        assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(tensor, tensors[name])
        assert torch.equal(blocks.block(name, ()), tensor)


@pytest.mark.property
@given(st.data())
def test_any_block_is_that_of_the_whole(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("stream") / "a.safetensors"
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    whole = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape(shape)
    save_file({"pad": torch.ones(3), "a": whole}, path)
    index = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        ends = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
        index.append(data.draw(st.sampled_from([slice(*ends), slice(None)])))
    assert torch.equal(BlockFile(path).block("a", index), whole[tuple(index)])


def test_columns_are_read_some_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("longshore.train.safetensors_stream.BLOCK", 64)
    whole = torch.arange(7 * 8.0).reshape(7, 8)
    save_file({"a": whole}, tmp_path / "a")
    asked = []
    honest = BlockFile._read
    monkeypatch.setattr(BlockFile, "_read", lambda *a: asked.append(a[2]) or honest(*a))
    block = BlockFile(tmp_path / "a").block("a", (slice(1, 6), slice(2, 5)))
    assert torch.equal(block, whole[1:6, 2:5])
    assert asked == [(2, 8), (2, 8), (1, 8)]


def test_a_file_that_was_cut_off_meanwhile(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "a")
    file = BlockFile(tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    with (tmp_path / "a").open("r+b") as opened:
        opened.truncate(len(content) - 8)
    assert len(file.block("a", (slice(0, 90),))) == 90
    with pytest.raises(ValueError, match="is cut off; copy it again"):
        file.block("a", ())


class ShortWrites:
    """A file of which each write takes 5 bytes at most, as on a disk that is nearly full."""

    def __init__(self, file):
        self.file = file

    def write(self, block):
        return self.file.write(block[:5])

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_short_writes_lose_nothing(tmp_path, monkeypatch):
    """Also where all tensors are moved, for a header that was not announced."""
    honest = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, block, at: honest(file, block[:5], at))
    writer = FileWriter(tmp_path / "a")
    writer._file = ShortWrites(writer._file)
    tensors = {"a": torch.arange(40.0), "b": torch.arange(3, dtype=torch.uint8)}
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    file = writer.finish()
    assert file.crc32 == zlib.crc32((tmp_path / "a").read_bytes())
    assert all(torch.equal(load_file(tmp_path / "a")[name], tensors[name]) for name in tensors)


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    writer = FileWriter(tmp_path / "a", ["a"])

    def full(file, block):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("longshore.train.safetensors_stream._write_all", full)
    with pytest.raises(OSError, match=r"No space left on device: .*a'"):
        writer.add("a", torch.ones(2))
    writer.close()
