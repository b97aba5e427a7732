"""`longshore train`: every wrong configuration gets one line, before torch is imported."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.data.tiny import CHATML, word_tokenizer

from longshore import Trainer
from longshore.cli.main import main
from longshore.cli.train import TRAIN_HELP
from longshore.config.load import load_config
from longshore.config.other_systems import all_keys
from longshore.data.source import TokenizedSample
from longshore.data.store import write_store
from longshore.distributed.process_group import Ranks

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
OWN = """\
from longshore.arch.presets import preset
from dataclasses import replace
seven = 7
fine = preset("tiny-qwen3")
def wrong():
    return {}["heads"]
def zero():
    return replace(fine, width=0)
"""
RECIPE = """\
[data]
path = "chats.jsonl"
tokenizer = "tok"
batch = 8
[plan]
capacity = 1024
[model]
preset = "tiny-llama"
[parallel]
ranks = 2
[train]
steps = 10
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a recipe, text, a tokenizer, prepared sequences and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("r.toml").write_text(RECIPE)
    Path("broken.toml").write_text("[train\nlr = 3")
    Path("flat.toml").write_text("lr = 3e-4\n")
    Path("titan.toml").write_text("[optimizer]\nlr = 3e-4\n")
    Path("own.py").write_text(OWN)
    Path("bad.py").write_text("import no_such")
    Path("chats.jsonl").write_text('{"text": "a b"}\n')
    Path("list.jsonl").write_text('[{"text": "a b"}]\n')
    word_tokenizer(tmp_path / "tok", "a b", template=CHATML)
    sample = TokenizedSample(0, np.arange(3000, dtype=np.int32), np.ones(3000, dtype=np.bool_))
    write_store(tmp_path / "made", [sample])
    write_store(tmp_path / "few", [sample], about={"samples": 4, "rejected": {"empty": 3}})
    write_store(tmp_path / "lost", [sample])
    Path("lost/manifest.json").unlink()
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(LLAMA))
    Path("full").mkdir()
    Path("full/metrics.jsonl").touch()
    return tmp_path


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command with a stand-in for the ranks: its exit code, stdout, stderr and calls."""
    calls = []
    monkeypatch.setattr(
        "longshore.cli.train.launch", lambda _, config, ranks: calls.append((config, ranks))
    )

    def call(*words):
        code = main(["train", *words])
        return code, *capsys.readouterr(), calls

    return call


MOCK = 'data.mock={mode="distribution",type="uniform",min_seq_len=4,max_seq_len=64}'
BAD = [
    # Words and files.
    (["none.toml"], "none.toml: cannot be read (No such file or directory)"),
    (["r.yaml"], "r.yaml: a recipe is a TOML file"),
    (["broken.toml"], "broken.toml: is not TOML"),
    (
        ["flat.toml"],
        "every key belongs into a [section]; there is no lr; did you mean train.lr?",
    ),
    (["titan.toml"], "there is no optimizer.lr; did you mean train.lr?"),
    (["r.toml", "x.toml"], "'x.toml' is a second recipe; give one"),
    (["recipe"], "'recipe' is not of the form section.key=value, such as train.lr=3e-4; a recipe"),
    (
        ["chats.jsonl"],
        "'chats.jsonl' is not of the form section.key=value, such as train.lr=3e-4; write data.pa",
    ),
    (["r.toml", "train.lr"], "'train.lr' is not of the form section.key"),
    (["r.toml", "=3"], "'=3' has no key before the ="),
    (["r.toml", "lr=3"], "there is no lr; did you mean train.lr?"),
    (["r.toml", "--train.lr=3"], "there is no --train.lr; write train.lr=VALUE, without dashes"),
    (["r.toml", "--lr", "3"], "there is no --lr; write train.lr=VALUE, without dashes"),
    (["r.toml", "--learning-rate=3"], "there is no --learning-rate; use train.lr"),
    (["r.toml", "--rank", "3"], "there is no --rank; did you mean --ranks?"),
    (["r.toml", "--ranks", "0"], "--ranks: 0 is not between 1 and"),
    # Keys of others, and near misses.
    (["r.toml", "train.lrr=3"], "there is no train.lrr; did you mean train.lr?"),
    (["r.toml", "train.batch=3"], "there is no train.batch; did you mean data.batch?"),
    (["r.toml", "trian.lr=3"], "there is no trian.lr; did you mean train.lr?"),
    (["r.toml", "train.quux=3"], "there is no train.quux; [train] has steps, epochs, lr"),
    (["r.toml", "quux.quux=3"], "there is no section [quux]; the sections are data, plan, model"),
    (["r.toml", "train.learning_rate=3"], "there is no train.learning_rate; use train.lr"),
    (["r.toml", "data.seq_length=3"], "use plan.capacity for a rank's tokens, data.max_length"),
    (["r.toml", "parallel.context_parallel_size=2"], "use plan.cp_size, or plan.max_cp"),
    (["r.toml", "train.gradient_accumulation_steps=2"], ": the plan decides the number of rounds"),
    (["r.toml", "train.per_device_train_batch_size=2"], "use data.batch, over all devices"),
    # Kinds and ranges.
    (["r.toml", "train.steps=ten"], "train.steps is 'ten'; it must be a whole number, 0 or more"),
    (["r.toml", "train.steps=1.5"], "train.steps is 1.5; it must be a whole number"),
    (["r.toml", "train.steps=-1"], "train.steps is -1; it must be a whole number"),
    (["r.toml", "train.lr=0"], "train.lr is 0; it must be a number above 0"),
    (["r.toml", "train.lr=nan"], "train.lr is nan; it must be a number above 0"),
    (["r.toml", "train.min_lr=2"], "train.min_lr is 2; it must be a number of at least 0, at most"),
    (["r.toml", "train.betas=[0.9]"], "train.betas is [0.9]; it must be two numbers"),
    (["r.toml", "train.betas=[0.9, 1]"], "train.betas is [0.9, 1]; it must be two numbers"),
    (["r.toml", "train.compile=True"], "train.compile is 'True'; it must be true, false or 'auto'"),
    (["r.toml", "train.dtype=bf16"], "train.dtype is 'bf16'; use bfloat16"),
    (["r.toml", "train.dtype=int8"], "it must be auto, bfloat16, float32 or float64"),
    (["r.toml", "plan.policy=dp_balanced"], "plan.policy is 'dp_balanced'; use static"),
    (
        ["r.toml", "data.path=", MOCK, "data.count=9", "plan.policy=given"],
        "plan.policy=given reads all packs from the data's field `pack`",
    ),
    (["r.toml", "plan.capacity=all"], "it must be a whole number, 1 or more, or 'auto'"),
    (["r.toml", "data.ignore=a,,b"], "data.ignore is 'a,,b'; it must be a list of strings"),
    (["r.toml", "data.ignore=5"], 'such as ["a", "b"] or a,b'),
    (["r.toml", "data.max_rejected=5"], "it must be a number of at least 0, at most 1"),
    (["r.toml", "data.path=lost"], "data.path: lost: is a prepared folder without its manifest"),
    (["r.toml", "data.path=few"], "data.path: few: rejected 3 of 4 samples (75 %): 3 empty; data"),
    (["r.toml", "data.batch.x=3"], "there is no data.batch.x: data.batch takes a whole number"),
    (["r.toml", "train.loss=mine"], "train.loss is 'mine'; it must be cross_entropy, dpo, grpo, "),
    (["r.toml", "train.loss=dpo", "data.stream=true"], "data.stream draws sequences one by one"),
    (["r.toml", "train.loss_options={beta=1}"], "train.loss_options need a train.loss; name one"),
    (["r.toml", "train.loss=distill", "parallel.tp=2", "--ranks", "2"], "train.loss=distill reads"),
    (["r.toml", "train.loss=no_such:loss"], "train.loss: there is no module no_such"),
    # Data.
    (["data.path=chats.jsonl"], "no model is given; set model.preset (such as tiny-llama), mo"),
    (["model.preset=tiny-llama", "data.batch=8"], "there is no data; give data.path"),
    (["r.toml", "data.path=none.jsonl"], "data.path: none.jsonl: cannot be read (No such file"),
    (
        ["r.toml", "data.path=tok"],
        "data.path: tok/tokenizer.json: is one JSON object; a .json file",
    ),
    (["r.toml", "data.path=list.jsonl"], "data.path: list.jsonl: is one JSON list"),
    (["r.toml", "data.tokenizer="], "chats.jsonl is text, which needs a tokenizer; set data.t"),
    (["r.toml", "data.tokenizer=hf"], "data.tokenizer: hf has no tokenizer.json"),
    (["r.toml", "data.template=none.jinja"], "data.template: there is no file none.jinja"),
    (["r.toml", 'data.fields=["a:b"]'], "data.fields: field 'a:b': must be name:per_token:dtype"),
    (["r.toml", "data.batch_tokens=64", "data.batch=2"], "data.batch and data.batch_tokens are b"),
    (["r.toml", "data.batch=0"], "give data.batch, the sequences in a step, or data.batch_tokens"),
    (["r.toml", "data.count=9"], "data.count works only with data.mock"),
    (["r.toml", MOCK], "data.mock: a distribution needs data.count"),
    (["r.toml", MOCK, "data.count=9", "data.max_length=9"], "data.max_length is for text, but"),
    (["r.toml", MOCK, "data.count=9", "data.path=made"], "data.path and data.mock are both given"),
    (["r.toml", "data.mock.mode=random"], "data.mock: mode is 'random'; it must be 'file' or"),
    (["r.toml", "data.mock={mode='file'}"], "data.mock: 'path' is missing"),
    (["r.toml", "data.path=made"], "the longest sequence: its 3000 tokens do not fit at any CP"),
    (["r.toml", "data.path=made", "data.loss_on=all"], "data.loss_on is for text, but data.path"),
    # Model, plan and machine.
    (["r.toml", "model.preset=tiny-lama"], "model.preset: unknown preset 'tiny-lama'; did you"),
    (["r.toml", "model.from_hf=me/x"], "model.from_hf: there is no folder me/x"),
    (["r.toml", "model.from_hf=tok"], "model.from_hf: tok has no config.json; name a Hugging"),
    (["r.toml", "model.from_hf=hf", "model.layers=2"], "model.layers only changes a preset; mode"),
    (["r.toml", "model.from_hf=hf", "model.preset=tiny-llama"], "are both given; leave one out"),
    (
        ["r.toml", "model.preset=tiny-hybrid", "output.export=out"],
        "; leave output.export out, and write the run with longshore export RUN DIR --format long",
    ),
    (["r.toml", "model.module=own", "model.preset=tiny-llama"], "model.preset and model.module ar"),
    (["r.toml", "model.module=own:fine", "model.layers=2"], "model.layers only changes a preset; "),
    (["r.toml", "model.module=own"], "model.module is 'own', without the name of a decoder; wri"),
    (["r.toml", "model.module=own:"], "model.module is 'own:'; it must be module:name, or a modu"),
    (["r.toml", "model.module=no_such:d"], "model.module: there is no module no_such; start in"),
    (["r.toml", "model.module=own:none"], "model.module: own has no none; define it in /"),
    (["r.toml", "model.module=own:seven"], "model.module: own:seven is a int; it must be a Decode"),
    (["r.toml", "model.module=own:wrong"], "own:wrong raised KeyError: 'heads' (own.py, line 6)"),
    (["r.toml", "model.module=own:zero"], "own:zero raised ValueError: DecoderConfig.width is 0"),
    (["r.toml", "model.module=own:fine.x"], "model.module is 'own:fine.x'; it must be module:name"),
    (["r.toml", "model.module=bad:d"], "importing bad raised ModuleNotFoundError: No module named"),
    (["r.toml", "plan.sync=step", "parallel.shard=zero3"], "use plan.sync=round, or parallel.shar"),
    (["r.toml", "plan.cp_size=2"], "plan.cp_size works only with the policies balanced, static"),
    (["r.toml", "plan.max_cp=4"], "plan.max_cp is 4, but there are only 2 lanes"),
    (["r.toml", "plan.min_cp=2", "plan.max_cp=1"], "plan.min_cp is 2; it must be between 1"),
    (["r.toml", "plan.align=4096"], "plan.align is 4096, more than the capacity of 1024 tokens"),
    (["r.toml", "plan.cost=none.json"], "plan.cost: profile none.json: cannot be read"),
    (
        ["r.toml", "--ranks", "8", "parallel.attention=heads", "plan.max_cp=8"],
        "plan.max_cp is 8, which does not divide the 4 heads that ranks",
    ),
    # Training and output.
    (["r.toml", "train.epochs=1", "train.steps=2"], "train.steps and train.epochs are both given"),
    (["r.toml", "--config", "x.yaml"], "--config: a recipe is a TOML file, named alone: longshore"),
    (["r.toml", "--dry-run"], "there is no --dry-run: --print-config prints the configuration"),
    (["r.toml", "train.recompute=true"], "train.recompute is 'true'; use blocks"),
    (
        ["r.toml", "train.warmup=1.0"],
        "train.warmup is 1.0; it must be a whole number of steps, or a share of all steps above 0",
    ),
    (["r.toml", "train.warmup=11"], "train.warmup is 11, more than train.steps (10)"),
    (
        ["r.toml", "output.folder=full"],
        "full already contains metrics.jsonl; name a new folder",
    ),
    (["r.toml", "output.folder=r.toml"], "output.folder: r.toml is a file; name a folder"),
    (["r.toml", "output.folder=r.toml/x"], "r.toml/x cannot be created"),
    (["r.toml", "output.folder={n}/x"], "{n} may be in its last part, once"),
    (["r.toml", "output.export=hf"], "output.export: hf already contains config.json"),
    (
        ["r.toml", "output.export=o", "output.folder=./o"],
        "output.export and output.folder are the same",
    ),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[" ".join(words)[:60] for words, _ in BAD])
def test_wrong_configurations_get_one_line(run, words, told):
    code, out, err, calls = run(*words)
    assert (code, out, calls) == (2, "", [])
    assert err.startswith("longshore: ")
    assert told in err
    assert err.count("\n") == 1
    assert err.endswith("\n")


PAIR = {"prompt": "a", "chosen": "b", "rejected": "a b"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train.device=cuda"], "train.device is 'cuda', but torch finds no GPU"),
        (
            ["output.trackers=wandb"],
            "output.trackers: wandb is not installed; install it with: pip",
        ),
        (["data.path=pairs.jsonl", "train.loss=grpo"], "reads the field advantages, and the data"),
        (["data.path=pairs.jsonl"], "pairs of chosen and rejected answers, and without a train"),
        (["train.loss=grpo"], "train.loss is grpo, which reads the field advantages"),
        (["train.loss=bad:loss"], "no_such"),
        (["model.from_hf=hf"], "hf has no weights: neither"),
    ],
)
def test_cheap_checks_come_before_text_is_tokenized(run, words, told, monkeypatch):
    """By the command, and by a Trainer, which is also what a rank of torchrun runs."""

    def tokenize(*args, **options):
        raise AssertionError("text is tokenized before all else is checked")

    monkeypatch.setattr("longshore.run.data.prepare_cache", tokenize)
    monkeypatch.setitem(sys.modules, "wandb", None)
    Path("pairs.jsonl").write_text(json.dumps(PAIR))
    code, out, err, calls = run("r.toml", *words)
    assert (code, out, calls, err.count("\n")) == (2, "", [], 1)
    assert told in err
    with pytest.raises(ValueError, match=re.escape(told)):
        Trainer("r.toml", overrides=words)


NO_TORCH = """\
import sys
from longshore.cli.main import main
for words in (
    ["train.learning_rate=3"], ["plan.max_cp=4"], ["data.path=made"], ["model.from_hf=tok"]
):
    assert main(["train", "r.toml", *words]) == 2
    assert "torch" not in sys.modules, words
