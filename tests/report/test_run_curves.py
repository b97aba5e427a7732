import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.report.run_files import choose_dots, cost_data, cost_text, fit_cost, verdict
from longshore.report.run_journal import SHOWN, JournalLine, curve, edges, rounded, run_curves
from longshore.report.run_page import experts_data, relative


def journal_line(predicted, elapsed, experts=()):
    return JournalLine(
        number=1,
        start=0,
        size=1,
        predicted=np.array(predicted, dtype=float),
        elapsed=np.array(elapsed, dtype=float),
        experts=tuple(np.array(layer) for layer in experts),
    )


def test_a_point_is_the_mean_with_both_extremes():
    at = edges(6, most=3)
    assert at.tolist() == [0, 2, 4, 6]
    found = curve(np.array([1.0, 3, 9, 1, 2, 2]), at)
    assert found == {"y": [2, 5, 2], "low": [1, 1, 2], "high": [3, 9, 2]}


def test_few_steps_stay_as_they_are():
    values = np.array([1.5, math.nan, 3])
    assert curve(values, edges(3, most=3)) == {"y": [1.5, None, 3]}


def test_a_point_without_values_is_a_gap():
    found = curve(np.array([math.nan, math.nan, 4, math.nan]), edges(4, most=2))
    assert found == {"y": [None, 4], "low": [None, 4], "high": [None, 4]}


@pytest.mark.property
@given(st.integers(1, 5000), st.integers(1, 1200), st.data())
def test_no_spike_is_lost(count, most, data):
    values = np.ones(count)
    spike = data.draw(st.integers(0, count - 1))
    values[spike] = 1e6
    at = edges(count, most=most)
    assert len(at) - 1 == min(count, most)
    assert (np.diff(at) > 0).all()
    assert (at[0], at[-1]) == (0, count)
    found = curve(values, at)
    assert max(found.get("high", found["y"])) == 1e6


def test_a_long_run_has_a_thousand_points():
    steps = np.arange(1, 100_001, dtype=float)
    loss = np.where(steps == 77_777, 50.0, 2.0)
    metrics = dict.fromkeys(SHOWN, np.full(100_000, math.nan))
    found = run_curves(
        {**metrics, "step": steps, "loss": loss, "tokens": steps * 0 + 10, "elapsed_s": steps * 0}
    )
    assert list(found["curves"]) == ["loss", "elapsed_s"], "what has no value is left out"
    assert len(found["step"]) == len(found["tokens"]) == 1000
    assert (found["first"], found["step"][0], found["step"][-1]) == (1, 100, 100_000)
    assert found["tokens"][-1] == 1_000_000
    assert max(found["curves"]["loss"]["high"]) == 50


def test_rounded_keeps_so_many_digits():
    assert rounded([1.23456789, 2.0, math.inf, 123456789.0]) == [1.2346, 2, None, 123460000]


def test_the_factor_is_taken_out_before_the_error():
    fit = fit_cost(np.array([1.0, 2, 3]), np.array([2.0, 4, 9]))
    assert (fit.rounds, fit.factor, fit.error) == (3, 2, 0)
    assert fit.correlation == pytest.approx(np.corrcoef([1, 2, 3], [2, 4, 9])[0, 1])
    assert fit.high == pytest.approx(np.quantile([2, 2, 3], 0.95) / 2)


def test_a_perfect_model_of_another_machine_is_very_good():
    predicted = np.linspace(1, 5, 50)
    fit = fit_cost(predicted, 7 * predicted)
    assert (fit.factor, fit.error) == (pytest.approx(7), pytest.approx(0))
    assert fit.correlation == pytest.approx(1)
    assert verdict(fit) == "very good"
    assert "The factor is 7" in cost_text(fit)


def test_a_model_that_knows_nothing_is_poor():
    rng = np.random.default_rng(0)
    fit = fit_cost(rng.lognormal(size=500), rng.lognormal(size=500))
    assert verdict(fit) == "poor"
    assert abs(fit.correlation) < 0.2


def test_predictions_that_never_differ_have_no_correlation():
    fit = fit_cost(np.full(9, 0.1), np.linspace(1, 2, 9))
    assert fit.correlation is None
    assert "correlation says little" in cost_text(fit)


def test_the_first_step_is_left_out_and_skipped_ones_are_none():
    lines = {n: journal_line([1.0, 2.0], [3.0, 6.0]) for n in range(2, 8)}
    lines = {1: journal_line([1.0], [90.0]), **lines, 8: journal_line([1.0], [])}
    found = cost_data(lines)
    assert (found["rounds"], found["factor"], found["skipped"]) == (12, 3, 1)
    assert set(found["dots"]["step"]) == {2, 3, 4, 5, 6, 7}
    assert found["ratio"]["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert found["ratio"]["y"][:2] == [90, 3]
    assert cost_data({8: lines[8]}) is None
    assert cost_data({}) is None


def test_with_few_steps_none_is_left_out():
    found = cost_data({n: journal_line([1.0], [2.0]) for n in (1, 2)})
    assert (found["rounds"], found["skipped"]) == (2, None)


def test_dots_keep_the_outliers():
    predicted = np.linspace(1, 2, 10_000)
    ratios = np.ones(10_000)
    ratios[[123, 7654]] = 40, 0.1
    dots = choose_dots(predicted, ratios)
    assert len(dots) <= 1200
    assert {123, 7654} <= set(dots)
    assert choose_dots(predicted[:5], ratios[:5]) == [0, 1, 2, 3, 4]


def test_shares_of_experts_are_hundredths_of_an_even_share():
    lines = {n: journal_line([1], [1], [[10, 10, 20, 0], [5, 5]]) for n in (1, 2, 3)}
    found = experts_data(lines)
    assert found["experts"] == [4, 2]
    assert found["maps"][0] == [[100] * 3, [100] * 3, [200] * 3, [0] * 3]
    assert found["peak"]["y"] == [1.5] * 3
    assert (found["peak"]["low"], found["peak"]["high"]) == ([1] * 3, [2] * 3)
    assert found["rows"][0] == {"busiest": 2, "most": 2, "idlest": 3, "least": 0, "starved": 1}


def test_many_experts_get_fewer_columns():
    lines = {n: journal_line([1], [1], [[n % 7] * 256] * 60) for n in range(300)}
    found = experts_data(lines)
    assert len(found["step"]) == 6
    assert sum(len(row) for layer in found["maps"] for row in layer) == 6 * 256 * 60
    assert found["step"][-1] == 299


def test_without_experts_there_is_nothing_to_show():
    assert experts_data({1: journal_line([1], [1])}) is None
    assert experts_data({}) is None
    assert relative(np.zeros((1, 3), dtype=np.int64)).tolist() == [[1, 1, 1]]
