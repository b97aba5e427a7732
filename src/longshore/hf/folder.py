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
def new_folder(folder: str | Path) -> Iterator[Path]:
    """The temporary folder; after an error it is removed and nothing is left."""
    path = check_new(folder)
    partial = path.absolute().parent / f".{path.absolute().name}.partial-{os.getpid()}"
    partial.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        check_new(path)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
