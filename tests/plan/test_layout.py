from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.plan.samples import examples

from longshore.plan.layout import (
    LONGEST_TEXT,
    NO_INPUTS,
    Layout,
    Stage,
    StageInputs,
    balanced_layout,
    one_stage,
    parse_layout,
)


def test_the_docstrings_example() -> None:
    layout = parse_layout("Ett|tt|ttm|L", pp=2, layers=6, depths=1)
    assert layout.stages == (
        Stage(True, range(2), False, range(0), False),
        Stage(False, range(2, 4), False, range(0), False),
        Stage(False, range(4, 6), True, range(1), False),
        Stage(False, range(6, 6), False, range(1, 1), True),
    )
    assert (layout.pp, layout.vpp, layout.layers, layout.depths) == (2, 2, 6, 1)
    assert [list(layout.of_rank(rank)) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [layout.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert [layout.streams(stage) for stage in range(4)] == [1, 1, 2, 2]
    assert [stage.has_embedding for stage in layout.stages] == [True, False, True, False]


def test_what_ranks_read() -> None:
    layout = parse_layout("Ett|tt|ttm|L", pp=2, layers=6, depths=1)
    nothing = StageInputs(*[False] * 6)
    assert [stage.inputs(depths=1) for stage in layout.stages] == [
        StageInputs(True, False, False, False, False, False),
        nothing,
        StageInputs(False, False, True, False, False, False),
        StageInputs(False, True, False, True, True, True),
    ]
    assert layout.inputs(0) == StageInputs(True, False, True, False, False, False)
    assert layout.inputs(1) == layout.stages[3].inputs(depths=1)
    assert nothing == NO_INPUTS
    assert layout.inputs(1) != NO_INPUTS
    assert parse_layout("E|t|L", pp=3, layers=1).inputs(1) == NO_INPUTS
    # Without depths the head has no targets of any.
    assert not one_stage(layers=2).inputs(0).depth_targets
    assert one_stage(layers=2, depths=1).inputs(0) == StageInputs()


def test_repetitions_and_spaces() -> None:
    spelled = parse_layout("E t*3 | (tt|)*2 m*2 L", pp=4, layers=7, depths=2)
    assert str(spelled) == "Ettt|tt|tt|mmL"
    assert str(parse_layout("E(t*2|)*2L", pp=3, layers=4)) == "Ett|tt|L"
    assert str(one_stage(layers=3, depths=1)) == "EtttmL"
    assert one_stage(layers=3, depths=1) == parse_layout("EtttmL", pp=1, layers=3, depths=1)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """A legal layout, with pp, layers and depths."""
    layers, depths = draw(st.integers(1, 9)), draw(st.integers(0, 3))
    letters = f"E{'t' * layers}{'m' * depths}L"
    pp = draw(st.integers(1, min(4, len(letters))))
    stages = pp * draw(st.integers(1, len(letters) // pp))
    places = st.integers(1, len(letters) - 1)
    cuts = draw(st.lists(places, min_size=stages - 1, max_size=stages - 1, unique=True))
    ends = [0, *sorted(cuts), len(letters)]
    text = "|".join(letters[start:stop] for start, stop in pairwise(ends))
    return text, pp, layers, depths


@pytest.mark.property
@given(texts())
def test_a_text_is_the_layout_it_describes(drawn: tuple[str, int, int, int]) -> None:
    text, pp, layers, depths = drawn
    layout = parse_layout(text, pp=pp, layers=layers, depths=depths)
    assert str(layout) == text
    assert (layout.pp, layout.layers, layout.depths) == (pp, layers, depths)
    assert [n for stage in layout.stages for n in stage.layers] == list(range(layers))
    assert [n for stage in layout.stages for n in stage.depths] == list(range(depths))
    assert [stage.embed for stage in layout.stages] == [True] + [False] * (len(layout.stages) - 1)
    assert [stage.head for stage in layout.stages] == [False] * (len(layout.stages) - 1) + [True]
    normed = [number for number, stage in enumerate(layout.stages) if stage.norm]
    first = next(n for n, stage in enumerate(layout.stages) if stage.depths or stage.head)
    assert normed == [first]
    assert sorted(n for rank in range(pp) for n in layout.of_rank(rank)) == list(
        range(len(layout.stages))
    )
    streams = [layout.streams(stage) for stage in range(len(layout.stages))]
    assert streams == sorted(streams)
    assert streams[-1] == 1 + depths


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    """Costs, pp, vpp, depths, embed."""
    costs = draw(st.lists(st.integers(0, 20), min_size=2, max_size=9))
    pp = draw(st.integers(1, min(4, len(costs))))
    vpp = draw(st.integers(1, len(costs) // pp))
    depths = draw(st.integers(0, len(costs) - 2))
    return costs, pp, vpp, depths, draw(st.integers(0, 20))


@pytest.mark.property
@settings(max_examples=examples(100, fuzz=2_000))
@example(([6, 3, 6, 19, 1, 11, 13, 14, 11], 1, 5, 0, 11)).via("evener though higher at first")
@given(problems())
def test_balanced_is_the_best_of_all(drawn: tuple[list[int], int, int, int, int]) -> None:
    costs, pp, vpp, depths, embed = drawn
    layout = balanced_layout(costs, pp=pp, vpp=vpp, depths=depths, embed=embed)
    layers = len(costs) - depths - 1
    assert (layout.pp, layout.vpp, layout.layers, layout.depths) == (pp, vpp, layers, depths)
    parts = [costs[0] + embed, *costs[1:]]
    letters = [str(stage).removeprefix("E") for stage in layout.stages]
    assert all(letters)
    ends = [sum(map(len, letters[:number])) for number in range(len(letters) + 1)]
    chosen = value([sum(parts[start:stop]) for start, stop in pairwise(ends)])
    everything = [
        value([sum(parts[start:stop]) for start, stop in pairwise((0, *cuts, len(parts)))])
        for cuts in combinations(range(1, len(parts)), pp * vpp - 1)
    ]
    assert chosen == min(everything)


def value(stages: list[int]) -> tuple[int, int]:
    return max(stages), sum(cost * cost for cost in stages)


def test_balanced_counts_the_head_and_the_embedding() -> None:
    assert str(balanced_layout([1] * 8 + [3], pp=2, vpp=1)) == "Ettttt|tttL"
    assert str(balanced_layout([1, 1, 1, 1, 0], pp=2, vpp=1, embed=2)) == "Et|tttL"
    assert str(balanced_layout([2, 2, 2, 2, 9], pp=2, vpp=1, depths=1)) == "Etttm|L"


@pytest.mark.parametrize(
    ("text", "pp", "message"),
    [
        ("Ett|t", 2, "not this model's list of parts: E, then 3 t, 1 m and L"),
        ("Ettt|L", 2, "not this model's list of parts"),
        ("mEttt|L", 2, "not this model's list of parts"),
        ("Ett||tmL", 3, "whose stage 1 has nothing to do"),
        ("Etttm|L|", 3, "whose stage 2 has nothing to do"),
        ("EtxtmL", 1, "in which 'x' means nothing; E is the embedding"),
        ("E(ttt)mL", 1, r"in which '\(' means nothing"),
        ("Et|t|tmL", 2, "has 3 stages, which cannot be shared evenly by 2 pipeline ranks"),
        ("E(t*99999)*9mL", 1, "which is too long"),
    ],
)
def test_errors(text: str, pp: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(text, pp=pp, layers=3, depths=1)


def test_the_longest_text() -> None:
    layers = LONGEST_TEXT
    assert parse_layout(f"Et*{layers}L", pp=1, layers=layers).layers == layers
    with pytest.raises(ValueError, match="too long"):
        parse_layout(f"Et*{layers + 1}L", pp=1, layers=layers + 1)


def test_too_few_parts() -> None:
    with pytest.raises(ValueError, match=r"2 layers, 1 depths and the head make 4 parts, too"):
        balanced_layout([1, 1, 1, 1], pp=3, vpp=2, depths=1)
    with pytest.raises(ValueError, match="has 0 stages"):
        Layout((), 1)
    with pytest.raises(ValueError, match="shared evenly by 0"):
        Layout(one_stage(layers=1).stages, 0)
