"""Factors beside linear layers: the base's output first, then what merged weights give."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from longshore.advisor.peak_memory import expected_peak
from longshore.arch.costs import parameter_count
from longshore.arch.decoder import LoRAConfig
from longshore.arch.memory import RankSetting, model_bytes, stage_parameters, whole_model
from longshore.arch.presets import preset
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.model.lora import hold_frozen, is_factor
from longshore.ops.linear import LowRank, adapt, projected, whole_weight
from longshore.plan.types import Axes
from longshore.train.optimizer import make_optimizer

PRESETS = ("tiny-llama", "tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-nemotron-h", "tiny-qwen3-next")
IDS = torch.arange(20) * 3 % 64


@pytest.mark.property
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    scale=st.floats(0.1, 4),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_an_adapted_layer_is_one_with_the_whole_weight(sizes, scale, bias, seed):
    torch.manual_seed(seed)
    rows, inputs, outputs, rank = sizes
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    x = torch.randn(rows, inputs, dtype=torch.float64, requires_grad=True)
    before = linear(x)
    adapt(linear, LowRank(inputs, outputs, rank=rank, scale=scale).double())
    torch.testing.assert_close(linear(x), before)
    nn.init.normal_(linear.lora.b)
    want = nn.functional.linear(x, whole_weight(linear), linear.bias)
    for output in (linear(x), *projected(x, (linear,)), linear(x[None])[0]):
        torch.testing.assert_close(output, want, rtol=1e-9, atol=1e-9)
    leaves = (x, linear.lora.a, linear.lora.b)
    pairs = (torch.autograd.grad(out.square().sum(), leaves) for out in (linear(x), want))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_only_factors_train_and_the_first_output_is_the_bases(name):
    config = replace(preset(name), lora=LoRAConfig(4, 8.0))
    models = [Decoder(each) for each in (config, config.merged())]
    for model in models:
        init_decoder(model, seed=2)
    with torch.no_grad():
        adapted, base = (model(IDS).values for model in models)
    torch.testing.assert_close(adapted, base, rtol=0, atol=0)
    named = dict(models[0].named_parameters())
    assert {name for name, each in named.items() if each.requires_grad} == set(
        filter(is_factor, named)
    )
    frozen = {name: each.clone() for name, each in named.items() if not is_factor(name)}

    optimizer = make_optimizer(models[0], weight_decay=0.1, betas=(0.9, 0.9), eps=1e-8)
    for _ in range(2):
        models[0](IDS).values.square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
        optimizer.zero_grad()
    assert set(optimizer.state) <= {each for name, each in named.items() if is_factor(name)}
    assert all(torch.equal(named[name], value) for name, value in frozen.items())
    moved = [name for name, each in named.items() if name.endswith(".b") and each.any()]
    assert moved


def test_frozen_parameters_are_held_in_the_dtype_of_the_arithmetic():
    config = replace(preset("tiny-deepseek-v3"), lora=LoRAConfig(4, 8.0, ("q_up", "kv_up")))
    with torch.device("meta"):
        model = Decoder(config)
        hold_frozen(model, torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {kind for name, kind in kinds.items() if is_factor(name)} == {torch.float32}
    assert kinds["layers.1.mlp.router.weight"] == torch.float32
    assert kinds["embed.weight"] == kinds["layers.1.mlp.experts.down"] == torch.bfloat16


@pytest.mark.parametrize("name", PRESETS)
def test_memory_counts_factors_and_no_gradients_of_the_base(name):
    config = replace(preset(name), lora=LoRAConfig(4, 8.0))
    with torch.device("meta"):
        named = dict(Decoder(config).named_parameters())
    factors = sum(each.numel() for name, each in named.items() if is_factor(name))
    (stage,) = whole_model(config).stages
    counted = stage_parameters(config, stage)
    assert counted.total == parameter_count(config)
    assert factors <= counted.factors <= 1.5 * factors
    bound, count = counted.factors, counted.total
    none = model_bytes(config, RankSetting(axes=Axes(lanes=4, shard="none"), dtype="bfloat16"))
    assert (none.parameters, none.gradients) == (2 * count + 6 * bound, 4 * bound)
    assert none.optimizer == 8 * bound
    for shard in ("zero2", "zero3"):
        lora, whole = (
            model_bytes(each, RankSetting(axes=Axes(lanes=4, shard=shard), dtype="bfloat16"))
            for each in (config, config.merged())
        )
        assert lora.optimizer == 8 * -(-bound // 4)
        assert lora.total < whole.total / 2
        how = RankSetting(axes=Axes(lanes=4, shard=shard))
        peaks = [expected_peak(each, how, tokens=64) for each in (config, config.merged())]
        assert peaks[0].optimizer == lora.optimizer
        assert peaks[0].total < peaks[1].total
        assert peaks[0].gradients < peaks[1].gradients
