"""The folder of a run: a new one each time, so that no run writes over another, and its lock.

In: a name, in which {n} stands for the next free number. Out: a folder that was not there, or was
empty. With runs/demo-1 and runs/demo-3 there, runs/demo-{n} is runs/demo-4 for a new run, and
runs/demo-3 for one that is resumed. The process that trains a run holds its lock.

Before the first step the room on the disks is compared with what a run or scores take. A model of 8
billion parameters in training takes 96 GB for a checkpoint with its moments, 32 GB for its weights
and, in bfloat16, 16 GB for its export; on one disk they are needed together. The older checkpoints
that output.keep allows are not counted: a run warns about these. No torch.
"""

import fcntl
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, count
from pathlib import Path

import numpy as np

from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig
from longshore.config.schema import RunConfig
from longshore.data.source import Field
from longshore.files import SPARE, free_bytes, size_text
from longshore.plan.cost import Ints
from longshore.train.checkpoint_files import newest_complete

NUMBER = "{n}"
CONFIG = "config.toml"
TRIES = 1000
LOCK = ".lock"
WAIT_S = 15.0  # for the ranks of a run that was just killed
SHOWN_RUNS = 5


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The run that is trained, locked by rank 0."""

    folder: Path
    """Where it writes."""
    is_resumed: bool
    """An earlier run is in the folder."""
    changes: tuple[str, ...] = ()
    """Settings that differ from the earlier run's, as text; on rank 0 only."""
    note: str = ""
    """Another line for the user, or ""; on rank 0 only."""
    is_forced: bool = False
    """It resumes with other data too."""
    lock: TextIOWrapper | None = None
    """Held by rank 0; None elsewhere, and where a file system does not count links."""

    @property
    def is_lost(self) -> bool:
        """Whether somebody has deleted or moved the folder; known to rank 0 only."""
        if self.lock is None:
            return False
        try:
            os.stat(self.folder / LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # a file system that does not answer now
        return os.fstat(self.lock.fileno()).st_nlink == 0

    @property
    def is_taken(self) -> bool:
        """Whether somebody has put another run there since."""
        return self.is_lost and (self.folder / CONFIG).exists()


def check_run_folder(folder: str) -> None:
    """Refuses a folder for the run that is in use, or that cannot be created."""
    path = Path(folder)
    if path.name.count(NUMBER) > 1 or NUMBER in str(path.parent):
        raise ValueError(f"output.folder is {folder!r}; {NUMBER} may be in its last part, once")
    check_new_folder(folder, "output.folder")


def check_new_folder(folder: str, key: str) -> None:
    """Refuses a folder that is in use, or that cannot be created. key: that names it."""
    path = Path(folder)
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{key}: {folder} is a file; name a folder")
        if inside := sorted(entry.name for entry in path.iterdir()):
            raise ValueError(
                f"{key}: {folder} already contains {inside[0]}; name a new folder, such as "
                f"{_unused(path)}"
            )
        check_writable(path, key)
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(
            f"{key}: {folder} cannot be created: {above} is not a folder, or is write-protected"
        )


def check_writable(folder: Path, key: str) -> None:
    """Refuses an existing folder in which nothing can be made."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{key}: {folder} is write-protected; make it writable, or name another")


def make_run_folder(folder: str) -> Path:
    """Makes it, on one rank; two runs that start at once get two folders."""
    path = Path(folder)
    try:
        for _ in range(TRIES):
            new = path.with_name(path.name.replace(NUMBER, str(_next_number(path))))
            try:
                new.mkdir(parents=True)
            except FileExistsError:
                if NUMBER in path.name:
                    continue
                check_new_folder(folder, "output.folder")
            return new
    except OSError as error:
        raise ValueError(f"output.folder: {folder} cannot be created ({error.strerror})") from None
    raise ValueError(f"output.folder: no number is free for {folder}; name another folder")


def find_run(folder: str) -> Path | None:
    """The run of this name, with {n} the newest; None if there is none.

    If the newest folder holds no run, there is none: to resume one before it would surprise.
    """
    path = Path(folder)
    newest = path.with_name(path.name.replace(NUMBER, str(_next_number(path) - 1)))
    return newest if (newest / CONFIG).is_file() else None


def write_config(config: RunConfig, folder: Path) -> None:
    """Atomically: no other process ever reads half a configuration."""
    partial = folder / f".{CONFIG}"
    partial.write_text(config.to_toml(), encoding="utf-8")
    partial.replace(folder / CONFIG)


def keep_config(folder: Path, stem: str) -> None:
    """Copies the configuration beside itself, to a name that nothing has yet."""
    text = (folder / CONFIG).read_text(encoding="utf-8")
    for name in chain([stem], (f"{stem}-{number}" for number in count(2))):
        try:
            with (folder / f"{name}.toml").open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            continue
        return


def lock_run(run: Path, job: str) -> TextIOWrapper:
    """Holds the run for this process alone, until the file is closed or the process ends.

    job: the name of the torchrun job that trains it, "" without torchrun.
    """
    file = (run / LOCK).open("a+", encoding="utf-8")
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise ValueError(
                    f"{run} is being trained by another process; wait for it, or end it"
                ) from None
            time.sleep(0.1)
            continue
        except OSError:
            pass  # a file system without locks
        file.truncate(0)
        file.write(job)
        file.flush()
        return file


def job_of(run: Path) -> str | None:
    """The job that locked the run last; None if none ever did."""
    with suppress(OSError):
        return (run / LOCK).read_text(encoding="utf-8")
    return None


def reached_step(run: Path) -> int | None:
    """The step of the run's newest checkpoint; None if it has none."""
    newest = newest_complete(run)
    return None if newest is None else int(newest.name.partition("-")[2])


def newest_runs(folder: str = "runs") -> str:
    """The newest runs in a folder, for an error: the last step of each, and how to resume."""
    runs = [path.parent for path in Path(folder).glob(f"*/{CONFIG}")]
    newest = sorted(runs, key=lambda run: (-_touched(run), run.name))[:SHOWN_RUNS]
    if not newest:
        return f"there is none in {folder}; leave --resume out to begin a new one"
    listed = ", ".join(f"{run} ({_state(run)})" for run in newest)
    more = f" and {len(runs) - len(newest)} more" if len(runs) > len(newest) else ""
    return f"in {folder} there are {listed}{more}; resume with --resume {newest[0]}"


def _state(run: Path) -> str:
    step = reached_step(run)
    reached = "no checkpoint" if step is None else f"step {step:,}"
    return f"{reached}, {_age(time.time() - _touched(run))} ago"


def _touched(run: Path) -> float:
    """When the run last wrote a file."""
    with suppress(OSError):
        return max(entry.stat().st_mtime for entry in run.iterdir())
    return 0.0


def _age(seconds: float) -> str:
    """90 seconds are 1 minute, 200,000 are 2 days."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return "less than a minute"


def _unused(path: Path) -> Path:
    numbered = path.with_name(f"{path.name}-{NUMBER}")
    return path.with_name(f"{path.name}-{_next_number(numbered)}")


def _next_number(path: Path) -> int:
    before, _, behind = path.name.partition(NUMBER)
    pattern = re.compile(re.escape(before) + r"(\d{1,9})" + re.escape(behind))
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    taken = [int(match[1]) for name in names if (match := pattern.fullmatch(name))]
    return max(taken, default=0) + 1


MOMENTS = 2
"""AdamW keeps this many for each parameter."""


def written_bytes(config: RunConfig, decoder: DecoderConfig) -> dict[str, int]:
    """What each of the run's outputs takes, by its key."""
    parameters, output = parameter_count(decoder), config.output
    kept = 0 if decoder.lora is not None else parameters  # adapters are small
    trained = 8 if config.train.dtype == "float64" else 4
    sizes = {}
    if output.keep and kept:
        sizes["checkpoint"] = (1 + MOMENTS) * trained * kept
    if output.weights and kept:
        sizes["weights"] = trained * kept
    if output.export:
        low = config.train.dtype in ("auto", "bfloat16")
        sizes["export"] = (2 if low else trained) * parameters
    return sizes


def check_disks(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses a run whose first checkpoint, weights and export do not fit on their disks."""
    output = config.output
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for what, size in written_bytes(config, decoder).items():
        folder = Path(output.export if what == "export" else output.folder).absolute()
        above = next(path for path in (folder, *folder.parents) if path.exists())
        disks.setdefault(disk_of(above), []).append((what, above, size))
    for needs in disks.values():
        above = needs[0][1]
        free, needed = free_bytes(above), sum(size for _, _, size in needs) + SPARE
        if free is not None and needed > free:
            parts = ", ".join(f"{what} {size_text(size)}" for what, _, size in needs)
            key = "output.export" if needs[0][0] == "export" else "output.folder"
            raise ValueError(
                f"{key}: the run writes {size_text(needed)} ({parts}), but only "
                f"{size_text(free)} are free in {above}; make room, name folders on other disks, "
                "or write less with output.keep=0 or output.weights=false"
            )


def check_scored(out: str, fields: Sequence[Field], lengths: Ints) -> None:
    """Refuses scores that do not fit on their disk. fields: all that is written beside tokens."""
    needed = scored_bytes(out, fields, lengths) + SPARE
    free = free_bytes(Path(out).absolute().parent)
    if free is not None and needed > free:
        raise ValueError(
            f"--out: {out} takes {size_text(needed)}, but only {size_text(free)} are free there; "
            "make room, or name a place on another disk"
        )


def scored_bytes(out: str, fields: Sequence[Field], lengths: Ints) -> int:
    """Bytes of tokens and fields; of Parquet, which compresses, the scores alone."""
    tokens, total = int(lengths.sum()), 0
    is_parquet = out.endswith(".parquet")
    for field in fields[-1:] if is_parquet else fields:
        values = len(lengths) if field.per == "sequence" else tokens
        total += values * field.width * np.dtype(field.dtype).itemsize
    return total if is_parquet else total + tokens * np.dtype(np.int32).itemsize


def disk_of(path: Path) -> int:
    """The number of the disk that a path is on."""
    return os.stat(path).st_dev
