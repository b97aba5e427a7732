"""How a run starts: in a new folder, or from where an earlier run stopped.

What does --resume do?

1. `longshore train --resume runs/x-1` takes runs/x-1/config.toml as the recipe; with a recipe and a
   bare --resume the run is the newest of output.folder, and where there is none a new one begins
   (cli/train.py). `check_output` refuses settings that would change the model or the order of the
   data, and fewer steps than are done, before any rank starts.
2. `open_run`: rank 0 takes the run's lock, so that nobody else resumes it, and checks again.
3. `load_checkpoint`: all ranks load the newest checkpoint that can be read (train/checkpoint.py):
   parameters, optimizer, random states, and the loader's place in the data. Their number may
   differ. Without a checkpoint it begins with step 1. Other data are refused, but for --force.
4. `keep_settings`: once the first step has worked, config.toml gets the settings from there on, and
   those before stay as config-until-step-40.toml (or -2, -3, …: nothing kept is overwritten).
   After a resume that fails, a plain --resume does as before.

Ranks, capacity, policy, the learning rate and the number of steps may change; with train.steps 100
before and 200 now the run says

    train.steps was 100 and is 200 from here on

A rank that torchrun restarts resumes by itself, but only a run that the same torchrun began, whose
name is in the run's lock file. No torch until ranks run: `longshore train` checks with it first.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from longshore.config.check import check_config, decoder_config
from longshore.config.load import NOT_THE_DEMO, load_config
from longshore.config.schema import SECTIONS, RunConfig
from longshore.run.folder import (
    CONFIG,
    OpenRun,
    check_disks,
    check_new_folder,
    check_run_folder,
    check_writable,
    find_run,
    job_of,
    keep_config,
    lock_run,
    make_run_folder,
    newest_runs,
    reached_step,
    write_config,
)
from longshore.train.checkpoint_files import FOLDER, remove_leftovers
from longshore.train.supervision import HEARTBEATS, writing

if TYPE_CHECKING:
    from longshore.data.steps import Loader
    from longshore.distributed.topology import Groups, Topology
    from longshore.train.checkpoint import Checkpoints
    from longshore.train.refine import Refiner

MAY_CHANGE = {"prefetch", "cache", "eval_path", "eval_mock", "eval_count"}  # of data
UNREPORTED = ("output.", "parallel.ranks", "plan.capacity")
ROOM = 256  # bytes of a path in the first collective


@dataclass(frozen=True, slots=True)
class Start:
    """How a run starts: as a new one, or from an earlier run where there is one."""

    is_asked: bool = False
    """The user wants to resume; otherwise only torchrun has restarted."""
    attempt: int = 0
    """The attempt of torchrun, from 0."""
    job: str = ""
    """The name of torchrun's job, the same in all its attempts."""
    is_forced: bool = False
    """Resume with other data too."""

    @property
    def resume(self) -> bool:
        return self.is_asked or self.attempt > 0


FRESH = Start()


