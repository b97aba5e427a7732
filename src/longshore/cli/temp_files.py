"""The environment of a command: torch's own files stay out of the shared temporary folder.

In: this process's environment. Out: the same with two settings for torch, unless they are set. With
them torch writes no /tmp/perf-PID.map and no /tmp/torchinductor_USER, names that others on the
machine can guess and take before; what it compiles is kept in ~/.cache/longshore/torchinductor.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def keep_out_of_temp() -> None:
    """To be called before torch is imported; processes that are started inherit it."""
    if not {"ONEDNN_JIT_PROFILE", "DNNL_JIT_PROFILE"} & os.environ.keys():
        os.environ["ONEDNN_JIT_PROFILE"] = "0"
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_cache())


def _cache() -> Path:
    """A folder of this user's, made when torch needs it; without a home, a new one for now."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(given or os.path.expanduser("~"))
    if home.is_absolute() and home.is_dir() and os.access(home, os.W_OK):
        return (home if given else home / ".cache") / "longshore" / "torchinductor"
    folder = tempfile.mkdtemp(prefix="longshore-torchinductor-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
