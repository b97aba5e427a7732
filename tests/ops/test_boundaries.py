from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from longshore.batch import whole_context
from longshore.ops.boundaries import chunks, chunks_of
from longshore.ops.conv import causal_conv
from longshore.ops.sizes import CHUNK_ROWS, CPU_CHUNK_ROWS

CPU = torch.device("cpu")


def test_chunks_are_made_once():
    bounds = whole_context([100, 70]).packs[0].padded
    first = chunks(bounds, 170, 64, CPU)
    assert chunks(bounds, 170, 64, CPU) is first
    assert chunks(bounds, 170, 16, CPU) is not first
    assert sorted(bounds.tables) == ["chunks of 16", "chunks of 64"]
    assert chunks(None, 170, 64, CPU).sequences == 1


def test_a_table_that_inference_made_serves_training():
    bounds = whole_context([3, 2]).packs[0].padded
    x_TC, weight_CK = torch.randn(5, 4), torch.randn(4, 3)
    with torch.inference_mode():
        want = causal_conv(x_TC, weight_CK, bounds=bounds)
    y_TC = causal_conv(x_TC.requires_grad_(), weight_CK, bounds=bounds)
    y_TC.sum().backward()
    assert bounds.tables
    assert torch.equal(y_TC, want)


def test_the_size_is_that_of_the_device():
    """The table made on the host for a GPU is what is looked for there: none is made."""
    bounds = whole_context([100, 70]).packs[0].padded
    on_host = chunks(bounds, 170, CHUNK_ROWS, CPU)
    assert chunks(bounds, 170, None, torch.device("cuda")) is on_host
    assert chunks(bounds, 170, None, CPU).size == CPU_CHUNK_ROWS


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 17))
def test_every_row_has_a_place_of_its_own(lengths, size):
    """No chunk holds two sequences, rows keep their order, and steps count all chunks."""
    offsets = tuple(accumulate(lengths, initial=0))
    layout = chunks_of(offsets, size, device=CPU)
    places = layout.places.tolist()
    assert len(set(places)) == len(places) == offsets[-1]
    assert sum(layout.steps) == sum(-(-length // size) for length in lengths)
    owners = {}
    for number, (start, stop) in enumerate(pairwise(offsets)):
        assert places[start:stop] == sorted(places[start:stop])
        for place in places[start:stop]:
            assert owners.setdefault(place // size, number) == number
    assert layout.order[layout.back].tolist() == list(range(len(lengths)))
    rows = torch.arange(offsets[-1])
    assert torch.equal(layout.join(layout.cut(rows)), rows)