assert main(["train", "r.toml", "--print-config"]) == 0
assert "torch" not in sys.modules
"""


def test_torch_is_not_imported_for_an_answer(folder):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (0, 4), done.stderr
    assert done.stdout.startswith("#") or "[model]" in done.stdout


def test_as_a_command(folder):
    command = [sys.executable, "-m", "longshore.cli.main", "train", "r.toml", "train.lrr=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "longshore: there is no train.lrr; did you mean train.lr?\n"


def test_without_a_recipe_it_is_the_demo(run):
    code, _, err, calls = run()
    assert (code, err) == (0, "")
    ((config, ranks),) = calls
    assert (ranks, config.parallel.ranks, config.train.device) == (4, 4, "cpu")
    assert config.output.folder == "runs/demo-{n}"


def test_the_demo_takes_other_ranks_and_keys(run):
    for ranks in (1, 2, 3):
        code, _, err, calls = run("--ranks", str(ranks), "train.steps=7")
        assert (code, err) == (0, "")
        assert calls[-1][1] == ranks
        assert (calls[-1][0].parallel.ranks, calls[-1][0].train.steps) == (ranks, 7)


def test_words_and_options_come_in_any_order(run):
    expected = run("r.toml", "train.lr=1e-3", "--ranks", "1")[3][-1]
    assert expected[0].train.lr == 1e-3
    assert run("--ranks", "1", "train.lr=1e-3", "r.toml")[3][-1] == expected
    assert run("train.lr=1e-3", "--ranks", "1", "r.toml")[3][-1] == expected


def test_resume_without_a_run_asks_which(run):
    for words in (["--resume"], ["--resume", "train.steps=7"], ["train.lr=1e-3", "--resume"]):
        code, out, err, calls = run(*words)
        assert (code, out, calls) == (2, "", [])
        assert err.startswith("longshore: --resume: which run? there is none in runs; ")
    Path("runs/demo-1").mkdir(parents=True)
    Path("runs/demo-1/config.toml").write_text(run("--print-config")[1])
    for words in (["--resume"], ["--resume", "runs"]):
        assert "runs/demo-1 (no checkpoint, less than a minute ago); resume with" in run(*words)[2]
    # A scheduler that always says --resume, with a recipe or a folder, gets a new run.
    for words in (["r.toml", "--resume"], ["--resume", "output.folder=runs/x"]):
        assert run(*words)[0] == 0
    assert run("--resume", "runs/demo-1")[3][-1][0].output.folder == "runs/demo-1"


def test_force_without_resume_is_refused(run):
    code, out, err, calls = run("--force")
    assert (code, out, calls) == (2, "", [])
    assert err.startswith("longshore: --force works only with --resume")


def test_print_config_reads_back_the_same(run):
    code, out, err, calls = run("r.toml", "--print-config", "--ranks", "3", "data.ignore=['a\"b']")
    assert (code, err, calls) == (0, "", [])
    Path("again.toml").write_text(out, encoding="utf-8")
    again = load_config("again.toml")
    assert again.to_toml() == out
    assert (again.parallel.ranks, again.data.ignore) == (3, ('a"b',))
    assert run("again.toml", "--print-config")[1] == out


def test_ranks_are_the_gpus_unless_said(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert run("r.toml", "parallel.ranks=0")[3][-1][1] == 3
    assert run("r.toml", "parallel.ranks=0", "train.device=cpu")[3][-1][1] == 1
    assert run("r.toml")[3][-1][1] == 2
    assert run("r.toml", "--ranks", "4")[3][-1][1] == 4, "ranks may share a GPU"


def torchrun(monkeypatch, **values):
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_under_torchrun_it_takes_the_ranks_it_is_given(run, monkeypatch):
    torchrun(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    seen = []
    monkeypatch.setattr("longshore.cli.train.train", lambda *words: seen.append(words))
    assert run("r.toml", "output.folder=full")[0] == 0  # only rank 0 looks at the folder
    ((config, place),) = seen
    assert place == Ranks(5, 8, 1, 4, "env://")
    assert config.parallel.ranks == 8
    assert run("r.toml", "--ranks", "8")[0] == 0
    assert run("r.toml", "--print-config")[1] == ""


def test_under_torchrun_one_rank_of_a_machine_answers(run, monkeypatch):
    torchrun(monkeypatch, RANK=4, WORLD_SIZE=8, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4)
    code, _, err, _ = run("r.toml", "--ranks", "2")
    assert (code, err.count("\n")) == (2, 1)
    assert "--ranks is 2, but torchrun started 8 processes; leave --ranks out" in err
    torchrun(monkeypatch, RANK=5, LOCAL_RANK=1)
    assert run("r.toml", "--ranks", "2")[:3] == (2, "", "")


def refuse(config, ranks):
    raise ValueError("raise plan.max_cp, or\nuse more lanes")


def crash(config, ranks):
    raise OSError(28, "No space left on device")


def interrupt(config, ranks):
    signal.raise_signal(signal.SIGTERM)


def test_errors_of_a_rank(capsys, monkeypatch):
    words = ["train", "--ranks", "1"]
    monkeypatch.setattr("longshore.cli.train.train", refuse)
    assert main(words) == 2
    assert capsys.readouterr().err == "longshore: raise plan.max_cp, or use more lanes\n"
    monkeypatch.setattr("longshore.cli.train.train", crash)
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("OSError: [Errno 28] No space left on device\n")
    monkeypatch.setattr("longshore.cli.train.train", interrupt)
    assert main(words) == 143
    stopped = "longshore: stopped before the first step\n"
    assert capsys.readouterr() == ("starting 1 rank…\n", stopped)


def test_help_names_every_option_and_key(run):
    code, out, err, _ = run("--help")
    assert (code, err) == (0, "")
    assert TRAIN_HELP.rstrip() in out
    for key in all_keys():
        section, name = key.split(".")
        part = out.partition(f"\n[{section}]")[2].partition("\n[")[0]
        assert re.search(rf"^  {name} +\S", part, re.MULTILINE), key
    assert max(map(len, out.splitlines())) <= 100
