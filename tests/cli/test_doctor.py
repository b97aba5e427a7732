"""`longshore doctor`: it looks at everything, never crashes, and says what is broken."""

import importlib
import io
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longshore.cli import doctor as command
from longshore.cli.doctor import DOCTOR_HELP, DoctorReport, register_doctor
from longshore.cli.launch import RankError
from longshore.cli.options import Parser
from longshore.doctor import machine, ranks
from longshore.doctor.machine import (
    DoctorOptions,
    Finding,
    bad,
    examine,
    findings_of,
    first_line,
    good,
    warn,
)
from longshore.doctor.ranks import RankPlace, RankProbe, with_time_limit

SECTIONS = ["machine", "torch", "devices", "ops", "kernels", "packages", "disk", "ranks"]
HERE = DoctorOptions(gpus=0, ranks=2, folder=Path("runs"))
DRIVER = """\
import argparse
from longshore.cli.doctor import register_doctor
parser = argparse.ArgumentParser()
register_doctor(parser.add_subparsers())
args = parser.parse_args()
args.run(args)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No torchrun, no GPUs, a folder of its own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys):
    """The command with words: its exit code and its stdout."""

    def run_with(*words):
        parser = Parser()
        register_doctor(parser.add_subparsers())
        args = parser.parse_args(["doctor", *words])
        code = 0
        try:
            args.run(args)
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().out

    return run_with


@pytest.fixture
def connected(monkeypatch):
    """Ranks that are connected already."""
    places = tuple(
        RankPlace(rank, 0, rank, "host", "cpu", "Python 3", rank, ((rank, 1), (0, 2)))
        for rank in range(2)
    )
    monkeypatch.setattr(command, "_probe_local", lambda ranks: RankProbe(places, (good("met"),)))


def only(monkeypatch, *findings):
    """Lets `torch` be the only section, with these findings."""
    monkeypatch.setattr(machine, "PROBES", (("torch", lambda setting: iter(findings)),))


def test_this_machine(run):
    """All sections, 80 columns, no broken line, and where each of three local ranks stands."""
    code, out = run("--ranks", "3")
    lines = out.splitlines()
    assert code == 0, out
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    assert max(map(len, lines)) <= 80
    assert "✗" not in out
    assert "\x1b" not in out
    assert "CP groups of 1, 2, 3 lanes: created in" in out
    rows = [line.split(maxsplit=6) for line in lines[lines.index("ranks") :]]
    places = [(row[0], row[3], row[5], row[6]) for row in rows if len(row) == 7 and "cpu" in row]
    # Lane 2 is left over by the groups of two.
    assert places == [
        ("0", "0", "0", "0, 0-1, 0-2"),
        ("1", "1", "1", "1, 0-1, 0-2"),
        ("2", "2", "2", "2, 0-2"),
    ]
    assert lines[-1].startswith("everything that training needs is available")


def test_json(run):
    code, out = run("--ranks", "1", "--json")
    found = json.loads(out)
    assert (code, found["ok"]) == (0, True)
    assert list(found["sections"]) == SECTIONS
    for findings in found["sections"].values():
        for finding in findings:
            assert list(finding) == ["mark", "text", "way_out"]
            assert finding["mark"] in ("ok", "warn")
    (place,) = found["ranks"]
    assert (place["rank"], place["lane"], place["cp_groups"]) == (0, 0, [[0, 1]])


@pytest.mark.long
def test_under_torchrun(tmp_path):
    """The real ranks connect, only rank 0 prints, and a remark of a rank would reach it."""
    (tmp_path / "driver.py").write_text(DRIVER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "driver.py", "doctor"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("everything that training needs is available") == 1
    assert "2 ranks connected over gloo" in done.stdout
    assert re.search(r"\n  1 +0 \S+ +1 +cpu +1 +1, 0-1\n", done.stdout)


@pytest.mark.parametrize(
    ("restarts", "shared", "remarks"), [("3", "True", 1), ("3", "False", 0), ("0", "True", 0)]
)
def test_restarts_of_torchrun(monkeypatch, restarts, shared, remarks):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    found = command._restarts()
    assert [finding.mark for finding in found] == ["warn"] * remarks


def test_ranks_of_torchrun_are_given(run, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--ranks is 4, but torchrun started 2 processes"):
        run("--ranks", "4")


def test_broken_things_end_with_1(run, connected, monkeypatch):
    only(monkeypatch, good("fine"), warn("odd", "look at it"), bad("gone", "get it"))
    code, out = run()
    assert code == 1
    assert out.splitlines()[:6] == [
        "torch",
        "  ✓ fine",
        "  ! odd",
        "    → look at it",
        "  ✗ gone",
        "    → get it",
    ]
    assert out.splitlines()[-1] == "1 problem prevents training; 1 warning"


def test_a_probe_that_fails_is_a_remark(run, connected, monkeypatch):
    def fails(setting):
        yield good("so far")
        raise OSError("no such thing\nand more")

    monkeypatch.setattr(machine, "PROBES", (("torch", fails),))
    code, out = run()
    assert code == 0
    assert "  ✓ so far\n  ! the check failed: OSError: no such thing\n" in out


def test_every_probe_survives_a_machine_without_anything(monkeypatch):
    """Nothing can be imported or read: findings, and no exception."""

    def refuse(*args, **kwargs):
        raise PermissionError("no")

    for place in ("os.sysconf", "shutil.disk_usage", "importlib.util.find_spec"):
        monkeypatch.setattr(place, refuse)
    monkeypatch.setitem(sys.modules, "torch", None)
    sections = dict(examine(HERE))
    assert list(sections) == SECTIONS[:-1]
    for name, findings in sections.items():
        assert findings, name
    assert sections["torch"][0].mark == "bad"


def test_without_torch(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out = run()
    assert code == 1
    assert "✗ torch cannot be imported: ModuleNotFoundError" in out
    assert "✗ not tested, because torch cannot be imported" in out


def test_the_command_is_there_without_torch():
    code = "import sys; sys.modules['torch'] = None; import longshore.cli.doctor"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RankError("rank 1 failed:\nTraceback …\n  File …\nTimeoutError: timeout after 9 s"),
            "the ranks could not connect: rank 1 failed: TimeoutError: timeout after 9 s",
        ),
        (
            RuntimeError("connectFullMesh"),
            "the ranks could not connect: RuntimeError: connectFullMesh",
        ),
    ],
)
def test_ranks_that_do_not_meet(run, monkeypatch, error, said):
    def launch(*_):
        raise error

    only(monkeypatch, good("fine"))
    monkeypatch.setattr(command, "launch", launch)
    code, out = run()
    assert code == 1
    assert said in " ".join(out.split())
    assert "GLOO_SOCKET_IFNAME" in out


def test_wrong_answers_of_a_group_are_told(run, monkeypatch):
    only(monkeypatch, good("fine"))
    monkeypatch.setattr(ranks, "gather", lambda shard, group: shard + 1)
    code, out = run("--ranks", "1")
    assert code == 1
    assert "✗ rank 0: the CP group of lanes 0 to 0 gathered [1]" in out


def test_within_ends_what_hangs():
    import threading

    def hangs(stage):
        stage.enter("waiting for rank 7")
        threading.Event().wait(60)

    assert with_time_limit(60, lambda stage: stage.name) == "starting"
    with pytest.raises(KeyError, match="mine"):
        with_time_limit(60, lambda stage: {}["mine"])
    with pytest.raises(
        TimeoutError, match=r"timeout after 0\.05 s in this stage: waiting for rank 7"
    ):
        with_time_limit(0.05, hangs)


PROBED = (
    "attention, attention of MLA, loss, norm, rope, gate, convolution, gated norm, "
    "state-space scan, delta rule: plain torch, match the reference"
)


def test_the_ops_of_a_cpu_in_two_lines():
    assert list(machine.ops(HERE)) == [
        good(PROBED),
        good("experts: torch grouped_mm, matches the reference"),
    ]


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("attention.attention", ["attention", "attention of MLA"]),
        ("cross_entropy.linear_cross_entropy", ["loss"]),
        ("pointwise.add_norm", ["norm"]),
        ("pointwise.norm_rotate", ["rope"]),
        ("pointwise.gated_linear", ["gate"]),
        ("experts.expert_mlp", ["experts"]),
        ("conv.causal_conv", ["convolution"]),
        ("pointwise.norm_before_gate", ["gated norm"]),
        ("ssd.ssd", ["state-space scan"]),
    ],
)
def test_an_op_that_is_wrong(monkeypatch, place, names):
    """Each is compared: an output that is 1% off shows, and only where it is off."""
    module, function = place.split(".")
    place = f"longshore.ops.{module}.{function}"
    right = getattr(importlib.import_module(f"longshore.ops.{module}"), function)

    def off(*given, **settings):
        output = right(*given, **settings)
        return tuple(1.01 * x for x in output) if isinstance(output, tuple) else 1.01 * output

    monkeypatch.setattr(place, off)
    wrong = [finding for finding in machine.ops(HERE) if finding.mark == "bad"]
    assert sorted(name for f in wrong for name in f.text.split(":")[0].split(", ")) == names
    for finding in wrong:
        assert "its output is wrong by 1% of the largest value" in finding.text
        assert "train.kernels=plain" in finding.way_out


def test_a_gradient_that_is_wrong(monkeypatch):
    from longshore.ops import delta_rule

    right = delta_rule.prepare_heads

    def off(q, k, v, *gates, bounds):
        return right(q, k.detach(), v, *gates, bounds=bounds)

    monkeypatch.setattr(delta_rule, "prepare_heads", off)
    (wrong,) = [finding for finding in machine.ops(HERE) if finding.mark == "bad"]
    assert "delta rule: plain torch: gradient 2 of its inputs is wrong by 100%" in wrong.text


def test_an_op_that_fails(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr("longshore.ops.conv.causal_conv", fails)
    (wrong,) = [finding for finding in machine.ops(HERE) if finding.mark == "bad"]
    assert wrong.text == (
        "convolution: no backend was chosen: fails: RuntimeError: no kernel image"
    )


@pytest.mark.parametrize(
    ("backend", "mark", "way_out"),
    [
        ("triton", "ok", ""),
        ("plain torch (triton: triton is not installed)", "warn", "pip install triton"),
        (
            "plain torch (flash-linear-attention: fla is not installed)",
            "warn",
            "pip install 'longshore[gpu]'",
        ),
        (
            "plain torch (flash-linear-attention: its backward is incorrect on Hopper with "
            "Triton 3.6.0)",
            "warn",
            "pip install 'triton>=3.7.1'",
        ),
        ("plain torch (triton: the device is older than compute capability 8.0)", "warn", ""),
    ],
)
def test_plain_torch_on_a_gpu(backend, mark, way_out):
    finding = machine.op_finding(["delta rule"], backend, "", has_gpu=True)
    assert (finding.mark, finding.way_out) == (mark, way_out)
    assert finding.text.startswith(f"delta rule: {backend}, matches the reference")
    assert finding.text.endswith("but is slow") == (mark == "warn")
    assert machine.op_finding(["norm", "gate"], backend, "", has_gpu=False) == good(
        f"norm, gate: {backend}, match the reference"
    )


def test_packages_with_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    versions = {"triton": "3.7.1", "flash-linear-attention": "0.6"}
    monkeypatch.setattr(machine, "_version", lambda package: versions.get(package, ""))
    monkeypatch.setattr("longshore.user_code.is_installed", lambda package: package == "fla")
    installed, flash = machine.kernels(HERE)
    assert installed == good("Triton 3.7.1, flash-linear-attention 0.6")
    assert (flash.mark, flash.way_out) == ("warn", "pip install 'longshore[gpu]'")
    versions.clear()
    assert [finding.mark for finding in machine.kernels(HERE)] == ["warn", "warn"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert [finding.mark for finding in machine.kernels(HERE)] == ["warn", "ok"]


def test_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert machine._open_files(96).mark == "ok"
    assert machine._open_files(97) == warn(
        "open files: the limit is 1,024, but 97 ranks need 1,032", "ulimit -n 1032"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    assert machine._open_files(10**6).mark == "ok"


def test_a_container_with_little_memory(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    limit.write_text(f"{1 << 30}\n")
    monkeypatch.setattr(machine, "LIMIT", limit)
    found = machine._cores_and_memory()
    assert found.mark == "warn"
    assert "this container may use 1.0 GiB" in found.text
    limit.write_text("max\n")
    assert machine._cores_and_memory().mark == "ok"


def test_disk_and_shared_memory(monkeypatch, tmp_path):
    amounts = {"free": 1 << 30, "total": 64 << 20}
    usage = type("Usage", (), amounts)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    monkeypatch.setattr(machine, "SHARED", tmp_path)
    disk, shared = findings_of(machine.storage, HERE)
    assert (disk.mark, disk.text) == ("warn", "runs/: 1.0 GiB of disk left")
    assert (shared.mark, shared.text) == ("warn", f"{tmp_path} has 0.1 GiB")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert findings_of(machine.storage, HERE)[0].mark == "bad"


def test_gpus_that_torch_cannot_use(monkeypatch):
    import warnings

    def unavailable():
        warnings.warn("the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    first, cpu = findings_of(machine.devices, DoctorOptions(2, 2, Path("runs")))
    assert first.mark == "bad"
    assert first.text == "2 GPUs are visible, but torch cannot use them: the driver is too old"
    assert cpu == good("the CPU: works")
    assert findings_of(machine.devices, HERE)[0].mark == "ok"


def test_an_old_torch_and_one_without_gloo(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    assert findings_of(machine.torch_build, HERE)[0].mark == "bad"
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    version, gloo = findings_of(machine.torch_build, HERE)
    assert (version.mark, gloo.mark) == ("ok", "bad")


def test_missing_packages(monkeypatch):
    missing = {"jinja2", "wandb", "tensorboard", "safetensors"}
    monkeypatch.setattr(machine, "version_of", lambda name: None if name in missing else "1")
    assert findings_of(machine.packages, HERE) == (
        bad("safetensors is missing", "pip install safetensors"),
        warn("jinja2 is missing, needed for text", "pip install 'longshore[hf]'"),
        good("optional: transformers 1"),
        good("optional, not installed: tensorboard, wandb"),
    )


def test_differences_between_machines():
    one = RankPlace(0, 0, 0, "a", "cuda:0", "torch 2.11")
    two = RankPlace(
        1, 1, 0, "b", "cuda:0", "torch 2.13", remarks=(warn("little disk", "clear it"),)
    )
    third = RankPlace(2, 1, 1, "b", "cuda:0", "torch 2.13")
    assert ranks._differences([one], "nccl") == []
    assert ranks._differences([one, two, third], "gloo") == [
        warn(
            "rank 1 has torch 2.13, but rank 0 has torch 2.11", "install the same on all machines"
        ),
        warn("several ranks share a GPU, connected over gloo", "start one rank for each GPU"),
        warn("node 1 (b): little disk", "clear it"),
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colour_on_a_terminal_and_letters_that_the_stream_has(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    DoctorReport(terminal, is_json=False).add("torch", [bad("gone", "get it")])
    assert "\x1b[1;31m✗\x1b[0m gone" in terminal.getvalue()
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    DoctorReport(stream, is_json=False).add("torch", [good("fine"), bad("gone – so", "get it")])
    stream.flush()
    assert raw.getvalue().decode() == "torch\n  + fine\n  x gone ? so\n    -> get it\n"


def test_a_table_of_many_ranks_is_cut():
    groups = tuple((0, 1 << i) for i in range(14))
    places = tuple(RankPlace(i, 0, i, "host", "cuda:0", "", i, groups) for i in range(70))
    lines = command._table(RankProbe(places, ()), 80)
    assert max(map(len, lines)) == 80
    assert lines[-1] == "  … and 6 more; --json has all"


def test_errors_in_one_line():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert first_line(UserWarning("old\ndriver")) == "old"
    assert len(first_line(ValueError("x" * 999))) == 200
    assert Finding("ok", "a") == good("a")


def test_times_in_words():
    assert [ranks.words(s) for s in (2.04, 0.5, 0.0123, 0.00123)] == [
        "2.0 s",
        "500 ms",
        "12 ms",
        "1.2 ms",
    ]


def test_help_fits_and_names_the_options():
    assert "--ranks N" in DOCTOR_HELP
    assert "--json" in DOCTOR_HELP
    assert max(map(len, DOCTOR_HELP.splitlines())) <= 100
