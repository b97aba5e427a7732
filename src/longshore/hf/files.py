"""Tensors in safetensors files: one file, or several with an index, as Hugging Face lays them out.

In: a folder, or (name, tensor) pairs as a stream. Out: tensors read lazily, whole or by rows; or
the files. With shards of at most 100 bytes, tensors a, b, c of 80, 40 and 40 bytes become

    model-00001-of-00002.safetensors    a
    model-00002-of-00002.safetensors    b, c
    model.safetensors.index.json        {"weight_map": {"a": "model-00001-of-00002.safetensors", …

No pickle is ever opened.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longshore.hf.config_file import load_object

PICKLES = ("pytorch_model*.bin", "model*.bin", "*.pth", "*.pt", "*.ckpt")


class TensorFiles:
    """The tensors of a folder, by the names in its files. Only the headers are read at once."""

    def __init__(self, folder: str | Path, stem: str = "model") -> None:
        self.folder = Path(folder)
        self._at: dict[str, Any] = {}
        for path, promised in _files(self.folder, stem).items():
            handle = _open(path)
            held = set(handle.keys())
            if absent := sorted(promised - held):
                raise ValueError(f"{path} has no tensor {absent[0]}, which the index promises")
            self._at.update(dict.fromkeys(held, handle))
        self.names = tuple(sorted(self._at))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._at[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start…stop of a tensor; no others are read."""
        rows: Tensor = self._at[name].get_slice(name)[start:stop]
        return rows


def write_files(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, stem: str = "model", shard_bytes: int
) -> torch.dtype:
    """Writes the stream, a shard at a time, so only one shard is held here.

    Gives the dtype that most of the numbers have.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be 1 or more")
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    held, total, counts = 0, 0, dict[torch.dtype, int]()
    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu").contiguous()
        if shard and held + tensor.nbytes > shard_bytes:
            shards.append(_save(folder, len(shards), shard))
            shard, held = {}, 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    if not shard:
        raise ValueError("there are no tensors to write")
    shards.append(_save(folder, len(shards), shard))
    _name_files(folder, stem, shards, total)
    return max(counts, key=lambda dtype: counts[dtype])


def _files(folder: Path, stem: str) -> dict[Path, set[str]]:
    """The files to open, with the tensors the index promises in each."""
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        raise ValueError(_why_none(folder, single, index))
    where = load_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} is broken: it has no weight_map")
    files: dict[Path, set[str]] = {}
    for name, file in where.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise ValueError(
                f"{index} says that {name} is in {file!r}; it must be a safetensors file beside it"
            )
        files.setdefault(folder / file, set()).add(name)
    if absent := sorted(path.name for path in files if not path.is_file()):
        raise ValueError(f"{folder} is not complete: {', '.join(absent)} of the index is missing")
    return files


def _why_none(folder: Path, single: Path, index: Path) -> str:
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code and is "
            "never opened; convert it to safetensors"
        )
    return f"{folder} has no weights: neither {single.name} nor {index.name}"


def _open(path: Path) -> Any:  # noqa: ANN401
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is broken: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None


def _save(folder: Path, number: int, shard: dict[str, Tensor]) -> list[str]:
    path = folder / f"{number}.part"
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error})") from None
    return list(shard)


def _name_files(folder: Path, stem: str, shards: list[list[str]], total: int) -> None:
    """How many shards there are, which their names say, is known at the end only."""
    if len(shards) == 1:
        (folder / "0.part").rename(folder / f"{stem}.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"{stem}-{number + 1:05}-of-{len(shards):05}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")
