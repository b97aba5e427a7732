"""The tables that kernels read, by hand."""

import torch
from tests.ops.twins import bounds_of

from longshore.ops.boundaries import chunk_table, filled_spans

CPU = torch.device("cpu")


def test_chunks_of_the_scan():
    bounds = bounds_of([3, 0, 70])
    layout = chunk_table(bounds, 73, CPU)
    assert layout.chunks.tolist() == [[0, 3], [3, 64], [67, 6]]
    # Longest first: index, first chunk, chunks, first row, rows.
    assert layout.sequences.tolist() == [[2, 1, 2, 3, 70], [0, 0, 1, 0, 3], [1, 1, 0, 3, 0]]
    assert layout.lengths.tolist() == [3, 0, 70]
    assert {x.dtype for x in (layout.chunks, layout.sequences, layout.lengths)} == {torch.int32}
    assert chunk_table(bounds, 73, CPU) is layout
    assert chunk_table(None, 65, CPU).chunks.tolist() == [[0, 64], [64, 1]]


def test_spans_with_rows():
    bounds = bounds_of([0, 3, 70])
    spans = filled_spans(bounds, 73, CPU)
    assert spans.cu_seqlens.tolist() == [0, 3, 73]
    assert spans.chunks.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert spans.kept.tolist() == [1, 2]
    assert filled_spans(bounds, 73, CPU) is spans
