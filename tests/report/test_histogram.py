import numpy as np
import pytest

from longshore.report.page_data import MOST_BINS, length_histogram


def test_small_lengths_get_a_class_each():
    histogram = length_histogram(np.array([1, 2, 3, 3]))
    assert histogram.edges == [1, 2, 3, 4]
    assert histogram.counts == [1, 1, 2]
    assert histogram.tokens == [1, 2, 6]


def test_one_length():
    histogram = length_histogram(np.array([4096, 4096]))
    assert sum(histogram.counts) == 2
    assert histogram.edges[0] == 4096


@pytest.mark.parametrize(("low", "high"), [(1, 131072), (1024, 8192), (1000, 1000), (7, 2_000_000)])
def test_every_length_is_in_its_class(low, high):
    lengths = np.unique(np.geomspace(low, high, 500).astype(np.int64))
    histogram = length_histogram(lengths)
    assert len(histogram.counts) <= MOST_BINS
    assert histogram.edges[0] <= lengths.min()
    assert histogram.edges[-1] > lengths.max()
    for i, count in enumerate(histogram.counts):
        inside = (lengths >= histogram.edges[i]) & (lengths < histogram.edges[i + 1])
        assert count == inside.sum()
        assert histogram.tokens[i] == lengths[inside].sum()
