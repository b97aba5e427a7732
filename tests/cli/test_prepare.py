"""`longshore prepare`: its options, what it says and how it ends."""

import json
from pathlib import Path

import pytest
from tests.data.tiny import CHATML, word_tokenizer

from longshore.cli.main import main
from longshore.data.store import Store

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
    assert "raise the limit, --max-bytes N" in out
    assert "more than the 5 % that --max-rejected 0.05 allows" in err
    assert err.endswith("or take what there is with --max-rejected 0.19\n")
    assert len(Store("out")) == 9
    code, out, err = run(rows, *limit, "--max-rejected", "0.19")
    assert (code, err) == (0, "")
    assert "1 shards (1 from an earlier run)" in out


def test_columns_to_ignore(run):
    rows = [{**ROW, "id": 3, "source": "web"}]
    code, _, err = run(rows)
    assert code == 2
    assert "rows.json record 1: columns 'id', 'source' are" in err
    assert "name them in --ignore (id,source, or * for all" in err
    assert not Path("out").exists()
    assert run(rows, "--ignore", "id,source", out="two")[0] == 0
    assert run(rows, "--ignore", "id", "--ignore", "source", out="again")[0] == 0
    assert run(rows, "--ignore", "*", out="all")[0] == 0


@pytest.mark.parametrize("text", ["5", "-1", "x", "nan"])
def test_the_share_is_a_share(run, text):
    code, _, err = run([ROW], "--max-rejected", text)
    assert code == 2
    assert f"--max-rejected: '{text}' is not a number from 0 to 1" in err
