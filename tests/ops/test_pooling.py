from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.ops.twins import LargestTensor, assert_same, bounds_of, on_meta, run
from tests.ops.whole_tables import group_rows

from longshore.ops import indexer as pooling
from longshore.ops import reference
from longshore.ops.indexer import pooled

HOST = torch.device("cpu")
NAMES = ("values_RC", "gates_RC", "bias_GC")


def inputs(rows, slots, channels, *, seed=0, dtype=torch.float64):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((rows, channels), (rows, channels), (slots, channels))
    drawn = [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]
    return dict(zip(NAMES, (x.to(dtype) for x in drawn), strict=True))


def assert_as_twin(given, rows, *, overlap):
    got, want = (run(op, given, rows_EG=rows, overlap=overlap) for op in (pooled, reference.pooled))
    assert_same(got, want, within=1e-12, rounding=1e-14)


@pytest.mark.property
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 9, 16]), min_size=1, max_size=4),
    ratio=st.integers(1, 5),
    overlap=st.booleans(),
    half=st.integers(1, 3),
    most=st.sampled_from([1, 40, 1 << 21]),
)
@example(lengths=[0], ratio=4, overlap=True, half=1, most=1)
def test_as_the_twin(lengths, ratio, overlap, half, most):
    offsets = bounds_of(lengths).offsets
    rows = group_rows(offsets, ratio=ratio, overlap=overlap, device=HOST)
    with patch.object(pooling, "MOST_POOLED", most):
        assert_as_twin(inputs(offsets[-1], ratio, 2 * half), rows, overlap=overlap)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_used_twice_and_groups_without_rows(overlap):
    rows = torch.tensor([[0, 1, 2, 2], [-1, -1, -1, -1], [2, -1, 0, 1]]).int()
    given = inputs(4, 2 if overlap else 4, 6)
    assert_as_twin(given, rows, overlap=overlap)
    entries, dvalues, dgates, _ = run(pooled, given, rows_EG=rows, overlap=overlap)
    assert (entries[1] == 0).all()
    # No group has row 3.
    assert (dvalues[3] == 0).all()
    assert (dgates[3] == 0).all()


def test_by_hand():
    """As the docstring of ops/indexer.py."""
    values = torch.tensor([[2.0], [6.0]])
    gates = torch.tensor([[1.0], [3.0]]).log()
    rows = torch.tensor([[0, 1]]).int()
    assert pooled(values, gates, torch.zeros(2, 1), rows).item() == pytest.approx(5)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    rows = torch.tensor([[-1, 0], [0, 1]]).int()
    entries = pooled(values, torch.zeros(2, 2), torch.zeros(1, 2), rows, overlap=True)
    assert entries.tolist() == [[2.0], [2.5]]


def test_an_entry_depends_on_its_own_rows_alone():
    offsets = (0, 9, 20)
    rows = group_rows(offsets, ratio=4, overlap=True, device=HOST)
    given = inputs(20, 4, 6)
    before = pooled(**given, rows_EG=rows, overlap=True)
    for number in (1.0, torch.nan):
        changed = {name: x.clone() for name, x in given.items()}
        changed["values_RC"][0] += number
        changed["gates_RC"][0] += number
        after = pooled(**changed, rows_EG=rows, overlap=True)
        # Row 0 is in the first sequence's two groups.
        assert torch.equal(before[2:], after[2:])
        assert (before[:2] != after[:2]).any(1).all()
    leaves = {name: x.requires_grad_() for name, x in changed.items()}
    out = pooled(**leaves, rows_EG=rows, overlap=True)
    grad = torch.cat([torch.full((2, 3), torch.nan), torch.ones(2, 3)]).double()
    dvalues, dgates = torch.autograd.grad(out, list(leaves.values())[:2], grad)
    assert dvalues[9:].isfinite().all()
    assert dgates[9:].isfinite().all()


def test_large_gates():
    """Gates of multiples of 1/64 around 1e5: softmax of exact numbers."""
    given = inputs(12, 4, 6)
    given["gates_RC"] = (64 * given["gates_RC"]).round() / 64 + 1e5
    given["bias_GC"] = (64 * given["bias_GC"]).round() / 64 - 1e4
    rows = group_rows((0, 12), ratio=4, overlap=False, device=HOST)
    assert_as_twin(given, rows, overlap=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_half_precision_is_computed_in_float32(overlap):
    rows = group_rows((0, 13), ratio=4, overlap=overlap, device=HOST)
    half = inputs(13, 4, 6, dtype=torch.bfloat16)
    half["bias_GC"] = half["bias_GC"].float()
    as_float = {name: x.float() for name, x in half.items()}
    got, want = (
        run(lambda **x: pooled(**x).float(), x, rows_EG=rows, overlap=overlap)
        for x in (half, as_float)
    )
    assert torch.equal(got[0], want[0].bfloat16().float())
    assert [x.dtype for x in got[1:]] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert_same([x.float() for x in got], want, within=0.01)


def test_no_tensor_is_larger_than_the_values():
    rows = group_rows((0, 128), ratio=4, overlap=True, device=HOST)
    given = inputs(128, 4, 8)
    with patch.object(pooling, "MOST_POOLED", 256), LargestTensor() as largest:
        run(pooled, given, rows_EG=rows, overlap=True)
    # The sums of the gradients have one more row, of half the channels.
    assert largest.numbers <= given["values_RC"].numel() + 4


def test_the_device_is_asked_for_nothing():
    leaves = on_meta(inputs(12, 4, 6))
    rows = torch.empty(3, 8, dtype=torch.int32, device="meta")
    entries = pooled(**leaves, rows_EG=rows, overlap=True)
    entries.sum().backward()
    assert entries.shape == (3, 3)
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves.values())


@pytest.mark.parametrize(
    ("change", "overlap", "words"),
    [
        ({"gates_RC": torch.zeros(8, 4)}, False, "both must be"),
        ({"bias_GC": torch.zeros(3, 6)}, False, "a row for each slot"),
        ({}, True, "a row for each two slots"),
        ({name: torch.zeros(2, 5) for name in NAMES}, True, "two halves"),
    ],
)
def test_bad_shapes_are_refused(change, overlap, words):
    with pytest.raises(ValueError, match=words):
        pooled(
            **inputs(8, 4, 6) | change,
            rows_EG=torch.zeros(2, 4, dtype=torch.int32),
            overlap=overlap,
        )
