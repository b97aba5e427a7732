"""What a pipeline's ranks record of their stages, and where."""

import json
from types import SimpleNamespace

import pytest

from longshore.plan import make_plan
from longshore.train.record import predicted_bubble, stage_times
from longshore.train.record import stage_line as as_line


def report(step: int = 3, stages=((0, 0.1, 0.2), (2, 0.1, 0.2))):
    plan = make_plan([8] * 4, lanes=1, capacity=8, pp=2, policy="static")
    metrics = SimpleNamespace(step=step, elapsed_s=0.8)
    return SimpleNamespace(step=SimpleNamespace(plan=plan), metrics=metrics, stages=stages)


def place(**changes):
    return SimpleNamespace(**{"pp": 2, "lane": 0, "tp_rank": 0, "pp_rank": 1, **changes})


def test_the_bubble_is_what_no_stage_worked():
    line = as_line(report(), 1)
    assert line["bubble"] == pytest.approx(0.25)
    assert line["stages"] == [[0, 0.1, 0.2], [2, 0.1, 0.2]]
    # Four equal rounds on two ranks: 1 / (4 + 1).
    assert line["predicted"] == pytest.approx(0.2, abs=0.01)


def test_without_a_pipeline_nothing_is_predicted():
    assert predicted_bubble(make_plan([8], lanes=1, capacity=8), 0) == 0.0


def test_each_rank_of_lane_0_has_a_file_and_a_resumed_run_cuts_it(tmp_path):
    for after, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with stage_times(tmp_path, place(), after=after) as write:
            for step in steps:
                write(report(step))
            write(report(9, stages=()))  # a skipped step
    (path,) = (tmp_path / "pipeline").iterdir()
    assert path.name == "rank-1.jsonl"
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


@pytest.mark.parametrize("changes", [{"pp": 1}, {"lane": 1}, {"tp_rank": 1}], ids=str)
def test_others_write_nothing(changes, tmp_path):
    with stage_times(tmp_path, place(**changes), after=0) as write:
        write(report())
    assert not (tmp_path / "pipeline").exists()
