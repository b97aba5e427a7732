"""Saves and loads the tensors of all ranks, as safetensors, by torch.distributed.checkpoint.

In: on each rank, by name, the blocks of each tensor that this rank saves. Out: one safetensors file
of each rank, and on rank 0 an index of them; or, from these, any blocks on any number of ranks.

    rank 0: {"model.embed.weight": [TensorBlock(values (2, 64),   offsets=(0, 0), shape=(256, 64))]}
    rank 1: {"model.embed.weight": [TensorBlock(values (254, 64), offsets=(2, 0), shape=(256, 64))]}

In a rank's file a tensor's only block has the tensor's name; one of several has its place too, as
"model.layers.0.mixer.in_proj.weight[48:64, 0:16]".

torch.distributed.checkpoint plans, checks that every value is saved once, and finds the blocks that
a rank needs. Its own storages do not fit: one writes a pickle, which executes code when it is read,
and the one for safetensors makes two more copies of a rank's tensors while it writes. This one
writes tensors from the memory they are in.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from longshore.train.checkpoint_files import (
    CheckpointIndex,
    DamagedError,
    SavedChunk,
    SavedFile,
    SavedTensor,
)
from longshore.train.safetensors_stream import DTYPES, OF_NAME, write_safetensors


@dataclass(frozen=True, slots=True, eq=False)
class TensorBlock:
    """A block of a tensor; offsets: its first index in the whole tensor, which has this shape."""

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.values.size())


Blocks = Mapping[str, Sequence[TensorBlock]]
"""A rank's blocks of each tensor, by the tensor's name; they do not overlap."""


def whole_block(tensor: Tensor) -> TensorBlock:
    """All of a tensor."""
    return TensorBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def save_blocks(
    blocks: Blocks, folder: Path, group: ProcessGroup
) -> tuple[dict[str, SavedFile], dict[str, SavedTensor]]:
    """Writes each rank's blocks; rank 0 gets all files and tensors. An OSError is on all ranks.

    They are contiguous, and on the CPU.
    """
    writer, planner = _Writer(folder, group.rank()), _SavePlanner(blocks)
    try:
        save(_state(blocks), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        cause, _ = error.failures[min(error.failures)]
        number = cause.errno if isinstance(cause, OSError) else None
        raise OSError(number, _first(error)) from None
    return writer.files, writer.tensors


def load_blocks(
    blocks: Blocks, folder: Path, content: CheckpointIndex, group: ProcessGroup
) -> None:
    """Fills each rank's blocks; raises DamagedError on all ranks if one fails."""
    planner, reader = _LoadPlanner(blocks), _Reader(folder, content)
    try:
        load(_state(blocks), storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise DamagedError(f"{folder} cannot be read ({_first(error)})") from None


def _state(blocks: Blocks) -> dict[str, Any]:
    """What torch takes the names from; the planners know the blocks."""
    return {name: own[0].values for name, own in blocks.items()}


def _first(error: CheckpointException) -> str:
    """The error text of the lowest rank that failed."""
    cause, _ = error.failures[min(error.failures)]
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, blocks: Blocks) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.blocks = _by_offsets(blocks)

    def create_local_plan(self) -> SavePlan:
        items = []
        for (name, _), block in self.blocks.items():
            data = TensorWriteData(
                chunk=block.chunk,
                properties=TensorProperties(dtype=block.values.dtype),
                size=torch.Size(block.shape),
            )
            index = MetadataIndex(name, block.chunk.offsets)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _block(self.blocks, index).values


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, blocks: Blocks) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.by_name = blocks
        self.blocks = _by_offsets(blocks)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, blocks in self.by_name.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"{name} is missing")
            for block in blocks:
                if saved.size != torch.Size(block.shape):
                    raise ValueError(f"{name} has the shape {tuple(saved.size)}, not {block.shape}")
            chunks = [block.chunk for block in blocks]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _block(self.blocks, index).values


_ByOffsets = dict[tuple[str, tuple[int, ...]], TensorBlock]


def _by_offsets(blocks: Blocks) -> _ByOffsets:
    return {(name, block.offsets): block for name, own in blocks.items() for block in own}


def _block(blocks: _ByOffsets, index: MetadataIndex) -> TensorBlock:
    return blocks[index.fqn, tuple(index.offset or ())]


class _Writer(StorageWriter):
    """One file of each rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.name = f"rank-{rank:05}.safetensors"
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
        blocks = Counter(item.index.fqn for item in plan.items)
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            name = item.index.fqn
            key = name if blocks[name] == 1 else _key(name, item.index.offset or (), tensor.shape)
            tensors[key] = tensor
        results = []
        if tensors:
            file = write_safetensors(self.folder / self.name, tensors)
            for item, (key, tensor) in zip(plan.items, tensors.items(), strict=True):
                results.append(WriteResult(item.index, tensor.nbytes, (self.name, file, key)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: collects which blocks are in which file; the caller writes the index."""
        chunks: dict[str, list[SavedChunk]] = {}
        for result in (result for each in results for result in each):
            name, (file, info, key) = result.index.fqn, result.storage_data
            self.files[file] = info
            saved = metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunk = saved.chunks[result.index.index or 0]
            place = SavedChunk(tuple(chunk.offsets), tuple(chunk.sizes), file, key)
            chunks.setdefault(name, []).append(place)
        for name, pieces in chunks.items():
            saved = metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            dtype, shape = DTYPES[saved.properties.dtype], tuple(saved.size)
            self.tensors[name] = SavedTensor(dtype, shape, tuple(sorted(pieces)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    """Reads blocks from the files that hold them, as listed in checkpoint.json."""

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
                    chunks=[
                        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                        for chunk in tensor.chunks
                    ],
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
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            chunks = self.content.tensors[item.storage_index.fqn].chunks
            chunk = chunks[item.storage_index.index or 0]
            by_file.setdefault(chunk.file, []).append((chunk.key, item))
        for name, items in by_file.items():
            with open_saved(self.folder / name) as file:
                for key, item in items:
                    target = planner.resolve_tensor(item)
                    read_block(file, key, item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _key(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The name of one of a tensor's blocks in their file."""
    pairs = zip(offsets, sizes, strict=True)
    return f"{name}[{', '.join(f'{start}:{start + size}' for start, size in pairs)}]"


@contextmanager
def open_saved(path: Path) -> Iterator[Any]:
    """A safetensors file of a checkpoint; a ValueError if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


def read_block(file: Any, key: str, offsets: Sequence[int], target: Tensor) -> None:  # noqa: ANN401
    """Fills `target` with the block of its shape at these offsets; no more is read."""
    if target.dim():
        pairs = zip(offsets, target.shape, strict=True)
        block = file.get_slice(key)[tuple(slice(start, start + size) for start, size in pairs)]
    else:
        block = file.get_tensor(key)
    if block.shape != target.shape:
        raise ValueError(f"the file of {key} is damaged: its shape is {tuple(block.shape)}")
    target.copy_(block)
