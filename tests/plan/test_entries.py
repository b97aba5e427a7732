from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.plan.shapes import (
    Spans,
    chunk_pair,
    chunk_spans,
    gathered_entries,
    halo_rows,
    near_rows,
    owned_entries,
    padded_length,
    pooled_rows,
    positions,
    rows_after_halos,
    visible_entries,
    whole_spans,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
RATIOS = st.sampled_from([1, 2, 4, 7])


def offsets_of(rows):
    return [0, *np.cumsum(rows).tolist()]


def spans_by_hand(length: int, *, cp_rank: int, cp_size: int, halo: int) -> Spans:
    """A lane's two chunks of one sequence, each with `halo` rows before it."""
    padded = np.array([padded_length(length, cp_size)])
    chunk, early, late = (int(each[0]) for each in chunk_pair(padded, cp_rank, cp_size))
    starts = np.array([early, late])
    bases = np.array([halo, 2 * halo + chunk]) - starts
    lengths = np.array([length, length])
    return Spans(starts, starts + chunk, lengths, bases, np.zeros_like(starts))


def test_by_hand() -> None:
    spans = whole_spans([0, 3, 8], [3, 5], 4)
    assert positions(spans).tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    first, stop = near_rows(spans, 2)
    assert list(zip(first.tolist(), stop.tolist(), strict=True)) == [
        *((0, 1), (0, 2), (1, 3)),
        *((3, 4), (3, 5), (4, 6), (5, 7), (6, 8)),
    ]
    first, counts = visible_entries(spans, 4)
    assert first.tolist() == [0] * 8
    assert counts.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert pooled_rows(spans, 4, overlap=False).tolist() == [[3, 4, 5, 6]]
    assert pooled_rows(spans, 4, overlap=True).tolist() == [[-1] * 4 + [3, 4, 5, 6]]


@given(LENGTHS, st.integers(0, 9), RATIOS, st.integers(1, 9), st.booleans())
def test_whole_sequences(lengths, padding, ratio, window, overlap) -> None:
    """Each row and each entry, one by one."""
    rows, real = [*lengths, padding], [*lengths, 0]
    spans = whole_spans(offsets_of(rows), real, ratio)
    near, visible = near_rows(spans, window), visible_entries(spans, ratio)
    pooled = pooled_rows(spans, ratio, overlap=overlap).tolist()
    row = entry = 0
    for count, length in zip(rows, real, strict=True):
        start = row
        for place in range(count):
            seen = range(int(near[0][row]), int(near[1][row]))
            assert [r - start for r in seen] == [p for p in range(place + 1) if place - p < window]
            numbers = [j for j in range(length // ratio) if (j + 1) * ratio <= place + 1]
            assert int(visible[1][row]) == len(numbers)
            assert int(visible[0][row]) == entry
            row += 1
        for number in range(length // ratio):
            own = [start + number * ratio + i for i in range(ratio)]
            before = [r - ratio if number else -1 for r in own] if overlap else []
            assert pooled[entry] == before + own
            entry += 1
    assert (row, entry) == (sum(rows), len(pooled))


@given(st.integers(1, 60), st.integers(1, 4), RATIOS, st.integers(1, 9), st.booleans())
def test_chunks_of_lanes_share_out_what_one_lane_has(
    length, cp_size, ratio, window, overlap
) -> None:
    """Every entry has one owner; rows with their halo hold what is pooled and what is near."""
    halo = max(window - 1, (2 * ratio if overlap else ratio) - 1)
    owned = []
    for rank in range(cp_size):
        spans = spans_by_hand(length, cp_rank=rank, cp_size=cp_size, halo=halo)
        chunk = int(spans.stops[0] - spans.starts[0])
        # The position in each row of the lane with its halos; before the sequence there is none.
        placed = np.concatenate([np.arange(start - halo, start + chunk) for start in spans.starts])
        numbers, _ = owned_entries(spans, ratio)
        owned += numbers.tolist()
        for number, rows in zip(numbers, pooled_rows(spans, ratio, overlap=overlap), strict=True):
            first = number - 1 if overlap else number
            expected = range(first * ratio, (number + 1) * ratio)
            assert [placed[r] if r >= 0 else None for r in rows] == [
                p if p >= 0 else None for p in expected
            ]
        first, stop = near_rows(spans, window)
        for place, a, b in zip(positions(spans), first, stop, strict=True):
            assert placed[a:b].tolist() == [p for p in range(place + 1) if place - p < window]
    assert sorted(owned) == list(range(length // ratio))


def test_no_entries_without_a_ratio() -> None:
    spans = whole_spans([0, 3], [3], 0)
    assert [each.tolist() for each in visible_entries(spans, 0)] == [[0, 0, 0]] * 2
    assert pooled_rows(spans, 0, overlap=False).shape == (0, 0)


def test_refuses_lengths_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"sequences of \[4\] tokens do not fit the rows \[3\]"):
        whole_spans([0, 3], [4], 4)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(2, 5),
    st.sampled_from([0, 2, 3, 4, 8]),
    st.integers(1, 9),
    st.booleans(),
)
def test_chunks_of_a_shared_pack(times, cp_size, ratio, window, overlap):
    """A row sees the positions it should, and an entry is owned once, by its last position."""
    padded = np.array(times) * 2 * cp_size
    halo = halo_rows(window, ratio, overlap=overlap)
    lanes = [
        chunk_spans(padded, ratio, cp_rank=rank, cp_size=cp_size, halo=halo)
        for rank in range(cp_size)
    ]
    owners = Counter()
    for spans in lanes:
        # Of each row after halos (sequence, position); −1 before a sequence begins.
        sequence = np.arange(len(spans.starts)) // 2
        own = [
            (s, p)
            for s, a, b in zip(sequence, spans.starts, spans.stops, strict=True)
            for p in range(a, b)
        ]
        halos = [
            (s, p) for s, a in zip(sequence, spans.starts, strict=True) for p in range(a - halo, a)
        ]
        layout = [(halos + own)[row] for row in rows_after_halos(spans, halo)]
        first, stop = near_rows(spans, window)
        for (number, place), low, high in zip(own, first, stop, strict=True):
            near = [(number, p) for p in range(max(0, place - window + 1), place + 1)]
            assert layout[low:high] == near
        numbers, span = owned_entries(spans, ratio)
        for number, of, rows in zip(
            numbers, span, pooled_rows(spans, ratio, overlap=overlap), strict=True
        ):
            owners[int(sequence[of]), int(number)] += 1
            begin = (number - overlap) * ratio
            places = range(begin, (number + 1) * ratio)
            wanted = [(sequence[of], p) if p >= 0 else None for p in places]
            assert [layout[row] if row >= 0 else None for row in rows] == wanted
    every = [(s, j) for s, n in enumerate(padded) for j in range(n // ratio if ratio else 0)]
    assert owners == Counter(every)
    order, most = gathered_entries(lanes, ratio)
    sent = [
        (spans.firsts[of] + number if i < len(numbers) else -1)
        for spans in lanes
        for numbers, span in [owned_entries(spans, ratio)]
        for i, (number, of) in enumerate(
            [*zip(numbers, span, strict=True), *[(0, 0)] * (most - len(numbers))]
        )
    ]
    assert [sent[place] for place in order] == list(range(len(every)))
