"""Chats and a Hugging Face checkpoint in, a better checkpoint out, through the command alone."""

import json

import pytest
import torch
from tests.data.tiny import CHATML, word_tokenizer
from tests.end_to_end.command import call
from tests.hf.folders import load, qwen3
from tests.lazy import transformers

from longshore.cli.main import main

LOSS = """\
def weights(batch):
    return batch.sequence_fields["weight"][batch.ctx.sequence_index]


def weighted(nll, batch):
    return nll * weights(batch)


def total(batch):
    return (weights(batch) * batch.targets.loss_mask).sum()
"""
WORDS = "system user assistant Be kind . one two three four five six seven eight nine ten ?"
NUMBERS = WORDS.split()[6:-1]


def make_chats():
    """A user says a number, the assistant counts on; one chat is long, and one weighs nothing."""
    chats = []
    for i in range(12):
        last = 12 if i != 3 else 90
        counted = " ".join(NUMBERS[(i + j) % len(NUMBERS)] for j in range(1, last))
        turns = [
            {"role": "user", "content": f"{NUMBERS[i % len(NUMBERS)]} ?"},
            {"role": "assistant", "content": counted},
        ]
        chats.append({"messages": turns, "weight": i / 4})
    return chats


def template_of(chat):
    """The chat as CHATML writes it, up to the assistant's words, and with them."""
    user, assistant = (turn["content"] for turn in chat["messages"])
    before = "<|im_start|>system\nBe kind.<|im_end|>\n"
    before += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return before, f"{before}{assistant}<|im_end|>"


def nll_of(model, tokenizer, chat):
    """Of each token that the assistant says, with transformers alone."""
    before, whole = (tokenizer(text)["input_ids"] for text in template_of(chat))
    assert whole[: len(before)] == before
    ids = torch.tensor([whole])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return nll[len(before) - 1 :]


def weighted_mean(model, tokenizer, chats):
    sums = [(chat["weight"], nll_of(model, tokenizer, chat)) for chat in chats]
    return sum(w * nll.sum() for w, nll in sums) / sum(w * len(nll) for w, nll in sums)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint, chats and a loss; a line of the chats is broken."""
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
    word_tokenizer(tmp_path / "base", WORDS + " \n", template=CHATML, **plain)
    qwen3(tmp_path / "base")
    lines = [json.dumps(chat) for chat in make_chats()]
    (tmp_path / "chats.jsonl").write_text("\n".join([*lines[:5], '{"messages": ', *lines[5:]]))
    (tmp_path / "mine.py").write_text(LOSS)
    return tmp_path


def test_chats_and_a_checkpoint_to_a_better_checkpoint(folder, monkeypatch):
    words = ["data.path=chats.jsonl", "data.fields=weight:per_sequence:float32"]
    words += ["data.max_rejected=0.1"]
    words += ["model.from_hf=base", "data.batch=12", "plan.capacity=128", "--ranks", "2"]
    words += ["train.loss=mine:weighted", "train.loss_count=mine:total", "train.dtype=float64"]
    words += ["train.epochs=12", "train.lr=1e-2", "train.warmup=2", "output.export=tuned"]
    code, out, err = call(folder, "train", *words, "output.folder=run")
    assert code == 0, err
    assert "12 sequences of 13 samples" in err
    assert "rejected 1 of 13 samples" in err
    assert "1 broken JSON, such as chats.jsonl line 6: " in err
    assert out.endswith("weights\nwrote tuned, a Hugging Face folder\n")

    read = transformers.AutoTokenizer.from_pretrained
    tokenizer = read(folder / "tuned")
    assert tokenizer.get_vocab() == read(folder / "base").get_vocab()
    base, tuned = (load(folder / name, torch.float64) for name in ("base", "tuned"))
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    # transformers makes its rotary tables in float32.
    first = weighted_mean(base, tokenizer, make_chats()).item()
    assert lines[0]["loss"] == pytest.approx(first, rel=1e-6)
    assert len(lines) == 12
    for chat in make_chats()[1:4]:
        before, after = (nll_of(model, tokenizer, chat).mean() for model in (base, tuned))
        assert after < before - 0.5

    monkeypatch.chdir(folder)
    assert main(["export", "run", "again"]) == 0
    assert main(["export", "run", "from-checkpoint", "--step", "12"]) == 0
    for path in (folder / "tuned").iterdir():
        for name in ("again", "from-checkpoint"):
            assert (folder / name / path.name).read_bytes() == path.read_bytes(), path.name
