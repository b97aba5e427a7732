import json
import re
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from longshore.plan.cost import CostProfile, share_out
from longshore.report.pages import PLAN_SCRIPTS, script_json, write_plan_page
from longshore.report.plan_page import MOST_BINS, TICKS, length_histogram, page_data

TOKENS_ONLY = CostProfile(linear=1.0, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)


@pytest.fixture
def small(make):
    """Two lanes, two rounds; one sequence is split, and lane 0 idles 3 of 10 seconds."""
    return make([8, 3, 3, 3], [[(0, 2, (0,)), (1, 1, (1,))], [(0, 1, (2,)), (1, 1, (3,))]], lanes=2)


def embedded(text):
    """The data of a written page, read back."""
    return json.loads(re.search(r'id="plan-data">(.*?)</script>', text, re.DOTALL)[1])


def test_times_are_ticks_of_a_millionth(small):
    step = page_data([small], {})["steps"][0]
    assert step["total"] == TICKS
    assert step["unit"] * TICKS == pytest.approx(10)
    assert step["start"] == [0, 700_000]
    assert step["end"] == [700_000, TICKS]
    assert step["busy"] == [[400_000, 700_000], [300_000, 300_000]]
    assert step["idle"] == pytest.approx(0.15)


def test_packs_are_columns(small):
    packs = page_data([small], {})["steps"][0]["packs"]
    assert packs["round"] == [0, 0, 1, 1]
    assert packs["lane"] == [0, 1, 0, 1]
    assert packs["cp"] == [2, 1, 1, 1]
    assert packs["tokens"] == [4, 3, 3, 3]
    assert packs["cost"] == [400_000, 300_000, 300_000, 300_000]
    assert packs["start"] == [0, 400_000, 700_000, 700_000]
    assert packs["count"] == [1, 1, 1, 1]
    assert packs["sequences"] == [0, 1, 2, 3]


def test_starts_are_lists_where_lanes_differ(make):
    rounds = [[(0, 1, (0,))], [(0, 1, (1,)), (1, 1, (2,))]]
    plan = make([6, 4, 2], rounds, lanes=2, sync="step")
    step = page_data([plan], {})["steps"][0]
    assert step["start"] == [0, [600_000, 0]]
    assert step["end"] == [[600_000, 0], [TICKS, 200_000]]


def test_a_rounds_own_cost_is_part_of_busy_time(make):
    profile = replace(TOKENS_ONLY, round=2.0)
    step = page_data([make([6], [[(0, 1, (0,))]], lanes=2, profile=profile)], {})["steps"][0]
    assert step["overhead"] == 250_000
    assert step["busy"] == [[TICKS, 250_000]]


def test_the_pages_own_policy_stands_beside_the_others(small):
    static = replace(small, stats=replace(small.stats, predicted=20.0))
    rows = page_data([small], {"static": [static], "padded": "too long"})["policies"]
    assert [row["name"] for row in rows] == ["mixed", "static", "padded"]
    assert [row["steps"][0]["predicted"] for row in rows[:2]] == [10, 20]
    assert rows[2] == {"name": "padded", "refused": "too long"}


def test_every_policy_is_described_and_an_unknown_one_has_no_words(small):
    theirs = replace(small, setting=replace(small.setting, policy="mine:greedy"))
    data = page_data([theirs], {"static": [small], "padded": "too long"})
    assert data["about"]["mine:greedy"] == ""
    assert data["about"]["padded"] == "one sequence per lane and round, padded to the longest"
    assert list(data["about"]) == ["mine:greedy", "static", "padded"]


def test_cp_sizes_are_those_of_all_steps(small, make):
    other = make([5], [[(0, 1, (0,))]], lanes=2)
    assert page_data([other, small], {})["cp_sizes"] == [1, 2]


def test_caps_look_at_all_steps(small):
    data = page_data([small, small], {})
    assert data["micro_batches"] == {"alone": 4, "others": 4}
    assert [(row["cap"], row["covered"]) for row in data["caps"]] == [(1, 0), (2, 1)]


def test_a_figure_that_is_not_finite_becomes_null(small):
    odd = replace(small, stats=replace(small.stats, gap=float("inf")))
    data = page_data([odd], {})
    assert data["steps"][0]["stats"]["gap"] is None
    script_json(data)


