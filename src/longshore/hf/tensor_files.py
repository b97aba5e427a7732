"""Tensors in safetensors files: one file, or several with an index, as Hugging Face lays them out.

In: a folder, or (name, tensor) pairs as a stream. Out: tensors read lazily, whole or in blocks;
or the files. With shards of at most 100 bytes, tensors a, b, c of 80, 40 and 40 bytes become

    model-00001-of-00002.safetensors    a
    model-00002-of-00002.safetensors    b, c
    model.safetensors.index.json        {"weight_map": {"a": "model-00001-of-00002.safetensors", …

No pickle is ever opened.
"""

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longshore.files import read_json_object
from longshore.train.checkpoint_files import SavedFile
from longshore.train.safetensors_stream import BlockFile, FileWriter

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "I16")
PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pth", "*.pt", "*.ckpt")


class TensorFiles:
    """The tensors of a folder, by the names in its files. Opening reads the headers only."""

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        self._handles: dict[str, Any] = {}
        self._files: dict[str, BlockFile] = {}
        files = _files(self.folder, stem)
        where = {name: path for path, names in files.items() for name in names}
        for path, promised in files.items():
            handle, blocks = _open(path), BlockFile(path)
            names = set(handle.keys())
            if absent := sorted(promised - names):
                raise ValueError(f"{path} has no tensor {absent[0]}, which the index lists there")
            for name in sorted(names):
                if name in self._handles or where.get(name, path) != path:
                    promised_in = where.get(name)
                    why = f"the index says it is in {promised_in.name}" if promised_in else ""
                    raise ValueError(
                        f"{path} has the tensor {name}, but {why or 'another file has it too'}; "
                        "two copies may differ, so remove one, or download the model again"
                    )
                self._handles[name] = handle
                self._files[name] = blocks
        self.names = tuple(sorted(self._handles))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype as safetensors calls it."""
        return str(self._handles[name].get_slice(name).get_dtype())

    def block(self, name: str, index: Sequence[slice]) -> Tensor:
        """A range of each dim of a tensor, or of the first dims alone; only its rows are read."""
        return self._files[name].block(name, index)


def write_files(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    stem: str = "model",
    shard_bytes: int,
    names: Iterable[str] = (),
) -> tuple[torch.dtype, dict[str, SavedFile]]:
    """Writes the stream; one tensor is in memory at a time. names: all that will come.

    Returns the dtype of most numbers that are not integers, and the files by name.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be 1 or more")
    left = dict.fromkeys(names)
    shards: list[tuple[list[str], SavedFile]] = []
    shard: FileWriter | None = None
    total, counts = 0, dict[torch.dtype, int]()
    try:
        for name, tensor in tensors:
            tensor = tensor.detach().to("cpu").contiguous()
            if shard is not None and shard.nbytes + tensor.nbytes > shard_bytes:
                shards.append((shard.names, shard.finish()))
                shard = None
            if shard is None:
                shard = FileWriter(folder / f"{len(shards)}.part", left)
            shard.add(name, tensor)
            left.pop(name, None)
            total += tensor.nbytes
            if tensor.is_floating_point():
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
            del tensor  # before the next one is made
        if shard is None:
            raise ValueError("there are no tensors to write")
        shards.append((shard.names, shard.finish()))
    finally:
        if shard is not None:
            shard.close()
    files = _name_files(folder, stem, shards, total)
    return max(counts, key=lambda dtype: counts[dtype]), files


def _files(folder: Path, stem: str) -> dict[Path, set[str]]:
    """The files to open, with the tensors the index promises in each."""
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code and "
                "is never opened; convert it to safetensors"
            )
        raise ValueError(f"{folder} has no weights: neither {single.name} nor {index.name}")
    where = read_json_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} is broken: it has no weight_map")
    files: dict[Path, set[str]] = {}
    for name, file in where.items():
        is_beside = isinstance(file, str) and Path(file).name == file
        if not is_beside or not file.endswith(".safetensors"):
            raise ValueError(
                f"{index} says that {name} is in {file!r}; it must be a safetensors file beside it"
            )
        files.setdefault(folder / file, set()).add(name)
    if absent := sorted(path.name for path in files if not path.is_file()):
        raise ValueError(
            f"{folder} is incomplete: the index lists {', '.join(absent)}, which is missing"
        )
    return files


def _open(path: Path) -> Any:  # noqa: ANN401
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is broken: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None


def _name_files(
    folder: Path, stem: str, shards: list[tuple[list[str], SavedFile]], total: int
) -> dict[str, SavedFile]:
    """Renames the parts: a name has the number of shards, which is known only at the end."""
    if len(shards) == 1:
        (folder / "0.part").rename(folder / f"{stem}.safetensors")
        return {f"{stem}.safetensors": shards[0][1]}
    where: dict[str, str] = {}
    files: dict[str, SavedFile] = {}
    for number, (names, written) in enumerate(shards):
        file = f"{stem}-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        where |= dict.fromkeys(names, file)
        files[file] = written
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    text = (json.dumps(index, indent=2) + "\n").encode()
    path = folder / f"{stem}.safetensors.index.json"
    path.write_bytes(text)
    return {**files, path.name: SavedFile(len(text), zlib.crc32(text))}
