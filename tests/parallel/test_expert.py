"""Which rows travel to which rank, and how they are summed again, against loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.ops.experts import sort_by_expert
from longshore.parallel.expert import (
    count_experts,
    destinations,
    own_choices,
    rows_and_positions,
    sum_rows,
)


@st.composite
def routings(draw):
    """(ids (T, K) with `each`·R for no expert, experts of a rank, ranks)."""
    ranks, each = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    tokens, top_k = draw(st.integers(0, 7)), draw(st.integers(1, each * ranks))
    rows = [
        draw(st.permutations(range(each * ranks)))[:top_k]
        if draw(st.booleans())
        else [each * ranks] * top_k
        for _ in range(tokens)
    ]
    return torch.tensor(rows, dtype=torch.int64).view(tokens, top_k), each, ranks


def by_loop(ids, each: int, ranks: int):
    """The token of each row, rank by rank, and the rows of each token."""
    rows = [
        token
        for rank in range(ranks)
        for token, chosen in enumerate(ids.tolist())
        if any(rank * each <= expert < (rank + 1) * each for expert in chosen)
    ]
    return rows, [[m for m, at in enumerate(rows) if at == token] for token in range(len(ids))]


def test_the_worked_example():
    ids = torch.tensor([[0, 1], [3, 0], [4, 4]])
    sent = destinations(ids, 2, 2)
    assert sent.tolist() == [[True, False], [True, True], [False, False]]
    tokens, positions = rows_and_positions(sent, 3, 2)
    assert tokens.tolist() == [0, 1, 1]
    assert positions.tolist() == [[0, 3], [1, 2], [3, 3]]


@pytest.mark.property
@given(routings())
def test_rows_and_positions_are_those_of_a_loop(routing):
    ids, each, ranks = routing
    rows, of_token = by_loop(ids, each, ranks)
    sent = destinations(ids, each, ranks)
    assert sent.sum().item() == len(rows)
    tokens, positions = rows_and_positions(sent, len(rows), ids.shape[1])
    assert tokens.tolist() == rows
    width = min(ids.shape[1], ranks)
    padded = [mine + [len(rows)] * (width - len(mine)) for mine in of_token]
    assert positions.shape == (len(ids), width)
    assert positions.tolist() == padded


@pytest.mark.property
@given(routings())
def test_taking_rows_and_summing_them_are_transposes(routing):
    """<take(x), y> = <x, sum(y)>, in integers."""
    ids, each, ranks = routing
    sent = destinations(ids, each, ranks)
    tokens, positions = rows_and_positions(sent, int(sent.sum()), ids.shape[1])
    x = torch.arange(3.0 * len(ids)).view(-1, 3)
    y = torch.arange(3.0 * len(tokens)).view(-1, 3).square()
    assert (x[tokens] * y).sum() == (x * sum_rows(y, positions)).sum()


@pytest.mark.property
@given(routings())
def test_every_choice_is_one_rank_s_own(routing):
    ids, each, ranks = routing
    weights = torch.rand(ids.shape, dtype=torch.float64) + 1
    choices = torch.cat([weights, ids.double()], dim=1)
    total = torch.zeros_like(weights)
    for rank in range(ranks):
        own, shares = own_choices(choices, each, rank)
        is_own = (ids >= rank * each) & (ids < (rank + 1) * each)
        assert torch.equal(own, torch.where(is_own, ids - rank * each, each))
        total += shares
    assert torch.equal(total, weights.where(ids < each * ranks, 0))


@pytest.mark.property
@given(routings())
def test_counts_are_those_of_all_experts_in_one_place(routing):
    ids, each, ranks = routing
    _, counts, _ = sort_by_expert(ids, each * ranks)
    own = count_experts(ids, each * ranks)
    assert own.dtype == counts.dtype == torch.int32
    assert own.tolist() == counts.tolist()


def test_half_precision_is_summed_in_float32():
    """256 + 1 is 256 in bfloat16; three ranks' rows of 256, 1 and 1 are 258."""
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    summed = sum_rows(rows, torch.tensor([[0, 1, 2], [3, 3, 3]]))
    assert summed.dtype == torch.bfloat16
    assert summed.tolist() == [[258.0], [0.0]]
