"""Several machines: two torchrun agents, started as recipes/launch/several-nodes.sh starts them.

Both run here, on the CPU and a tiny model, and meet at a port that is free when the test begins.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.end_to_end.command import OURS, trained
from tests.metrics_file import read_metrics

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
RECIPE = RECIPES / "qwen3-8b-2nodes.toml"
SCRIPT = RECIPES / "launch" / "several-nodes.sh"
LIMIT_S = 120  # a run takes about 20 s: only a hang takes so long
# The recipe, but for its size: a tiny model, made-up sequences, some of them split over all lanes.
SMALL = (
    "model.preset=tiny-qwen3",
    'data.mock={mode = "distribution", type = "lognormal", min_seq_len = 8, '
    "max_seq_len = 512, mean_seq_len = 64, lognormal_sigma = 1.5}",
    "data.count=32",
    "data.batch_tokens=1024",
    "plan.capacity=128",
    "train.steps=4",
    "train.warmup=1",
    "train.dtype=float64",
    "train.device=cpu",
)


def free_port():
    """A port that nobody has; whoever wants it takes it at once."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start_nodes(folder, *words, nodes=2, ranks=2, restarts=2):
    """Starts the script once for each node, as a user would on machines of his."""
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NODES": str(nodes),
        "GPUS": str(ranks),
        "HEAD": "localhost",
        "RUN": folder.name,
        "PORT": str(free_port()),
        "RESTARTS": str(restarts),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return [
        subprocess.Popen(
            ["bash", SCRIPT, RECIPE, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for _ in range(nodes)
    ]


def finish(agents):
    """The exit code and the output of each; none is left behind."""
    try:
        deadline = time.monotonic() + LIMIT_S
        written = [agent.communicate(timeout=deadline - time.monotonic())[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()  # torchrun ends its workers with itself
        for agent in agents:
            agent.wait(timeout=LIMIT_S)
            agent.stdout.close()
    return [agent.returncode for agent in agents], written


@pytest.mark.long
def test_two_nodes_train_as_four_local_ranks(tmp_path):
    agents = start_nodes(tmp_path, *SMALL, "output.folder=two")
    codes, written = finish(agents)
    assert codes == [0, 0], "\n".join(written)
    assert sum("step 4 of 4" in text for text in written) == 1, "one node tells, the other does not"
    two = read_metrics(tmp_path / "two" / "metrics.jsonl")
    one, _ = trained(tmp_path, "one", RECIPE, *SMALL, "--ranks", "4")
    assert [line["step"] for line in two] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "tokens", "rounds", "efficiency"):
        assert [line[name] for line in two] == [line[name] for line in one], name


def kill_and_return(folder, run, *words, after_step=2):
    """Kills a worker of the second node when `after_step` is written; torchrun starts it again."""
    agents = start_nodes(folder, *words, f"output.folder={run}")
    metrics = folder / run / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT_S
    while not metrics.exists() or len(metrics.read_text().splitlines()) < after_step:
        assert time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.05)
    pid = agents[1].pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    return finish(agents)


@pytest.mark.fuzz
def test_a_node_whose_worker_is_killed_comes_back(tmp_path, is_fuzz):
    """To the losses of a run that nobody disturbed, each step once."""
    if not is_fuzz:
        pytest.skip("over a minute; in `make fuzz`")
    words = (*SMALL, "output.save_every=1", "train.steps=12")
    codes, written = kill_and_return(tmp_path, "two", *words)
    assert codes == [0, 0], "\n".join(written)
    found = read_metrics(tmp_path / "two" / "metrics.jsonl")
    whole, _ = trained(tmp_path, "one", RECIPE, *words, "--ranks", "4")
    assert [line["step"] for line in found] == [*range(1, 13)]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == [line[name] for line in whole], name
