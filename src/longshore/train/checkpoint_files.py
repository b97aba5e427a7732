"""The files of checkpoints: which are complete, how one is written, which to remove. No torch.

In: a run's folder. Out: RUN/checkpoints, where a folder named after its step is complete:

    step-00000020/rank-00000.safetensors …   blocks of parameters and moments, a file of each rank
    step-00000020/checkpoint.json            written last: the step, the loader's state, the size
                                             and checksum of each file, and a checksum of itself
    .step-00000040.partial/                  a save in progress, or one that was killed

A partial folder is renamed once everything is on disk, so a killed save does no harm. Only JSON and
safetensors are read: no file in a checkpoint can contain code.
"""

import math
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

from longshore.files import check_room, open_sealed, parse_json, reason, sealed_json

FORMAT = "longshore checkpoint"
VERSION = 3
MARKER = "checkpoint.json"
FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8,})")
BLOCK = 1 << 24


class DamagedError(Exception):
    """A checkpoint that cannot be read; its text names it."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """The size of a file and the checksum of all its bytes."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True, order=True)
class SavedChunk:
    """A block of a tensor, and where it is."""

    offsets: tuple[int, ...]
    """Its first index in the tensor; () for a 0-dim one."""
    sizes: tuple[int, ...]
    file: str
    key: str
    """Its name in the file."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor, and the files its blocks are in."""

    dtype: str
    """The name that safetensors uses, such as F32."""
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]
    """They cover it, and do not overlap."""


@dataclass(frozen=True, slots=True)
class CheckpointIndex:
    """The content of checkpoint.json."""

    step: int
    """Steps done."""
    updates: int
    """Updates of the parameters: fewer than steps where steps were skipped."""
    ranks: int
    """Ranks that saved it."""
    loader: dict[str, object]
    """The loader's state."""
    files: dict[str, SavedFile]
    """The files, by name."""
    tensors: dict[str, SavedTensor]
    """The tensors in them, by name."""
    base: dict[str, object] = field(default_factory=dict)
    """What the run began with, which low-rank factors belong to (hf/lora.py); {}: new weights."""


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08}"


def partial_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f".step-{step:08}.partial"


def saved_steps(run: Path) -> list[int]:
    """Steps with a checkpoint, the newest first; not checked for damage."""
    folder = run / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(
        (int(match[1]) for name in names if (match := NAME.fullmatch(name))), reverse=True
    )


def newest_complete(run: Path) -> Path | None:
    """The newest checkpoint whose files all exist with the right sizes."""
    for step in saved_steps(run):
        try:
            read_index(checkpoint_folder(run, step))
        except DamagedError:
            continue
        return checkpoint_folder(run, step)
    return None


def read_index(folder: Path) -> CheckpointIndex:
    """The index of a checkpoint; also checks that each file exists with the right size."""
    try:
        raw = (folder / MARKER).read_bytes()
        data = parse_json(raw)
        version = (data["format"], data["version"])
        index = _parse(open_sealed(raw)) if version == (FORMAT, VERSION) else None
    except OSError as error:
        raise DamagedError(f"{folder / MARKER} cannot be read ({reason(error)})") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / MARKER} is damaged ({error})") from None
    if index is None:
        raise DamagedError(
            f"{folder / MARKER} has the format {version[0]!r}, version {version[1]!r}; this "
            f"Longshore reads {FORMAT!r}, version {VERSION}"
        )
    if folder.name != checkpoint_folder(Path(), index.step).name:
        raise DamagedError(f"{folder / MARKER} is of step {index.step}, not of its folder's step")
    for name, file in index.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != file.bytes:
            state = "is missing" if size is None else f"has {size} bytes of {file.bytes}"
            raise DamagedError(f"{path} {state}")
    return index


def _parse(data: dict[str, Any]) -> CheckpointIndex:
    files = {name: SavedFile(**file) for name, file in data["files"].items()}
    tensors = {}
    for name, tensor in data["tensors"].items():
        shape = tuple(map(int, tensor["shape"]))
        chunks = tuple(_chunk(name, shape, chunk) for chunk in tensor["chunks"])
        tensors[name] = SavedTensor(str(tensor["dtype"]), shape, chunks)
        check_covered(name, tensors[name])
    names = [*files, *(chunk.file for tensor in tensors.values() for chunk in tensor.chunks)]
    if any(Path(name).name != name or name not in files for name in names):
        raise ValueError("it names files outside the checkpoint")
    counts = {name: data[name] for name in ("step", "updates", "ranks")}
    for name, value in counts.items():
        least, most = (0, counts["step"]) if name == "updates" else (1, math.inf)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}")
    return CheckpointIndex(
        **counts,
        loader=dict(data["loader"]),
        files=files,
        tensors=tensors,
        base=dict(data.get("base", {})),
    )


