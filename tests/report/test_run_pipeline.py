import json
from statistics import median

import pytest
from tests.report.run_folders import make_run, write_lines

from longshore.report.pages import read_runs, report_summary
from longshore.report.run_files import pipeline_data, read_pipeline, read_rank, stage_texts


def line(step, *stages, elapsed=1.0, bubble=0.2, predicted=0.3):
    stages = [list(stage) for stage in stages] or [[0, 0.25, 0.5]]
    return {
        "step": step,
        "elapsed_s": elapsed,
        "stages": stages,
        "bubble": bubble,
        "predicted": predicted,
    }


def write_ranks(folder, ranks):
    """A folder as a run leaves it: the lines of each rank."""
    folder.mkdir()
    for rank, lines in ranks.items():
        write_lines(folder / f"rank-{rank}.jsonl", lines)
    return folder


def rows_of(folder, **config):
    return pipeline_data(read_pipeline(folder), {f"parallel.{k}": v for k, v in config.items()})


def test_the_example_of_the_module(tmp_path):
    lines = [
        {"step": 1, "elapsed_s": 4.0, "stages": [[0, 1.0, 1.0]], "bubble": 0.5, "predicted": 0.2},
        {"step": 2, "elapsed_s": 1.0, "stages": [[0, 0.3, 0.6]], "bubble": 0.1, "predicted": 0.3},
    ]
    data = rows_of(write_ranks(tmp_path / "pipeline", {0: lines}), pp=2)
    (row,) = data["rows"]
    assert (row["forward"], row["backward"]) == (0.275, 0.425)
    assert (row["bubble"], row["predicted"]) == (0.3, 0.25)
    assert row["stages"] == [{"number": 0, "text": None, "forward": 0.275, "backward": 0.425}]
    assert data["missing"] == [1]


@pytest.mark.parametrize(("steps", "skipped"), [(4, None), (5, 1)])
def test_medians_leave_the_first_of_enough_steps_out(tmp_path, steps, skipped):
    bubbles = [0.9, 0.1, 0.2, 0.4, 0.3][:steps]
    lines = [line(n, bubble=bubble) for n, bubble in enumerate(bubbles, 1)]
    data = rows_of(write_ranks(tmp_path / "pipeline", {0: lines, 1: lines}), pp=2)
    counted = bubbles if skipped is None else bubbles[1:]
    assert data["skipped"] == skipped
    assert [row["bubble"] for row in data["rows"]] == [pytest.approx(median(counted))] * 2
    assert data["rows"][0]["steps"] == len(counted)


def test_a_rank_of_several_stages_adds_them_and_names_them(tmp_path):
    ranks = {0: [line(1, (0, 0.1, 0.2), (2, 0.2, 0.3))], 1: [line(1, (1, 0.1, 0.1), (3, 0, 0.5))]}
    folder = write_ranks(tmp_path / "pipeline", ranks)
    first, second = rows_of(folder, pp=2, vpp=2, layout="E(t*2|)*2 ttm|L")["rows"]
    assert (first["forward"], first["backward"]) == (pytest.approx(0.3), pytest.approx(0.5))
    assert [stage["text"] for stage in first["stages"]] == ["Ett", "ttm"]
    assert [(stage["number"], stage["text"]) for stage in second["stages"]] == [(1, "tt"), (3, "L")]
    assert second["stages"][1] == {"number": 3, "text": "L", "forward": 0, "backward": 0.5}


@pytest.mark.parametrize("layout", ["", None, 7, "Ett|x|L", "Et||L", "Et|t|L", "tt|EL"])
def test_stages_without_a_valid_layout_have_numbers_alone(layout):
    assert stage_texts(layout, 2) == []


def test_ranks_are_in_order_and_other_files_are_ignored(tmp_path):
    folder = write_ranks(tmp_path / "pipeline", {10: [line(1)], 2: [line(1)], 0: [line(1)], 1: []})
    for name in ("rank-x.jsonl", "rank-01.jsonl", "rank-3.jsonl.unreadable", "rank-99999.jsonl"):
        (folder / name).write_text("rubbish\n")
    (folder / "rank-4.jsonl").mkdir()
    assert list(read_pipeline(folder)) == [0, 2, 10]
    assert rows_of(folder)["missing"] == [1, 3, 4, 5, 6, 7, 8, 9]


