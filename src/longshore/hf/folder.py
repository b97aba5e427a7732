"""A folder that appears whole or not at all. No torch.

In: the path wanted. Out: a temporary folder beside it to write into, renamed at the end:

    with new_folder("out/model") as partial:      out/.model.partial-4711
        (partial / "config.json").write_text(…)
    # now out/model is there
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def check_new(folder: str | Path) -> Path:
    """Refuses a path that holds something already."""
    path = Path(folder)
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"{path} is not empty; name a new folder, or remove it first")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"{path} is not a folder; name a new folder")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be made, because {above} is not a folder")
    return path


@contextlib.contextmanager
def new_folder(folder: str | Path, *, is_replaced: bool = False) -> Iterator[Path]:
    """The temporary folder; after an error it is removed and nothing is left.

    is_replaced: a folder that is there already stays until the new one is whole.
    """
    path = Path(folder).absolute() if is_replaced else check_new(folder).absolute()
    start = f".{path.name}.partial-"
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent, start)
    partial, old = (path.parent / f"{start}{os.getpid()}{end}" for end in ("", "-old"))
    partial.mkdir()
    try:
        yield partial
        if is_replaced and path.exists():
            path.rename(old)
        else:
            check_new(folder)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove_leftovers(folder: Path, start: str) -> None:
    """What writers that were killed have left; not of one that is still at work."""
    for left in [path for path in folder.iterdir() if path.name.startswith(start)]:
        pid = left.name.removeprefix(start).removesuffix("-old")
        if pid == str(os.getpid()) or (pid.isdecimal() and not _is_alive(int(pid))):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
