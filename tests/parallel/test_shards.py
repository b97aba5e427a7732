"""Where a rank's tensors lie in the whole ones: together they are all of it, as often as said."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.arch.tp_parts import WIDTH, parts_on_ranks
from torch import nn

from longshore.arch.cuts import Span, TensorCut, TPRank
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Norm
from longshore.arch.scan import Mamba2Config
from longshore.model.interface import LanguageModel
from longshore.model.registry import make_feed_forward, make_mixer
from longshore.parallel import shards
from longshore.parallel.fsdp import split_dim
from longshore.parallel.shards import boxes_of, cuts_by_name, fill


def shard_of(lane, lanes, tensor):
    """As FSDP splits a rank's tensor over the lanes."""
    dim = split_dim(tensor, ranks=lanes).dim
    size = tensor.shape[dim]
    each = -(-size // lanes)
    start = min(lane * each, size)
    return tensor.narrow(dim, start, min(each, size - start)), dim, start


def on_lane(lane, lanes, tensor, cut):
    """The boxes of a lane that has its rows of the tensor alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "shard_span", partial(shard_of, lane, lanes))
        return boxes_of(tensor, cut)


def tensors_of(part):
    """A module's tensors, each value different."""
    make = make_feed_forward if isinstance(part, MLPConfig) else make_mixer
    module = make(part, WIDTH, norm=Norm(1e-6))
    return {
        name: torch.arange(tensor.numel()).view(tensor.shape)
        for name, tensor in module.named_parameters()
    }


def cut_out(whole, cut):
    """A rank's tensor."""
    if cut is None:
        return whole
    spans = [whole.narrow(cut.dim, span.start, span.stop - span.start) for span in cut.spans]
    return torch.cat([whole.narrow(cut.dim, 0, 0), *spans], dim=cut.dim)


def check_cover(whole, boxes, shared=1):
    """All of the whole, each value as often as its boxes say; shared: by ranks of no cut."""
    times = torch.zeros(whole.shape)
    for box in boxes:
        assert torch.equal(whole[box.index], box.local)
        times[box.index] += 1 / box.copies
    assert torch.allclose(times, torch.full_like(times, shared)), times


@given(parts_on_ranks(), st.integers(1, 5))
def test_the_boxes_of_all_ranks_are_the_whole(part_and_tp, lanes):
    part, tp = part_and_tp
    local = tensors_of(part.on_tp_rank(tp))
    for name, whole in tensors_of(part).items():
        cuts = [part.tp_cuts(WIDTH, TPRank(tp, rank)).get(name) for rank in range(tp)]
        boxes = []
        for cut in cuts:
            mine = cut_out(whole, cut)
            if cut is None or cut.spans:
                assert mine.shape == local[name].shape
            for lane in range(lanes):
                shape, more = on_lane(lane, lanes, mine, cut)
                assert shape == whole.shape
                boxes += more
        check_cover(whole, boxes, tp if cuts[0] is None else 1)


@given(st.integers(1, 70), st.integers(1, 8), st.integers(1, 5))
def test_an_uneven_vocabulary(rows, tp, lanes):
    whole = torch.arange(rows * 3).view(rows, 3)
    cuts = [TPRank(tp, rank).vocabulary(rows) for rank in range(tp)]
    boxes = [
        box
        for cut in cuts
        for lane in range(lanes)
        for box in on_lane(lane, lanes, cut_out(whole, cut), cut)[1]
    ]
    check_cover(whole, boxes)


def test_the_docstrings_example():
    mamba = Mamba2Config(heads=4, head_dim=8, state_dim=16, groups=2)
    cut = mamba.tp_cuts(16, TPRank(2, 1))["in_proj.weight"]
    whole = torch.arange(132 * 16).view(132, 16)
    shape, boxes = on_lane(0, 2, cut_out(whole, cut), cut)
    assert shape == (132, 16)
    assert [(len(box.local), box.offsets) for box in boxes] == [
        (16, (16, 0)),
        (16, (48, 0)),
        (1, (80, 0)),
    ]


def test_a_tensor_without_dims_or_values():
    assert boxes_of(torch.tensor(5.0))[1][0].index == ()
    nothing = TensorCut(0, 6, ())
    assert boxes_of(torch.empty(0), nothing) == ((6,), ())


def test_each_rank_asks_for_its_blocks_alone():
    """Of a module in a module, cut in columns; buffers too."""
    with torch.device("meta"):
        inner = nn.Linear(3, 4)
        inner.register_buffer("bias_of_routing", torch.empty(2))
    model = LanguageModel()
    model.inner = inner
    model.cuts["inner.weight"] = TensorCut(1, 6, (Span(0, 1), Span(4, 6)))
    stages = nn.ModuleDict({"3": model})
    assert cuts_by_name(stages) == {"3.inner.weight": model.cuts["inner.weight"]}
    asked = []

    def block(name, shape, index):
        asked.append((name, tuple(shape), index))
        return torch.arange(float(shape.numel())).view(shape)[index]

    fill(model, torch.device("cpu"), block)
    assert asked == [
        ("inner.weight", (4, 6), (slice(0, 4), slice(0, 1))),
        ("inner.weight", (4, 6), (slice(0, 4), slice(4, 6))),
        ("inner.bias", (4,), (slice(0, 4),)),
        ("inner.bias_of_routing", (2,), (slice(0, 2),)),
    ]
    assert model.inner.weight.tolist() == [[6 * r, 6 * r + 4, 6 * r + 5] for r in range(4)]


def test_fsdp_splits_the_rows_unless_there_are_too_few():
    """2 experts on 4 ranks: along the first dim that 4 divides; the rows if none is."""
    shapes = ((10, 3), (2, 64, 32), (2, 6, 8), (2, 3), (4,))
    dims = [split_dim(torch.empty(shape), ranks=4).dim for shape in shapes]
    assert dims == [0, 1, 2, 0, 0]
