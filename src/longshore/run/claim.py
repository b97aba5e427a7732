"""The folder of a run, made or found by rank 0 and known to all ranks.

In: a settled configuration and how the run starts. Out: Claimed. Rank 0 holds the run's lock, so
that nobody else goes on with a run that is being trained. All checks come first: an earlier run's
config.toml changes once the first step with other settings has worked, and the settings before stay
as config-until-step-40.toml (or -2, -3, …: a kept configuration is never overwritten).
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from longshore.config.load import load_config
from longshore.config.schema import RunConfig
from longshore.distributed.collectives import agreed, gather_rows
from longshore.distributed.topology import Groups, Topology
from longshore.run.folder import CONFIG, make_run_folder
from longshore.run.resume import (
    Start,
    changed_settings,
    check_steps,
    lock_run,
    run_to_resume,
)
from longshore.train.record import writing

ROOM = 256  # bytes of a path in the first collective


@dataclass(frozen=True, slots=True)
class Claimed:
    """is_resumed: whether an earlier run is in it. changes: from its settings, in words.

    note: what else to say, "" for nothing. is_forced: it resumes with other data too.
    """

    folder: Path
    is_resumed: bool
    changes: tuple[str, ...] = ()
    note: str = ""
    is_forced: bool = False


@contextmanager
def claimed_run(
    config: RunConfig, start: Start, topology: Topology, *, steps: int
) -> Iterator[Claimed]:
    """All ranks enter it together. steps: of the whole run."""
    with ExitStack() as held:
        mine = Claimed(Path(), False)
        with agreed(topology.groups):
            if topology.rank == 0:
                with writing(Path(config.output.folder), then="start again"):
                    mine = _claim(config, start, held, steps=steps)
        told = _from_first([str(mine.folder), str(mine.is_resumed)], topology.groups)
        yield replace(
            mine,
            folder=Path(told[0]),
            is_resumed=told[1] == "True",
            is_forced=start.is_forced,
        )


def _claim(config: RunConfig, start: Start, held: ExitStack, *, steps: int) -> Claimed:
    run = run_to_resume(config, start)
    if run is None:
        folder = make_run_folder(config.output.folder)
        try:
            held.enter_context(lock_run(folder, start))
            write_config(config, folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)  # nothing is in it yet
            raise
        note = f"--resume: there is no run to resume yet, so {folder} is a new one"
        return Claimed(folder, False, note=note if start.is_asked else "")
    held.enter_context(lock_run(run, start))
    check_steps(steps, config, run)
    return Claimed(run, True, tuple(changed_settings(config, run)))


def write_config(config: RunConfig, folder: Path) -> None:
    """At once, so that a folder with half a configuration is never found."""
    partial = folder / f".{CONFIG}"
    partial.write_text(config.to_toml(), encoding="utf-8")
    partial.replace(folder / CONFIG)


def change_config(config: RunConfig, claimed: Claimed, *, step: int) -> None:
    """On rank 0: the settings from this step on, where they differ from those before."""
    path = claimed.folder / CONFIG
    name = load_config(str(path)).output.folder
    if claimed.changes:
        _keep(path, f"config-until-step-{step}")
    write_config(replace(config, output=replace(config.output, folder=name)), claimed.folder)


def _keep(path: Path, stem: str) -> None:
    """Copies a file beside itself, under a name that nothing has yet."""
    text = path.read_text(encoding="utf-8")
    for name in chain([stem], (f"{stem}-{number}" for number in count(2))):
        kept = path.with_name(f"{name}.toml")
        try:
            with kept.open("x", encoding="utf-8") as out:
                out.write(text)
        except FileExistsError:
            continue
        return


def _from_first(words: list[str], groups: Groups) -> list[str]:
    """The words of rank 0, on all ranks."""
    import torch

    text = list("\0".join(words).encode())
    rows = torch.tensor(text, dtype=torch.int64, device=groups.device).view(-1, 1)
    found = gather_rows(rows, groups.world, room=ROOM)[0]
    return bytes(found.view(-1).tolist()).decode().split("\0")