def check_covered(name: str, tensor: SavedTensor) -> None:
    """Refuses a tensor whose chunks do not cover every value exactly once."""
    if not _tile(tensor.shape, [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]):
        raise ValueError(f"parts of {name} are missing or listed twice")


def _chunk(name: str, shape: tuple[int, ...], data: list[Any]) -> SavedChunk:
    offsets, sizes, file, *key = data
    offsets, sizes = tuple(map(int, offsets)), tuple(map(int, sizes))
    chunk = SavedChunk(offsets, sizes, str(file), str(*key) or name)
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        raise ValueError(f"parts of {name} have another number of dims")
    return chunk


Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def _tile(shape: tuple[int, ...], blocks: Sequence[Block]) -> bool:
    """Whether blocks cover every value exactly once.

    Where no block begins or ends along dim 0, the blocks there must do so in the other dims.
    """
    if not shape:
        return len(blocks) == 1
    ordered = sorted(blocks)
    active, begun, end = list[Block](), 0, 0
    while end < shape[0]:
        start = end
        active = [block for block in active if block[0][0] + block[1][0] > start]
        while begun < len(ordered) and ordered[begun][0][0] == start:
            active.append(ordered[begun])
            begun += 1
        edges = [offsets[0] + sizes[0] for offsets, sizes in active]
        edges += [offsets[0] for offsets, _ in ordered[begun : begun + 1]]
        end = min(edges, default=start)
        others = [(offsets[1:], sizes[1:]) for offsets, sizes in active]
        if not start < end <= shape[0] or not _tile(shape[1:], others):
            return False
    return begun == len(ordered)


def check_files(folder: Path, index: CheckpointIndex, *, part: int, parts: int) -> None:
    """Verifies the checksums of every parts-th file, starting with the part-th."""
    for name, file in sorted(index.files.items())[part::parts]:
        check_file(folder / name, file)


def check_file(path: Path, file: SavedFile) -> None:
    """Verifies the checksum of a file."""
    size, crc32 = 0, 0
    try:
        with path.open("rb") as opened:
            while block := opened.read(BLOCK):
                size, crc32 = size + len(block), zlib.crc32(block, crc32)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({reason(error)})") from None
    if (size, crc32) != (file.bytes, file.crc32):
        raise DamagedError(f"{path} is damaged: its checksum does not match")


def begin_save(run: Path, step: int, *, needed: int) -> None:
    """Creates the partial folder of a save, if there is room for `needed` bytes."""
    remove_leftovers(run)
    check_room(run, needed)
    partial_folder(run, step).mkdir(parents=True)


def remove_leftovers(run: Path) -> None:
    """Removes what killed or failed saves have left: it may fill the disk."""
    for left in (*(run / FOLDER).glob(".step-*"), *run.glob(".weights.partial-*")):
        shutil.rmtree(left, ignore_errors=True)


def finish_save(run: Path, index: CheckpointIndex, *, keep: int) -> None:
    """Completes the checkpoint atomically, then removes all but the last `keep`."""
    partial, folder = partial_folder(run, index.step), checkpoint_folder(run, index.step)
    with (partial / MARKER).open("wb") as file:
        file.write(sealed_json({"format": FORMAT, "version": VERSION, **_as_json(index)}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    if folder.exists():
        _remove(run, index.step)  # a damaged one: a good one is not saved again
    partial.rename(folder)
    sync_folder(folder.parent)
    for old in [step for step in saved_steps(run) if step < index.step][keep - 1 :]:
        _remove(run, old)


def _as_json(index: CheckpointIndex) -> dict[str, object]:
    """There are many chunks, so each is a short list: [offsets, sizes, file, key].

    The key is left out where it is the tensor's name.
    """
    tensors = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "chunks": [astuple(chunk)[: 3 if chunk.key == name else 4] for chunk in tensor.chunks],
        }
        for name, tensor in index.tensors.items()
    }
    files = {name: asdict(file) for name, file in index.files.items()}
    return {each.name: getattr(index, each.name) for each in fields(index)} | {
        "files": files,
        "tensors": tensors,
    }


def _remove(run: Path, step: int) -> None:
    """Renames it first: half a checkpoint must not look like a complete one."""
    gone = run / FOLDER / f".step-{step:08}.removed"
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint_folder(run, step).rename(gone)
    shutil.rmtree(gone)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
