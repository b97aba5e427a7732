"""data.stream: tokenized while it trains, on 2 ranks, resumed, and equal to the indexed run."""

import gzip
import json

import pytest
from tests.data.tiny import word_tokenizer
from tests.end_to_end.command import trained

NUMBERS = "one two three four five six seven eight nine ten"
WORDS = ["model.preset=tiny-llama", "data.tokenizer=tok", "data.path=texts.jsonl.gz"]
WORDS += ["data.batch=4", "data.shuffle=false", "data.max_length=400", "plan.capacity=256"]
WORDS += ["train.dtype=float64", "train.schedule=constant", "train.lr=1e-2", "--ranks", "2"]
CURVE = ("loss", "grad_norm", "tokens")


@pytest.fixture
def folder(tmp_path):
    """12 texts, one of them longer than a rank's capacity."""
    word_tokenizer(tmp_path / "tok", NUMBERS)
    words = NUMBERS.split()
    texts = [" ".join(words[(i + j) % 10] for j in range(9 * (i % 3) + 5)) for i in range(12)]
    texts[5] = " ".join(words[j % 10] for j in range(150))
    lines = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "texts.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


def curve(metrics):
    return [[step[name] for name in CURVE] for step in metrics]


def test_a_stream_trains_as_the_indexed_run_and_resumes(folder):
    """Two lanes take the rows of the file in turn, so that each step has those of the other run."""
    indexed, _ = trained(folder, "indexed", *WORDS, "train.steps=7")
    _, out = trained(folder, "streamed", *WORDS, "train.steps=2", "data.stream=true")
    assert "a stream of 1 file of " in out
    assert not (folder / "runs" / "prepared" / "streamed").exists()
    more = ("--resume", "streamed", "train.steps=7", "--ranks", "2")
    streamed, out = trained(folder, "streamed", *more)
    assert "resumes after step 2" in out
    assert len(streamed) == 7
    for one, other in zip(curve(streamed), curve(indexed), strict=True):
        assert one == pytest.approx(other, rel=1e-9)
