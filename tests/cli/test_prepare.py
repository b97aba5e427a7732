"""`longshore prepare`: its options, messages and exit codes, and `longshore plan` of its folder."""

import json
from functools import partial
from pathlib import Path

import pytest
from tests.data.family_templates import QWEN3
from tests.data.tiny import CHATML, word_tokenizer

from longshore.cli.main import main
from longshore.data.source import BatchSize, Place
from longshore.data.steps import IndexedSteps
from longshore.data.store import Store
from longshore.plan import make_plan

ROW = {"instruction": "a", "input": "", "output": "b"}


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path / "tok", "user assistant system Be kind. a b \n", template=CHATML)

    def call(rows, *words, out="out"):
        if not Path("rows.json").exists():
            Path("rows.json").write_text(json.dumps(rows))
        where = ["--tokenizer", "tok", "--out", out, "--workers", "1"]
        return main(["prepare", "rows.json", *where, *words]), *capsys.readouterr()

    return call


def test_many_rejected_samples_fail_and_what_was_prepared_is_kept(run):
    rows = [*[ROW] * 9, 7, {**ROW, "output": "b " * 500}]
    limit = ["--max-bytes", "600"]
    code, out, err = run(rows, *limit)
    assert code == 2
    assert "rejected 2 of 11 samples (18.2 %); each is in out/rejected.jsonl" in out
    assert "1 broken JSON, such as rows.json record 10: it is int, not an object" in out
    assert "1 too large, such as rows.json record 11: the record has 1,0" in out
    assert "raise the limit, data.max_bytes=N" in out
    assert "data.max_rejected=0.05 allows at most 5 %" in err
    assert err.endswith("or train on the rest with data.max_rejected=0.19\n")
    assert len(Store("out")) == 9
    code, out, err = run(rows, *limit, "--max-rejected", "0.19")
    assert (code, err) == (0, "")
    assert "1 shards (1 from an earlier run)" in out


def test_columns_to_ignore(run):
    rows = [{**ROW, "id": 3, "source": "web"}]
    code, _, err = run(rows)
    assert code == 2
    assert "rows.json record 1: unknown columns 'id', 'source' in" in err
    assert "leave them out with data.ignore=id,source (or * for all" in err
    assert not Path("out").exists()
    assert run(rows, "--ignore", "id,source", out="two")[0] == 0
    assert run(rows, "--ignore", "id", "--ignore", "source", out="again")[0] == 0
    assert run(rows, "--ignore", "*", out="all")[0] == 0


@pytest.mark.parametrize("text", ["5", "-1", "x", "nan"])
def test_the_share_is_a_share(run, text):
    code, _, err = run([ROW], "--max-rejected", text)
    assert code == 2
    assert f"--max-rejected: '{text}' is not a number from 0 to 1" in err


WORDS = "what is a longshore current it runs along the beach"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a tokenizer, good chats and one bad line."""
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path / "tok", WORDS, template=CHATML)
    chats = [
        {
            "messages": [
                {"role": "user", "content": "what is a longshore current"},
                {"role": "assistant", "content": " ".join(WORDS.split()[: 1 + i % 9])},
            ]
        }
        for i in range(20)
    ]
    lines = [json.dumps(chat) for chat in chats]
    lines.insert(3, "{broken")
    Path("chats.jsonl").write_text("\n".join(lines))


def prepare(*words):
    return main(["prepare", "chats.jsonl", "--tokenizer", "tok", "--out", "made", *words])


def test_chats_become_a_store_and_bad_lines_are_told(capsys):
    assert prepare("--workers", "1") == 0
    out = capsys.readouterr().out
    assert "20 sequences of 21 samples" in out
    assert "broken JSON" in out
    assert len(Store("made")) == 20
    rejected = json.loads(Path("made/rejected.jsonl").read_text())
    assert (rejected["line"], rejected["reason"]) == (4, "broken JSON")


def test_the_template_is_chosen_and_told(capsys):
    """Turns with thinking, through a template that drops the thinking of all but the last."""
    word_tokenizer(Path("tok"), WORDS, template=QWEN3)
    thinks = {"role": "assistant", "content": "it runs", "reasoning_content": "a current"}
    turns = [{"role": "user", "content": "what is a beach"}, thinks] * 3
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}))
    line = "chat template: Longshore's training template for Qwen3, because the tokenizer's own"
    assert prepare("--workers", "1") == 0
    assert f"{line} rewrites earlier turns\n" in capsys.readouterr().out
    manifest = json.loads(Path("made/manifest.json").read_text())
    assert manifest["about"]["chat_template"] == f"{line} rewrites earlier turns"
    assert prepare("--workers", "1", "--template", "own", "--start-over") == 2
    error = capsys.readouterr().err
    assert "no sample became a sequence; rejected 1 of 1 samples (100 %): 1 spans not" in error
    assert ", such as chats.jsonl line 1: " in error
    assert prepare("--workers", "1", "--template", "chatml", "--start-over") == 0
    assert "training template for ChatML, as asked for" in capsys.readouterr().out
    Path("chats.jsonl").write_text(json.dumps({"text": "what is a beach"}))
    assert prepare("--workers", "1", "--start-over") == 0
    assert "template" not in capsys.readouterr().out


def test_a_prepared_folder_is_planned_as_training_will_take_it(capsys):
    prepare("--workers", "1")
    plan = ["plan", "made", "--lanes", "2", "--capacity", "64", "--batch", "8", "--seed", "3"]
    assert main([*plan, "--json", "out.json"]) == 0
    steps = json.loads(Path("out.json").read_text())["steps"]
    source = Store("made")
    training = IndexedSteps(
        source,
        planner=partial(make_plan, lanes=2, capacity=64),
        batch=BatchSize("sequences", 8),
        seed=3,
    )
    order = training.batches.from_place(Place())
    plans = [training.planner(source.lengths[next(order)[1]].tolist()) for _ in range(3)]
    assert [step["digest"] for step in steps] == [plan.digest for plan in plans]
    assert main([*plan, "--steps", "2", "--json", "out.json"]) == 0
    assert len(json.loads(Path("out.json").read_text())["steps"]) == 2


def test_batches_by_tokens(capsys):
    prepare("--workers", "1")
    words = ["plan", "made", "--lanes", "2", "--capacity", "64", "--batch-tokens", "100"]
    assert main([*words, "--json", "out.json"]) == 0
    steps = json.loads(Path("out.json").read_text())["steps"]
    assert sum(step["tokens"] for step in steps) == int(Store("made").lengths.sum())
    assert max(step["tokens"] for step in steps) < 130


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prepare", "chats.jsonl", "--tokenizer", "tok"], "--out"),
        (["prepare", "none.jsonl", "--tokenizer", "tok", "--out", "o"], "none.jsonl"),
        (["prepare", "chats.jsonl", "--tokenizer", "nowhere", "--out", "o"], "nowhere"),
        (["prepare", "chats.jsonl", "--tokenizer", "tok", "--out", "o", "--loss-on", "x"], "x"),
        (["prepare", "chats.jsonl", "--tokenizer", "tok", "--out", "o", "--field", "a:b"], "a:b"),
        (["plan", "tok", "--lanes", "2", "--capacity", "64"], "tok: is not a prepared folder"),
        (["plan", "l.csv", "--lanes", "2", "--capacity", "64", "--seed", "1"], "--seed is for"),
    ],
)
def test_bad_input_is_answered_in_one_line(words, told, capsys):
    Path("l.csv").write_text("5\n")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err
    assert err.startswith("longshore: ")
