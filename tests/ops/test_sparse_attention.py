from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.ops.twins import LargestTensor, assert_same, bounds_of, on_meta, run
from tests.ops.whole_tables import causal_ranges
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longshore.ops import reference
from longshore.ops import sparse_attention as blocks
from longshore.ops.sparse_attention import row_ranges, sparse_attention

HOST = torch.device("cpu")
SMALL_BLOCKS = {"MOST_ROWS": 7, "MOST_ENTRIES": 3, "MOST_COPIED": 30}
NAMES = ("q_THD", "near_RD", "entries_ED", "sinks_H")


def ranges_of(lengths, window, ratio):
    return causal_ranges(bounds_of(lengths).offsets, window=window, ratio=ratio, device=HOST)


def inputs(lengths, ratio, *, heads=2, width=3, seed=0, dtype=torch.float64):
    rows = sum(lengths)
    entries = sum(n // ratio for n in lengths) if ratio else 0
    draw = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads, width), (rows, width), (entries, width), (heads,))
    drawn = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    return dict(zip(NAMES, (x.to(dtype) for x in drawn), strict=True))


def some_entries(ranges, most, seed=0):
    """For each query some entries of its range, rising, then −1; perhaps none."""
    draw = np.random.default_rng(seed)
    width = min(most, ranges.most_entries)
    chosen = np.full((len(ranges), width), -1, dtype=np.int32)
    for t, (first, count) in enumerate(ranges.host[2:].T):
        number = draw.integers(0, min(width, count) + 1)
        chosen[t, :number] = first + np.sort(draw.choice(count, number, replace=False))
    return torch.from_numpy(chosen)


def assert_as_twin(given, **options):
    wanted = {"needs_mass": options.get("chosen_TK") is not None}
    _, mass = sparse_attention(**given, **options, **wanted)
    _, want = reference.sparse_attention(**given, **options, **wanted)
    if want is not None:
        assert not mass.requires_grad
        assert_same([mass], [want], within=1e-12)
    got, want = (
        run(lambda op=op, **all_of: op(**all_of)[0], given, **options)
        for op in (sparse_attention, reference.sparse_attention)
    )
    assert_same(got, want, within=1e-12, rounding=1e-14)


@st.composite
def problems(draw):
    lengths = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 30]), min_size=1, max_size=4)
    return {
        "lengths": draw(lengths),
        "window": draw(st.integers(1, 35)),
        "ratio": draw(st.sampled_from([0, 1, 2, 4, 7])),
        "most_chosen": draw(st.none() | st.integers(1, 9)),
        "heads": draw(st.integers(1, 3)),
        "width": draw(st.integers(1, 4)),
        "sizes": draw(st.sampled_from([{"MOST_ROWS": 128}, SMALL_BLOCKS])),
        "seed": draw(st.integers(0, 9)),
    }


WHOLE_BLOCKS = {"heads": 2, "width": 3, "sizes": {"MOST_ROWS": 128}, "seed": 0}


@pytest.mark.property
@given(problem=problems())
@example({"lengths": [300, 1], "window": 40, "ratio": 1, "most_chosen": None, **WHOLE_BLOCKS})
@example({"lengths": [300, 1], "window": 40, "ratio": 4, "most_chosen": 20, **WHOLE_BLOCKS})
def test_as_the_twin(problem):
    ranges = ranges_of(problem["lengths"], problem["window"], problem["ratio"])
    sizes = {name: problem[name] for name in ("heads", "width", "seed")}
    most = problem["most_chosen"]
    with patch.multiple(blocks, **problem["sizes"]):
        assert_as_twin(
            inputs(problem["lengths"], problem["ratio"], **sizes),
            ranges=ranges,
            scale=0.7,
            chosen_TK=None if most is None else some_entries(ranges, most, problem["seed"]),
        )


