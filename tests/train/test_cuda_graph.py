"""Layers that are replayed give what eager layers give, whatever the packs of a round are.

A recorder for CPUs stands in for CUDA's: a replay calls the function again, on the tensors at
fixed addresses, and writes the outputs where they were. So what is not copied is stale here too.
"""

from functools import partial

import pytest
import torch
from tests.ranks.spine import batches_of, make_samples

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.batch import MicroBatch
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.model.recurrent import Mamba2
from longshore.plan import make_plan
from longshore.plan.graph_use import GraphSetting
from longshore.train.cuda_graph import (
    GraphedLayers,
    GraphMemory,
    GraphPiece,
    GraphShape,
    RecordingError,
    parameters_of,
)

ALL = {AttentionConfig, MLAConfig, MLPConfig, DeltaNetConfig, Mamba2Config}
CAP = 6


class RunAgain:
    """Records by remembering; `weak` is the same tensor, as nothing here frees memory."""

    bytes = 0
    runs_again = True

    def record(self, run):
        outputs = run()

        def replay():
            for fixed, now in zip(outputs, run(), strict=True):
                if fixed.data_ptr() != now.data_ptr():
                    fixed.copy_(now)

        return replay, outputs

    def weak(self, tensor):
        return tensor


def rounds(lengths, *, depths, capacity=64):
    """Micro-batches of one lane, all of 64 tokens."""
    plan = make_plan(lengths, lanes=1, capacity=capacity, buckets=(64,))
    return batches_of(plan, make_samples(plan), 0, depths, max_sequences=CAP)


WHOLE = [[9, 5, 3, 12, 20], [30, 30], [17, 44]]
HALVES = [[4] * 16, [5] * 9, [7] * 8]
"""More sequences than the cap. Of each: one round runs eagerly, one records, one replays."""


def model_of(name, *, recompute=False):
    model = Decoder(preset(name) if isinstance(name, str) else name).double()
    init_decoder(model, seed=3)
    for block in model.blocks():
        block.recompute = recompute
    return model


def run(model, batch):
    """The losses and every gradient of a round, which is added to those before."""
    out = model(batch.token_ids, batch.ctx, batch.targets.labels, batch.mtp)
    aux = sum((routed.auxiliary for routed in out.routed), torch.zeros(()))
    (out.values.sum() + sum(depth.sum() for depth in out.mtp) + aux).backward()
    return out.values.detach().clone()


def apart(batch):
    """Without the tables that ops of another model have made."""
    return MicroBatch.from_tensors(batch.skeleton(), batch.to_tensors())


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def graphed(model, *, kinds=frozenset(ALL), halves=True, recompute=False, most=1, moving=False):
    memory = GraphMemory(RunAgain(), recompute=recompute, moving=moving)
    setting = GraphSetting(CAP, halves)
    told = []
    layers = GraphedLayers(
        model, kinds=kinds, setting=setting, memory=memory, most_bytes=most, tell=told.append
    )
    layers.told = told
    return layers


def compare(name, *, steps=(*WHOLE, *HALVES), **options):
    one, other = (model_of(name, recompute=options.get("recompute", False)) for _ in range(2))
    layers = graphed(other, **options)
    for lengths in steps:
        for batch in rounds(lengths, depths=len(one.config.mtp)):
            losses = run(one, apart(batch)), run(other, apart(batch))
            torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
        expected, actual = gradients(one), gradients(other)
        assert expected.keys() == actual.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(actual[key], gradient, rtol=1e-10, atol=1e-12, msg=key)
        one.zero_grad()
        other.zero_grad()
    return layers


