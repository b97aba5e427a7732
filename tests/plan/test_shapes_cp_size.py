import pytest

from longshore.plan.shapes import legal_cp_sizes, padded_length, usable_capacity


@pytest.mark.parametrize(
    ("lanes", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (12, (1, 2, 4, 8, 12)),
        (24, (1, 2, 4, 8, 16, 24)),
        (40, (1, 2, 4, 8, 16, 32, 40)),
    ],
)
def test_powers_of_two_and_the_whole_are_legal(lanes: int, sizes: tuple[int, ...]):
    assert legal_cp_sizes(lanes) == sizes


def test_any_size_up_to_64_lanes():
    assert legal_cp_sizes(6, kind="any") == (1, 2, 3, 4, 5, 6)
    assert legal_cp_sizes(64, kind="any") == tuple(range(1, 65))
    with pytest.raises(ValueError, match="up to 64 lanes, but there are 65; use 'pow2'"):
        legal_cp_sizes(65, kind="any")


def test_limits_cut_both_ends():
    assert legal_cp_sizes(16, min_cp=2, max_cp=8) == (2, 4, 8)
    assert legal_cp_sizes(16, min_cp=3, max_cp=5) == (4,)
    assert legal_cp_sizes(6, max_cp=5) == (1, 2, 4)
    assert legal_cp_sizes(6, min_cp=6) == (6,)
    assert legal_cp_sizes(6, kind="any", min_cp=3, max_cp=5) == (3, 4, 5)


def test_only_sizes_that_divide_the_heads():
    assert legal_cp_sizes(8, heads=4) == (1, 2, 4)
    assert legal_cp_sizes(6, heads=12, kind="any") == (1, 2, 3, 4, 6)
    assert legal_cp_sizes(6, heads=8) == (1, 2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_cp": 8, "heads": 4}, "no CP size that divides the 4 heads is legal from"),
        ({"min_cp": 4, "max_cp": 2}, r"min_cp is 4; it must be between 1 and plan.max_cp \(2\)"),
        ({"min_cp": 9}, r"min_cp is 9; it must be between 1 and plan.max_cp \(8\)"),
        ({"min_cp": 0}, "min_cp is 0"),
        ({"max_cp": 16}, "max_cp is 16, but there are only 8 lanes"),
        ({"min_cp": 3, "max_cp": 3}, "no CP size is legal from plan.min_cp 3 to plan.max_cp 3"),
        ({"kind": "odd"}, "cp_sizes is 'odd'; it may be 'pow2' or 'any'"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        legal_cp_sizes(8, **arguments)


def test_the_advice_to_allow_any_size_works():
    with pytest.raises(ValueError, match=r"set plan\.cp_sizes='any'"):
        legal_cp_sizes(8, min_cp=3, max_cp=3)
    assert legal_cp_sizes(8, min_cp=3, max_cp=3, kind="any") == (3,)


@pytest.mark.parametrize(
    ("length", "cp_size", "tokens"),
    [
        (7, 1, 7),
        (1, 2, 4),
        (4, 2, 4),
        (5, 2, 8),
        (10, 2, 12),
        (12, 6, 12),
        (13, 6, 24),
        (1, 40, 80),
    ],
)
def test_padding_is_to_twice_the_cp_size(length: int, cp_size: int, tokens: int):
    assert padded_length(length, cp_size) == tokens


def test_alignment_leaves_whole_multiples():
    assert usable_capacity(100, 1) == 100
    assert usable_capacity(100, 16) == 96
    assert usable_capacity(96, 16) == 96
    assert usable_capacity(100, 100) == 100