def test_by_hand():
    """As the docstring of ops/sparse_attention.py."""
    ranges = row_ranges(*np.array([[0], [2], [0], [1]]), offsets=(0, 1), device=HOST)
    given = {
        "q_THD": torch.zeros(1, 1, 1),
        "near_RD": torch.tensor([[1.0], [3.0]]),
        "entries_ED": torch.tensor([[4.0]]),
        "sinks_H": torch.zeros(1),
    }
    options = {"ranges": ranges, "scale": 1.0, "needs_mass": True}
    chosen, none = torch.tensor([[0]]).int(), torch.tensor([[-1]]).int()
    out, mass = sparse_attention(**given, **options, chosen_TK=chosen)
    assert (out.item(), mass.tolist()) == (2.0, [[0.25]])
    out, mass = sparse_attention(**given, **options)
    assert (out.item(), mass) == (2.0, None)
    out, mass = sparse_attention(**given, **options, chosen_TK=none)
    assert (out.item(), mass.tolist()) == (pytest.approx(4 / 3), [[0.0]])


def test_queries_of_part_of_a_sequence_with_other_rows_between():
    """As a lane with two chunks of a sequence has them, each with the rows it sees before it."""
    given = inputs([40], 4)
    whole = ranges_of([40], 6, 4)
    out, _ = sparse_attention(**given, ranges=whole, scale=0.7)
    numbers = whole.host[:, [*range(10, 17), *range(30, 37)]].copy()
    # Rows 5…16 and 25…36 of the sequence are this lane's rows 0…23.
    numbers[:2] -= np.where(np.arange(14) < 7, 5, 13)
    ranges = row_ranges(*numbers, offsets=(0, 7, 14), device=HOST)
    near = torch.cat([given["near_RD"][5:17], given["near_RD"][25:37]])
    q = torch.cat([given["q_THD"][10:17], given["q_THD"][30:37]])
    part = given | {"q_THD": q, "near_RD": near}
    got, _ = sparse_attention(**part, ranges=ranges, scale=0.7)
    assert_same([got], [torch.cat([out[10:17], out[30:37]])], within=1e-12)
    assert_as_twin(part, ranges=ranges, scale=0.7)


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sequence_is_the_same_in_every_bit_whatever_lies_beside_it(dtype, most):
    lengths = [3, 1, 65, 2, 33]
    given, ranges = inputs(lengths, 2, dtype=dtype), ranges_of(lengths, 6, 2)
    chosen = None if most is None else some_entries(ranges, most)
    options = {"scale": 0.7, "needs_mass": False}
    with patch.multiple(blocks, MOST_ROWS=16, MOST_ENTRIES=8, MOST_COPIED=40):
        out, _, dq, dnear, dentries, _ = _all_of(given, ranges, chosen, options)
        row, entry = 0, 0
        for length in lengths:
            rows, entries = slice(row, row + length), slice(entry, entry + length // 2)
            own = given | {
                "q_THD": given["q_THD"][rows].clone(),
                "near_RD": given["near_RD"][rows].clone(),
                "entries_ED": given["entries_ED"][entries].clone(),
            }
            own_ranges = ranges_of([length], 6, 2)
            own_chosen = None
            if chosen is not None:
                own_chosen = torch.where(chosen[rows] < 0, -1, chosen[rows] - entry)
                own_chosen = own_chosen[:, : own_ranges.most_entries]
            alone = _all_of(own, own_ranges, own_chosen, options)
            assert torch.equal(alone[0], out[rows])
            assert torch.equal(alone[2], dq[rows])
            assert torch.equal(alone[3], dnear[rows])
            assert torch.equal(alone[4], dentries[entries])
            row, entry = rows.stop, entries.stop


def _all_of(given, ranges, chosen, options):
    """Output, mass, and the gradients of Σ out²."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
    out, mass = sparse_attention(**leaves, ranges=ranges, chosen_TK=chosen, **options)
    return [out.detach(), mass, *torch.autograd.grad(out.square().sum(), list(leaves.values()))]


@pytest.mark.parametrize("most", [None, 4])
def test_what_a_query_does_not_see_changes_no_bit_of_it(most):
    lengths = [30, 12]
    given, ranges = inputs(lengths, 2), ranges_of(lengths, 6, 2)
    chosen = None if most is None else some_entries(ranges, most)
    options = {"scale": 0.7, "needs_mass": True}
    with patch.multiple(blocks, **SMALL_BLOCKS):
        before = _all_of(given, ranges, chosen, options)
        for name, row in (("near_RD", 8), ("entries_ED", 3), ("near_RD", 35)):
            changed = given | {name: given[name].clone()}
            changed[name][row] += 1.0
            after = _all_of(changed, ranges, chosen, options)
            if name == "near_RD":
                sees = (ranges.near_first <= row) & (row < ranges.near_stop)
            elif chosen is None:
                sees = (ranges.entry_first <= row) & (row < ranges.entry_first + ranges.entry_count)
            else:
                sees = (chosen == row).any(1)
            assert sees.any()
            for i in (0, 2):
                assert torch.equal(before[i][~sees], after[i][~sees])
                assert (before[i][sees] != after[i][sees]).flatten(1).any(1).all()
            if chosen is not None:
                assert torch.equal(before[1][~sees], after[1][~sees])


@pytest.mark.parametrize("most", [None, 4])
def test_nothing_leaks_even_from_a_sequence_of_nan(most):
    lengths = [8, 20]
    given, ranges = inputs(lengths, 2), ranges_of(lengths, 6, 2)
    chosen = None if most is None else some_entries(ranges, most)
    options = {"scale": 0.7, "needs_mass": True}
    want = _all_of(given, ranges, chosen, options)
    poisoned = {name: x.clone() for name, x in given.items()}
    for name, rows in zip(NAMES, (8, 8, 4), strict=False):
        poisoned[name][:rows] = torch.nan
    after = _all_of(poisoned, ranges, chosen, options)
    for a, b, rows in zip(after, want, (8, 8, 8, 8, 4), strict=False):
        if b is not None:
            assert torch.equal(a[rows:], b[rows:])
    assert after[0][:8].isnan().all()


def test_a_query_that_sees_nothing_gives_zero():
    """One query sees nothing at all, one only its row."""
    ranges = row_ranges(*np.array([[0, 0], [0, 1], [0, 0], [0, 0]]), offsets=(0, 2), device=HOST)
    given = inputs([2], 0)
    for chosen in (None, torch.full((2, 0), -1, dtype=torch.int32)):
        out, _, *grads = _all_of(given, ranges, chosen, {"scale": 1.0})
        assert (out[0] == 0).all()
        assert (out[1] != 0).all()
        assert all(grad.isfinite().all() for grad in grads)
        assert_as_twin(given, ranges=ranges, scale=1.0, chosen_TK=chosen)
    nothing = row_ranges(*np.zeros((4, 2), dtype=int), offsets=(0, 2), device=HOST)
    assert_as_twin(given, ranges=nothing, scale=1.0)


def test_no_queries():
    given, ranges = inputs([0], 4), ranges_of([0], 4, 4)
    out, mass, *grads = _all_of(given, ranges, torch.zeros(0, 0, dtype=torch.int32), {"scale": 1.0})
    assert (out.shape, mass) == ((0, 2, 3), None)
    assert [grad.shape for grad in grads] == [x.shape for x in given.values()]


@pytest.mark.parametrize("most", [None, 4])
def test_large_scores(most):
    """Of multiples of 1/64 scores are exact, so that the twin has the same: about 1e5."""
    lengths = [40]
    ranges = ranges_of(lengths, 6, 2)
    given = {name: (64 * x).round() / 64 for name, x in inputs(lengths, 2).items()}
    given["q_THD"][:, :, 0] = 1000.0
    given["near_RD"][:, 0] = given["entries_ED"][:, 0] = 100.0
    given["sinks_H"] += 1e5
    chosen = None if most is None else some_entries(ranges, most)
    assert_as_twin(given, ranges=ranges, scale=1.0, chosen_TK=chosen)
    narrow = {name: x.float() for name, x in given.items()}
    all_of = _all_of(narrow, ranges, chosen, {"scale": 1.0, "needs_mass": True})
    assert all(x.isfinite().all() for x in all_of if x is not None)


@pytest.mark.parametrize("most", [None, 4])
def test_half_precision_is_computed_in_float32(most):
    lengths = [30, 3]
    ranges = ranges_of(lengths, 6, 2)
    chosen = None if most is None else some_entries(ranges, most)
    half = inputs(lengths, 2, dtype=torch.bfloat16) | {"sinks_H": torch.randn(2)}
    out, mass, *grads = _all_of(half, ranges, chosen, {"scale": 0.7, "needs_mass": True})
    as_float = {name: x.float() for name, x in half.items()}
    want, want_mass, *want_grads = _all_of(
        as_float, ranges, chosen, {"scale": 0.7, "needs_mass": True}
    )
    assert torch.equal(out, want.bfloat16())
    if most is not None:
        assert mass.dtype == torch.float32
        assert torch.equal(mass, want_mass)
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 3 + [torch.float32]
    assert_same([grad.float() for grad in grads], want_grads, within=0.02)


@pytest.mark.parametrize("most", [None, 8])
def test_no_tensor_is_larger_than_the_queries(most):
    """96 queries of 2 × 4 numbers with 48 entries: a matrix of both would have 6 times more."""
    given, ranges = inputs([96], 2, width=4), ranges_of([96], 8, 2)
    chosen = None if most is None else some_entries(ranges, most)
    saved = []
    with (
        patch.multiple(blocks, MOST_ROWS=16, MOST_ENTRIES=16, MOST_COPIED=256),
        LargestTensor() as largest,
        saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x),
    ):
        _all_of(given, ranges, chosen, {"scale": 0.7, "needs_mass": True})
    assert largest.numbers <= given["q_THD"].numel()
    # Of Σ out² the output is saved once more.
    assert sum(saved) <= 5 * given["q_THD"].numel() + 96 * (most or 0)


@pytest.mark.parametrize("most", [None, 4])
def test_the_device_is_asked_for_nothing(most):
    bounds = bounds_of([30, 12])
    bounds.tables["ranges"] = ranges_of([30, 12], 6, 2)
    ranges = bounds.map_tensors(lambda _, tensor: tensor.to("meta")).tables["ranges"]
    chosen = None if most is None else torch.empty(42, most, dtype=torch.int32, device="meta")
    leaves = on_meta(inputs([30, 12], 2))
    out, mass = sparse_attention(
        **leaves, ranges=ranges, scale=1.0, chosen_TK=chosen, needs_mass=True
    )
    out.sum().backward()
    assert (out.shape, mass is None) == ((42, 2, 3), most is None)
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves.values())


def test_under_checkpointing():
    given, ranges = inputs([9, 4], 2), ranges_of([9, 4], 3, 2)
    leaves = [x.requires_grad_() for x in given.values()]
    chosen = some_entries(ranges, 2)

    def call(*tensors):
        return sparse_attention(*tensors, ranges=ranges, scale=1.0, chosen_TK=chosen)[0]

    plain, again = call(*leaves), checkpoint(call, *leaves, use_reentrant=False)
    assert torch.equal(plain, again)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (plain, again)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_second_derivative_is_refused():
    given, ranges = inputs([3], 2), ranges_of([3], 2, 2)
    q = given["q_THD"].requires_grad_()
    out, _ = sparse_attention(**given, ranges=ranges, scale=1.0)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_THD": torch.zeros(5, 2)}, r"q must be \(rows, heads, width\)"),
        ({"near_RD": torch.zeros(5, 4)}, "the same width"),
        ({"sinks_H": torch.zeros(3)}, "there are 2 heads"),
        ({"entries_ED": torch.zeros(2, 3).double()}, "give one dtype"),
        ({"q_THD": torch.zeros(6, 2, 3)}, "there are 6 queries, but ranges for 5"),
        ({"entries_ED": torch.zeros(1, 3)}, "entries up to 2, but there are 1"),
        ({"chosen_TK": torch.zeros(4, 1).int()}, "with 5 rows"),
    ],
)
def test_bad_input_is_refused(change, words):
    given = inputs([5], 2, dtype=torch.float32) | {"ranges": ranges_of([5], 3, 2)} | change
    with pytest.raises(ValueError, match=words):
        sparse_attention(**given, scale=1.0)
