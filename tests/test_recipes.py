"""Every recipe loads and fits the machine it names; every launch script starts what it says."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from longshore.arch.presets import PRESETS
from longshore.cli.main import main
from longshore.config.check import check_config, decoder_config
from longshore.config.load import load_config
from longshore.run.auto import resolve

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))
SCRIPTS = sorted((FOLDER / "launch").glob("*.sh"))
FOR = re.compile(r"^# For (\d+) nodes? of (\d+) (GPUs? with (\d+) GiB|CPU processes)", re.MULTILINE)
LONGEST = re.compile(r"sequences of up to ([\d,]+) tokens")
START = re.compile(r"recipes/([\w.-]+\.toml)")
STAND_IN = """\
#!/usr/bin/env bash
[ "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" = 1 ] || exit 3
printf '%s\\n' "$@" > "$ARGUMENTS"
"""
SLURM = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "123456"}


def stated(recipe):
    """Ranks, GiB of each (8 for a process on a CPU) and the longest sequence, from the header."""
    text = recipe.read_text()
    nodes, each, _, memory = FOR.search(text).groups()
    return int(nodes) * int(each), int(memory or 8), int(LONGEST.search(text)[1].replace(",", ""))


def loaded(recipe, longest):
    """The recipe on made-up data, one sequence of which is the longest it is made for."""
    mock = f'data.mock={{mode = "distribution", type = "fixed", mean_seq_len = {longest}}}'
    return load_config(str(recipe), [mock, "data.count=2"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_fits_the_machine_it_names(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks, memory, longest = stated(recipe)
    config = loaded(recipe, longest)
    check_config(config, ranks)
    decoder = decoder_config(config.model)
    dtype = "float32" if config.train.device == "cpu" else "bfloat16"
    # It refuses what does not fit: the model, or the longest sequence on all ranks.
    resolved = resolve(
        config,
        decoder,
        lanes=ranks,
        dtype=dtype,
        device="cpu" if dtype == "float32" else "cuda",
        memory=memory << 30,
        longest=longest,
    )
    if config.data.batch_tokens:
        assert config.data.batch_tokens >= ranks * resolved.capacity, "less than a round"
    assert recipe.stem.startswith(config.model.preset)
    assert config.parallel.ranks == (ranks if dtype == "float32" else 0)
    assert set(START.findall(recipe.read_text())) == {recipe.name}, "how to start it"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_is_named_after_its_machine(recipe):
    nodes, each, kind, _ = FOR.search(recipe.read_text()).groups()
    machine = f"{nodes}nodes" if nodes != "1" else f"{each}gpu{'s' if each != '1' else ''}"
    assert recipe.stem.endswith("-cpu" if kind.startswith("CPU") else f"-{machine}")


def test_refuses_a_machine_that_is_too_small(tmp_path, monkeypatch):
    """The check above can fail: 8B parameters do not fit on two GPUs."""
    monkeypatch.chdir(tmp_path)
    config = loaded(FOLDER / "qwen3-8b-8gpus.toml", 131072)
    with pytest.raises(ValueError, match="fit"):
        resolve(
            config,
            decoder_config(config.model),
            lanes=2,
            dtype="bfloat16",
            device="cuda",
            memory=80 << 30,
            longest=131072,
        )


def test_every_preset_has_a_recipe_and_every_recipe_a_mention():
    made = {load_config(str(recipe)).model.preset for recipe in RECIPES}
    assert made == set(PRESETS)
    readme = (FOLDER / "README.md").read_text()
    for recipe in RECIPES:
        assert recipe.name in readme or recipe.name.removesuffix("-cpu.toml") in readme
    for name in set(re.findall(r"`([\w.-]+\.toml)`", readme)):
        assert (FOLDER / name).is_file(), name
    for name in set(re.findall(r"launch/[\w.-]+", readme)):
        assert (FOLDER / name).is_file(), name


def test_recipes_differ_from_the_demo_by_keys_that_exist(capsys):
    """Words behind a recipe reach it, as the README shows."""
    recipe = FOLDER / "tiny-llama-cpu.toml"
    assert main(["train", str(recipe), "train.steps=7", "--print-config"]) == 0
    assert "steps = 7" in capsys.readouterr().out


def started(script, folder, *words, **environment):
    """What the script gives torchrun, read by torchrun's own parser."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    stand_ins = {
        "torchrun": STAND_IN,
        "srun": '#!/usr/bin/env bash\nshift\nexec "$@"\n',
        "scontrol": "#!/usr/bin/env bash\nprintf 'a1\\na2\\n'\n",
    }
    for name, text in stand_ins.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}"
    given = {"PATH": path, "ARGUMENTS": str(folder / "arguments"), **environment}
    subprocess.run(["bash", script, *words], env=given, check=True, timeout=30)
    arguments = (folder / "arguments").read_text().splitlines()
    return get_args_parser().parse_args(arguments)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_and_executable(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    assert "set -euo pipefail" in script.read_text()


def check_work(args, *words):
    """It runs the command with the recipe and the words, under a real name."""
    assert args.module
    assert args.training_script == "longshore.cli.main"
    assert args.training_script_args == ["train", *words]


WORDS = ("recipes/x.toml", "data.path=a folder")


def test_one_node(tmp_path):
    args = started(FOLDER / "launch/one-node.sh", tmp_path, *WORDS, GPUS="2")
    assert (args.standalone, args.nproc_per_node, args.max_restarts) == (True, "2", 3)
    check_work(args, *WORDS)


def test_several_nodes(tmp_path):
    given = {"NODES": "3", "HEAD": "first", "PORT": "1234", "RESTARTS": "1", "RUN": "r7"}
    args = started(FOLDER / "launch/several-nodes.sh", tmp_path, *WORDS, **given)
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("3", "gpu", 1)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "first:1234")
    assert args.rdzv_id == "r7"
    check_work(args, *WORDS)


