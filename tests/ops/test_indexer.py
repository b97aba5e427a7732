import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.twins import LargestTensor, assert_same, bounds_of, on_meta, run
from tests.ops.whole_tables import causal_ranges

from longshore.ops import indexer, reference
from longshore.ops.indexer import choose, index_loss
from longshore.ops.sparse_attention import row_ranges

HOST = torch.device("cpu")
NAMES = ("q_THD", "weights_TH", "keys_ED")
SMALL_BLOCKS = {"MOST_ROWS": 5, "MOST_ENTRIES": 3, "MOST_COPIED": 20}
LARGE_BLOCKS = {"MOST_ROWS": 64}


def ranges_of(lengths, ratio):
    return causal_ranges(bounds_of(lengths).offsets, window=3, ratio=ratio, device=HOST)


def inputs(lengths, ratio, *, heads=2, width=3, seed=0, dtype=torch.float64):
    entries = sum(n // ratio for n in lengths)
    draw = torch.Generator().manual_seed(seed)
    shapes = ((sum(lengths), heads, width), (sum(lengths), heads), (entries, width))
    drawn = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    return dict(zip(NAMES, (x.to(dtype) for x in drawn), strict=True))


def masses(chosen, seed=0):
    """Some entries, and some rows, have a mass of 0."""
    draw = torch.Generator().manual_seed(seed)
    mass = torch.rand(chosen.shape, dtype=torch.float64, generator=draw)
    kept = torch.rand(chosen.shape, generator=draw) < 0.8
    rows = torch.rand(len(chosen), 1, generator=draw) < 0.8
    counted = torch.rand(len(chosen), generator=draw) < 0.8
    return {"mass_TK": mass * (kept & rows & (chosen >= 0)), "counted_T": counted}


problems = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 30]), min_size=1, max_size=4),
        "ratio": st.sampled_from([1, 2, 4, 7]),
        "top_k": st.integers(1, 9),
        "heads": st.integers(1, 3),
        "sizes": st.sampled_from([LARGE_BLOCKS, SMALL_BLOCKS]),
        "seed": st.integers(0, 9),
    }
)


@pytest.mark.property
@given(problem=problems, whole=st.booleans())
def test_choice_as_the_twin(problem, whole):
    """With whole numbers many scores are equal, and exact."""
    lengths, ratio = problem["lengths"], problem["ratio"]
    given = inputs(lengths, ratio, heads=problem["heads"], seed=problem["seed"])
    if whole:
        given = {name: x.round() for name, x in given.items()}
    options = {"ranges": ranges_of(lengths, ratio), "top_k": problem["top_k"]}
    with patch.multiple(indexer, **problem["sizes"]):
        chosen = choose(**given, **options)
    want = reference.choose(**given, **options)
    assert (chosen.dtype, chosen.shape) == (torch.int32, want.shape)
    assert torch.equal(chosen, want)


@pytest.mark.property
@given(problem=problems)
def test_loss_as_the_twin(problem):
    lengths, ratio = problem["lengths"], problem["ratio"]
    given = inputs(lengths, ratio, heads=problem["heads"], seed=problem["seed"])
    chosen = reference.choose(**given, ranges=ranges_of(lengths, ratio), top_k=problem["top_k"])
    options = {"chosen_TK": chosen, **masses(chosen, problem["seed"])}
    with patch.multiple(indexer, **problem["sizes"]):
        got = run(index_loss, given, **options)
    want = run(reference.index_loss, given, **options)
    assert_same(got, want, within=1e-12, rounding=1e-14)


def one_query(scores):
    """A query of one head whose score for each entry is this, of one sequence."""
    keys = torch.tensor(scores, dtype=torch.float64)[:, None]
    numbers = np.array([[0], [1], [0], [len(scores)]])
    ranges = row_ranges(*numbers, offsets=(0, 1), device=HOST)
    ones = torch.ones(1, 1, dtype=torch.float64)
    return {"q_THD": ones[None], "weights_TH": ones, "keys_ED": keys}, ranges


