"""Which rows travel to which rank, and how they are summed again, against loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.ops.experts import sort_by_expert
from longshore.parallel.expert import (
    chosen_on_ranks,
    count_experts,
    own_choices,
    rank_copies,
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
    chosen = chosen_on_ranks(ids, 2, 2)
    assert chosen.tolist() == [[2, 0], [1, 1], [0, 0]]
    copies = rank_copies(chosen > 0, 3, 2)
    assert copies.rows.tolist() == [0, 1, 1]
    assert copies.positions.tolist() == [[0, 3], [1, 2], [3, 3]]
    came = torch.tensor([[0.5, 0.5, 0, 1], [0.25, 0.75, 3, 0]])  # weights and ids of t0 and t1
    copies, own_ids, weights = own_choices(came, 2, 0, 3)
    assert copies.rows.tolist() == [0, 0, 1]
    assert copies.positions.tolist() == [[0, 1], [2, 3]]
    assert own_ids.flatten().tolist() == [0, 1, 0]
    assert weights.flatten().tolist() == [0.5, 0.5, 0.75]


@pytest.mark.property
@given(routings())
def test_rows_and_positions_are_those_of_a_loop(routing):
    ids, each, ranks = routing
    rows, of_token = by_loop(ids, each, ranks)
    sent = chosen_on_ranks(ids, each, ranks) > 0
    assert sent.sum().item() == len(rows)
    copies = rank_copies(sent, len(rows), ids.shape[1])
    assert copies.rows.tolist() == rows
    width = min(ids.shape[1], ranks)
    padded = [mine + [len(rows)] * (width - len(mine)) for mine in of_token]
    assert copies.positions.shape == (len(ids), width)
    assert copies.positions.tolist() == padded


@pytest.mark.property
@given(routings())
def test_taking_rows_and_summing_them_are_transposes(routing):
    """<take(x), y> = <x, sum(y)>, in integers."""
    ids, each, ranks = routing
    sent = chosen_on_ranks(ids, each, ranks) > 0
    copies = rank_copies(sent, int(sent.sum()), ids.shape[1])
    x = torch.arange(3.0 * len(ids)).view(-1, 3)
    y = torch.arange(3.0 * len(copies.rows)).view(-1, 3).square()
    assert (x[copies.rows] * y).sum() == (x * sum_rows(y, copies.positions)).sum()


@pytest.mark.property
@given(routings())
def test_every_choice_is_one_rank_s_own(routing):
    ids, each, ranks = routing
    weights = torch.rand(ids.shape, dtype=torch.float64) + 1
    choices = torch.cat([weights, ids.double()], dim=1)
    chosen = chosen_on_ranks(ids, each, ranks)
    for rank in range(ranks):
        first = rank * each
        pairs = [
            (row, expert - first, weights[row, place].item())
            for row, experts in enumerate(ids.tolist())
            for place, expert in enumerate(experts)
            if first <= expert < first + each
        ]
        assert chosen[:, rank].sum().item() == len(pairs)
        copies, own_ids, own_weights = own_choices(choices, each, rank, len(pairs))
        numbers = (copies.rows, own_ids.flatten(), own_weights.flatten())
        assert list(zip(*(each.tolist() for each in numbers), strict=True)) == pairs
        y = torch.arange(1.0, len(pairs) + 1)[:, None]
        sums = [
            sum(n for n, pair in enumerate(pairs, 1) if pair[0] == row) for row in range(len(ids))
        ]
        assert sum_rows(y, copies.positions).flatten().tolist() == sums


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
