"""Checkpoints as files: which are complete, how one appears at once, and which may go. No torch.

In: a run's folder. Out: RUN/checkpoints, where a folder named for its step is a whole checkpoint:

    step-00000020/lane-00000.safetensors …   rows of parameters and moments, one file of each lane
    step-00000020/checkpoint.json            written last: the step, the loader's place, of each
                                             file its size and checksum, and a checksum of itself
    .step-00000040.partial/                  a save that is going on, or was killed

A partial folder is renamed once all is on disk, so a killed save harms nothing. Only JSON and
safetensors are ever read: no file in a checkpoint can bring code.
"""

import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longshore.files import check_room, open_sealed, reason, sealed_json

FORMAT = "longshore checkpoint"
VERSION = 2
MARKER = "checkpoint.json"
FOLDER = "checkpoints"
NAME = re.compile(r"step-(\d{8,})")
BLOCK = 1 << 24


class DamagedError(Exception):
    """A checkpoint that cannot be read; its text names it."""


@dataclass(frozen=True, slots=True)
class File:
    """bytes: its size. crc32: of all of them."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor over all files. dtype: as safetensors calls it. chunks: (first row, rows, file)."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """What checkpoint.json says.

    updates: of the parameters; fewer than steps where steps were skipped. ranks: that saved it.
    loader: its state.
    """

    step: int
    updates: int
    ranks: int
    loader: dict[str, object]
    files: dict[str, File]
    tensors: dict[str, Tensor]


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08}"


def partial_folder(run: Path, step: int) -> Path:
    return run / FOLDER / f".step-{step:08}.partial"


def saved_steps(run: Path) -> list[int]:
    """Steps with a checkpoint, the newest first; whether it can be read is not looked at."""
    folder = run / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(
        (int(found[1]) for name in names if (found := NAME.fullmatch(name))), reverse=True
    )


def newest_complete(run: Path) -> Path | None:
    """The newest checkpoint whose files are all there, in their sizes."""
    for step in saved_steps(run):
        try:
            read_saved(checkpoint_folder(run, step))
        except DamagedError:
            continue
        return checkpoint_folder(run, step)
    return None


def read_saved(folder: Path) -> Saved:
    """What a checkpoint holds, after a look at the size of each file."""
    try:
        raw = (folder / MARKER).read_bytes()
        data = json.loads(raw)
        made = (data["format"], data["version"])
        saved = _parse(open_sealed(raw)) if made == (FORMAT, VERSION) else None
    except OSError as error:
        raise DamagedError(f"{folder / MARKER} cannot be read ({reason(error)})") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedError(f"{folder / MARKER} is damaged ({error})") from None
    if saved is None:
        raise DamagedError(
            f"{folder / MARKER} is {made[0]!r}, version {made[1]!r}; this Longshore reads "
            f"{FORMAT!r}, version {VERSION}"
        )
    if folder.name != checkpoint_folder(Path(), saved.step).name:
        raise DamagedError(f"{folder / MARKER} is of step {saved.step}, its folder is not")
    for name, file in saved.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != file.bytes:
            state = "is missing" if size is None else f"has {size} bytes of {file.bytes}"
            raise DamagedError(f"{path} {state}")
    return saved


def _parse(data: dict[str, Any]) -> Saved:
    files = {name: File(**file) for name, file in data["files"].items()}
    tensors = {}
    for name, tensor in data["tensors"].items():
        chunks = tuple((int(row), int(rows), str(file)) for row, rows, file in tensor["chunks"])
        shape = tuple(int(size) for size in tensor["shape"])
        tensors[name] = Tensor(str(tensor["dtype"]), shape, chunks)
        if not _is_whole(tensors[name]):
            raise ValueError(f"rows of {name} are missing or there twice")
    inside = [*files, *(file for tensor in tensors.values() for _, _, file in tensor.chunks)]
    if any(Path(name).name != name or name not in files for name in inside):
        raise ValueError("it names files that are not its own")
    counts = {name: int(data[name]) for name in ("step", "updates", "ranks")}
    return Saved(**counts, loader=dict(data["loader"]), files=files, tensors=tensors)


def _is_whole(tensor: Tensor) -> bool:
    """Whether its chunks hold every row once."""
    end = 0
    for row, rows, _ in sorted(tensor.chunks):
        if row != end or rows < 1:
            return False
        end += rows
    return end == (tensor.shape[0] if tensor.shape else 1)


def check_files(folder: Path, saved: Saved, *, part: int, parts: int) -> None:
    """Reads every parts-th file whole, from the part-th on, and compares its checksum."""
    for name, file in sorted(saved.files.items())[part::parts]:
        check_file(folder / name, file)


def check_file(path: Path, file: File) -> None:
    """Reads a file whole and compares its checksum."""
    size, crc32 = 0, 0
    try:
        with path.open("rb") as opened:
            while block := opened.read(BLOCK):
                size, crc32 = size + len(block), zlib.crc32(block, crc32)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({reason(error)})") from None
    if (size, crc32) != (file.bytes, file.crc32):
        raise DamagedError(f"{path} is damaged: its checksum is another")


def begin(run: Path, step: int, *, needed: int) -> None:
    """Makes the folder that a save of so many bytes writes into, if there is room for it."""
    remove_leftovers(run)
    check_room(run, needed)
    partial_folder(run, step).mkdir(parents=True)


def remove_leftovers(run: Path) -> None:
    """What killed or failed saves have left: it may fill the disk."""
    for left in (*(run / FOLDER).glob(".step-*"), *run.glob(".weights.partial-*")):
        shutil.rmtree(left, ignore_errors=True)


def finish(run: Path, saved: Saved, *, keep: int) -> None:
    """Makes the checkpoint exist, all at once, then removes those before the last `keep`."""
    partial, folder = partial_folder(run, saved.step), checkpoint_folder(run, saved.step)
    with (partial / MARKER).open("wb") as file:
        file.write(sealed_json({"format": FORMAT, "version": VERSION, **asdict(saved)}))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    if folder.exists():
        _remove(run, saved.step)  # a damaged one: a good one is not saved again
    partial.rename(folder)
    sync_folder(folder.parent)
    for old in [step for step in saved_steps(run) if step < saved.step][keep - 1 :]:
        _remove(run, old)


def _remove(run: Path, step: int) -> None:
    """Under another name first: a half of a checkpoint must not look like one."""
    gone = run / FOLDER / f".step-{step:08}.removed"
    shutil.rmtree(gone, ignore_errors=True)
    checkpoint_folder(run, step).rename(gone)
    shutil.rmtree(gone)


def sync_folder(folder: Path) -> None:
    """Until the names in a folder are on disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
