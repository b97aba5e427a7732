"""Pairs in, their scores beside them, and a model that prefers the chosen answers."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tests.data.tiny import word_tokenizer
from tests.end_to_end.command import call
from tests.metrics_file import read_metrics

from longshore.arch.presets import preset
from longshore.cli.main import main
from longshore.data.store import Store
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder

WORDS = "one two three four five six seven eight nine ten ?"
MODEL = ["model.layers=1", "model.vocab_size=64", "train.dtype=float64", "plan.capacity=48"]
SMALL = [*MODEL, "train.device=cpu", "output.display=none"]


def pair(number: int) -> dict[str, str]:
    words = WORDS.split()[:10]
    counted = " ".join(words[(number + j) % 10] for j in range(4 + 5 * (number % 3)))
    return {"prompt": f"{words[number]} ?", "chosen": f" {counted}", "rejected": " ten ten"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    word_tokenizer(tmp_path / "tok", WORDS + " \n", template="", eos_token="<|end_of_text|>")
    rows = [json.dumps(pair(number)) for number in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def alone(tokens: np.ndarray) -> list[float]:
    """The log-probability of each token, by a model that sees this sequence only."""
    model = Decoder(preset("tiny-llama", layers=1, vocab_size=64)).double()
    init_decoder(model, seed=0)
    ids = torch.tensor(tokens.tolist())
    with torch.no_grad():
        logp = model(ids).values.log_softmax(-1)[:-1]
    return [0.0, *logp.gather(1, ids[1:, None])[:, 0].tolist()]


def test_pairs_are_scored_and_trained_on(folder):
    assert main(["prepare", "pairs.jsonl", "--tokenizer", "tok", "--out", "pairs"]) == 0
    score = ["score", "pairs", "--model", "tiny-llama", *SMALL]
    code, out, err = call(folder, *score, "--out", "scored", "--ranks", "2", "data.batch=6")
    assert code == 0, err
    assert out.endswith("scored: pairs with the field ref_logprobs\n")
    assert main([*score, "--out", "one.parquet", "--field", "old", "plan.capacity=200"]) == 0
    pairs, scored, one = Store("pairs"), Store("scored"), pq.read_table("one.parquet").to_pylist()
    assert [str(field) for field in scored.fields][-1] == "ref_logprobs:per_target:float64"
    assert len(scored) == len(one) == len(pairs) == 16
    for place, row in enumerate(one):
        want = alone(pairs[place].tokens)
        assert row["tokens"] == scored[place].tokens.tolist() == pairs[place].tokens.tolist()
        assert scored[place].loss_mask.tolist() == row["loss_mask"]
        assert scored[place].fields["ref_logprobs"] == pytest.approx(want, rel=1e-9)
        assert row["old"] == pytest.approx(want, rel=1e-9)
        assert row["sign"] == (1, -1)[place % 2]

    train = ["train", "data.path=scored", "model.preset=tiny-llama", *SMALL, "data.batch=6"]
    train += ["train.loss=dpo", "train.loss_options={beta=0.5}", "train.lr=3e-3"]
    assert main([*train, "train.epochs=4", "output.folder=run"]) == 0
    lines = read_metrics(folder / "run/metrics.jsonl")
    losses = [line["loss"] for line in lines]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-9), "the model is its own reference"
    assert len(losses) == 4 * 3
    assert losses[-1] < 0.4
    assert lines[-1]["loss_metrics"]["reward_accuracy"] == 1


@pytest.mark.long
def test_pairs_alone_are_scored_by_the_run(folder, capsys):
    """In one command, from the text: the same losses as with scores of one's own."""
    train = ["train", "data.path=pairs.jsonl", "data.tokenizer=tok", "model.preset=tiny-llama"]
    train += [*SMALL, "data.batch=6", "train.loss=dpo", "train.loss_options={beta=0.5}"]
    train += ["train.lr=3e-3", "train.steps=4", "train.schedule=constant"]
    assert main([*train, "output.folder=one"]) == 0, capsys.readouterr().err
    (scored,) = (folder / "runs/prepared").glob("reference-*")
    written = (scored / "manifest.json").stat().st_mtime_ns
    code, _, err = call(folder, *train, "output.folder=two", "parallel.ranks=2", "train.steps=2")
    assert code == 0, err
    assert main(["train", "--resume", "two", "train.steps=4", "parallel.ranks=1"]) == 0
    assert (scored / "manifest.json").stat().st_mtime_ns == written, "it is scored once"
    assert len([*(folder / "runs/prepared").glob("reference-*")]) == 1
    own = ["data.path=" + str(scored), "model.preset=tiny-llama", *SMALL, *train[-7:]]
    assert main(["train", *own, "output.folder=three"]) == 0
    one, two, three = (
        [line["loss"] for line in read_metrics(folder / name / "metrics.jsonl")]
        for name in ("one", "two", "three")
    )
    assert one[0] == pytest.approx(math.log(2), rel=1e-9)
    assert one == pytest.approx(two, rel=1e-9)
    assert one == three
    assert main([*train, "output.folder=four", "train.seed=1"]) == 0
    assert len([*(folder / "runs/prepared").glob("reference-*")]) == 2, "of another base"


def refused(capsys, *words) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err.strip()


def test_what_does_not_fit_is_refused(folder, capsys):
    assert main(["prepare", "pairs.jsonl", "--tokenizer", "tok", "--out", "pairs"]) == 0
    capsys.readouterr()
    score = ["score", "pairs", "--model", "tiny-llama", *SMALL]
    assert refused(capsys, *score, "--out", "pairs").startswith("longshore: --out: pairs exists")
    said = refused(capsys, *score, "--out", "x", "--field", "sign")
    assert said.startswith("longshore: --field sign: pairs already has a field of this name")
    said = refused(capsys, "score", "--model", "tiny-llama", "--out", "x")
    assert said.startswith("longshore: score takes one data set, but got none")