def start_from_environment() -> Start:
    """Whether torchrun restarts this process, and the name of its job."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = os.environ.get("TORCHELASTIC_RUN_ID", "")
    name = f"process {os.getppid()}" if job == "none" else job
    return Start(attempt=int(count) if count.isdecimal() else 0, job=name)


def recipe_of(run: Path, *, asked_by: str) -> str:
    """The recipe in the folder of a run. asked_by: for the error."""
    if not (run / CONFIG).is_file():
        raise ValueError(
            f"{asked_by}: {run} has no {CONFIG}; name the folder of a run: {newest_runs()}"
        )
    return str(run / CONFIG)


def names_run(keys: Iterable[str]) -> bool:
    """Whether one of the keys names the data, the model or the folder, so that it is no demo."""
    return any(key in (*NOT_THE_DEMO, "output.folder") for key in keys)


def checked_config(
    config: RunConfig, ranks: int, start: Start, *, is_first: bool, is_run_here: bool = True
) -> RunConfig:
    """The configuration with the ranks it runs on, once all that can be refused was checked.

    is_first: whether this is rank 0, which alone checks folders. is_run_here: see check_output.
    """
    check_config(config, ranks)
    if is_first:
        check_output(config, start, is_run_here=is_run_here)
    return config.with_ranks(ranks)


def check_output(config: RunConfig, start: Start, *, is_run_here: bool = True) -> None:
    """Refuses folders that the run cannot write, and a resume that would change the run.

    is_run_here: on this machine, whose disks must have room for it.
    """
    run = find_run(config.output.folder) if start.resume else None
    if run is None:
        check_run_folder(config.output.folder)
    else:
        for folder in (run, run / FOLDER):
            if folder.exists():
                check_writable(folder, "output.folder")
        changed_settings(config, run)
        if config.train.steps:  # of epochs the number is known with the data
            check_steps(config.train.steps, config, run)
    if config.output.export:
        check_new_folder(config.output.export, "output.export")
        _check_export(config)
    if is_run_here:
        check_disks(config, decoder_config(config.model))


def _check_export(config: RunConfig) -> None:
    """Refuses an export into a folder that the run itself fills."""
    export = Path(config.output.export).absolute()
    if export == Path(config.output.folder).absolute():
        raise ValueError("output.export and output.folder are the same folder; change one of them")
    for key, folder in (("output.folder", config.output.folder), ("data.cache", config.data.cache)):
        if folder and export in Path(folder).absolute().parents:
            raise ValueError(
                f"output.export: {config.output.export} contains {key}, {folder}, so it would not "
                "be empty at the end; name a folder of its own"
            )


def changed_settings(config: RunConfig, run: Path) -> list[str]:
    """Settings that differ from the run's own, as text; a ValueError if one must not change."""
    before = load_config(str(run / CONFIG))
    changes = []
    for section, kind in SECTIONS.items():
        for field in fields(kind):
            key = f"{section}.{field.name}"
            was, now = (getattr(getattr(c, section), field.name) for c in (before, config))
            if was == now or key.startswith(UNREPORTED) or _is_own_choice(key, config):
                continue
            if _is_fixed(key, before, config):
                raise ValueError(
                    f"{key} was {was!r} in {run} and is now {now!r}; a run resumes with the data "
                    "and the model it began with, so set it back, or leave --resume out"
                )
            changes.append(f"{key} was {was!r} and is {now!r} from here on")
    return changes


def _is_fixed(key: str, before: RunConfig, config: RunConfig) -> bool:
    """Whether a change of the key would make it another run.

    The base may be in another folder: checkpoints know it by its content.
    """
    section, _, name = key.partition(".")
    if key == "model.from_hf" and before.model.from_hf and config.model.from_hf:
        return False
    return section == "model" or (section == "data" and name not in MAY_CHANGE)


def _is_own_choice(key: str, config: RunConfig) -> bool:
    """Whether a run decides about the key itself: buckets, for CUDA graphs."""
    return key == "plan.buckets" and not config.plan.buckets and bool(config.graph.layers)


def check_steps(steps: int, config: RunConfig, run: Path) -> None:
    """Refuses to end a run after fewer steps than it has done. steps: of the whole run."""
    done = reached_step(run) or 0
    if steps < done:
        epochs = "" if config.train.steps else f", because train.epochs is {config.train.epochs}"
        raise ValueError(
            f"{run} has already done {done} steps, more than the {steps} asked for{epochs}; raise "
            f"train.steps to continue, set train.steps={done} to finish it now, or leave --resume "
            "out to begin a new run"
        )


@contextmanager
def open_run(
    config: RunConfig, start: Start, topology: "Topology", *, steps: int
) -> Iterator[OpenRun]:
    """Opens the run's folder on rank 0, for all ranks, which enter together.

    All checks come first. steps: of the whole run.
    """
    from longshore.distributed.collectives import agreed

    with ExitStack() as locked:
        mine = OpenRun(Path(), False)
        with agreed(topology.groups):
            if topology.rank == 0:
                with writing(Path(config.output.folder), then="start again"):
                    mine = _open(config, start, locked, steps=steps)
        folder, is_resumed = _from_first([str(mine.folder), str(mine.is_resumed)], topology.groups)
        yield replace(
            mine,
            folder=Path(folder),
            is_resumed=is_resumed == "True",
            is_forced=start.is_forced,
        )


