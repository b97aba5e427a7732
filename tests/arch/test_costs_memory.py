from dataclasses import replace

import pytest
import torch

from longshore.arch.costs import (
    auto_capacity,
    exchanged_by,
    logits_bytes,
    model_bytes,
    parameter_count,
    token_bytes,
)
from longshore.arch.decoder import HyperConfig
from longshore.arch.memory import INPUT_BYTES, RankSetting
from longshore.arch.part import Sharing
from longshore.arch.presets import preset
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.ops import pointwise as norm
from longshore.plan.types import Axes

GIB = 1 << 30
GATHER = Sharing("gather", "auto")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SAVED_INPUTS = 8 + 8 + 1 + 1  # id, and the loss's label and two masks


def saved_bytes(model, run):
    """Bytes that autograd keeps of a run, each storage once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made = run()
    total = sum(storage.nbytes() for storage in kept.values())
    made.sum().backward()
    return total


def norm_copies(model, tokens, monkeypatch):
    """What norms keep on the CPU beyond a fused one: the normed rows before their scale."""
    sizes, plain = [], norm._rms_norm

    def counted(*given):
        normed = plain(*given)
        sizes.append(normed.nbytes)
        return normed

    monkeypatch.setattr(norm, "_rms_norm", counted)
    model(tokens)
    return sum(sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_activations_as_measured(name, dtype, monkeypatch):
    """Exactly: all but two things, each known, is what the estimate says."""
    config = preset(name, layers=3, mlp=160)
    model = Decoder(config).to(DTYPES[dtype])
    ctx = whole_context((1, 2, 7, 54))
    ids = torch.arange(ctx.tokens)
    measured = saved_bytes(model, lambda: model(ids, ctx, ids).values)
    estimate = token_bytes(config, RankSetting(dtype=dtype, recompute=False)).saved
    others = estimate - INPUT_BYTES + SAVED_INPUTS
    assert measured - norm_copies(model, ids, monkeypatch) == ctx.tokens * others


def test_hyper_connections_as_measured():
    """What they add, in float32: there plain torch keeps what kernels keep."""
    ctx, residuals, sizes = whole_context((1, 2, 7, 54)), HyperConfig(count=4, iterations=5), []
    ids = torch.arange(ctx.tokens)
    for each in (None, residuals):
        config = replace(preset("tiny-qwen3", layers=3), residuals=each)
        model = Decoder(config)
        measured = saved_bytes(model, lambda model=model: model(ids, ctx, ids).values)
        sizes.append(
            (measured, token_bytes(config, RankSetting(dtype="float32", recompute=False)).saved)
        )
    (plain, plain_estimate), (hyper, estimate) = sizes
    added = (hyper - plain) / ctx.tokens / (estimate - plain_estimate)
    assert 0.95 < added <= 1
    less = token_bytes(config, RankSetting(dtype="bfloat16", recompute=True))
    block = 2 * config.row_width
    assert less.saved < token_bytes(config, RankSetting(dtype="bfloat16", recompute=False)).saved
    assert less.saved > 3 * block


def test_recomputation_keeps_inputs():
    config = preset("tiny-llama", layers=5)
    less = token_bytes(config, RankSetting(dtype="bfloat16", recompute=True))
    more = token_bytes(config, RankSetting(dtype="bfloat16", recompute=False))
    block = 1408 * 2 + 10 * 4
    assert more.saved - less.saved == 5 * (block - 64 * 2)
    assert (more.working, less.working) == (block, 2 * block)


def test_model_bytes():
    config = preset("llama-3.2-1b")
    count = parameter_count(config)
    none = model_bytes(config, RankSetting(axes=Axes(lanes=8, shard="none"), dtype="bfloat16"))
    assert (none.parameters, none.gradients, none.optimizer) == (6 * count, 4 * count, 8 * count)
    zero2 = model_bytes(config, RankSetting(axes=Axes(lanes=8, shard="zero2"), dtype="bfloat16"))
    assert zero2.parameters == count // 8 * 4 + 2 * count
    assert zero2.optimizer == count
    zero3 = model_bytes(config, RankSetting(axes=Axes(lanes=8, shard="zero3"), dtype="bfloat16"))
    assert (zero3.parameters, zero3.gradients) == (count // 2, count // 2)
    ends = 128_256 * 2048 + 2048
    block = (count - ends) // 16
    assert zero3.gathered == 2 * (2 * block + ends) + 4 * (block + ends)
    plain = model_bytes(config, RankSetting(axes=Axes(lanes=1, shard="none"), dtype="float32"))
    assert plain.total == 16 * count


def test_logits_are_those_of_the_loss():
    config = preset("qwen3-8b")
    vocabulary, width = 151_936, 4096
    assert (config.vocab_size, config.width) == (vocabulary, width)
    head = 4 * vocabulary * width
    # With kernels: float32 logits and a bfloat16 gradient, and the hidden states' gradient.
    for tokens, chunk in ((1000, 512), (10_000, 2048), (1 << 20, 2048)):
        expected = chunk * 6 * vocabulary + head + 2 * tokens * width
        assert logits_bytes(config, tokens, dtype="bfloat16") == expected
    assert logits_bytes(config, 1, dtype="bfloat16") == 8 * vocabulary + head
    # Plain torch, all that computes in float64: logits and their gradient, 1/16 of the tokens.
    expected = 2 * 62 * 8 * vocabulary + 2 * head
    assert logits_bytes(config, 1000, dtype="float64") == expected


def test_depths_hold_gradients_of_their_own():
    one = preset("tiny-llama")
    three = replace(one, mtp=one.layers[:1] * 2)
    head, hidden = 4 * one.vocab_size * one.width, 2 * 1000 * one.width
    more = logits_bytes(three, 1000, dtype="bfloat16") - logits_bytes(one, 1000, dtype="bfloat16")
    assert more == 2 * (head + hidden)


def run_8b(memory=139 * GIB, cp_sizes=(1, 2, 4, 8), lanes=8, shard="zero3", **changes):
    given = {"axes": Axes(lanes=lanes, shard=shard), "recompute": True, "sharing": GATHER}
    how = RankSetting(**{**given, **changes})
    return auto_capacity(preset("qwen3-8b"), how, memory_bytes=memory, cp_sizes=cp_sizes)


def test_capacity():
    capacity, lines = run_8b()
    assert capacity % 256 == 0
    assert f"= {capacity} tokens" in lines[-1]
    assert fits("qwen3-8b", capacity, 139 * GIB)
    assert not fits("qwen3-8b", capacity + 256, 139 * GIB)
    assert run_8b(recompute=False)[0] < capacity < run_8b(lanes=64)[0]
    assert run_8b(cp_sizes=(1, 2, 4, 8, 16))[0] < capacity < run_8b(cp_sizes=(1, 2))[0]
    assert run_8b(sharing=Sharing("auto", "auto"))[0] > capacity
    assert "gathered or expanded by a layer at CP size 8" in lines[3]
    assert (
        lines[4]
        == f"at CP size 8 a lane's layer reads up to {8 * capacity:,} tokens of a full pack"
    )


def fits(name, tokens, memory_bytes):
    config = preset(name)
    token = token_bytes(config, RankSetting(dtype="bfloat16", recompute=True))
    needed = (
        model_bytes(config, RankSetting(axes=Axes(lanes=8, shard="zero3"), dtype="bfloat16")).total
        + logits_bytes(config, tokens, dtype="bfloat16")
        + tokens * (token.saved + token.working)
        + exchanged_by(config.layers, 8, tokens, sharing=GATHER, item=2)
    )
    return needed <= memory_bytes - memory_bytes // 10


def test_a_small_model_pays_for_small_logits():
    how = RankSetting(axes=Axes(lanes=8, shard="zero3"), recompute=True, sharing=GATHER)
    config = preset("tiny-llama")
    memory = 300 << 20
    capacity, _ = auto_capacity(config, how, memory_bytes=memory, cp_sizes=(8,))
    assert fits("tiny-llama", capacity, memory)
    assert not fits("tiny-llama", capacity + 256, memory)


def test_no_room():
    with pytest.raises(ValueError, match="not even 256 tokens fit") as error:
        run_8b(shard="none", recompute=False, memory=80 * GIB)
    said = str(error.value)
    assert (
        "recompute blocks in backward, or shard the model as zero3, or allow only smaller" in said
    )
    assert "CP sizes, or use more lanes or a smaller model\n" in said
    assert "model 137.3 GiB with none over 8 lanes" in said


def test_unknown_settings():
    with pytest.raises(ValueError, match="shard is 'zero1'; known are zero3, zero2, none"):
        run_8b(shard="zero1")
    with pytest.raises(ValueError, match="dtype is 'fp8'; known are bfloat16"):
        run_8b(dtype="fp8")
    with pytest.raises(ValueError, match="lanes is 0"):
        run_8b(lanes=0)