@pytest.mark.parametrize("missing", ["NODES", "HEAD", "RUN"])
def test_several_nodes_says_what_is_missing(missing):
    given = {"PATH": os.environ["PATH"], "NODES": "2", "HEAD": "first", "RUN": "r7"}
    del given[missing]
    done = subprocess.run(
        ["bash", FOLDER / "launch/several-nodes.sh"],
        env=given,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0
    assert f"{missing}: set it to" in done.stderr


def test_slurm(tmp_path):
    script = FOLDER / "launch/slurm.sh"
    args = started(script, tmp_path, *WORDS, **SLURM)
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("2", "gpu", "123456")
    assert args.rdzv_endpoint == f"a1:{20000 + 123456 % 20000}"
    check_work(args, *WORDS)
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : 1 + len(options)] == options, "sbatch reads no further than the first command"


def test_slurm_resumes_what_was_queued_again(tmp_path):
    script = FOLDER / "launch/slurm.sh"
    args = started(script, tmp_path, *WORDS, **SLURM, SLURM_RESTART_COUNT="1")
    check_work(args, *WORDS, "--resume")


WAITS = """\
#!/usr/bin/env bash
trap 'touch stopped; exit 1' TERM
echo $$ > srun.pid
while true; do sleep 0.05; done
"""


def test_slurm_stops_in_time_and_queues_again(tmp_path):
    """At its own signal the ranks get SIGTERM; once they have ended the job is queued again."""
    stand_ins = {
        "srun": WAITS,
        "scancel": '#!/usr/bin/env bash\necho "$@" > cancelled\nkill -TERM "$(cat srun.pid)"\n',
        "scontrol": "#!/usr/bin/env bash\necho \"$@\" >> controlled\nprintf 'a1\\na2\\n'\n",
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **SLURM}
    script = FOLDER / "launch/slurm.sh"
    process = subprocess.Popen(
        ["bash", script, *WORDS], cwd=tmp_path, env=environment, start_new_session=True
    )
    try:
        while not (tmp_path / "srun.pid").exists() or not (tmp_path / "srun.pid").read_text():
            time.sleep(0.02)
            assert process.poll() is None
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=30) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "stopped").exists()
    assert (tmp_path / "cancelled").read_text() == "--signal=TERM 123456.0\n"
    assert (tmp_path / "controlled").read_text().splitlines()[-1] == "requeue 123456"
    options = script.read_text()
    assert "#SBATCH --signal=B:USR1@300\n" in options
    assert "#SBATCH --requeue\n" in options


def test_kubernetes():
    job = yaml.safe_load((FOLDER / "launch/kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    (name,) = spec["pytorchReplicaSpecs"]
    worker = spec["pytorchReplicaSpecs"][name]
    nodes, elastic = worker["replicas"], spec["elasticPolicy"]
    assert (name, elastic["rdzvBackend"]) == ("Worker", "c10d")
    assert (elastic["minReplicas"], elastic["maxReplicas"]) == (nodes, nodes)
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["env"] == [{"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
    torchrun, *arguments = container["command"]
    args = get_args_parser().parse_args(arguments)
    recipe, *_ = args.training_script_args[1:]
    assert torchrun == "torchrun"
    check_work(args, recipe, "data.path=/shared/prepared")
    ranks, _, _ = stated(FOLDER / Path(recipe).name)
    assert ranks == nodes * int(spec["nprocPerNode"])
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_only_scripts_read_the_environment():
    """A recipe means the same wherever it is run."""
    for recipe in RECIPES:
        lines = recipe.read_text().splitlines()
        assert "$" not in "\n".join(line for line in lines if not line.startswith("#"))
