"""The environment of a command and its ranks: imports, output, limits, torch's files.

In: nothing but the process. Out: the same process, changed for the time of a block.

    with safe_path(): ...        processes started here do not import from the working folder
    with lossy_output(): ...     a reader that goes away, such as `head`, ends no run

`check_limits` refuses a shell whose limits (ulimit) no run fits into, and `exceeded_limit` finds
them behind an error. `keep_out_of_temp` lasts.
"""

import atexit
import io
import math
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from longshore.distributed.process_group import set_variables
from longshore.files import size_text

FLASH_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
FLASH_CACHE_FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def safe_path() -> AbstractContextManager[None]:
    """Python puts the working folder first of all for `-c`, with which pools start processes."""
    return set_variables({"PYTHONSAFEPATH": "1"})


def working_folder_last() -> None:
    """Makes a user's own loss importable; what is installed comes first."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def send_nowhere(descriptor: int) -> None:
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


class _Lossy(io.FileIO):
    """A file that drops what cannot be written, because its reader is gone."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            send_nowhere(self.fileno())
            with suppress(OSError):
                if self.fileno() == 1:
                    os.write(2, b"longshore: stdout is closed; the run continues without it\n")
            return memoryview(data).nbytes  # type: ignore[arg-type]


@contextmanager
def lossy_output() -> Iterator[None]:
    """stdout and stderr that are dropped when they cannot be written, in place of an error."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lossy(sys.stdout, 1), _lossy(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _lossy(stream: TextIO, number: int) -> TextIO:
    """As it is, if it is none of the process's own."""
    with suppress(OSError, ValueError, AttributeError):
        if stream.fileno() == number and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            return io.TextIOWrapper(
                io.BufferedWriter(_Lossy(number, "w", closefd=False)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering or number == 2,
            )
    return stream


LEAST_MEMORY = 2_000_000_000  # addresses that torch and the smallest model take
LEAST_FILES = 48  # of one rank alone; it had 43 open
OF_MEMORY = (
    "not enough memory",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "failed to map segment",
    "Resource temporarily unavailable",
    "can't start new thread",
)


def check_limits(ranks: int) -> None:
    """Refuses limits of the shell that are too low for any run, before torch is imported."""
    files = LEAST_FILES if ranks == 1 else 80 + 4 * ranks  # each of 2 had 91 open, of 4 104
    if _limit(resource.RLIMIT_NOFILE) < files:
        raise ValueError(_of_files(f"a process of {ranks} rank{'s' * (ranks > 1)} needs {files}"))
    if _limit(resource.RLIMIT_AS) < LEAST_MEMORY:
        raise ValueError(_of_memory(f"torch needs {size_text(LEAST_MEMORY)} and more"))


def exceeded_limit(text: str) -> str:
    """One line if a limit of the shell explains the text of an error; else ""."""
    if "Too many open files" in text:
        return _of_files("the run needs more")
    if any(symptom in text for symptom in OF_MEMORY) and math.isfinite(_limit(resource.RLIMIT_AS)):
        return _of_memory("the run needs more")
    return ""


def _limit(kind: int) -> float:
    soft, _ = resource.getrlimit(kind)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _of_files(needs: str) -> str:
    limit = _limit(resource.RLIMIT_NOFILE)
    return f"the limit is {limit:.0f} open files (ulimit -n), and {needs}; raise it: ulimit -n 4096"


def _of_memory(needs: str) -> str:
    limit = f"{size_text(_limit(resource.RLIMIT_AS))} of addresses (ulimit -v)"
    return f"the limit is {limit}, and {needs}; lift it: ulimit -v unlimited"


def keep_out_of_temp() -> None:
    """Keeps files of torch and of kernels out of the shared temporary folder.

    Unless the variables are set, torch writes /tmp/perf-PID.map and /tmp/torchinductor_USER, names
    that others on the machine can guess and take first. To be called before torch is imported.
    """
    if not {"ONEDNN_JIT_PROFILE", "DNNL_JIT_PROFILE"} & os.environ.keys():
        os.environ["ONEDNN_JIT_PROFILE"] = "0"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _cache("torchinductor")
    # flash-attn-4 loads and runs what it finds in its folder, and keeps nothing unless it is told.
    os.environ.setdefault(FLASH_CACHE, "1")
    if os.environ[FLASH_CACHE] == "1" and FLASH_CACHE_FOLDER not in os.environ:
        os.environ[FLASH_CACHE_FOLDER] = _cache("flash-attention")


def _cache(name: str) -> str:
    """A folder of this user's, made when it is needed; without a home, a new one for now."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given or os.path.expanduser("~"))
    if home.is_absolute() and home.is_dir() and os.access(home, os.W_OK):
        return str((home if given else home / ".cache") / "longshore" / name)
    folder = tempfile.mkdtemp(prefix=f"longshore-{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
