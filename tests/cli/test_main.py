import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longshore.cli.main import main
from longshore.cli.options import FOREIGN_OPTIONS
from longshore.cli.plan import CHOICES, COUNTS
from longshore.plan.lengths_file import Lengths
from longshore.plan.types import POLICIES

LENGTHS = "length\n900\n12000\n\n300\n5000\n77\n"
MACHINE = ("--lanes", "4", "--capacity", "8192")
PROFILE = {"linear": 1, "quadratic": 0, "gather": [0, 0], "node": 8, "pack": 0, "round": 0}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test runs in a folder of its own with a file of lengths."""
    monkeypatch.chdir(tmp_path)
    Path("l.csv").write_text(LENGTHS)
    Path("packs.csv").write_text("length,pack\n900,a\n5000,b\n700,a\n")
    Path("cost.json").write_text(json.dumps(PROFILE))
    return tmp_path


@pytest.fixture
def run(capsys):
    """Runs the command: its exit code, stdout and stderr."""

    def call(*words):
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def plan(run):
    """Plans l.csv with these options, which must work; what was printed, and OUT.json."""

    def call(*words, file="l.csv", machine=MACHINE):
        code, out, err = run("plan", file, *machine, "--json", "out.json", *words)
        assert (code, err) == (0, "")
        return out, json.loads(Path("out.json").read_text())

    return call


def without_clock(data):
    for stats in [*data["steps"], data["total"]]:
        del stats["planning_seconds"]
    return data


def page_data(path):
    found = re.search(r'id="plan-data">(.*?)</script>', Path(path).read_text("utf-8"), re.DOTALL)
    return json.loads(found[1])


def test_a_step_in_words(plan):
    out, _ = plan()
    assert out.startswith(
        "sequences: 5 with 18,277 tokens, the longest 12,000\n"
        "lanes: 4 of 8,192 tokens; policy: mixed\n"
    )
    for name in ("predicted", "bound", "gap", "efficiency", "idle", "padding", "fill", "rounds"):
        assert re.search(rf"^{name} +[0-9]", out, re.MULTILINE), name
    assert "s (estimated)" in out
    assert "sequences at each CP size: " in out
    assert "planned in" in out
    assert "bubble" not in out
    assert out.endswith("plan: out.json\n")


def test_the_json_contract(plan):
    _, data = plan()
    assert {
        *("version", "lanes", "capacity", "policy", "sync", "pp", "vpp", "align"),
        *("max_sequences", "profile", "steps"),
    } <= set(data)
    assert (data["version"], data["lanes"], data["capacity"]) == (1, 4, 8192)
    assert (data["policy"], data["sync"], data["max_sequences"]) == ("mixed", "round", None)
    (step,) = data["steps"]
    assert {
        *("rounds", "predicted", "lower_bound", "efficiency", "imbalance", "fill", "padding"),
        "planning_seconds",
    } <= set(step)
    packs = [pack for round_ in step["rounds"] for pack in round_["packs"]]
    assert sorted(i for pack in packs for i in pack["sequences"]) == [0, 1, 2, 3, 4]
    assert all(
        set(pack) == {"first_lane", "cp_size", "sequences", "tokens_per_lane"} for pack in packs
    )


def test_batch_cuts_the_file_into_steps(plan):
    out, data = plan("--batch", "2")
    assert [step["tokens"] for step in data["steps"]] == [12900, 5300, 77]
    rows = [line.split() for line in out.splitlines()]
    header = next(row for row in rows if row[:1] == ["step"])
    assert header[1:4] == ["predicted", "bound", "gap"]
    first = rows.index(header)
    assert [row[0] for row in rows[first + 1 : first + 5]] == ["1", "2", "3", "all"]
    assert "predicted and bound in s (estimated)" in out


def test_options_reach_the_planner(plan):
    _, data = plan(
        *("--policy", "dynamic", "--min-cp", "2", "--max-cp", "3", "--cp-sizes", "any"),
        *("--max-sequences", "7", "--align", "16", "--sync", "step", "--cost", "cost.json"),
    )
    assert data["cp_sizes"] == [2, 3]
    assert (data["policy"], data["sync"], data["align"]) == ("dynamic", "step", 16)
    assert data["max_sequences"] == 7
    assert data["profile"] == {**PROFILE, "message": 0.0}


def test_one_cp_size(plan):
    _, data = plan("--policy", "static", "--cp-size", "4")
    assert data["steps"][0]["cp_histogram"] == {"4": 5}


def test_times_have_the_profiles_unit(plan):
    out, data = plan("--cost", "cost.json")
    assert "units of the profile" in out
    assert "estimated" not in out
    assert f"{data['steps'][0]['predicted']:,.0f} units" in out


def test_a_pipeline_shows_its_bubble(plan):
    out, data = plan("--pp", "2", "--vpp", "2")
    assert (data["pp"], data["vpp"]) == (2, 2)
    assert re.search(r"^bubble +[0-9.]+% of the step", out, re.MULTILINE)


def test_policy_given_takes_the_packs_of_the_file(plan):
    _, data = plan("--policy", "given", file="packs.csv")
    packs = [pack["sequences"] for round_ in data["steps"][0]["rounds"] for pack in round_["packs"]]
    assert sorted(packs) == [[0, 2], [1]]


def test_gpus_stand_for_lanes(plan):
    machine = ("--gpus", "64", "--tp", "2", "--pp", "4", "--capacity", "8192")
    out, data = plan(machine=machine)
    assert out.startswith("lanes = 64 GPUs / (tp 2 x pp 4) = 8\n")
    assert (data["lanes"], data["pp"]) == (8, 4)
    out, data = plan(machine=("--gpus", "6", "--capacity", "8192"))
    assert out.startswith("lanes = 6 GPUs / (tp 1 x pp 1) = 6\n")


def test_tp_and_pp_divide_the_time_of_the_model(plan):
    """64 GPUs have the same arithmetic to do however the model is split; pp adds its bubble."""
    Path("many.csv").write_text("4000\n" * 512)
    told, predicted = {}, {}
    for words in ((), ("--tp", "4"), ("--pp", "4"), ("--tp", "2", "--pp", "2")):
        machine = ("--gpus", "64", "--capacity", "8192", *words)
        out, data = plan("--policy", "static", file="many.csv", machine=machine)
        told[words], total = out.splitlines()[1], data["total"]
        predicted[words] = total["predicted"] * (1 - total["bubble"])
        assert total["efficiency"] == pytest.approx(1 - total["bubble"], rel=0.05)
    assert [*predicted.values()] == pytest.approx([predicted[()]] * 4, rel=0.05)
    assert told[()].startswith("sequences: ")
    assert told["--tp", "2", "--pp", "2"] == (
        "times: the cost of one GPU, divided by tp 2 x pp 2; what tensor parallelism "
        "communicates is not included"
    )


def test_the_longest_of_all_steps_is_named(run):
    Path("steps.csv").write_text("9000\n20\n40000\n10\n50000\n3\n")
    Path("own.csv").write_text("length,pack\n9000,a\n100,b\n9000,b\n")
    for file, words, told in (
        ("steps.csv", ("--batch", "2"), "steps.csv line 5: its 50000 tokens do not fit"),
        ("steps.csv", ("--batch", "2", "--policy", "padded"), "steps.csv line 5: its 50000"),
        ("own.csv", ("--policy", "given"), "own.csv line 3: pack 'b': its 9100 tokens do not fit"),
    ):
        code, _, err = run("plan", file, "--lanes", "2", "--capacity", "4096", *words)
        assert code == 2
        assert told in err


def test_the_demo_has_its_own_machine(run):
    code, out, _ = run("plan", "--demo", "--json", "demo.json")
    assert code == 0
    assert out.startswith("sequences: 1,024 with ")
    data = json.loads(Path("demo.json").read_text())
    assert (data["lanes"], data["capacity"]) == (32, 16384)
    run("plan", "--demo", "--gpus", "48", "--tp", "2", "--capacity", "32768", "--json", "demo.json")
    data = json.loads(Path("demo.json").read_text())
    assert (data["lanes"], data["capacity"]) == (24, 32768)


def test_two_runs_agree_but_for_the_clock(plan):
    runs = [plan("--batch", "3")[1] for _ in range(2)]
    assert without_clock(runs[0]) == without_clock(runs[1])


def test_the_page_compares_the_policies(plan):
    out, _ = plan("--batch", "2", "--html", "out.html")
    assert out.endswith("page: out.html (open it in a browser)\n")
    data = page_data("out.html")
    assert [row["name"] for row in data["policies"]] == [
        *("mixed", "padded", "static", "balanced", "dynamic")
    ]
    assert all(len(row["steps"]) == 3 for row in data["policies"])


def test_the_page_keeps_a_cp_size_to_those_that_take_it(plan):
    plan("--policy", "static", "--cp-size", "2", "--html", "out.html")
    policies = page_data("out.html")["policies"]
    rows = {row["name"]: row["steps"][0]["cp_histogram"] for row in policies}
    assert rows["static"] == rows["balanced"] == rows["padded"] == [[2, 5]]
    assert rows["mixed"] != [[2, 5]]


def test_the_page_says_why_a_policy_was_refused(plan, monkeypatch):
    honest = Lengths.plan

    def refuse_static(lengths, policy, options):
        if policy == "static":
            raise ValueError("raise plan.max_cp; plan.cp_size is 3, runs/max_cp/l.csv")
        return honest(lengths, policy, options)

    monkeypatch.setattr(Lengths, "plan", refuse_static)
    plan("--policy", "given", "--html", "out.html", file="packs.csv")
    rows = {row["name"]: row for row in page_data("out.html")["policies"]}
    assert list(rows) == ["given", "padded", "static", "balanced", "dynamic", "mixed"]
    why = "raise plan.max_cp; plan.cp_size is 3, runs/max_cp/l.csv"
    assert rows["static"] == {"name": "static", "refused": why}


def test_progress_is_for_terminals(run, monkeypatch):
    assert run("plan", "l.csv", *MACHINE)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    code, _, err = run("plan", "l.csv", *MACHINE, "--batch", "3")
    assert code == 0
    assert "planning mixed, step 2 of 2" in err
    assert err.endswith("\r\x1b[K")
    assert "\n" not in err


PLAN = ("plan", "l.csv", *MACHINE)
BAD = [
    (("plan",), "give either a file"),
    (("plan", "l.csv", "--demo"), "give either a file"),
    (("plan", "l.csv"), "give either --lanes, or --gpus"),
    (("plan", "l.csv", "--lanes", "4"), "give --capacity"),
    (("plan", "l.csv", "--lanes", "4", "--gpus", "4", "--capacity", "9"), "either --lanes"),
    ((*PLAN, "--tp", "2"), "--tp works only with --gpus"),
    (
        ("plan", "--demo", "--gpus", "8", "--tp", "2", "--ep", "16"),
        "parallel.ep is 16, which does not divide the 8 ranks of a pipeline stage (4 lanes × paral",
    ),
    (
        ("plan", "--demo", "--ep", "4", "--sync", "step"),
        "plan.sync=step does not work with parallel.ep 4: the ranks that sh",
    ),
    ((*PLAN, "--expert-parallel-degree", "2"), "use --ep"),
    (("plan", "--demo", "--gpus", "100", "--tp", "8", "--pp", "2"), "--gpus 96 or 112 would"),
    (("plan", "--demo", "--gpus", "3", "--tp", "4"), "4 x pp 1 = 4; --gpus 4 would work"),
    (("plan", "none.csv", *MACHINE), "none.csv: cannot be read (No such file"),
    (("plan", ".", *MACHINE), ".: is not a prepared folder, or is unfinished"),
    (("plan", "l.csv", "--lanes", "0", "--capacity", "9"), "--lanes: 0 is not between"),
    (("plan", "l.csv", "--lanes", "-4", "--capacity", "9"), "--lanes: -4 is not between"),
    (("plan", "l.csv", "--lanes", "4.0", "--capacity", "9"), "'4.0' is not a whole number"),
    (("plan", "l.csv", "--lanes", "9" * 30, "--capacity", "9"), "is not a whole number"),
    (("plan", "l.csv", "--lanes", "9999999", "--capacity", "9"), "between 1 and 1048576"),
    (("plan", "l.csv", "--lanes", "4", "--capacity", "16k"), "--capacity: '16k' is not a whole"),
    (("plan", "l.csv", "--lanes", "4", "--capacity"), "--capacity: expected one argument"),
    (("plan", "l.csv", "--lanes", "2", "--capacity", "512"), "l.csv line 3: its 12000 tokens do"),
    ((*PLAN, "--batch", "0"), "--batch: 0 is not between"),
    ((*PLAN, "--policy", "best"), "--policy: 'best' is not one of mixed, dynamic, balanced"),
    ((*PLAN, "--policy", "given"), "l.csv: plan.policy given needs"),
    ((*PLAN, "--cp-size", "2"), "plan.cp_size works only with the policies balanced, static"),
    ((*PLAN, "--policy", "static", "--cp-size", "3"), "plan.cp_size is 3; legal are 1, 2, 4"),
    ((*PLAN, "--min-cp", "4", "--max-cp", "2"), "plan.min_cp is 4; it must be"),
    ((*PLAN, "--max-cp", "8"), "plan.max_cp is 8, but there are only 4 lanes"),
    ((*PLAN, "--cp-sizes", "odd"), "--cp-sizes: 'odd' is not one of pow2, any"),
    ((*PLAN, "--sync", "never"), "--sync: 'never' is not one of round, step"),
    ((*PLAN, "--sync", "step", "--pp", "2"), "does not work with a pipeline (parallel.pp 2)"),
    ((*PLAN, "--vpp", "2"), "vpp is 2, but without a pipeline"),
    ((*PLAN, "--align", "9000"), "align is 9000, more than the capacity"),
    ((*PLAN, "--cost", "none.json"), "profile none.json: cannot be read"),
    ((*PLAN, "--cost", "l.csv"), "cost profile l.csv: is not JSON"),
    ((*PLAN, "--cost", "packs.csv", "--json", "packs.csv"), "cost profile packs.csv"),
    ((*PLAN, "--json", "no/out.json"), "no/out.json: cannot be written, there is no folder no"),
    ((*PLAN, "--html", "."), ".: cannot be written, it is a folder"),
    ((*PLAN, "--json", "l.csv"), "l.csv: cannot be written, another argument names"),
    ((*PLAN, "--json", "x", "--html", "./x"), "./x: cannot be written, another argument names"),
    ((*PLAN, "--json", "/dev/full"), "/dev/full: cannot be written (No space left"),
    ((*PLAN, "--html", "/dev/full"), "/dev/full: cannot be written (No space left"),
    ((*PLAN, "more.csv"), "unexpected argument 'more.csv'"),
    ((*PLAN, "--lane", "3"), "there is no --lane; did you mean --lanes?"),
    ((*PLAN, "--cp_size=3"), "there is no --cp_size; did you mean --cp-size?"),
    ((*PLAN, "--quux", "3"), "there is no --quux; see --help"),
    (("trian",), "'trian'"),
    (("--lanes", "3"), "'3'"),
]


@pytest.mark.parametrize(
    ("words", "message"),
    BAD,
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else "",
)
def test_bad_input_is_answered_in_one_line(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("longshore: ")
    assert message in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    "profile",
    [
        [],
        {**PROFILE, "more": 1},
        {**PROFILE, "linear": "1"},
        {**PROFILE, "linear": -1},
        {**PROFILE, "linear": 0},
        {**PROFILE, "linear": 10**400},
        {**PROFILE, "linear": 1e308},
        {**PROFILE, "linear": 1e-320},
        {**PROFILE, "linear": float("nan")},
        {**PROFILE, "node": 0},
        {**PROFILE, "node": float("inf")},
        {**PROFILE, "gather": [1]},
    ],
    ids=str,
)
def test_bad_profiles_are_answered_in_one_line(run, profile):
    Path("cost.json").write_text(json.dumps(profile))
    code, out, err = run(*PLAN, "--cost", "cost.json")
    assert (code, out) == (2, "")
    assert err.startswith("longshore: ")
    assert err.count("\n") == 1


def test_an_error_in_a_later_step_is_one_line_too(run):
    code, out, err = run("plan", "l.csv", "--lanes", "4", "--capacity", "1300", "--batch", "1")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"longshore: l\.csv line 3: its 12000 tokens .*\n", err)


def test_a_protected_file_is_refused(run, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    code, _, err = run(*PLAN, "--json", "out.json")
    assert code == 2
    assert "out.json: cannot be written, it is a folder, or write-protected" in err


def test_a_name_with_a_line_break_stays_one_line(run):
    code, _, err = run("plan", "a\nb.csv", *MACHINE)
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in FOREIGN_OPTIONS if name.startswith("--")])
def test_foreign_options_are_answered_with_ours(run, name):
    for typed in (name, "--" + name[2:].replace("-", "_")):
        code, _, err = run("plan", typed, "8", "l.csv", *MACHINE)
        assert code == 2
        assert err.count("\n") == 1
        assert typed in err
        assert FOREIGN_OPTIONS[name] in err
        assert run(*PLAN, f"{typed}=8")[2] == err


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("--max-seqlen-per-dp-cp-rank", "for --max-seqlen-per-dp-cp-rank use --capacity"),
        ("--context-parallel-size", "for --context-parallel-size use --cp-size"),
        ("--micro-batch-size", "there is no --micro-batch-size: --capacity decides"),
        ("--num-microbatches", "there is no --num-microbatches: the plan decides"),
    ],
)
def test_what_megatrons_users_read(run, name, ours):
    assert run(*PLAN, name, "8")[2].startswith(f"longshore: {ours}")


@pytest.mark.parametrize(
    ("foreign", "ours"), [("dp_balanced", "static"), ("default_dynamic_cp", "dynamic")]
)
def test_foreign_policies_are_answered_with_ours(run, foreign, ours):
    code, _, err = run(*PLAN, "--policy", foreign)
    assert (code, err) == (2, f"longshore: --policy: for {foreign} use {ours}\n")


def test_foreign_answers_name_real_options():
    ours = {word for text in FOREIGN_OPTIONS.values() for word in re.findall(r"--[a-z-]+", text)}
    known = {f"--{name}" for name in [*COUNTS, *CHOICES]}
    assert ours <= known
    assert not known & set(FOREIGN_OPTIONS)


def test_help_names_every_option(run):
    code, out, err = run("plan", "--help")
    assert (code, err) == (0, "")
    for name in [*COUNTS, *CHOICES, "demo", "cost", "json", "html"]:
        assert re.search(rf"^  --{name}\b", out, re.MULTILINE), name
    for policy in POLICIES:
        assert re.search(rf"^ .* {policy} +\w", out, re.MULTILINE), policy
    assert out.rstrip().splitlines()[-1].startswith("  longshore plan lengths.csv")
    assert max(map(len, out.splitlines())) <= 100


def test_the_helps_example_works(run):
    command = run("plan", "--help")[1].splitlines()[-1].split()
    Path("lengths.csv").write_text(LENGTHS)
    assert run(*command[1:])[0] == 0


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_the_first_help_leads_on(run, words):
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert "longshore plan --demo" in out


def test_version(run):
    code, out, _ = run("--version")
    assert code == 0
    assert re.fullmatch(r"longshore [0-9]+\.[0-9]+\S*\n", out)


def test_an_interrupt_is_no_traceback(run, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("longshore.cli.plan.read_lengths", interrupt)
    assert run(*PLAN) == (130, "", "longshore: interrupted\n")


COMMAND = [sys.executable, "-m", "longshore.cli.main", "plan", "l.csv", *MACHINE]


def test_as_a_command(folder):
    done = subprocess.run([*COMMAND], capture_output=True, text=True, cwd=folder, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("sequences: 5 ")


def test_it_starts_without_torch(folder):
    code = "import sys, longshore.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_a_closed_pipe_is_no_traceback(folder, words):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run(
            [*COMMAND, *words], stdout=pipe, stderr=subprocess.PIPE, cwd=folder, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_one_line(folder):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, cwd=folder, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "longshore: the summary cannot be printed (No space left on device)\n"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), BrokenPipeError()])
def test_an_exit_code_outlives_the_terminal(monkeypatch, error):
    """A run that SIGHUP has stopped has closed output, which is no error of its own."""

    def fail():
        raise error

    def end(argv):
        monkeypatch.setattr(sys, "stdout", terminal)
        raise SystemExit(129)

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "flush", fail)
    monkeypatch.setattr("longshore.cli.main._dispatch", end)
    assert main([]) == 129


def test_sigterm_is_one_line(run, monkeypatch):
    """Of every command; `longshore train` has more to say."""

    def end(*_):
        assert os.environ["PYTHONSAFEPATH"], "its worker processes do not import from here"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("longshore.cli.plan.read_lengths", end)
    assert run(*PLAN) == (143, "", "longshore: ended by SIGTERM\n")