@pytest.mark.parametrize(
    ("scores", "top_k", "best"),
    [
        ([1, 3, 0, 3], 3, [0, 1, 3]),
        ([2, 2, 2, 0], 2, [0, 1]),
        ([0, 0, 1, 0, 0], 3, [0, 1, 2]),
        ([-5, -1, -2], 2, [0, 1]),  # all are 0 after relu
        ([1, 2], 5, [0, 1]),
    ],
)
def test_ties_go_to_the_lower_index(scores, top_k, best):
    given, ranges = one_query(scores)
    assert choose(**given, ranges=ranges, top_k=top_k).tolist() == [best]


def test_negative_weights():
    given, ranges = one_query([3, 1, 0, 2])
    given["weights_TH"] = -given["weights_TH"]
    assert choose(**given, ranges=ranges, top_k=2).tolist() == [[1, 2]]


def test_loss_by_hand():
    """As the docstring of ops/indexer.py."""
    given, _ = one_query([0, math.log(3)])
    chosen, counted = torch.tensor([[0, 1, -1]]).int(), torch.tensor([True])
    mass = torch.tensor([[0.1, 0.1, 7.0]]).double()
    loss = index_loss(**given, chosen_TK=chosen, mass_TK=mass, counted_T=counted)
    assert loss.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    same = index_loss(**given, chosen_TK=chosen, mass_TK=mass * 3, counted_T=counted)
    assert same.item() == pytest.approx(loss.item())
    right = torch.tensor([[0.1, 0.3, 0.0]]).double()
    assert abs(index_loss(**given, chosen_TK=chosen, mass_TK=right, counted_T=counted)) < 1e-15
    loss = index_loss(**given, chosen_TK=chosen, mass_TK=mass, counted_T=~counted)
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("chosen", "mass"),
    [
        ([[-1, -1]], [[0.0, 0.0]]),
        ([[0, 1]], [[0.0, 0.0]]),
        ([[]], [[]]),
        ([[0, -1]], [[1e-320, 0]]),
    ],
)
def test_rows_without_entries_or_mass_give_zero(chosen, mass):
    given, _ = one_query([1, 2])
    chosen, mass = torch.tensor(chosen).int(), torch.tensor(mass).double()
    out, *grads = run(
        index_loss, given, chosen_TK=chosen, mass_TK=mass, counted_T=torch.ones(1) > 0
    )
    assert out.item() == 0
    assert all((grad == 0).all() for grad in grads)


def test_no_entries_at_all():
    given, ranges = inputs([3, 1], 4), ranges_of([3, 1], 4)
    assert given["keys_ED"].shape == (0, 3)
    chosen = choose(**given, ranges=ranges, top_k=2)
    assert chosen.shape == (4, 0)
    for width in (0, 2):
        none = torch.full((4, width), -1, dtype=torch.int32)
        out, *grads = run(
            index_loss,
            given,
            chosen_TK=none,
            mass_TK=torch.zeros(4, width),
            counted_T=torch.ones(4) > 0,
        )
        assert out.item() == 0
        assert all((grad == 0).all() for grad in grads)


def test_large_scores_stay_finite():
    """The predicted probability of the entry with all mass underflows; its log does not."""
    given, _ = one_query([0, 1e5])
    mass, counted = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([True])
    options = {"chosen_TK": torch.tensor([[0, 1]]).int(), "mass_TK": mass, "counted_T": counted}
    loss, *grads = run(index_loss, given, **options)
    assert loss.item() == 1e5
    assert all(grad.isfinite().all() for grad in grads)
    assert_same([loss, *grads], run(reference.index_loss, given, **options), within=1e-12)


def test_entries_outside_a_range_change_nothing():
    lengths = [20, 12]
    given, ranges = inputs(lengths, 2), ranges_of(lengths, 2)
    poisoned = {name: x.clone() for name, x in given.items()}
    for name, rows in zip(NAMES, (20, 20, 10), strict=True):
        poisoned[name][:rows] = torch.nan
    before, after = (choose(**x, ranges=ranges, top_k=3) for x in (given, poisoned))
    assert torch.equal(before[20:], after[20:])
    assert ((after >= -1) & (after < 16)).all()
    # Row 10 of the first sequence sees the entries 0…4.
    changed = given | {"keys_ED": given["keys_ED"].clone()}
    changed["keys_ED"][5:] += 1.0
    assert torch.equal(before[:11], choose(**changed, ranges=ranges, top_k=3)[:11])


