import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.arch.presets import preset
from longshore.batch import Counts, MicroBatch
from longshore.data.lane_broadcast import LaneShape, StageInputs, zero_batches
from longshore.data.lane_context import lane_context
from longshore.model.host_tables import table_makers
from longshore.ops.boundaries import chunks
from longshore.ops.sizes import CHUNK_ROWS
from longshore.plan.planner import make_plan

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def hybrid():
    return preset("tiny-hybrid")


def context(lengths, *, cp_size=2, scan="auto", device=GPU):
    plan = make_plan(lengths, lanes=2, capacity=512, policy="static", cp_size=cp_size)
    makers = table_makers(hybrid(), scan=scan, device=device)
    return lane_context(plan, 0, 0, tables=makers)


def test_a_decoder_without_scans_needs_none():
    assert table_makers(preset("tiny-llama"), scan="auto", device=GPU) == ()
    assert len(table_makers(hybrid(), scan="auto", device=GPU)) == 1


@pytest.mark.parametrize(
    ("scan", "names"),
    [("auto", ("padded", "chunks")), ("heads", ("padded",)), ("states", ("chunks",))],
)
def test_a_shared_pack_has_the_boundaries_that_are_scanned(scan, names):
    pack = context([100, 70], scan=scan).packs[0]
    by_name = {"padded": pack.padded, "chunks": pack.zigzag.chunks}
    for name, bounds in by_name.items():
        assert list(bounds.tables) == (["chunks of 64"] if name in names else [])
    assert list(context([100], cp_size=1, scan=scan).packs[0].padded.tables) == ["chunks of 64"]
    assert list(context([100], device=CPU).packs[0].padded.tables) == ["chunks of 32"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_tables_travel(lengths, cp_size):
    """Through a skeleton and tensors, pickled, an op finds the values that it would make."""
    plan = make_plan(lengths, lanes=2, capacity=512, policy="static", cp_size=cp_size)
    shape = LaneShape(0, 0, (), (), table_makers(hybrid(), scan="auto", device=GPU))
    counts, stage = Counts.of([1], lengths), StageInputs(True, True, False)
    (batch,) = zero_batches(plan, shape, counts, stage)
    skeleton = pickle.loads(pickle.dumps(batch.skeleton()))
    copy = MicroBatch.from_tensors(skeleton, batch.to_tensors()).to(CPU)
    for pack in copy.ctx.packs:
        bounds = pack.padded
        rows = bounds.offsets[-1]
        arrived = chunks(bounds, rows, CHUNK_ROWS, CPU)
        assert arrived is bounds.tables["chunks of 64"]
        expected = chunks(None, rows, 1, CPU)
        assert len(arrived.places) == len(expected.places) == rows
        assert torch.equal(arrived.join(arrived.cut(expected.places)), expected.places)
