"""Saves and loads the tensors of all ranks, as safetensors, by torch.distributed.checkpoint.

In: on each rank, by name, the rows of each tensor that this rank saves. Out: one safetensors file
of each rank, and on rank 0 an index of them; or, from these, any rows on any number of ranks.

    rank 0: {"model.embed.weight": TensorRows(rows 0…2,   start=0, shape=(256, 64))}
    rank 1: {"model.embed.weight": TensorRows(rows 2…256, start=2, shape=(256, 64))}

torch.distributed.checkpoint plans, checks that every row is saved once, and finds the rows that a
rank needs. Its own storages do not fit: one writes a pickle, which executes code when it is read,
and the one for safetensors makes two more copies of a rank's tensors while it writes. This one
writes tensors from the memory they are in.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from longshore.files import reason
from longshore.train.checkpoint_files import CheckpointIndex, DamagedError, SavedFile, SavedTensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
BLOCK = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """Rows of a tensor, from row `start` on; a 0-dim tensor is one row."""

    rows: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        offsets = (self.start, *(0 for _ in self.shape[1:])) if self.shape else ()
        return ChunkStorageMetadata(torch.Size(offsets), self.rows.size())


def save_parts(
    parts: Mapping[str, TensorRows], folder: Path, group: ProcessGroup
) -> tuple[dict[str, SavedFile], dict[str, SavedTensor]]:
    """Writes each rank's rows; rank 0 gets all files and tensors. An OSError is on all ranks."""
    writer = _Writer(folder, group.rank())
    state = {name: part.rows for name, part in parts.items()}
    try:
        save(state, storage_writer=writer, planner=_SavePlanner(parts), process_group=group)
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        number = cause.errno if isinstance(cause, OSError) else None
        raise OSError(number, _first(error)) from None
    return writer.files, writer.tensors


def load_parts(
    parts: Mapping[str, TensorRows], folder: Path, content: CheckpointIndex, group: ProcessGroup
) -> None:
    """Fills each rank's rows; raises DamagedError on all ranks if one fails."""
    state = {name: part.rows for name, part in parts.items()}
    planner, reader = _LoadPlanner(parts), _Reader(folder, content)
    try:
        load(state, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise DamagedError(f"{folder} cannot be read ({_first(error)})") from None


def _first(error: CheckpointException) -> str:
    """The error text of the lowest rank that failed."""
    cause, _ = error.failures[min(error.failures)]
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, parts: Mapping[str, TensorRows]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, part in self.parts.items():
            data = TensorWriteData(
                chunk=part.chunk,
                properties=TensorProperties(dtype=part.rows.dtype),
                size=torch.Size(part.shape),
            )
            index = MetadataIndex(name, part.chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.parts[index.fqn].rows


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, TensorRows]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, part in self.parts.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"{name} is missing")
            if saved.size != torch.Size(part.shape):
                raise ValueError(f"{name} has the shape {tuple(saved.size)}, not {part.shape}")
            items += create_read_items_for_chunk_list(name, saved, [part.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.parts[index.fqn].rows


class _Writer(StorageWriter):
    """One file of each rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.name = f"lane-{rank:05}.safetensors"
        self.files: dict[str, SavedFile] = {}
        self.tensors: dict[str, SavedTensor] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[item.index.fqn] = tensor
        results = []
        if tensors:
            file = write_safetensors(self.folder / self.name, tensors)
            for item in plan.items:
                size = tensors[item.index.fqn].nbytes
                results.append(WriteResult(item.index, size, (self.name, file)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: collects which rows are in which file; the caller writes the index."""
        chunks: dict[str, list[tuple[int, int, str]]] = {}
        for result in (result for each in results for result in each):
            name, (file, info) = result.index.fqn, result.storage_data
            self.files[file] = info
            saved = metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunk = saved.chunks[result.index.index or 0]
            row, rows = (chunk.offsets[0], chunk.sizes[0]) if chunk.offsets else (0, 1)
            chunks.setdefault(name, []).append((row, rows, file))
        for name, pieces in chunks.items():
            saved = metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            dtype, shape = DTYPES[saved.properties.dtype], tuple(saved.size)
            self.tensors[name] = SavedTensor(dtype, shape, tuple(sorted(pieces)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    """Reads rows from the files that hold them, as listed in checkpoint.json."""

    def __init__(self, folder: Path, content: CheckpointIndex) -> None:
        self.folder = folder
        self.content = content

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=OF_NAME[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[_chunk(tensor.shape, row, rows) for row, rows, _ in tensor.chunks],
                )
                for name, tensor in self.content.tensors.items()
            }
        )

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            chunk = self.content.tensors[item.storage_index.fqn].chunks
            by_file.setdefault(chunk[item.storage_index.index or 0][2], []).append(item)
        for name, items in by_file.items():
            try:
                self._read(self.folder / name, items, planner)
            except SafetensorError as error:
                raise ValueError(f"{name} is damaged: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, path: Path, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        with safe_open(path, framework="pt") as file:
            for item in items:
                name, target = item.storage_index.fqn, planner.resolve_tensor(item)
                if not item.lengths:
                    rows = file.get_tensor(name)
                else:
                    start = item.storage_offsets[0]
                    rows = file.get_slice(name)[start : start + item.lengths[0]]
                if rows.shape != target.shape:
                    raise ValueError(f"{path.name} is damaged: {name} has the shape {rows.shape}")
                target.copy_(rows)
                planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _chunk(shape: tuple[int, ...], row: int, rows: int) -> ChunkStorageMetadata:
    if not shape:
        return ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    offsets = torch.Size((row, *(0 for _ in shape[1:])))
    return ChunkStorageMetadata(offsets, torch.Size((rows, *shape[1:])))


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> SavedFile:
    """Writes CPU tensors without a copy, and waits until they are on disk.

    safetensors' own writer copies each tensor to bytes first.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        about = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**about, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size, crc32 = 0, 0
    try:
        with path.open("wb", buffering=0) as file:
            for block in _blocks(len(text).to_bytes(8, "little") + text, tensors.values()):
                crc32 = zlib.crc32(block, crc32)
                size += len(block)
                while block:
                    block = block[file.write(block) :]
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, reason(error), str(path)) from None
    return SavedFile(size, crc32)


def _blocks(head: bytes, tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        content = memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for start in range(0, len(content), BLOCK):
            yield content[start : start + BLOCK]
