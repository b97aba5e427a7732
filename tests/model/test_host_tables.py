import pickle
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.presets import preset
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig
from longshore.batch import Boundaries, Counts, MicroBatch
from longshore.data.pack import context_batches, lane_context
from longshore.model import interface
from longshore.model.registry import table_makers
from longshore.model.sparse_attention import EntryKind, entry_tables
from longshore.ops.boundaries import chunk_table, chunks, filled_spans
from longshore.ops.sizes import CHUNK_ROWS
from longshore.plan.planner import make_plan

GPU, CPU = torch.device("cuda"), torch.device("cpu")


PLAIN, SSD, SPANS = "chunks of 64", "ssd chunks of 64", "delta rule: spans with rows"
SINCE, SPAN = "conv: rows since the start", "conv: span of each row"


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """The packages with kernels that are installed: none, until a test adds some."""
    names = set()
    monkeypatch.setattr(interface, "is_installed", lambda package: package in names)
    return names


def context(lengths, *, name="tiny-hybrid", cp_size=2, scan="auto", device=GPU, kernels="auto"):
    plan = make_plan(lengths, lanes=2, capacity=512, policy="static", cp_size=cp_size)
    makers = table_makers(preset(name), scan=scan, device=device, kernels=kernels)
    return lane_context(plan, 0, 0, tables=makers)


def names_of(bounds):
    return sorted(bounds.tables)


def test_a_decoder_without_scans_needs_none():
    assert table_makers(preset("tiny-llama"), scan="auto", device=GPU) == ()
    assert len(table_makers(preset("tiny-nemotron-h"), scan="auto", device=GPU)) == 1
    assert len(table_makers(preset("tiny-hybrid"), scan="auto", device=GPU)) == 2


@pytest.mark.parametrize(
    ("scan", "names"),
    [("auto", ("padded", "chunks")), ("heads", ("padded",)), ("states", ("chunks",))],
)
def test_a_shared_pack_has_the_boundaries_that_are_scanned(scan, names):
    pack = context([100, 70], scan=scan).packs[0]
    by_name = {"padded": pack.padded, "chunks": pack.zigzag.chunks}
    for name, bounds in by_name.items():
        assert names_of(bounds) == ([PLAIN] if name in names else [])
    assert names_of(context([100], cp_size=1, scan=scan).packs[0].padded) == [PLAIN]
    assert names_of(context([100], device=CPU).packs[0].padded) == ["chunks of 32"]


@pytest.mark.parametrize(
    ("name", "padded", "chunks"),
    [
        ("tiny-nemotron-h", [SINCE, SPAN, SSD], [SINCE, SPAN, SSD]),
        # flash-linear-attention may refuse, and it gives no transitions.
        ("tiny-qwen3-next", [PLAIN, SINCE, SPAN, SPANS], [PLAIN, SINCE, SPAN]),
        ("tiny-hybrid", [PLAIN, SINCE, SPAN, SPANS, SSD], [PLAIN, SINCE, SPAN, SSD]),
    ],
)
def test_kernels_find_their_tables(packages, name, padded, chunks):
    packages |= {"triton", "fla"}
    pack = context([100, 70], name=name).packs[0]
    assert (names_of(pack.padded), names_of(pack.zigzag.chunks)) == (padded, chunks)
    plain = context([100, 70], name=name, kernels="plain").packs[0]
    assert names_of(plain.padded) == names_of(plain.zigzag.chunks) == [PLAIN]
    on_cpu = context([100, 70], name=name, device=CPU).packs[0]
    assert names_of(on_cpu.padded) == ["chunks of 32"]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.sampled_from([1, 2]))
def test_tables_travel(lengths, cp_size):
    """Through a skeleton and tensors, pickled, an op finds the values that it would make."""
    plan = make_plan(lengths, lanes=2, capacity=512, policy="static", cp_size=cp_size)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interface, "is_installed", lambda package: True)
        makers = table_makers(preset("tiny-hybrid"), scan="auto", device=GPU)
        copy = travelled(plan, makers, lengths)
    for pack in copy.ctx.packs:
        bounds = pack.padded
        rows = bounds.offsets[-1]
        arrived = chunks(bounds, rows, CHUNK_ROWS, CPU)
        assert arrived is bounds.tables[PLAIN]
        expected = chunks(None, rows, 1, CPU)
        assert len(arrived.places) == len(expected.places) == rows
        assert torch.equal(arrived.join(arrived.cut(expected.places)), expected.places)
        anew = Boundaries(bounds.offsets, bounds.cu_seqlens, bounds.longest)
        for name, make in ((SSD, chunk_table), (SPANS, filled_spans)):
            arrived = make(bounds, rows, CPU)
            assert arrived is bounds.tables[name]
            assert_equal_tables(arrived, make(anew, rows, CPU))


def assert_equal_tables(one, other):
    for field in fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        assert first.dtype == second.dtype
        assert torch.equal(first, second), field.name


def travelled(plan, makers, lengths):
    """A lane's batch without data, as another process receives it."""
    (batch,) = context_batches(plan, 0, counts=Counts.of([1], lengths), tables=makers)
    skeleton = pickle.loads(pickle.dumps(batch.skeleton()))
    return MicroBatch.from_tensors(skeleton, batch.to_tensors()).to(CPU)


SPARSE = SparseAttentionConfig(heads=2, head_dim=4, rope_dim=2, q_rank=3, window=5, o_rank=3)
CHOSEN = replace(SPARSE, ratio=4, index=IndexConfig(heads=2, head_dim=4, top_k=2))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_tables_of_sparse_attention_travel(lengths):
    """One for each window and ratio, however many layers have them; equal to those made there."""
    mixers = (SPARSE, CHOSEN, replace(CHOSEN, heads=4), SPARSE)
    layers = tuple(LayerConfig(mixer, None) for mixer in mixers)
    decoder = DecoderConfig(vocab_size=5, width=6, layers=layers, mtp=layers[:1])
    makers = table_makers(decoder, scan="auto", device=GPU)
    assert len(makers) == 2
    plan = make_plan(lengths, lanes=1, capacity=512, buckets=(512,))
    copy = travelled(plan, pickle.loads(pickle.dumps(makers)), lengths)
    (pack,) = copy.ctx.packs
    bounds = pack.padded
    anew = replace(pack, padded=Boundaries(bounds.offsets, bounds.cu_seqlens, bounds.longest))
    for mixer in (SPARSE, CHOSEN):
        kind = EntryKind.of(mixer)
        arrived = entry_tables(pack, kind, CPU)
        assert arrived is bounds.tables[str(kind)]
        expected = entry_tables(anew, kind, CPU)
        assert torch.equal(arrived.rows, expected.rows)
        assert torch.equal(arrived.positions, expected.positions)
        for name in ("near_first", "near_stop", "entry_first", "entry_count"):
            ours, theirs = getattr(arrived.ranges, name), getattr(expected.ranges, name)
            assert ours.dtype == torch.int32
            assert torch.equal(ours, theirs)
        count = sum(length // 4 for length in pack.lengths) if mixer.ratio else 0
        assert len(arrived.rows) == len(arrived.positions) == count
