"""The command as a user runs it: a process of its own, in a folder of its own."""

import os
import subprocess
import sys

from tests.metrics_file import read_metrics

LONGSHORE = [sys.executable, "-m", "longshore.cli.main"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LIMIT_S = 300  # far more than any run needs: a hang is a failure


def environment():
    """Of this process, but not of a torchrun above it, and with one thread."""
    others = {name: value for name, value in os.environ.items() if name not in OURS}
    return {**others, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}


def call(folder, *words, command=LONGSHORE):
    """Exit code, stdout and stderr of a command in a folder."""
    done = subprocess.run(
        [*command, *map(str, words)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def trained(folder, run, *words, command=LONGSHORE):
    """The metrics and the output of `longshore train` into folder/run, which must succeed."""
    code, out, err = call(folder, "train", f"output.folder={run}", *words, command=command)
    assert code == 0, err
    return read_metrics(folder / run / "metrics.jsonl"), out


def torchrun(ranks):
    """The command under torchrun."""
    return [*TORCHRUN, str(ranks), *LONGSHORE[1:]]
