from itertools import combinations, product

import pytest
import torch

from longshore.hf.tensor_map import Interleaved, PerExpert, Source, read_tensor_names


class Files:
    """Tensors in memory, which count the values that are read."""

    def __init__(self, tensors):
        self.tensors = tensors
        self.values_read = 0

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def block(self, name, index):
        block = self.tensors[name][tuple(index)]
        self.values_read += block.numel()
        return block


SOURCES = {
    "plain": (Source("a"), (12, 3)),
    "copied": (Source("a", copies=("b", "c")), (12, 3)),
    "two parts": (PerExpert("e", parts=("gate", "up")), (4, 6, 5)),
    "one part": (PerExpert("e", parts=("down",)), (4, 5, 3)),
    "interleaved": (Interleaved("a", block=6, rotary=4), (12, 3)),
    "interleaved bias": (Interleaved("a", block=12, rotary=10), (12,)),
}


@pytest.mark.parametrize("case", SOURCES)
def test_what_is_written_is_read_in_any_blocks(case):
    source, shape = SOURCES[case]
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    written = dict(source.write(tensor))
    assert {name: tuple(part.shape) for name, part in written.items()} == source.shapes(shape)
    files = Files(written)
    ranges = [[slice(*pair) for pair in combinations(range(size + 1), 2)] for size in shape]
    ranges[0] += [slice(row, row) for row in range(shape[0] + 1)]
    for dims in range(1, len(shape) + 1):
        for index in product(*ranges[:dims]):
            assert torch.equal(source.read(files, index), tensor[index])


def test_the_docstrings_examples():
    rows = torch.arange(6)
    source = Interleaved("q", block=6, rotary=4)
    assert source.read(Files({"q": rows}), (slice(0, 6),)).tolist() == [0, 1, 2, 4, 3, 5]
    assert dict(source.write(torch.tensor([0, 1, 2, 4, 3, 5])))["q"].tolist() == rows.tolist()
    source = PerExpert("mlp.experts", parts=("gate_proj", "up_proj"))
    written = dict(source.write(torch.arange(16).view(2, 4, 2)))
    assert written["mlp.experts.1.gate_proj.weight"].tolist() == [[8, 9], [10, 11]]
    assert written["mlp.experts.1.up_proj.weight"].tolist() == [[12, 13], [14, 15]]


def test_no_more_is_read_than_needed():
    source = PerExpert("e", parts=("gate", "up"))
    files = Files(dict(source.write(torch.zeros(8, 6, 5))))
    source.read(files, (slice(2, 4), slice(0, 6), slice(1, 3)))
    assert files.values_read == 2 * 6 * 2
    source = Interleaved("a", block=6, rotary=4)
    files = Files({"a": torch.zeros(60, 2)})
    source.read(files, (slice(13, 19), slice(1, 2)))
    assert files.values_read == 12


def test_copies_have_memory_of_their_own():
    tensor = torch.zeros(3, 2)
    written = dict(Source("a", copies=("b",)).write(tensor))
    assert written["a"] is tensor
    assert written["b"].data_ptr() != tensor.data_ptr()


def test_names_of_a_folder(tmp_path):
    from longshore.hf.tensor_files import write_files

    assert read_tensor_names(tmp_path) is None
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2)}
    write_files(tmp_path, tensors.items(), shard_bytes=100)
    assert read_tensor_names(tmp_path) == {"a", "b"}
    other = tmp_path / "other"
    other.mkdir()
    write_files(other, tensors.items(), shard_bytes=12)
    assert read_tensor_names(other) == {"a", "b"}


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{"]
)
def test_broken_weights_have_no_names(tmp_path, data):
    (tmp_path / "model.safetensors").write_bytes(data)
    assert read_tensor_names(tmp_path) is None
