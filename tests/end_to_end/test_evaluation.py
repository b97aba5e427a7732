"""Evaluation during a real run: the same on any ranks and policy, and training does not notice."""

import json

import pytest
from tests.end_to_end.command import trained

MOCK = "{mode='distribution', type='uniform', min_seq_len=1, max_seq_len=200}"
WORDS = (
    f"data.mock={MOCK}",
    "data.count=32",
    "data.batch=8",
    "model.preset=tiny-qwen3",
    "plan.capacity=256",
    "train.steps=5",
    "train.dtype=float64",
    "train.device=cpu",
)
HELD_OUT = (f"data.eval_mock={MOCK}", "data.eval_count=20", "train.eval_every=2")


def losses(folder):
    return [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_held_out_losses(tmp_path):
    plain, _ = trained(tmp_path, "plain", *WORDS, "--ranks", "1")
    one, out = trained(tmp_path, "one", *WORDS, *HELD_OUT, "--ranks", "1")
    two, _ = trained(
        tmp_path, "two", *WORDS, *HELD_OUT, "plan.policy=static", "plan.capacity=128", "--ranks=2"
    )
    found, again = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [line["step"] for line in found] == [2, 4, 5], "every two steps, and after the last"
    assert {line["name"] for line in found} == {"held-out"}
    assert found[-1]["loss"] < found[0]["loss"]
    assert f"step 2: held-out loss {found[0]['loss']:.4f}" in out
    lines = [line.split("   ")[0].partition(" loss")[0] for line in out.splitlines()]
    start, built = lines.index("reading the data…"), lines.index("building the model…")
    assert start < built
    shown = [line for line in lines[built + 1 : -1] if line != "step 3 of 5"]  # on a slow machine
    assert shown == [
        *("planning…", "first step…", "step 1 of 5"),
        *("step 2 of 5", "step 2: held-out", "step 4 of 5", "step 4: held-out"),
        *("step 5 of 5", "step 5: held-out"),
    ]
    want = [line["loss"] for line in found]
    assert [line["loss"] for line in again] == pytest.approx(want, rel=1e-9)
    assert [line["loss"] for line in one] == [line["loss"] for line in plain]
    assert [line["loss"] for line in two] == pytest.approx([x["loss"] for x in one], rel=1e-9)
