"""Whole tensors of a checkpoint in one process, whichever ranks wrote it, one at a time.

In: the folder of a checkpoint, and the names of the model's tensors. Out: each tensor when it is
asked for, put together from the blocks in the ranks' files. Moments stay on the disk.

    tensors = CheckpointTensors(Path("runs/x-1/checkpoints/step-00000040"), ["embed.weight", …])
    tensors["embed.weight"]       (256, 64), rows 0…128 from rank-00000.safetensors, …
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from longshore.train.checkpoint_files import check_files, read_index
from longshore.train.safetensors_stream import OF_NAME, BlockFile


class CheckpointTensors(Mapping[str, Tensor]):
    """A model's tensors in the order of `names`; each is read when asked for, and not kept.

    Raises DamagedError for a checkpoint that cannot be read; all checksums are verified first.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = names
        self.index = read_index(folder)
        self._files: dict[str, BlockFile] = {}
        if missing := [name for name in names if f"model.{name}" not in self.index.tensors]:
            raise ValueError(f"{folder} has no tensor {missing[0]}; it is of another model")
        check_files(folder, self.index, part=0, parts=1)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        tensors = (self.index.tensors[f"model.{name}"] for name in self.names)
        return sum(prod(tensor.shape) * OF_NAME[tensor.dtype].itemsize for tensor in tensors)

    def __getitem__(self, name: str) -> Tensor:
        saved = self.index.tensors[f"model.{name}"]
        whole = torch.empty(saved.shape, dtype=OF_NAME[saved.dtype])
        for chunk in saved.chunks:
            target = whole
            for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, start, size)
            try:
                block = self._file(chunk.file).block(chunk.key, ())
                if block.shape != target.shape:
                    raise ValueError(f"the shape of {chunk.key} is {tuple(block.shape)}")
                target.copy_(block)
            except (LookupError, OSError, ValueError) as error:
                raise ValueError(f"{self.folder / chunk.file} is damaged: {error}") from None
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _file(self, name: str) -> BlockFile:
        if name not in self._files:
            self._files[name] = BlockFile(self.folder / name)
        return self._files[name]