def test_rows_that_are_not_counted_give_no_gradient_even_from_nan():
    lengths = [12, 8]
    given, ranges = inputs(lengths, 2), ranges_of(lengths, 2)
    chosen = choose(**given, ranges=ranges, top_k=3)
    options = {"chosen_TK": chosen, **masses(chosen)} | {"counted_T": torch.arange(20) >= 12}
    want = run(index_loss, given, **options)
    for name, rows in zip(NAMES, (12, 12, 6), strict=True):
        given[name][:rows] = torch.nan
    loss, dq, dweights, dkeys = run(index_loss, given, **options)
    assert torch.equal(loss, want[0])
    for got, full, rows in zip((dq, dweights, dkeys), want[1:], (12, 12, 6), strict=True):
        assert torch.equal(got[rows:], full[rows:])


def test_half_precision_is_computed_in_float32():
    lengths = [30, 3]
    half, ranges = inputs(lengths, 2, dtype=torch.bfloat16), ranges_of(lengths, 2)
    as_float = {name: x.float() for name, x in half.items()}
    chosen = choose(**half, ranges=ranges, top_k=4)
    assert torch.equal(chosen, choose(**as_float, ranges=ranges, top_k=4))
    options = {"chosen_TK": chosen, **masses(chosen)}
    options["mass_TK"] = options["mass_TK"].float()
    got, want = (run(index_loss, x, **options) for x in (half, as_float))
    assert torch.equal(got[0], want[0])
    assert [x.dtype for x in got] == [torch.float32] + [torch.bfloat16] * 3
    assert_same([x.float() for x in got], want, within=0.01)


def test_no_tensor_grows_with_queries_times_entries():
    """96 queries of 2 × 4 numbers with 48 entries: a matrix of both has 4608."""
    given, ranges = inputs([96], 2, width=4), ranges_of([96], 2)
    sizes = {"MOST_ROWS": 4, "MOST_ENTRIES": 8, "MOST_COPIED": 256}
    with patch.multiple(indexer, **sizes), LargestTensor() as largest:
        chosen = choose(**given, ranges=ranges, top_k=8)
        run(index_loss, given, chosen_TK=chosen, **masses(chosen))
    assert largest.numbers <= given["q_THD"].numel()


def test_the_device_is_asked_for_nothing():
    bounds = bounds_of([30, 12])
    bounds.tables["ranges"] = ranges_of([30, 12], 2)
    ranges = bounds.map_tensors(lambda _, tensor: tensor.to("meta")).tables["ranges"]
    leaves = on_meta(inputs([30, 12], 2))
    chosen = choose(**leaves, ranges=ranges, top_k=4)
    assert chosen.shape == (42, 4)
    mass, counted = (torch.empty(size, device="meta") for size in ((42, 4), (42,)))
    index_loss(**leaves, chosen_TK=chosen, mass_TK=mass, counted_T=counted > 0).backward()
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves.values())


def test_nothing_but_the_indexer_gets_a_gradient():
    given, ranges = inputs([8], 2), ranges_of([8], 2)
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    chosen = choose(**leaves, ranges=ranges, top_k=2)
    assert not chosen.requires_grad
    mass = torch.ones(chosen.shape, dtype=torch.float64, requires_grad=True)
    loss = index_loss(**leaves, chosen_TK=chosen, mass_TK=mass, counted_T=torch.ones(8) > 0)
    loss.backward()
    assert mass.grad is None
    assert all((leaf.grad != 0).any() for leaf in leaves.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"weights_TH": torch.zeros(5, 3)}, "they must be"),
        ({"keys_ED": torch.zeros(2, 4)}, "they must be"),
        ({"keys_ED": torch.zeros(1, 3)}, "entries up to 2, but there are 1"),
    ],
)
def test_bad_input_is_refused(change, words):
    given = inputs([5], 2) | {"ranges": ranges_of([5], 2), "top_k": 1}
    with pytest.raises(ValueError, match=words):
        choose(**given | change)


def test_a_mass_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="with 5 rows"):
        index_loss(
            **inputs([5], 2),
            chosen_TK=torch.zeros(5, 2).int(),
            mass_TK=torch.zeros(5, 1),
            counted_T=torch.ones(5) > 0,
        )
