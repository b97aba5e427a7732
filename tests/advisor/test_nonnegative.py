import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.advisor.step_time import fit_nonnegative


def test_the_example():
    assert fit_nonnegative([[1, 10], [1, 20], [1, 40]], [3, 5, 9]) == pytest.approx([1, 0.2])


def test_no_coefficient_is_below_zero():
    """Plain least squares would take −1 for the constant."""
    constant, slope = fit_nonnegative([[1, 1], [1, 2], [1, 3]], [1, 3, 5])
    assert constant == 0
    assert slope > 0


def test_columns_of_zeros_and_parts_below_zero():
    assert fit_nonnegative([[0, 1], [0, 2]], [2, 4]) == pytest.approx([0, 2])
    assert fit_nonnegative([[1], [2]], [-1, -2], totals=[5, 5]) == [0]


@pytest.mark.property
@given(st.lists(st.floats(1e-9, 1e3), min_size=3, max_size=3))
def test_exact_data_is_fitted(wanted):
    rows = [[1, 2, 4], [1, 3, 9], [1, 5, 25], [1, 7, 49]]
    seconds = [sum(a * b for a, b in zip(row, wanted, strict=True)) for row in rows]
    fitted = fit_nonnegative(rows, seconds)
    again = [sum(a * b for a, b in zip(row, fitted, strict=True)) for row in rows]
    assert again == pytest.approx(seconds, rel=1e-4)
