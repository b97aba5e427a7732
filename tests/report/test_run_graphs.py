"""How graphs served a run: shares over steps and in all, and nothing without graphs."""

import json

import pytest
from tests.report.run_folders import make_run, write_lines

from longshore.report.pages import read_runs, report_summary


def lines(*graphed):
    common = {"loss": 1.0, "tokens": 9, "elapsed_s": 1.0, "tokens_per_s": 9.0, "skipped": False}
    ways = ("whole", "halves", "eager")
    named = [{"graphed": dict(zip(ways, each, strict=True))} if each else {} for each in graphed]
    return [{"step": n, **common, **each} for n, each in enumerate(named, start=1)]


def test_shares_of_each_way(tmp_path):
    """A run that got graphs only when it was resumed, after its first step."""
    rows = lines((), (6, 2, 0), (8, 0, 0))
    rows[2]["graph_gib"] = 1.25
    write_lines(tmp_path / "metrics.jsonl", rows)
    data = read_runs([tmp_path])
    graphs = data["runs"][0]["graphs"]
    assert [graphs[way] for way in ("whole", "halves", "eager")] == [0.875, 0.125, 0]
    assert (graphs["layers"], graphs["memory_gib"]) == (16, 1.25)
    assert graphs["step"] == [2, 3]
    assert graphs["curves"]["whole"]["y"] == [0.75, 1]
    expected = "layers ran 87.5% whole, 12.5% by halves, 0.0% eagerly; 1.25 GiB"
    assert f"  CUDA graphs: {expected}" in report_summary(data)


def test_nothing_without_graphs(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", lines((), ()))
    data = read_runs([tmp_path])
    assert data["runs"][0]["graphs"] is None
    assert not any("CUDA" in line for line in report_summary(data))


def test_a_wrong_line_is_named(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "graphed": [1]}])
    with pytest.raises(ValueError, match=r"line 1: graphed is \[1\]; it must be an object"):
        read_runs([tmp_path])


def test_a_run_of_many_steps(tmp_path):
    run = make_run(tmp_path / "run", graphs=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counts = [row["graphed"] for row in rows]
    graphs = read_runs([run])["runs"][0]["graphs"]
    whole = sum(each["whole"] for each in counts)
    assert graphs["layers"] == sum(sum(each.values()) for each in counts)
    assert graphs["whole"] == pytest.approx(whole / graphs["layers"], rel=1e-3)
