from dataclasses import replace

import pytest
import torch
from tests.model.experts import KINDS, LENGTHS, WIDTH, make, one_layer, rows
from torch.utils.flop_counter import FlopCounterMode

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.model.feed_forward import MoE


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_flops(kind):
    config = KINDS[kind]
    moe = make(config)
    assert config.parameters(WIDTH) == sum(p.numel() for p in moe.parameters())
    with FlopCounterMode(display=False) as counter:
        moe(rows(), whole_context(LENGTHS))
    assert config.flops(WIDTH, sum(LENGTHS)) == counter.get_total_flops()
    assert (config.ropes, config.gathered()) == ((), 0)


def test_the_example_of_the_config():
    config = MoEConfig(experts=128, top_k=8, width=768)
    assert config.parameters(2048) == 604_241_920
    assert config.flops(2048, 1) == 76_021_760


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_token_keeps(kind):
    """An estimate: between what is measured and 1.15 of it, at sizes where rows matter most."""
    config = replace(KINDS[kind], width=64)
    moe = MoE(config, 96, norm=Norm(1e-6))
    skipped = {p.untyped_storage().data_ptr() for p in moe.parameters()}
    x = rows((64,), width=96).float().requires_grad_()
    skipped.add(x.untyped_storage().data_ptr())
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in skipped:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made = moe(x, whole_context((64,)))
    measured = sum(storage.nbytes() for storage in kept.values()) / 64
    saved = config.saved(96)
    assert made
    assert measured <= 4 * (saved.values + saved.stats) <= 1.15 * measured + 4 * 96


@pytest.mark.parametrize("kind", KINDS)
def test_the_config_as_json(kind):
    config = one_layer(KINDS[kind])
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k is 7; a token can choose among only 6 experts"),
        ({"experts": 0}, "experts is 0; it must be a whole number"),
        ({"score": "max"}, "score is 'max'; known are softmax, sigmoid"),
        ({"groups": 4}, "groups is 4; it must divide the 6 experts into groups of 2"),
        ({"groups": 6}, "groups is 6; it must divide the 6 experts into groups of 2"),
        ({"groups": 2, "top_groups": 3}, "top_groups is 3; it can be at most groups, 2"),
        ({"groups": 3, "top_k": 3}, "top_k is 3; a token can choose among only 2 experts"),
        ({"shared_gate": True}, "needs a shared expert; give a shared_width"),
        ({"shared_width": -1}, "shared_width is -1; it must be a whole number"),
        ({"aux_weight": -0.1}, "aux_weight is -0.1; it must be a finite number above 0"),
        ({"bias_update": float("inf")}, "bias_update is inf; it must be a finite"),
        ({"scale": 0.0}, "scale is 0.0; it must be a finite number above 0"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MoEConfig(experts=6, top_k=2, width=8), **change)


def test_a_moving_bias_is_a_bias():
    plain = MoEConfig(experts=6, top_k=2, width=8)
    assert not plain.bias
    assert replace(plain, bias_update=0.001).bias
    assert MoE(plain, 4, norm=Norm(1e-6)).router.bias is None
