"""What plan.refine did to a profile, as the page of a run shows it."""

import json

import pytest
from tests.report.run_folders import make_run, refine_line, write_lines

from longshore.report.pages import read_runs
from longshore.report.run_files import last_change, read_refined, refine_data


@pytest.fixture
def path(tmp_path):
    write_lines(tmp_path / "refine.jsonl", [refine_line(step) for step in (37, 21, 53, 53)])
    return tmp_path / "refine.jsonl"


def test_ratios_of_each_kind_and_rows_of_changes(path):
    lines = read_refined(path)
    assert list(lines) == [21, 37, 53]
    assert last_change(lines) == 37, "the last window changed nothing"
    data = refine_data(lines)
    assert data["parts"] == ["linear", "quadratic"]
    assert [row["step"] for row in data["rows"]] == [21, 37]
    assert data["rows"][0]["factors"] == [1, 9.5]
    one, two = data["kinds"]
    assert one == {"kind": 1, "step": [16, 32, 48], "first": [1.5] * 3, "before": [2, 1.1, 1]}
    assert two["kind"] == 2
    assert refine_data({}) is None


def test_the_cost_model_is_judged_by_its_last_profile(tmp_path):
    run = make_run(tmp_path / "run", steps=60, refined=True)
    cost = read_runs([run])["runs"][0]["cost"]
    assert min(cost["dots"]["step"]) == 37
    assert cost["skipped"] is None
    assert "Steps before 37 are left out" in cost["words"]
    few = make_run(tmp_path / "few", steps=38, refined=True)
    cost = read_runs([few])["runs"][0]["cost"]
    assert min(cost["dots"]["step"]) == 2, "two steps say too little"


@pytest.mark.parametrize(
    "change", [{"window": [1]}, {"errors": None}, {"kinds": [[1, 2, 0.0, 1.0, 1.0]]}, {"step": -1}]
)
def test_a_broken_line_is_named(path, change):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps({**refine_line(21), **change}) + "\n")
    with pytest.raises(ValueError, match=r"refine.jsonl, line 5: is not what a refined profile"):
        read_refined(path)
