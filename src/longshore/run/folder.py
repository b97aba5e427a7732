"""The folder of a run: a new one each time, so that no run writes over another.

In: a name, in which {n} stands for the next free number. Out: a folder that was not there, or was
empty. With runs/demo-1 and runs/demo-3 there, runs/demo-{n} is runs/demo-4; to a run that is to be
gone on with it is runs/demo-3.
"""

import os
import re
from pathlib import Path

NUMBER = "{n}"
CONFIG = "config.toml"
TRIES = 1000


def check_run_folder(folder: str) -> None:
    """Refuses a folder for the run that is in use, or where none can be made."""
    path = Path(folder)
    if path.name.count(NUMBER) > 1 or NUMBER in str(path.parent):
        raise ValueError(f"output.folder is {folder!r}; {NUMBER} may stand once, in its last part")
    check_new_folder(folder, "output.folder")


def check_new_folder(folder: str, key: str) -> None:
    """Refuses a folder that is in use, or where none can be made. key: where its name stands."""
    path = Path(folder)
    if path.exists():
        if not path.is_dir():
            raise ValueError(f"{key}: {folder} is a file; name a folder")
        if inside := sorted(entry.name for entry in path.iterdir()):
            raise ValueError(
                f"{key}: {folder} holds {inside[0]} already; name a new folder, such as "
                f"{_unused(path)}"
            )
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{key}: {folder} cannot be made, {above} is no folder or is protected")


def make_run_folder(folder: str) -> Path:
    """Makes it, on one rank; two runs that start at once get two folders."""
    path = Path(folder)
    try:
        for _ in range(TRIES):
            made = path.with_name(path.name.replace(NUMBER, str(_next_number(path))))
            try:
                made.mkdir(parents=True)
            except FileExistsError:
                if NUMBER in path.name:
                    continue
                check_new_folder(folder, "output.folder")
            return made
    except OSError as error:
        raise ValueError(f"output.folder: {folder} cannot be made ({error.strerror})") from None
    raise ValueError(f"output.folder: {folder} finds no free number")


def find_run(folder: str) -> Path | None:
    """The run of this name, with {n} the newest; None if there is none.

    A newest folder that holds no run is none: going on with one before it would surprise.
    """
    path = Path(folder)
    newest = path.with_name(path.name.replace(NUMBER, str(_next_number(path) - 1)))
    return newest if (newest / CONFIG).is_file() else None


def _unused(path: Path) -> Path:
    numbered = path.with_name(f"{path.name}-{NUMBER}")
    return path.with_name(f"{path.name}-{_next_number(numbered)}")


def _next_number(path: Path) -> int:
    before, _, behind = path.name.partition(NUMBER)
    pattern = re.compile(re.escape(before) + r"(\d{1,9})" + re.escape(behind))
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    taken = [int(found[1]) for name in names if (found := pattern.fullmatch(name))]
    return max(taken, default=0) + 1
