"""What a rank keeps for backward under TP and EP, beside what arch/memory.py estimates."""

import pytest
import torch
from tests.ranks.harness import run_ranks

from longshore.arch.costs import token_bytes
from longshore.arch.memory import INPUT_BYTES, RankSetting
from longshore.arch.presets import preset
from longshore.batch import whole_context
from longshore.distributed.topology import make_topology
from longshore.model.decoder import Decoder
from longshore.ops import pointwise as norm
from longshore.parallel.expert import split_experts
from longshore.parallel.tensor import split_tensors
from longshore.plan.types import Axes

TOKENS = 64
SAVED_INPUTS = 8 + 8 + 1 + 1  # id, and the loss's label and two masks


def saved_on_rank(name, tp, ep):
    """Bytes that autograd keeps of a forward, each storage once, and those that only CPUs keep."""
    torch.manual_seed(0)
    topology = make_topology(lanes=max(1, ep // tp), tp=tp, ep=ep, device="cpu")
    model = Decoder(preset(name, layers=3))
    split_tensors(model, topology)
    split_experts(model, topology)
    ctx, ids = whole_context((1, 2, 7, 54)), torch.arange(TOKENS)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, copies, plain = {}, [], norm._rms_norm

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    def counted(*given):
        normed = plain(*given)
        copies.append(normed.nbytes)
        return normed

    norm._rms_norm = counted
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = model(ids, ctx, ids)
    total = sum(storage.nbytes() for storage in kept.values())
    losses.values.sum().backward()
    return total, sum(copies)


def measured_and_estimated(name, *, tp, ep, ranks):
    """Bytes per token of a lane: of each rank, and as estimated."""
    axes = Axes(lanes=max(1, ep // tp), tp=tp, ep=ep)
    config = preset(name, layers=3)
    token = token_bytes(config, RankSetting(axes=axes, dtype="float32"))
    sizes = [
        (total - copies) / TOKENS for total, copies in run_ranks(ranks, saved_on_rank, name, tp, ep)
    ]
    return sizes, token.saved + SAVED_INPUTS - INPUT_BYTES


def test_a_tensor_parallel_rank_saves_what_is_estimated():
    sizes, estimated = measured_and_estimated("tiny-qwen3", tp=4, ep=1, ranks=4)
    assert sizes == pytest.approx([estimated] * 4, abs=2)


def test_experts_save_at_most_what_is_estimated():
    """Every token is taken to have its two experts on different ranks, which most have."""
    sizes, estimated = measured_and_estimated("tiny-qwen3-moe", tp=2, ep=4, ranks=4)
    assert all(0.8 * estimated < size <= estimated for size in sizes), sizes
