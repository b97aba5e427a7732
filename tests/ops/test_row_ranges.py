import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.twins import bounds_of
from tests.ops.whole_tables import causal_ranges, group_rows

from longshore.batch import Boundaries
from longshore.ops.boundaries import table
from longshore.ops.sparse_attention import RangeBlock, add_rows_, row_ranges, sums_for, take_rows

HOST = torch.device("cpu")


def test_as_the_docstring_shows():
    ranges = causal_ranges((0, 5, 7), window=3, ratio=2, device=HOST)
    assert ranges.near_first.tolist() == [0, 0, 0, 1, 2, 5, 5]
    assert ranges.near_stop.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert ranges.entry_first.tolist() == [0, 0, 0, 0, 0, 2, 2]
    assert ranges.entry_count.tolist() == [0, 1, 1, 2, 2, 0, 1]
    assert ranges.near_first.dtype == torch.int32
    assert (len(ranges), ranges.most_entries) == (7, 2)
    assert list(ranges.blocks(lambda entries: 3 if entries == 2 else 9)) == [
        RangeBlock(slice(0, 3), slice(0, 3), slice(0, 1), 1),
        RangeBlock(slice(3, 5), slice(1, 5), slice(0, 2), 2),
        RangeBlock(slice(5, 7), slice(5, 7), slice(2, 3), 1),
    ]


def test_groups_as_the_docstring_shows():
    def rows(overlap):
        return group_rows((0, 5, 6, 8), ratio=2, overlap=overlap, device=HOST).tolist()

    assert rows(False) == [[0, 1], [2, 3], [6, 7]]
    assert rows(True) == [[-1, -1, 0, 1], [0, 1, 2, 3], [-1, -1, 6, 7]]
    assert group_rows((0, 3), ratio=4, overlap=True, device=HOST).shape == (0, 8)


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    window=st.integers(1, 25),
    ratio=st.integers(0, 5),
    rows=st.integers(1, 9),
)
def test_who_sees_what(lengths, window, ratio, rows):
    """Each query sees its own sequence: the window's tokens, and entries of full groups so far."""
    offsets = bounds_of(lengths).offsets
    ranges = causal_ranges(offsets, window=window, ratio=ratio, device=HOST)
    groups = group_rows(offsets, ratio=ratio, overlap=False, device=HOST).tolist() if ratio else []
    t = 0
    for start, length in zip(offsets, lengths, strict=False):
        for p in range(length):
            first, stop, entry, count = ranges.host[:, t].tolist()
            assert (first, stop) == (start + max(0, p - window + 1), t + 1)
            visible = [j for j, group in enumerate(groups) if start <= group[0] and group[-1] <= t]
            assert list(range(entry, entry + count)) == visible
            t += 1
    met = list(ranges.blocks(lambda _: rows))
    assert [t for block in met for t in range(block.rows.start, block.rows.stop)] == [*range(t)]
    assert all(block.rows.stop - block.rows.start <= rows for block in met)
    for block in met:
        first, stop, entry, count = ranges.host[:, block.rows]
        assert (block.near.start, block.near.stop) == (first.min(), stop.max())
        assert block.most_entries == count.max()
        if block.most_entries:
            assert (block.entries.start, block.entries.stop) == (entry[0], (entry + count).max())


def test_a_table_moves_with_the_boundaries():
    bounds = bounds_of([5, 2])
    table(bounds, "ranges", lambda: causal_ranges((0, 5, 7), window=3, ratio=2, device=HOST))
    moved: Boundaries = bounds.map_tensors(lambda _, tensor: tensor.to("meta"))
    ranges = moved.tables["ranges"]
    assert ranges.entry_count.is_meta
    assert ranges.offsets == (0, 5, 7)
    # The blocks need nothing from the device.
    assert [block.near for block in ranges.blocks(lambda _: 9)] == [slice(0, 5), slice(5, 7)]


@pytest.mark.parametrize(
    ("numbers", "offsets", "words"),
    [
        (([0], [1], [0], [0]), (0, 2), "go from 0 to 2, but there are 1 queries"),
        (([1], [0], [0], [0]), (0, 1), "stops before its first"),
        (([0], [1], [0], [-1]), (0, 1), "is negative"),
    ],
)
def test_bad_ranges_are_refused(numbers, offsets, words):
    with pytest.raises(ValueError, match=words):
        row_ranges(*map(np.array, numbers), offsets=offsets, device=HOST)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 7, 3), "there are 6 queries, but ranges for 7"),
        ((7, 6, 3), "rows up to 7, but there are 6"),
        ((7, 7, 2), "entries up to 3, but there are 2"),
    ],
)
def test_ranges_past_the_end_are_refused(sizes, words):
    ranges = causal_ranges((0, 5, 7), window=3, ratio=2, device=HOST)
    ranges.check(7, 7, 3)
    with pytest.raises(ValueError, match=words):
        ranges.check(*sizes)


def test_rows_by_index_as_the_docstring_shows():
    index, rows = torch.tensor([1, -1, 0]), torch.tensor([[5.0], [7.0]])
    assert take_rows(rows, index, torch.float64).tolist() == [[7], [0], [5]]
    sums = sums_for(rows, torch.float64)
    add_rows_(sums, index, torch.tensor([[1.0], [torch.nan], [3.0]], dtype=torch.float64))
    assert sums[:-1].tolist() == [[3], [1]]
