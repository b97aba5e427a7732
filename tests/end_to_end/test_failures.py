"""What goes wrong once the ranks have started: one clear answer, and never a hang."""

import numpy as np
import pytest
from tests.end_to_end.command import call, torchrun

from longshore.data.source import TokenizedSample
from longshore.data.store import write_store

LOSS = """\
import torch.distributed as dist

calls = 0


def fails(nll, batch):
    global calls
    calls += 1
    if dist.get_rank() == 1 and calls == 4:
        raise RuntimeError("rank 1 has had enough")
    return nll
"""
DEMO = ("train", "train.steps=20", "train.loss=mine:fails", "data.batch=4")


@pytest.mark.long
def test_one_rank_fails_all_end(tmp_path):
    """Rank 1 alone fails, in the middle, while the others wait for it in a collective."""
    (tmp_path / "mine.py").write_text(LOSS)
    code, _, err = call(tmp_path, *DEMO, "--ranks", 2)
    assert code == 1
    assert err.startswith("longshore: rank 1 failed:\nTraceback")
    assert err.endswith("RuntimeError: rank 1 has had enough\n")
    code, _, err = call(tmp_path, *DEMO, command=torchrun(2))
    assert code == 1
    assert "RuntimeError: rank 1 has had enough\n" in err


def test_an_id_the_model_does_not_have(tmp_path):
    """One rank reads the sequence; the whole run ends with its one line."""
    samples = [
        TokenizedSample(i, np.full(4, 7 if i < 5 else 300, np.int32), np.ones(4, np.bool_))
        for i in range(8)
    ]
    write_store(tmp_path / "made", samples)
    words = ("model.preset=tiny-llama", "data.path=made", "data.batch=2", "data.shuffle=false")
    code, out, err = call(tmp_path, "train", *words, "plan.capacity=64", "--ranks", 2)
    assert code == 2, err
    assert err == (
        "longshore: data.path: made: sequence 5 has the token id 300, but the model knows only 0 "
        "to 255; use the model's tokenizer, or with model.preset a larger model.vocab_size\n"
    )
    assert "step 1 of 4" in out
