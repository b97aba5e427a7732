"""Broken folders of safetensors are refused with a line that names the file."""

import json
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from longshore.hf.checkpoint import check_stream, check_tensors
from longshore.hf.tensor_files import TensorFiles, write_files
from longshore.hf.tensor_map import refuse_quantized_files

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """Tensors a, b, c of 80, 40 and 40 bytes in shards of at most 100."""
    tensors = {"a": torch.arange(20.0), "b": torch.ones(10), "c": torch.zeros(5, 2)}
    write_files(tmp_path, tensors.items(), shard_bytes=100)
    return tmp_path


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_the_docstrings_example(folder):
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    assert where == {"a": first, "b": second, "c": second}
    assert {path.name for path in folder.iterdir()} == {first, second, INDEX}
    files = TensorFiles(folder)
    assert files.names == ("a", "b", "c")
    assert files.shape("c") == (5, 2)
    assert files.block("a", (slice(3, 6),)).tolist() == [3.0, 4.0, 5.0]


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"incomplete: the index lists model-00002-of-00002\.safetensors"
    ):
        TensorFiles(folder)


@pytest.mark.parametrize("damage", [lambda data: data[:50], lambda data: data[:-1], lambda _: b""])
def test_a_damaged_shard_is_named(folder, damage):
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is broken"):
        TensorFiles(folder)


def test_a_header_that_is_nested_too_deep_is_no_error_of_its_own(tmp_path):
    deep = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    refuse_quantized_files(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors is broken"):
        TensorFiles(tmp_path)


def test_a_tensor_that_the_index_promises_must_be_there(folder):
    change_index(folder, lambda index: index["weight_map"].update(d=index["weight_map"]["a"]))
    with pytest.raises(ValueError, match=r"00001-of-00002\.safetensors has no tensor d"):
        TensorFiles(folder)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "x.bin", 3])
def test_the_index_names_only_safetensors_beside_it(folder, file):
    change_index(folder, lambda index: index["weight_map"].update(a=file))
    with pytest.raises(ValueError, match="must be a safetensors file beside it"):
        TensorFiles(folder)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is not JSON"), ("[]", "a JSON object"), ("{}", "no weight_map"), ("\xff", "not JSON")],
)
def test_a_broken_index_is_refused(folder, text, reason):
    (folder / INDEX).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=reason):
        TensorFiles(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.ind"):
        TensorFiles(tmp_path)


def test_there_must_be_tensors_and_room_for_them(tmp_path):
    with pytest.raises(ValueError, match="no tensors"):
        write_files(tmp_path, [], shard_bytes=100)
    with pytest.raises(ValueError, match="shard_bytes is 0"):
        write_files(tmp_path, [("a", torch.ones(1))], shard_bytes=0)


def test_a_full_disk_is_told_by_the_system(tmp_path):
    (tmp_path / "0.part").mkdir()
    with pytest.raises(OSError, match=r"Is a directory: .*0\.part"):
        write_files(tmp_path, [("a", torch.ones(1))], shard_bytes=100)


def test_only_one_tensor_is_held_at_a_time(tmp_path):
    """When one is asked for, the one before is on the disk, and its memory is free."""
    before, sizes = [], []

    def stream():
        for i in range(4):
            assert not before or before.pop()() is None
            sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            memory = np.ones(24, dtype=np.float32)
            before.append(weakref.ref(memory))
            yield f"t{i}", torch.from_numpy(memory)
            del memory

    checked = check_stream(stream(), {f"t{i}": (24,) for i in range(4)}, dtype=None)
    assert write_files(tmp_path, checked, shard_bytes=100)[0] == torch.float32
    assert [later - earlier >= 96 for earlier, later in pairwise(sizes)] == [True] * 3


@pytest.mark.parametrize("is_named", [True, False])
def test_a_second_copy_of_a_tensor_is_refused(folder, is_named):
    """Which one is loaded must not depend on the order of files."""
    name = "b" if is_named else "z"
    extra = {"d": "model-00003-of-00002.safetensors"}
    save_file(
        {name: torch.full((10,), 7.0), "d": torch.ones(1)},
        folder / "model-00003-of-00002.safetensors",
    )
    if not is_named:
        path = folder / "model-00001-of-00002.safetensors"
        save_file({"a": torch.arange(20.0), "z": torch.ones(10)}, path)
    change_index(folder, lambda index: index["weight_map"].update(extra))
    told = "the index says it is in model-00002" if is_named else "another file has it too"
    with pytest.raises(ValueError, match=rf"00003-of-00002.* tensor {name}, but {told}.*remove"):
        TensorFiles(folder)


def test_numbers_of_several_sizes_in_one_file(tmp_path):
    """Each tensor lies at a multiple of its number's size, in whatever order they came."""
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.arange(5, dtype=torch.float64),
        "c": torch.ones(1, dtype=torch.float16),
        "d": torch.arange(3, dtype=torch.float32),
    }
    write_files(tmp_path, tensors.items(), shard_bytes=10**6)
    files = TensorFiles(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(files.block(name, (slice(0, len(tensor)),)), tensor)
        assert torch.equal(load_file(tmp_path / "model.safetensors")[name], tensor)


DTYPES = ("int8", "uint8", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_no_weights_are_refused(tmp_path, dtype):
    tensors = {"a": torch.ones(4), "b": torch.zeros(4).to(getattr(torch, dtype))}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    with pytest.raises(ValueError, match=r"the tensor b is \w+; only F64, .*convert quantized"):
        check_tensors(files, {"a": (4,), "b": (4,)})
    check_tensors(files, {"a": (4,)}, ignored="b")