def test_a_run_resumed_with_fewer_ranks_counts_the_steps_since(tmp_path):
    old, new = line(1, (0, 0.5, 0.5)), line(2, (0, 0.1, 0.3))
    folder = write_ranks(tmp_path / "pipeline", {0: [old, new], 1: [old, new], 2: [old], 3: [old]})
    data = rows_of(folder, pp=2)
    assert [row["rank"] for row in data["rows"]] == [0, 1]
    assert [(row["steps"], row["forward"]) for row in data["rows"]] == [(1, 0.1)] * 2
    assert data["missing"] == []
    assert rows_of(folder, pp=1) is None
    assert rows_of(folder, pp=4)["rows"][0]["forward"] == 0.5, "the step that all have"


def test_a_run_resumed_with_other_stages_counts_the_last(tmp_path):
    old, new = line(1, (0, 0.5, 0.5)), line(2, (0, 0.1, 0.1), (2, 0.1, 0.1))
    data = rows_of(write_ranks(tmp_path / "pipeline", {0: [old, new], 1: [old, new]}), pp=2)
    assert [(row["steps"], row["forward"]) for row in data["rows"]] == [(1, 0.2)] * 2


def test_ranks_without_a_common_step_have_no_section(tmp_path):
    folder = write_ranks(tmp_path / "pipeline", {0: [line(1)], 1: [line(2)]})
    assert rows_of(folder, pp=2) is None


def test_no_pipeline_no_section(tmp_path):
    assert read_pipeline(tmp_path / "nowhere") == {}
    (tmp_path / "pipeline").touch()
    assert read_pipeline(tmp_path / "pipeline") == {}
    assert pipeline_data({}, {"parallel.pp": 2}) is None
    assert pipeline_data({}, {}) is None


def test_the_later_line_counts_and_half_a_line_does_not(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    write_lines(path, [line(2), line(1), line(2, bubble=0.4)])
    with open(path, "a") as file:
        file.write('{"step": 3, "elap')
    steps = read_rank(path)
    assert list(steps) == [1, 2]
    assert steps[2].bubble == 0.4


def test_rounding_is_forgiven_and_no_time_has_no_shares(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    write_lines(path, [line(1, elapsed=0, bubble=0.0, predicted=-1e-16)])
    times = read_rank(path)[1]
    assert (times.forward, times.backward, times.predicted) == ((0,), (0,), 0)


@pytest.mark.parametrize(
    "harm",
    [
        "[1]",
        '{"step": 2, "el{"step": 3}',
        json.dumps({"step": 2}),
        json.dumps(line(2, elapsed="long")),
        json.dumps(line(2, elapsed=-1.0)),
        json.dumps(line(2, elapsed=1e-320)),
        json.dumps(line(-1)),
        json.dumps(line(2, bubble=1.5)),
        json.dumps(line(2, predicted=None)),
        json.dumps(line(2, (0, 1))),
        json.dumps(line(2, (-1, 0.1, 0.1))),
        json.dumps(line(2) | {"stages": []}),
        json.dumps(line(2) | {"stages": 5}),
        '{"step": 2, "elapsed_s": 1, "stages": [[0, NaN, 0]], "bubble": 0, "predicted": 0}',
        '{"step": 2, "elapsed_s": Infinity, "stages": [[0, 0, 0]], "bubble": 0, "predicted": 0}',
    ],
)
def test_a_broken_line_names_file_and_line(tmp_path, harm):
    path = tmp_path / "rank-0.jsonl"
    path.write_text(f"{json.dumps(line(1))}\n{harm}\n{json.dumps(line(3))}\n")
    with pytest.raises(ValueError, match=r"rank-0\.jsonl, line 2: is not a step of a pipeline"):
        read_rank(path)


def test_a_run_with_a_pipeline_has_it_in_its_page_and_summary(tmp_path):
    plain = make_run(tmp_path / "plain", steps=2)
    piped = make_run(tmp_path / "piped", steps=6, pp=2, vpp=2)
    data = read_runs([plain, piped])
    assert data["runs"][0]["pipeline"] is None
    rows = data["runs"][1]["pipeline"]["rows"]
    assert [[stage["number"] for stage in row["stages"]] for row in rows] == [[0, 2], [1, 3]]
    for row in rows:
        assert 0.1 < row["bubble"] < 0.3
        assert row["backward"] == pytest.approx(2 * row["forward"], rel=1e-3)
    said = [text for text in report_summary(data) if "bubble" in text]
    assert len(said) == 1
    assert said[0].startswith("  bubble of 2 pipeline ranks: ")
    assert said[0].endswith("% measured, 25.0% predicted")
