"""Gated delta net against its recurrence written out token by token, and against transformers."""

from dataclasses import replace

import pytest
import torch
from tests.model import scans
from torch.nn.functional import silu, softplus

from longshore.arch.part import Norm
from longshore.arch.scan import DeltaNetConfig
from longshore.batch import whole_context
from longshore.model.recurrent import DeltaNet

BASE = DeltaNetConfig(key_heads=2, value_heads=4, key_dim=5, value_dim=3)
WIDTH = 10
EPS = 1e-5
VARIANTS = [
    BASE,
    replace(BASE, key_heads=4, kernel=1),
    replace(BASE, key_heads=1, value_heads=3, kernel=7),
]


def mixer(config=BASE):
    torch.manual_seed(1)
    made = DeltaNet(config, WIDTH, norm=Norm(EPS, zero_centred=True)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
        made.per_head.A_log -= 2  # memories that last
    return made


def convolved(made, mixed_TX):
    """Of each token, itself and those before it under its taps."""
    taps, kernel = made.conv1d.weight[:, 0], made.config.kernel
    rows = []
    for t in range(len(mixed_TX)):
        seen = range(min(kernel, t + 1))
        rows.append(silu(sum(taps[:, kernel - 1 - back] * mixed_TX[t - back] for back in seen)))
    return torch.stack(rows)


def unit(x):
    return x / (x.square().sum() + 1e-6).sqrt()


def written_out(made, x_TC):
    """One sequence, one token and one head at a time."""
    config, per_head = made.config, made.per_head
    served = config.value_heads // config.key_heads
    sizes = [config.key_dim, config.key_dim, *[served * config.value_dim] * 2]
    rows = made.in_proj_qkvz(x_TC).view(len(x_TC), config.key_heads, -1)
    q, k, v, z = (part.reshape(len(x_TC), -1) for part in rows.split(sizes, dim=2))
    ba = made.in_proj_ba(x_TC).view(len(x_TC), config.key_heads, 2, served)
    mixed = convolved(made, torch.cat([q, k, v], dim=1))
    q, k, v = mixed.split([config.keys, config.keys, config.values], dim=1)
    states = [torch.zeros(config.key_dim, config.value_dim).double()] * config.value_heads
    rows = []
    for t in range(len(x_TC)):
        heads = []
        for head in range(config.value_heads):
            shared, place = divmod(head, served)
            q_K = unit(q[t].view(config.key_heads, -1)[shared]) * config.key_dim**-0.5
            k_K = unit(k[t].view(config.key_heads, -1)[shared])
            v_V, z_V = (part[t].view(config.value_heads, -1)[head] for part in (v, z))
            b, a = ba[t, shared, 0, place], ba[t, shared, 1, place]
            rate = per_head.A_log[head].exp() * softplus(a + per_head.dt_bias[head])
            faded = torch.exp(-rate) * states[head]
            states[head] = faded + torch.outer(k_K, b.sigmoid() * (v_V - k_K @ faded))
            out = q_K @ states[head]
            normed = out / (out.square().mean() + EPS).sqrt() * made.norm.weight
            heads.append(normed * silu(z_V))
        rows.append(made.out_proj(torch.cat(heads)))
    return torch.stack(rows)


@pytest.mark.parametrize("config", VARIANTS)
def test_as_written_out(config):
    scans.as_written_out(mixer(config), written_out, WIDTH, (1, 2, 9, 3))


@pytest.mark.parametrize("config", VARIANTS)
def test_packed_as_one_at_a_time(config):
    scans.packed_as_one_at_a_time(mixer(config), WIDTH)


def test_no_sequence_sees_another():
    scans.nothing_leaks(mixer(), WIDTH)


def test_as_transformers():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"linear_key_head_dim": 5, "linear_value_head_dim": 3, "linear_conv_kernel_dim": 4}
    config = Qwen3NextConfig(
        hidden_size=WIDTH, num_hidden_layers=1, rms_norm_eps=EPS, **heads, **dims
    )
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    made = mixer().float()
    state = {name.removeprefix("per_head."): value for name, value in made.state_dict().items()}
    theirs.load_state_dict(state)
    x_TC = torch.randn(21, WIDTH)
    got = made(x_TC, whole_context((21,)), {})
    want = theirs(x_TC[None])[0]
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("config", VARIANTS)
def test_parameters(config):
    scans.parameters_as_counted(config, mixer(config), WIDTH)


def test_flops():
    config = replace(BASE, value_dim=6)
    projections = 8 * (10 + 10 + 24 + 24 + 4 + 4) + 24 * 8  # q, k, v, z, b, a, and the output's
    conv = 4 * (10 + 10 + 24)
    assert config.flops(8, 1) == 2 * (projections + conv) + 4 * 6 * 5 * 6
    assert config.flops(8, 9) == 9 * config.flops(8, 1)
    assert config.gathered() == 0


@pytest.mark.parametrize(
    "config",
    [
        DeltaNetConfig(key_heads=4, value_heads=8, key_dim=16, value_dim=16),
        DeltaNetConfig(key_heads=4, value_heads=4, key_dim=32, value_dim=64),
    ],
)
def test_keeps_what_it_says(config):
    scans.keeps_what_it_says(config, 64)


def test_first_values():
    scans.begins_as_it_should(BASE, {})


@pytest.mark.usefixtures("half_by_float32")
def test_bfloat16_is_near():
    scans.bfloat16_is_near(BASE, WIDTH)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"key_heads": 3}, "key_heads is 3; it must divide value_heads, 4"),
        ({"kernel": 0}, "kernel is 0"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **wrong)
