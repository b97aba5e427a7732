"""Files: folders that appear atomically, JSON with a checksum, free disk space, text for terminals.

In: a path and what to write. Out: a folder that is complete or absent, because it is written under
another name and renamed; a file with its old or its new content; or JSON with its own SHA-256:

    with new_folder("out/model") as partial:      out/.model.partial-4711
        (partial / "config.json").write_text(…)
    # now out/model exists

    sealed_json({"step": 40})         {"step": 40, "sha256": "9f86d081…"}
    open_sealed(raw)                  {"step": 40, …}; a ValueError if any bit of raw was changed

The checksum is computed with zeros in its own place. It detects accidents, not forgery.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

TEMPORARY = "longshore-"
OWNER = "owner"
SEAL = "sha256"
BLANK = b"0" * 64
MOST_JSON_BYTES = 1_000_000_000  # an index of a million tensors has a tenth of this
SPARE = 1 << 20  # bytes next to a big file: metrics, names, JSON
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PROTECTED = (errno.EACCES, errno.EPERM, errno.EROFS)
PLAIN = re.compile(r"[\n\t\x20-\x7e]*")
KEPT = "\n\t\u200c\u200d\u00ad"
ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")


def check_new(folder: str | Path) -> Path:
    """Raises ValueError if the path already holds something."""
    path = Path(folder)
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"{path} is not empty; name a new folder, or remove it first")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"{path} is not a folder; name a new folder")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be created, because {above} is not a folder")
    return path


@contextlib.contextmanager
def new_folder(folder: str | Path, *, is_replaced: bool = False) -> Iterator[Path]:
    """Yields the temporary folder; after an error it is removed.

    is_replaced: an existing folder stays until the new one is complete.
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
    """Removes what killed processes left, but not the folder of one that still runs."""
    for leftover in [path for path in folder.iterdir() if path.name.startswith(start)]:
        pid = leftover.name.removeprefix(start).removesuffix("-old")
        if pid == str(os.getpid()) or (pid.isdecimal() and not _is_alive(int(pid))):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


@contextlib.contextmanager
def temporary_folder(kind: str = "") -> Iterator[str]:
    """A folder of this process's own; first removes those that killed processes have left.

    Its owner holds a lock in it: a process number may be that of another container, or used again.
    """
    _remove_ownerless(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=TEMPORARY + kind) as folder:
        new = Path(folder, f".{OWNER}")
        with new.open("w") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
                new.rename(Path(folder, OWNER))  # only now, so that nobody finds it unlocked
            yield folder


def _remove_ownerless(parent: Path) -> None:
    """Removes this user's temporary folders whose owner is gone."""
    for folder in parent.glob(f"{TEMPORARY}*"):
        with suppress(OSError):  # it is locked, somebody else's, or just being removed
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                with (folder / OWNER).open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


def sealed_json(data: Mapping[str, Any], *, indent: int | None = None) -> bytes:
    """The data as JSON with a checksum as its last key."""
    blank = {**data, SEAL: BLANK.decode()}
    raw = json.dumps(blank, indent=indent, ensure_ascii=False).encode() + b"\n"
    head, _, tail = raw.rpartition(BLANK)
    return head + hashlib.sha256(raw).hexdigest().encode() + tail


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - as json.loads
    """What JSON from a file says; a ValueError also where it is nested too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects are nested too deep") from None


def read_json_object(path: Path, *, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file, which has at most `most_bytes`."""
    if path.is_file() and (size := path.stat().st_size) > most_bytes:
        raise ValueError(f"{path} has {size:,} bytes; the limit is {most_bytes:,}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {path.name}" if path.parent.is_dir() else "is not a folder"
        raise ValueError(f"{path.parent} {what}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ValueError(f"{path} is broken: its lists and objects are nested too deep") from None
    except ValueError:
        raise ValueError(f"{path} is broken: it is not JSON") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is broken: it must hold a JSON object")
    return data


def open_sealed(raw: bytes) -> dict[str, Any]:
    """What sealed_json was given; a ValueError if any byte has changed."""
    data = parse_json(raw)
    seal = data.pop(SEAL, None) if isinstance(data, dict) else None
    if not isinstance(seal, str) or len(seal) != len(BLANK):
        raise ValueError(f"it has no {SEAL}")
    head, separator, tail = raw.rpartition(seal.encode())
    if not separator or hashlib.sha256(head + BLANK + tail).hexdigest() != seal:
        raise ValueError("its checksum does not match")
    assert isinstance(data, dict)
    return data


def write_atomically(path: str | Path, data: str | bytes) -> None:
    """Writes a file atomically: it has its old or its new content, never half of either."""
    content = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced
        target.write_bytes(content)
        return
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o777)
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, reason(error), str(path)) from None
        raise


def check_room(folder: Path, needed: int) -> None:
    """Raises the OSError of a full disk, before writing, if there is too little room."""
    free = free_bytes(folder)
    if free is not None and needed + SPARE > free:
        raise OSError(
            errno.ENOSPC,
            f"it takes {size_text(needed + SPARE)}, but only {size_text(free)} are free",
        )


def free_bytes(folder: Path) -> int | None:
    """Bytes this user may still write there; None if the system does not know."""
    above = next((p for p in (folder.absolute(), *folder.absolute().parents) if p.exists()), None)
    try:
        state = os.statvfs(above) if above else None
    except OSError:
        return None
    return state.f_bavail * state.f_frsize if state and state.f_blocks else None


def reason(error: OSError) -> str:
    """Why the system refused, without numbers and names."""
    return error.strerror or str(error) or type(error).__name__


def way_out(error: OSError) -> str:
    """The advice for an error, to be followed by "then …"."""
    if error.errno in FULL:
        return "make room there"
    if error.errno == errno.ELOOP:
        return "put a copy of the file in its place"
    return "make it writable" if error.errno in PROTECTED else "check the disk"


def size_text(size: float) -> str:
    """1536 is "1.5 kB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def printable(text: str) -> str:
    """The text with what a terminal would execute escaped, "\\x1b[2J" as the letters \\x1b[2J.

    Escaped are control characters, characters that change the writing direction or hide text, other
    line separators, and lone surrogates; newlines, tabs and the joiners of scripts and emoji stay.
    """
    if PLAIN.fullmatch(text):
        return text
    return "".join(_escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    if letter in KEPT or unicodedata.category(letter) not in ESCAPED:
        return letter
    code = ord(letter)
    if code < 0x80:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
