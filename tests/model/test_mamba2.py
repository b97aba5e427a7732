"""Mamba2 against its recurrence written out token by token, and against transformers."""

from dataclasses import replace

import pytest
import torch
from tests.model import scans
from torch.nn.functional import silu, softplus

from longshore.arch.part import Norm
from longshore.arch.scan import Mamba2Config
from longshore.batch import whole_context
from longshore.model.recurrent import Mamba2

BASE = Mamba2Config(heads=4, head_dim=3, state_dim=5, groups=2)
WIDTH = 12
EPS = 1e-5
VARIANTS = [
    BASE,
    replace(BASE, groups=1, kernel=1, conv_bias=False),
    replace(BASE, groups=4, kernel=3, bias=True, norm_groups=1),
    replace(BASE, kernel=7, norm_groups=6, dt_min=0.6, dt_max=1.2),
]


def mixer(config=BASE):
    torch.manual_seed(1)
    made = Mamba2(config, WIDTH, norm=Norm(EPS)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


def convolved(made, mixed_TX):
    """Of each token, itself and those before it under its taps."""
    taps, kernel = made.conv1d.weight[:, 0], made.config.kernel
    rows = []
    for t in range(len(mixed_TX)):
        row = sum(
            taps[:, kernel - 1 - back] * mixed_TX[t - back] for back in range(min(kernel, t + 1))
        )
        rows.append(silu(row if made.conv1d.bias is None else row + made.conv1d.bias))
    return torch.stack(rows)


def written_out(made, x_TC):
    """One sequence, one token and one head at a time."""
    config, per_head = made.config, made.per_head
    z_TX, mixed_TX, dt_TH = made.in_proj(x_TC).split(
        [config.inner, config.conv_dim, config.heads], dim=1
    )
    mixed_TX = convolved(made, mixed_TX)
    sizes = [config.inner, config.groups * config.state_dim, config.groups * config.state_dim]
    states = [torch.zeros(config.head_dim, config.state_dim).double()] * config.heads
    rows = []
    for t in range(len(x_TC)):
        x, B, C = mixed_TX[t].split(sizes)
        heads = []
        for head, x_P in enumerate(x.view(config.heads, -1)):
            group = head * config.groups // config.heads
            B_N, C_N = (part.view(config.groups, -1)[group] for part in (B, C))
            step = softplus(dt_TH[t, head] + per_head.dt_bias[head])
            step = step.clamp(config.dt_min, config.dt_max)
            kept = torch.exp(-step * per_head.A_log[head].exp())
            states[head] = kept * states[head] + step * torch.outer(x_P, B_N)
            heads.append(states[head] @ C_N + per_head.D[head] * x_P)
        gated = (torch.cat(heads) * silu(z_TX[t])).view(config.norm_groups or config.groups, -1)
        normed = gated / (gated.square().mean(1, keepdim=True) + EPS).sqrt()
        rows.append(made.out_proj(made.norm.weight * normed.flatten()))
    return torch.stack(rows)


@pytest.mark.parametrize("config", VARIANTS)
def test_as_written_out(config):
    scans.as_written_out(mixer(config), written_out, WIDTH, (1, 2, 9, 3))


@pytest.mark.parametrize("config", VARIANTS)
def test_packed_as_one_at_a_time(config):
    scans.packed_as_one_at_a_time(mixer(config), WIDTH)


def test_no_sequence_sees_another():
    scans.nothing_leaks(mixer(), WIDTH)


@pytest.mark.parametrize("norm_groups", [1, 2])
def test_as_transformers(norm_groups):
    """norm_groups 1 is its Mamba2, as many as groups its Nemotron-H."""
    config = replace(BASE, norm_groups=norm_groups, kernel=4, dt_min=0.001)
    shared = {"hidden_size": WIDTH, "n_groups": 2, "num_hidden_layers": 1, "conv_kernel": 4}
    if norm_groups == 1:
        from transformers import Mamba2Config as Theirs
        from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

        sizes = {"num_heads": 4, "head_dim": 3, "state_size": 5, "expand": 1}
        limits = {"time_step_limit": (0.001, float("inf")), "chunk_size": 8}
        theirs = Mamba2Mixer(Theirs(**shared, **sizes, **limits, layer_norm_epsilon=EPS), 0)
    else:
        from transformers import NemotronHConfig
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

        sizes = {"mamba_num_heads": 4, "mamba_head_dim": 3, "ssm_state_size": 5}
        kinds = {"layers_block_type": ["mamba"], "chunk_size": 8, "layer_norm_epsilon": EPS}
        theirs = NemotronHMamba2Mixer(NemotronHConfig(**shared, **sizes, **kinds), 0)
    made = mixer(config).float()
    state = {name.removeprefix("per_head."): value for name, value in made.state_dict().items()}
    theirs.load_state_dict(state)
    x_TC = torch.randn(21, WIDTH)
    got = made(x_TC, whole_context((21,)), {})
    want = theirs.eval()(x_TC[None])[0]
    assert (got - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("config", VARIANTS)
def test_parameters(config):
    scans.parameters_as_counted(config, mixer(config), WIDTH)


def test_the_numbers_of_the_example():
    config = Mamba2Config(heads=4, head_dim=8, state_dim=16)
    assert config.parameters(16) == 2476
    assert config.flops(16, 1) == 6784
    assert config.flops(16, 7) == 7 * 6784
    assert config.gathered() == 0


@pytest.mark.parametrize(
    "config",
    [
        Mamba2Config(heads=8, head_dim=16, state_dim=32, groups=2),
        Mamba2Config(heads=16, head_dim=8, state_dim=64, groups=4, norm_groups=2),
    ],
)
def test_keeps_what_it_says(config):
    scans.keeps_what_it_says(config, 64)


def test_first_values():
    scans.begins_as_it_should(BASE, {"D": 1.0})


@pytest.mark.usefixtures("half_by_float32")
def test_bfloat16_is_near():
    scans.bfloat16_is_near(BASE, WIDTH)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": 3}, "groups is 3; it must divide heads, 4"),
        ({"norm_groups": 5}, "norm_groups is 5; it must divide heads times head_dim, 12"),
        ({"kernel": 0}, "kernel is 0"),
        ({"dt_min": 0.5, "dt_max": 0.2}, "dt_max is 0.2; it must be a finite number above 0.5"),
        ({"dt_min": -1.0}, "dt_min is -1.0; it must be a finite number of 0 or more"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(BASE, **wrong)
