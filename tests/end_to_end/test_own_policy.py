"""docs/adding-a-policy.md shows a policy of one file; this runs that very text."""

import json
import re
from pathlib import Path

import pytest
from tests.end_to_end.command import call, trained

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-policy.md"
NAME = "mine:first_fit"
SMALL = ("model.preset=tiny-llama", "data.count=64", "data.batch=8", "train.steps=2")
MOCK = ("data.mock.mode=distribution", "data.mock.type=lognormal", "data.mock.mean_seq_len=64")


def write_policy(folder, text=None):
    shown = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    (folder / "mine.py").write_text(text or shown)


def train_words(policy):
    mock = (
        *MOCK,
        "data.mock.min_seq_len=8",
        "data.mock.max_seq_len=400",
        "data.mock.lognormal_sigma=1",
    )
    return (*SMALL, *mock, "plan.capacity=256", "train.device=cpu", f"plan.policy={policy}")


def test_it_plans_from_the_command_line(tmp_path):
    write_policy(tmp_path)
    (tmp_path / "l.csv").write_text("90\n400\n70\n120\n33\n")
    words = ("plan", "l.csv", "--lanes", "2", "--capacity", "256", "--policy", NAME)
    code, out, err = call(tmp_path, *words, "--json", "p.json", "--html", "p.html")
    assert (code, err) == (0, "")
    assert f"policy: {NAME}" in out
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["policy"] == NAME
    packs = [[p["sequences"] for p in r["packs"]] for r in data["steps"][0]["rounds"]]
    assert packs == [[[1]], [[3, 0, 4], [2]]]
    assert NAME in (tmp_path / "p.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_it_trains_two_ranks_and_is_reported(tmp_path):
    write_policy(tmp_path)
    metrics, _ = trained(tmp_path, "run", *train_words(NAME), "--ranks=2")
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["sequences"] == 8 and line["loss"] > 0 for line in metrics)
    (tmp_path / "mine.py").unlink()
    code, _, err = call(tmp_path, "report", "run")
    assert (code, err) == (0, "")
    assert NAME in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_wrong_one_is_refused_before_the_run(tmp_path):
    write_policy(tmp_path, "def first_fit(task, choice):\n    choice.offer_packs([])\n")
    code, out, err = call(tmp_path, "train", *train_words(NAME), "--ranks=2")
    assert (code, out) == (2, "")
    assert err == (
        f"longshore: plan.policy {NAME}: sequence 0: it is in the plan 0 times; it must be there "
        "once\n"
    )
    (tmp_path / "mine.py").unlink()
    code, _, err = call(tmp_path, "train", *train_words(NAME), "--ranks=2")
    assert code == 2
    assert "plan.policy: there is no module mine; start in the folder that contains it" in err
