"""`longshore advise`: its options, its errors of one line, its page, and no torch."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from longshore.cli.main import main
from longshore.data.source import TokenizedSample
from longshore.data.store import write_store

LENGTHS = "length\n900\n1200\n300\n500\n77\n"
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
TINY = ("advise", "l.csv", "--gpus", "2", "--model", "tiny-qwen3")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("l.csv").write_text(LENGTHS)
    return tmp_path


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_text_and_page(run):
    code, out, err = run(*TINY, "--tokens", "2M", "--page", "p.html")
    assert (code, err) == (0, "")
    assert out.startswith("tiny-qwen3 on 2 × h200 (139.8 GiB each): ")
    assert "for 2,000,000 tokens" in out
    assert out.endswith("page: p.html (open it in a browser)\n")
    page = Path("p.html").read_text()
    data = json.loads(re.search(r'id="advice-data">(.*?)</script>', page, re.DOTALL)[1])
    assert data["headline"] == out.splitlines()[0]
    assert "://" not in page
    assert not re.search(r"\{\{\w+\}\}", page)


def test_json(run):
    code, out, _ = run(*TINY, "--json", "--epochs", "3", "--batch", "2", "--memory", "30")
    data = json.loads(out)
    assert code == 0
    assert (data["total_tokens"], data["batch"], data["memory_gib"]) == (3 * 2977, 2, 30)
    assert data["candidates"][0]["tokens_per_s"] > 0


def test_a_prepared_folder(run):
    samples = [
        TokenizedSample(i, np.arange(n, dtype=np.int32), np.ones(n, dtype=bool))
        for i, n in enumerate((5, 9))
    ]
    write_store(Path("made"), samples)
    code, out, _ = run("advise", "made", *TINY[2:], "--json")
    assert code == 0
    assert (json.loads(out)["sequences"], json.loads(out)["longest"]) == (2, 9)


def test_a_hugging_face_folder(run):
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(QWEN3))
    code, out, err = run(*TINY[:-1], "hf", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert (data["model"], data["layers"]) == ("hf", 2)
    assert 'from_hf = "hf"' in data["recipe"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("advise",), "give a file with one length a line"),
        (("advise", "l.csv", "--model", "tiny-qwen3"), "give --gpus, the number of GPUs"),
        (("advise", "l.csv", "--gpus", "2"), "give --model, what to train"),
        ((*TINY[:-1], "qwen4"), "--model is 'qwen4', which is no preset and no folder"),
        ((*TINY[:-1], "."), "has no config.json"),
        ((*TINY[:-1], ".", "--layers", "2"), "--layers only changes a preset"),
        ((*TINY, "--tokens", "1B", "--epochs", "2"), "--tokens and --epochs are both given"),
        ((*TINY, "--tokens", "many"), "'many' is not a number of tokens, such as 15B or 2e9"),
        ((*TINY, "--memory", "big"), "'big' is not a size in GiB, such as 80"),
        ((*TINY, "--batch", "9"), "--batch is 9, but there are only 5 sequences"),
        ((*TINY, "--gpu", "h999"), "profile h999: cannot be read"),
        ((*TINY, "--dtype", "float32"), "was measured in bfloat16"),
        ((*TINY, "--page", "no/p.html"), "no/p.html: cannot be written, there is no folder no"),
        ((*TINY, "--page", "l.csv"), "another argument names the same file"),
        ((*TINY, "--memory", "1"), "nothing fits into 0.9 GiB of each of 2 GPUs"),
        (("advise", "gone.csv", *TINY[2:]), "gone.csv: cannot be read"),
        ((*TINY, "more.csv"), "advise takes one file of lengths, but got l.csv more.csv"),
        ((*TINY, "train.lr=1"), "'train.lr=1': advise takes keys of [model]"),
        ((*TINY, "model.code=transformers"), "runs the code of a Hugging Face checkpoint"),
        ((*TINY, "model.lora.alpha=3"), "model.lora has no rank"),
    ],
)
def test_errors_are_one_line(run, words, message):
    code, out, err = run(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_machine_of_your_own_needs_its_memory(run):
    from longshore.advisor.machine import load_machine

    Path("mine.json").write_text(json.dumps(load_machine("h200").as_json()))
    code, _, err = run(*TINY, "--gpu", "mine.json")
    assert code == 2
    assert "give it as --memory, in GiB" in err
    assert run(*TINY, "--gpu", "mine.json", "--memory", "80")[0] == 0


def test_keys_of_the_model(run):
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps(QWEN3))
    words = ("model.code=transformers", "model.lora.rank=4", "model.lora.targets=q_proj")
    code, out, err = run(*TINY[:-1], "hf", *words, "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    recipe = tomllib.loads(data["recipe"])
    lora = {"rank": 4, "targets": "q_proj"}
    assert recipe["model"] == {"from_hf": "hf", "code": "transformers", "lora": lora}
    assert not {"capacity", "max_cp"} & set(recipe["plan"]), "a run decides by upper bounds"
    sizes = {(each["tp"], each["pp"], each["ep"], each["graphs"]) for each in data["candidates"]}
    assert sizes == {(1, 1, 1, 0)}
    assert [note.partition(":")[0] for note in data["notes"]] == ["LoRA", "model.code=transformers"]


def test_a_machine_from_data_sheets(run):
    code, out, err = run(*TINY, "--gpu", "h100")
    assert (code, err) == (0, "")
    assert out.startswith("tiny-qwen3 on 2 × h100 (79.3 GiB each): ")
    assert "NVIDIA H100: derived from data sheets, not measured\n" in out
    assert 'cost = "h100"' in out
    plan = ("plan", "l.csv", "--lanes", "2", "--capacity", "4096", "--model", "tiny-qwen3")
    code, out, err = run(*plan, "--gpu", "h100")
    assert (code, err) == (0, "")
    assert "times: NVIDIA H100: derived from data sheets, not measured\n" in out
    assert "not measured" not in run(*plan, "--cost", "h200")[1]


def test_a_cpu_computes_in_the_dtype_of_its_profile(run):
    code, out, err = run(*TINY, "--gpu", "cpu", "--memory", "64", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert data["dtype"] == "float32"
    assert 'dtype = "float32"' in data["recipe"]
    assert not data["candidates"][0]["graphs"]


def test_torch_is_not_imported():
    program = (
        "import sys\nfrom longshore.cli.main import main\ncode = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *TINY, "--page", "p.html"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
