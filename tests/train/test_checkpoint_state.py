"""What each rank saves: all ranks together every value once, however many have it."""

from dataclasses import dataclass, replace
from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.arch.tp_parts import WIDTH, parts_on_ranks
from tests.parallel.test_shards import cut_out, tensors_of

from longshore.arch.cuts import Span, TensorCut, TPRank
from longshore.arch.decoder import LoRAConfig
from longshore.arch.presets import preset
from longshore.model.decoder import Decoder
from longshore.model.lora import is_factor
from longshore.plan.types import Axes
from longshore.train import checkpoint as checkpoint_state
from longshore.train.checkpoint import own_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Axes):
    """A rank's place without process groups."""

    lane: int
    tp_rank: int


def places(lanes, tp, ep=1):
    return [
        Place(lanes=lanes, tp=tp, ep=ep, lane=lane, tp_rank=rank)
        for lane in range(lanes)
        for rank in range(tp)
    ]


def saved_sizes(whole, pairs):
    """How much each of (place, cut) saves; all of them must save every value once."""
    times, sizes = torch.zeros(whole.shape), []
    for place, cut in pairs:
        blocks = own_blocks(cut_out(whole, cut), cut, place)
        for block in blocks:
            at = zip(block.offsets, block.values.shape, strict=True)
            index = tuple(slice(start, start + size) for start, size in at)
            assert block.shape == tuple(whole.shape)
            assert torch.equal(whole[index], block.values)
            times[index] += 1
        sizes.append(sum(block.values.numel() for block in blocks))
    assert torch.equal(times, torch.ones_like(times))
    return sizes


@given(parts_on_ranks(), st.integers(1, 4))
def test_every_value_is_saved_once(part_and_tp, lanes):
    part, tp = part_and_tp
    cuts = [part.tp_cuts(WIDTH, TPRank(tp, rank)) for rank in range(tp)]
    for name, whole in tensors_of(part).items():
        saved_sizes(whole, [(at, cuts[at.tp_rank].get(name)) for at in places(lanes, tp)])


@given(st.integers(1, 3), st.sampled_from([(2, 1, 2), (2, 2, 4), (4, 2, 2), (2, 2, 1), (1, 4, 4)]))
def test_experts_over_lanes_and_tp_ranks(each, axes):
    lanes, tp, ep = axes
    experts = each * ep
    pairs = []
    for at in places(lanes, tp, ep):
        first = (at.lane * tp + at.tp_rank) % ep * each
        pairs.append((at, TensorCut(0, experts, (Span(first, first + each),), "ep")))
    sizes = saved_sizes(torch.arange(experts * 60).view(experts, 4, 15), pairs)
    replicas = lanes * tp // ep
    assert max(sizes) <= each * 60 / max(15, replicas) * ceil(15 / replicas)


def test_what_all_have_is_divided_evenly():
    """In columns where there are fewer rows than ranks; a single value by the first."""
    for shape, size in (((16, 3), 2 * 3), ((3, 16), 3 * 2), ((2, 3), 2)):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        assert max(saved_sizes(whole, [(at, None) for at in places(4, 2)])) == size
    assert saved_sizes(torch.tensor(3.0), [(at, None) for at in places(2, 1)]) == [1, 0]


def test_the_docstrings_example():
    at = Place(lanes=2, tp=2, lane=1, tp_rank=0)
    (block,) = own_blocks(torch.ones(64), None, at)
    assert (block.offsets, len(block.values)) == ((32,), 16)
    (block,) = own_blocks(torch.ones(32, 64), TensorCut(0, 64, (Span(0, 32),)), at)
    assert (block.offsets, len(block.values)) == ((16, 0), 16)


def test_frozen_parameters_are_saved_unless_a_base_has_them():
    config = preset("tiny-qwen3-moe", layers=1)
    for lora in (None, LoRAConfig(rank=2, alpha=4)):
        with torch.device("meta"):
            model = Decoder(replace(config, lora=lora))
        model.norm.weight.requires_grad_(False)
        names = [name for name, _, _ in checkpoint_state.tensors_of(model)]
        if lora is None:
            every = [*model.named_parameters(), *model.named_buffers()]
            assert sorted(names) == sorted(name for name, _ in every)
        else:
            assert names
            assert all(map(is_factor, names))
