"""model.code=transformers through the command: a Gemma 3, of which Longshore has no code, tuned.

In `make fuzz` it stops after 2 steps and resumes, on another number of ranks.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.data.tiny import CHATML, word_tokenizer
from tests.end_to_end.command import call
from tests.end_to_end.test_fine_tuning import WORDS, make_chats, nll_of
from tests.hf.folders import gemma3, load
from tests.lazy import transformers

from longshore.cli.main import main

RUN = ["data.path=chats.jsonl", "data.ignore=*", "model.from_hf=base", "model.code=transformers"]
RUN += ["data.batch=12", "plan.capacity=128", "train.dtype=float64", "parallel.shard=zero3"]
RUN += ["train.lr=1e-2", "train.schedule=constant", "output.folder=run", "--ranks", "2"]


@pytest.fixture
def folder(tmp_path):
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
    word_tokenizer(tmp_path / "base", WORDS + " \n", template=CHATML, **plain)
    gemma3(tmp_path / "base")
    lines = [json.dumps(chat) for chat in make_chats()]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return tmp_path


def mean_of(model, tokenizer):
    return torch.cat([nll_of(model, tokenizer, chat) for chat in make_chats()]).mean().item()


@pytest.mark.long
@pytest.mark.fuzz
def test_a_model_of_transformers_is_tuned(folder, monkeypatch, is_fuzz):
    steps = ["train.steps=2"] if is_fuzz else ["train.steps=6", "output.export=tuned"]
    code, out, err = call(folder, "train", *RUN, *steps)
    assert code == 0, err
    if is_fuzz:
        last = ["train.steps=6", "output.export=tuned", "plan.capacity=256"]
        code, out, err = call(folder, "train", "--resume", "run", *last, "--ranks", "1")
        assert code == 0, err
    assert out.endswith("wrote tuned, a Hugging Face folder\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tuned")
    base, tuned = (load(folder / name, torch.float64) for name in ("base", "tuned"))
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    # transformers' norms are float32.
    assert lines[0]["loss"] == pytest.approx(mean_of(base, tokenizer), rel=1e-5)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert mean_of(tuned, tokenizer) < mean_of(base, tokenizer) - 0.5

    monkeypatch.chdir(folder)
    assert main(["export", "run", "again"]) == 0
    assert main(["export", "run", "from-checkpoint", "--step", "6"]) == 0
    expected = load_file("tuned/model.safetensors")
    for name in ("again", "from-checkpoint"):
        tensors = load_file(f"{name}/model.safetensors")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert main(["export", "run", "no", "--format", "longshore"]) == 2
    assert main(["export", "run", "no", "--max-length", "64"]) == 2