def test_a_pipeline_shows_its_ranks(make):
    plan = make([6, 6], [[(0, 1, (0,))], [(0, 1, (1,))]], lanes=1, pp=2)
    pipeline = page_data([plan], {})["steps"][0]["pipeline"]
    assert pipeline["kinds"] == ["forward", "backward"]
    assert sorted(set(pipeline["rank"])) == [0, 1]
    assert max(pipeline["end"]) == TICKS
    assert pipeline["unit"] * TICKS == pytest.approx(18)
    assert len(pipeline["rank"]) == 2 * 2 * 2
    assert pipeline["bubbles"] == pytest.approx([1 / 3, 1 / 3], rel=1e-5)


def test_stages_that_differ_have_bubbles_of_their_own(make):
    plan = make([6, 6], [[(0, 1, (0,))], [(0, 1, (1,))]], lanes=1, pp=2)
    costs = share_out(linear=[(1, 2), (1, 3)], quadratic=[(1, 2)] * 2, streams=[1, 1], pp=2)
    unequal = replace(plan, setting=replace(plan.setting, stage_costs=costs))
    data = page_data([unequal], {})
    script_json(data)
    first, last = data["steps"][0]["pipeline"]["bubbles"]
    assert 0 < last < first < 1


def test_without_a_pipeline_there_is_none(small):
    assert page_data([small], {})["steps"][0]["pipeline"] is None


def test_text_cannot_leave_the_data_block(small, tmp_path):
    nasty = "</script><script>alert(1)</script> {{js}} <!-- & \u2028"
    write_plan_page(tmp_path / "plan.html", [small], {"static": nasty})
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2
    assert "alert(1)</script>" not in text
    assert embedded(text)["policies"][1]["refused"] == nasty


def test_the_page_needs_nothing_from_outside(small, tmp_path):
    write_plan_page(tmp_path / "plan.html", [small], {})
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    addresses = set(re.findall(r"https?://[^\s\"']+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of SVG, which is not fetched"
    assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=|@import|url\(", text)
    assert "{{" not in text


def test_steps_are_counted_from_1_as_in_the_text(small, tmp_path):
    write_plan_page(tmp_path / "plan.html", [small, small], {})
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "`${i + 1} of ${steps.length}: " in text, "the names of the steps to choose from"
    assert "Steps are counted from 1; lanes" in text


@pytest.mark.parametrize("name", [*PLAN_SCRIPTS, "plan_page.css"])
def test_no_piece_ends_its_own_element(name):
    piece = files("longshore.report").joinpath(name).read_text(encoding="utf-8")
    assert "</" not in piece
    assert piece.count("\n") < 400


def test_a_big_plan_makes_a_moderate_file(make_random, tmp_path):
    plan = make_random(1024, rounds=3, seed=1)
    assert len(plan.sequences) > 4096
    write_plan_page(tmp_path / "plan.html", [plan], {})
    assert (tmp_path / "plan.html").stat().st_size < 400_000


def test_refuses_what_it_cannot_show(small, make):
    with pytest.raises(ValueError, match="at least one step"):
        page_data([], {})
    with pytest.raises(ValueError, match="'static' has plans for 2 steps, but there are 1"):
        page_data([small], {"static": [small, small]})
    with pytest.raises(ValueError, match=r"different lane counts: \[1, 2\]"):
        page_data([small, make([5], [[(0, 1, (0,))]], lanes=1)], {})
    with pytest.raises(ValueError, match="step 1 has no rounds"):
        page_data([replace(small, rounds=())], {})


def test_small_lengths_get_a_class_each():
    histogram = length_histogram(np.array([1, 2, 3, 3]))
    assert histogram["edges"] == [1, 2, 3, 4]
    assert histogram["counts"] == [1, 1, 2]
    assert histogram["tokens"] == [1, 2, 6]


def test_one_length():
    histogram = length_histogram(np.array([4096, 4096]))
    assert sum(histogram["counts"]) == 2
    assert histogram["edges"][0] == 4096


@pytest.mark.parametrize(("low", "high"), [(1, 131072), (1024, 8192), (1000, 1000), (7, 2_000_000)])
def test_every_length_is_in_its_class(low, high):
    lengths = np.unique(np.geomspace(low, high, 500).astype(np.int64))
    histogram = length_histogram(lengths)
    assert len(histogram["counts"]) <= MOST_BINS
    assert histogram["edges"][0] <= lengths.min()
    assert histogram["edges"][-1] > lengths.max()
    for i, count in enumerate(histogram["counts"]):
        inside = (lengths >= histogram["edges"][i]) & (lengths < histogram["edges"][i + 1])
        assert count == inside.sum()
        assert histogram["tokens"][i] == lengths[inside].sum()
