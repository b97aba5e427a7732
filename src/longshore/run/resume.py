"""Going on with a run: which one, and what of its configuration may differ.

In: a configuration and the folder of an earlier run. Out: the settings that differ, or a ValueError
where they would change the order of the data or the model. Ranks, capacity, policy, the learning
rate and the number of steps may change; with train.steps 100 before and 200 now:

    train.steps was 100 and is 200 from here on

A run that has done 13 steps cannot end after 2: `check_steps` refuses that before anything changes.
A rank that torchrun restarts goes on by itself, but only with a run that the same torchrun began,
whose name stands in the run's lock.
"""

import fcntl
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from io import TextIOWrapper
from pathlib import Path

from longshore.config.load import load_config
from longshore.config.schema import SECTIONS, RunConfig
from longshore.run.folder import CONFIG, check_new_folder, check_run_folder, find_run
from longshore.train.checkpoint_files import newest_complete

MAY_CHANGE = {"prefetch", "cache", "eval_path", "eval_mock", "eval_count"}  # of data
UNTOLD = ("output.", "parallel.ranks", "plan.capacity")
LOCK = ".lock"
WAIT_S = 15.0  # for the ranks of a run that was just killed
SHOWN_RUNS = 5


@dataclass(frozen=True, slots=True)
class Start:
    """How a run starts. resume: it goes on, where there is something to go on with.

    is_asked: the user wants it, and torchrun has not only restarted. attempt: of torchrun, from 0.
    job: of torchrun, which names all its attempts alike. is_forced: also with other data.
    """

    is_asked: bool = False
    attempt: int = 0
    job: str = ""
    is_forced: bool = False

    @property
    def resume(self) -> bool:
        return self.is_asked or self.attempt > 0


FRESH = Start()


def run_to_resume(config: RunConfig, start: Start) -> Path | None:
    """The folder to go on in, or None to make a new one."""
    found = find_run(config.output.folder) if start.resume else None
    if found is None or start.is_asked:
        return found
    return found if _job_of(found) == start.job else None


def changed_settings(config: RunConfig, run: Path) -> list[str]:
    """What differs from the run's own settings, in words."""
    before = load_config(str(run / CONFIG))
    told = []
    for section, kind in SECTIONS.items():
        for field in fields(kind):
            key = f"{section}.{field.name}"
            was, now = (getattr(getattr(c, section), field.name) for c in (before, config))
            if was == now or key.startswith(UNTOLD):
                continue
            if section == "model" or (section == "data" and field.name not in MAY_CHANGE):
                raise ValueError(
                    f"{key} was {was!r} in {run} and is {now!r}; a run goes on with the data and "
                    "the model it began with, so set it as it was, or leave --resume out"
                )
            told.append(f"{key} was {was!r} and is {now!r} from here on")
    return told


def reached_step(run: Path) -> int | None:
    """The step of the run's newest checkpoint; None if it has none."""
    newest = newest_complete(run)
    return None if newest is None else int(newest.name.partition("-")[2])


def check_steps(steps: int, config: RunConfig, run: Path) -> None:
    """Refuses to end a run after fewer steps than it has done. steps: of the whole run."""
    done = reached_step(run) or 0
    if steps < done:
        epochs = "" if config.train.steps else f", because train.epochs is {config.train.epochs}"
        raise ValueError(
            f"{run} has done {done} steps, and is to end after {steps}{epochs}; give more to train "
            f"it further, train.steps={done} to end it where it stands, or leave --resume out to "
            "begin a new run"
        )


def newest_runs(folder: str = "runs") -> str:
    """The runs in a folder, for one who has to name one: how far each came, and how to resume."""
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


def lock_run(run: Path, start: Start) -> TextIOWrapper:
    """Holds the run for this process alone, until the file is closed or the process ends."""
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
        file.write(start.job)
        file.flush()
        return file


def _job_of(run: Path) -> str | None:
    with suppress(OSError):
        return (run / LOCK).read_text(encoding="utf-8")
    return None


def check_output(config: RunConfig, start: Start) -> None:
    """Refuses folders that the run cannot write, and a resume that would change the run."""
    run = find_run(config.output.folder) if start.resume else None
    if run is None:
        check_run_folder(config.output.folder)
    else:
        changed_settings(config, run)
        if config.train.steps:  # of epochs the number is known with the data
            check_steps(config.train.steps, config, run)
    if config.output.export:
        check_new_folder(config.output.export, "output.export")
        if Path(config.output.export).absolute() == Path(config.output.folder).absolute():
            raise ValueError("output.export is output.folder; name a folder of its own")