OTHERS = ["tiny-llama", "tiny-deepseek-v3", "tiny-nemotron-h"]
NAMES = ["tiny-hybrid", "tiny-qwen3-next"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]
)
def test_replayed_layers_give_the_same_gradients(name):
    layers = compare(name)
    ways = {shape.way: len(shape.pieces) for shape in layers.shapes.values()}
    assert ways["whole"] >= layers.blocks
    assert ways["halves"] >= layers.blocks
    assert sum("recorded" in line for line in layers.told) >= 1
    # Of each way the first micro-batch runs eagerly, the other two are replayed.
    assert layers.take_runs() == [2 * layers.blocks, 2 * layers.blocks, 2 * layers.blocks]
    assert layers.take_runs() == [0, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-next"])
def test_with_recomputation(name):
    layers = compare(name, steps=WHOLE, recompute=True, halves=False)
    assert {shape.way for shape in layers.shapes.values()} == {"whole"}
    assert all(shape.pieces for shape in layers.shapes.values())


@pytest.mark.fuzz
@pytest.mark.parametrize("kinds", [{MLPConfig}, {AttentionConfig}, {Mamba2Config, DeltaNetConfig}])
def test_some_kinds_of_layers(kinds, is_fuzz):
    if AttentionConfig not in kinds and not is_fuzz:
        pytest.skip("in `make fuzz`")
    layers = compare("tiny-hybrid", kinds=kinds, steps=[*WHOLE, *HALVES] if is_fuzz else HALVES)
    assert layers.blocks > 0


def test_parameters_that_move_are_copied():
    """As zero3 gathers them: other memory every time, here a copy before each forward."""
    one, other = model_of("tiny-hybrid"), model_of("tiny-hybrid")
    graphed(other, moving=True)
    for lengths in WHOLE:
        for parameter in other.parameters():
            parameter.data = parameter.data.clone()
        for batch in rounds(lengths, depths=len(one.config.mtp)):
            torch.testing.assert_close(
                run(one, apart(batch)), run(other, apart(batch)), rtol=0, atol=1e-12
            )
    for key, gradient in gradients(one).items():
        torch.testing.assert_close(gradients(other)[key], gradient, rtol=1e-10, atol=1e-12)


def test_layers_of_one_kind_share_the_copies_of_parameters():
    model = model_of("tiny-llama")
    layers = graphed(model, moving=True)
    for _ in range(3):
        for batch in rounds([30, 30], depths=0):
            run(model, batch)
    block = next(iter(model.layers.values()))
    assert len(layers.memory.copies) == len(list(block.parameters()))


def test_more_memory_than_allowed_is_not_used():
    model = model_of("tiny-llama")
    layers = graphed(model, most=0)
    layers.memory.recorder.bytes = 1
    for _ in range(4):
        for batch in rounds([30, 30], depths=0):
            run(model, batch)
    assert not any(shape.pieces for shape in layers.shapes.values())
    assert len(layers.failed) == 1
    assert "graph.memory_gib" in layers.failed[0]
    assert layers.take_runs() == [0, 0, 4 * layers.blocks], "the plan says whole"


def test_what_cannot_be_recorded_runs_eagerly():
    """Mamba2 here; the other layers are replayed."""

    class Refuses(RunAgain):
        def record(self, run):
            before = Mamba2.core
            Mamba2.core = refused
            try:
                return super().record(run)
            finally:
                Mamba2.core = before

    def refused(*args):
        raise RecordingError("no")

    one, other = model_of("tiny-hybrid"), model_of("tiny-hybrid")
    layers = graphed(other)
    layers.memory.recorder = Refuses()
    for lengths in WHOLE:
        for batch in rounds(lengths, depths=len(one.config.mtp)):
            losses = run(one, apart(batch)), run(other, apart(batch))
            torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    for key, gradient in gradients(one).items():
        torch.testing.assert_close(gradients(other)[key], gradient, rtol=1e-10, atol=1e-12)
    assert layers.failed == ["Mamba2, whole: no"]
    mambas = sum(isinstance(block.mixer, Mamba2) for block in other.layers.values())
    others = layers.blocks - mambas
    assert layers.take_runs() == [2 * others, 0, others + 3 * mambas]
    kinds = {type(block.mixer) for shape in layers.shapes.values() for block, _ in shape.pieces}
    assert Mamba2 not in kinds
    assert kinds


def test_a_block_whose_second_half_cannot_be_recorded_runs_eagerly(monkeypatch):
    """Its first half was recorded before, and is not tried again in every micro-batch."""

    def refused(*args):
        raise RecordingError("no")

    monkeypatch.setattr(GraphShape, "_after", refused)
    model = model_of("tiny-llama")
    layers = graphed(model)
    for lengths in HALVES:
        for batch in rounds(lengths, depths=0):
            run(model, batch)
    assert layers.failed == ["Attention, halves: no"]
    assert layers.take_runs() == [0, 0, 3 * layers.blocks]


def test_boundaries_are_copied_to_where_graphs_read_them():
    """Kernels read them on the GPU; on a CPU ops read the host's numbers, so losses do not tell."""
    model = model_of("tiny-llama")
    layers = graphed(model)
    places = set()
    for lengths in (*WHOLE, [40, 3]):
        for batch in rounds(lengths, depths=0):
            run(model, batch)
        bounds = layers.shapes["whole", 64].bounds
        if bounds is not None:
            places.add(bounds.cu_seqlens.data_ptr())
            assert bounds.cu_seqlens.tolist() == list(batch.ctx.packs[0].padded.offsets)
            assert bounds.longest == 64
    assert len(places) == 1


def test_a_shape_of_which_nothing_can_be_recorded_is_left_alone():
    class Refuses(RunAgain):
        def record(self, run):
            raise RecordingError("no")

    model = model_of("tiny-llama")
    layers = graphed(model)
    layers.memory.recorder = Refuses()
    for _ in range(4):
        for batch in rounds([30, 30], depths=0):
            run(model, batch)
    assert layers.shapes["whole", 64].is_off
    assert layers.told == ["CUDA graphs: Attention, whole runs without graphs: no"]
    assert layers.take_runs() == [0, 0, 4 * layers.blocks]


def test_evaluation_is_eager():
    model = model_of("tiny-llama")
    layers = graphed(model)
    with torch.no_grad():
        for _ in range(3):
            for batch in rounds([30, 30], depths=0):
                model(batch.token_ids, batch.ctx, batch.targets.labels)
    assert not layers.shapes


def test_a_piece_copies_inputs_that_lie_elsewhere():
    layer = torch.nn.Linear(3, 2, bias=False).double()
    memory = GraphMemory(RunAgain(), recompute=False, moving=False)
    piece = GraphPiece(lambda rows: (layer(rows[0]), rows[1]), parameters_of(layer), memory)
    sample = partial(torch.randn, 4, 3, dtype=torch.float64, requires_grad=True)
    piece.record((sample(), sample()))
    for _ in range(2):
        x, y = sample(), sample()
        layer.weight.grad = None
        product, same = piece(x, y)
        (product.sum() + (2 * same).sum()).backward()
        torch.testing.assert_close(product, x @ layer.weight.T)
        torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, 3))
        torch.testing.assert_close(y.grad, torch.full_like(y, 2))
        torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3))