def _open(config: RunConfig, start: Start, locked: ExitStack, *, steps: int) -> OpenRun:
    """Rank 0's part. locked: closes the lock when the run ends."""
    run = _run_to_resume(config, start)
    if run is not None:
        lock = _locked(run, start, locked)
        shutil.rmtree(run / HEARTBEATS, ignore_errors=True)  # of ranks that were killed
        check_steps(steps, config, run)
        return OpenRun(run, True, tuple(changed_settings(config, run)), lock=lock)
    folder = make_run_folder(config.output.folder)
    try:
        lock = _locked(folder, start, locked)
        write_config(config, folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)  # nothing is in it yet
        raise
    note = f"--resume: there is no run to resume yet, so {folder} is a new one"
    return OpenRun(folder, False, note=note if start.is_asked else "", lock=lock)


def _locked(run: Path, start: Start, locked: ExitStack) -> TextIOWrapper | None:
    lock = locked.enter_context(lock_run(run, start.job))
    return lock if os.fstat(lock.fileno()).st_nlink else None


def _run_to_resume(config: RunConfig, start: Start) -> Path | None:
    """The folder of the run to resume, or None to make a new one."""
    run = find_run(config.output.folder) if start.resume else None
    if run is None or start.is_asked:
        return run
    return run if job_of(run) == start.job else None


def load_checkpoint(
    run: OpenRun,
    checkpoints: "Checkpoints",
    loader: "Loader",
    *,
    steps: int,
    refiner: "Refiner | None" = None,
) -> tuple[int, int, list[str]]:
    """Loads the newest checkpoint of a resumed run into its model, optimizer, loader and refiner.

    Returns the steps and the updates done, and notes for the user. All ranks call it together.
    """
    from longshore.distributed.collectives import agreed
    from longshore.train.checkpoint import same_data

    if not run.is_resumed:
        return 0, 0, [run.note] if run.note else []
    with agreed(checkpoints.topology.groups):
        if checkpoints.topology.rank == 0:
            remove_leftovers(run.folder)
    position, notes = checkpoints.load_newest()
    if position is None:
        notes.append(f"{run.folder} has no checkpoint, so it begins with step 1")
        return 0, 0, [*notes, *run.changes]
    with agreed(checkpoints.topology.groups):
        data = loader.steps.describe()
        state, warnings = same_data(position.loader, data, is_forced=run.is_forced)
        loader.load_state_dict(state)
        if refiner is not None:
            warnings += refiner.load(state, position.step)
    reached = f"{run.folder} resumes after step {position.step}"
    if position.step >= steps:
        reached = (
            f"{run.folder} is already finished: step {position.step} of {steps} is done; "
            "a larger train.steps or train.epochs trains it further"
        )
    return position.step, position.updates, [*notes, *warnings, reached, *run.changes]


def keep_settings(config: RunConfig, run: OpenRun, topology: "Topology", *, step: int) -> None:
    """Writes the settings of a resumed run, whose first step has just worked with them."""
    from longshore.distributed.collectives import agreed

    if not run.is_resumed:
        return
    with agreed(topology.groups):
        if topology.rank == 0:
            with writing(run.folder):
                change_config(config, run, step=step)


def change_config(config: RunConfig, run: OpenRun, *, step: int) -> None:
    """On rank 0: the settings from this step on, where they differ from those before."""
    name = load_config(str(run.folder / CONFIG)).output.folder
    if run.changes:
        keep_config(run.folder, f"config-until-step-{step}")
    write_config(replace(config, output=replace(config.output, folder=name)), run.folder)


def restore_folder(config: RunConfig, run: OpenRun, topology: "Topology") -> None:
    """Makes a lost folder again, with what it takes to resume from a checkpoint in it."""
    from longshore.distributed.collectives import agreed

    with agreed(topology.groups):
        if topology.rank == 0:
            with writing(run.folder, then="start again"):
                run.folder.mkdir(parents=True, exist_ok=True)
                write_config(config, run.folder)


def _from_first(texts: list[str], groups: "Groups") -> list[str]:
    """The texts of rank 0, on all ranks."""
    import torch

    from longshore.distributed.collectives import gather_rows

    text = list("\0".join(texts).encode())
    rows = torch.tensor(text, dtype=torch.int64, device=groups.device).view(-1, 1)
    first = gather_rows(rows, groups.world, expected=ROOM)[0]
    return bytes(first.view(-1).tolist()).decode().split("\0")
