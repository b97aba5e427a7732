"""The mixer, in both forms, against the same written out token by token."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.arch.test_costs_memory import saved_bytes
from tests.model.exact import assert_all_close, assert_close, cut, decoder, gradients, tokens
from tests.model.test_attention import turned
from torch.utils.flop_counter import FlopCounterMode

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.attention import MLAConfig, causal_pairs
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.part import Norm
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.batch import CPGroup, whole_context
from longshore.model import attention as mla
from longshore.model.attention import MLA
from longshore.model.interface import LOCAL
from longshore.model.norm_rope import attention_factor, rope_tables

BASE = MLAConfig(heads=3, kv_rank=5, nope_dim=4, rope_dim=6, value_dim=7)
YARN = YarnScaling(factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
WIDTH = 10
CONFIGS = {
    "plain": BASE,
    "rank": replace(BASE, q_rank=8),
    "bias": replace(BASE, q_rank=8, bias=True, value_dim=2),
    "one head": replace(BASE, heads=1, rope=RopeConfig(theta=50.0, rotary_dim=4)),
}
FORMS = ("decompressed", "absorbed")


def mixer(config, width=WIDTH):
    torch.manual_seed(1)
    made = MLA(config, width, norm=Norm(1e-6)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


def normed(x_TR, norm):
    return x_TR / (x_TR.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def written_out(made, x_TC):
    """One sequence, one head and one token at a time."""
    config = made.config
    nope, up = config.nope_dim, config.nope_dim + config.value_dim
    if config.q_rank is None:
        q_TX = made.q_proj(x_TC)
    else:
        q_TX = made.q_up(normed(made.q_down(x_TC), made.q_norm))
    down_TL = made.kv_down(x_TC)
    latent_TR, key_TE = down_TL[:, : config.kv_rank], down_TL[:, config.kv_rank :]
    up_TX = normed(latent_TR, made.kv_norm) @ made.kv_up.weight.T
    rows = []
    for t in range(len(x_TC)):
        heads = []
        for head in range(config.heads):
            q_D = q_TX[t, head * config.head_dim : (head + 1) * config.head_dim]
            q_E = turned(q_D[nope:], t, config.ropes[0])
            keys_N = up_TX[: t + 1, head * up : head * up + nope]
            values_V = up_TX[: t + 1, head * up + nope : (head + 1) * up]
            near = [q_E @ turned(key_TE[s], s, config.ropes[0]) for s in range(t + 1)]
            scores = (keys_N @ q_D[:nope] + torch.stack(near)) / math.sqrt(config.head_dim)
            heads.append(torch.softmax(scores, 0) @ values_V)
        rows.append(made.o_proj(torch.cat(heads)))
    return torch.stack(rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_as_written_out(name, form):
    lengths = (1, 2, 9)
    made = mixer(replace(CONFIGS[name], form=form))
    torch.manual_seed(2)
    x_TC = torch.randn(sum(lengths), WIDTH, dtype=torch.float64)
    weight_TC = torch.randn_like(x_TC)
    ctx = whole_context(lengths)
    tables = rope_tables(made.config.ropes, ctx, torch.float64)

    def run(forward):
        inputs = x_TC.clone().requires_grad_()
        out_TC = forward(inputs)
        made.zero_grad()
        (out_TC * weight_TC).sum().backward()
        return [out_TC, inputs.grad, *(p.grad for p in made.parameters())]

    got = run(lambda x: made(x, ctx, tables))
    want = run(lambda x: torch.cat([written_out(made, part) for part in x.split(lengths)]))
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() > 1e-12
        assert_close(a, b)


def tiny(**changes):
    rank = replace(BASE, q_rank=8, rope=RopeConfig(scaling=YARN), **changes)
    return DecoderConfig(
        vocab_size=31,
        width=12,
        layers=(LayerConfig(rank, None), LayerConfig(replace(BASE, **changes), None)),
    )


def run_decoder(config, parts):
    """nll of all tokens, and gradients, of these (ctx, ids, labels) one after the other."""
    model = decoder(config)
    made = []
    for ctx, ids, labels in parts:
        nll = model(ids, ctx, labels).values
        nll.sum().backward()
        made.append(nll.detach())
    return torch.cat(made), gradients(model)


def test_packed_alone_and_both_forms():
    ctx, ids, labels = tokens(tiny())
    alone = [(whole_context((len(a),)), a, b) for a, b in zip(cut(ids), cut(labels), strict=True)]
    want = run_decoder(tiny(), alone)
    for form in FORMS:
        got = run_decoder(tiny(form=form), [(ctx, ids, labels)])
        assert_close(got[0], want[0])
        assert_all_close(got[1], want[1])


@pytest.mark.parametrize("together", [1, 2, 3])
def test_heads_a_few_at_a_time(together, monkeypatch):
    """Keys and values of some heads at a time give the same, also where groups are uneven."""
    ctx, ids, labels = tokens(tiny())
    want = run_decoder(tiny(), [(ctx, ids, labels)])
    calls = []

    def few(rows, heads, head_bytes):
        calls.append(heads)
        return together

    monkeypatch.setattr(mla, "heads_at_once", few)
    got = run_decoder(tiny(), [(ctx, ids, labels)])
    assert set(calls) == {tiny().layers[0].mixer.heads}
    assert_close(got[0], want[0])
    assert_all_close(got[1], want[1])


def halved(rows, first, each):
    """Rows of Hugging Face's as ours: of every `each` from `first` on, the even dims come first."""
    order = torch.arange(len(rows)).view(-1, each)
    turn = order[:, first:]
    order[:, first:] = torch.cat([turn[:, 0::2], turn[:, 1::2]], 1)
    return rows[order.flatten()]


def theirs(config):
    """transformers' mixer and rotary tables, in float64."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    made = DeepseekV3Config(
        hidden_size=WIDTH,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        kv_lora_rank=config.kv_rank,
        q_lora_rank=config.q_rank,
        qk_nope_head_dim=config.nope_dim,
        qk_rope_head_dim=config.rope_dim,
        v_head_dim=config.value_dim,
        attention_bias=config.bias,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        attn_implementation="sdpa",
    )
    rotary = modeling.DeepseekV3RotaryEmbedding(made).double()
    return modeling.DeepseekV3Attention(made, 0).double(), rotary


@pytest.mark.parametrize("name", ["plain", "bias"])
@torch.no_grad()
def test_as_transformers(name):
    config = replace(CONFIGS[name], rope=RopeConfig(scaling=YARN))
    other, rotary = theirs(config)
    ours = mixer(config)
    names = {
        "q_a_proj": "q_down",
        "q_a_layernorm": "q_norm",
        "q_b_proj": "q_up",
        "kv_a_proj_with_mqa": "kv_down",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "kv_up",
    }
    state = {}
    for key, value in other.state_dict().items():
        value.copy_(torch.randn_like(value))
        place, kind = key.rsplit(".", 1)
        place = names.get(place, place)
        if place in ("q_proj", "q_up"):
            value = halved(value, config.nope_dim, config.head_dim)
        if place == "kv_down":
            value = halved(value, config.kv_rank, config.latent_dim)
        state[f"{place}.{kind}"] = value
    ours.load_state_dict(state)
    x_TC = torch.randn(23, WIDTH, dtype=torch.float64)
    ctx = whole_context((23,))
    got = ours(x_TC, ctx, rope_tables(config.ropes, ctx, torch.float64))
    # transformers makes its angles in float32.
    tables = rotary(x_TC[None], ctx.positions[None])
    want = other(x_TC[None], tables, None)[0][0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_scale():
    assert BASE.scale == pytest.approx(10**-0.5, rel=1e-15)
    grown = 0.1 * math.log(40) + 1
    yarn = replace(BASE, rope=RopeConfig(scaling=YARN))
    assert yarn.scale == pytest.approx(10**-0.5 * grown**2, rel=1e-15)
    assert attention_factor(yarn.ropes[0]) == 1.0
    without = replace(YARN, mscale=None, mscale_all_dim=None)
    assert replace(BASE, rope=RopeConfig(scaling=without)).scale == BASE.scale


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_costs_as_measured(name, form):
    config = replace(CONFIGS[name], form=form)
    made = mixer(config)
    assert config.parameters(WIDTH) == sum(p.numel() for p in made.parameters())
    ctx = whole_context((1, 2, 7, 54))
    tables = rope_tables(config.ropes, ctx, torch.float64)
    x_TC = torch.randn(ctx.tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    measured = saved_bytes(made, lambda: made(x_TC, ctx, tables))
    known = x_TC.nbytes + sum(part.nbytes for table in tables.values() for part in table)
    saved = config.saved(WIDTH)
    # Norms on the CPU also keep the normed rows before their scale.
    copies = config.kv_rank + (config.q_rank or 0)
    assert measured - known == 8 * ctx.tokens * (saved.values + saved.stats + copies)


def dense(mixer, ctx, apart, q_THD, latent_TL):
    """All n² pairs of one sequence."""
    del ctx, apart
    config, scale = mixer.config, mixer.config.scale
    nope = config.nope_dim
    weight_HXR = mixer.kv_up.weight.unflatten(0, (config.heads, -1))
    heads, _, rank = weight_HXR.shape
    up_THX = (latent_TL[:, :rank] @ weight_HXR.flatten(0, 1).T).unflatten(1, (heads, -1))
    k_THE = latent_TL[:, None, rank:].expand(-1, heads, -1)
    k_HTD = torch.cat([up_THX[..., :nope], k_THE], 2).transpose(0, 1)
    probs_HTT = torch.softmax(q_THD.transpose(0, 1) @ k_HTD.mT * scale, -1)
    return (probs_HTT @ up_THX[..., nope:].transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_as_torch_counts(name):
    config, length = CONFIGS[name], 9
    made = mixer(config)
    made.core = partial(dense, made)
    ctx = whole_context((length,))
    x_TC = torch.randn(length, WIDTH, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        made(x_TC, ctx, rope_tables(config.ropes, ctx, torch.float64))
    unseen = length**2 - causal_pairs(length)
    extra = 2 * unseen * config.heads * (config.head_dim + config.value_dim)
    assert counter.get_total_flops() == config.flops(WIDTH, length) + extra


def test_example_of_the_module():
    config = MLAConfig(heads=2, kv_rank=8, nope_dim=4, rope_dim=2, value_dim=6)
    assert config.parameters(16) == 712
    assert config.gathered() == 10


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_rank": 0}, "MLAConfig.q_rank is 0"),
        ({"kv_rank": None}, "MLAConfig.kv_rank is None"),
        ({"rope_dim": 5}, "dims rotate in pairs"),
        ({"rope": RopeConfig(rotary_dim=8)}, "a head has only 6 dims"),
        ({"form": "compressed"}, "form is 'compressed'; known are decompressed, absorbed"),
    ],
)
def test_what_is_wrong_is_named(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(BASE, **changes)


def test_a_shared_pack_is_refused():
    ctx = whole_context((4,))
    shared = replace(ctx.packs[0], group=CPGroup(first_lane=0, cp_size=2, cp_rank=0))
    made = mixer(BASE)
    tables = rope_tables(BASE.ropes, ctx, torch.float64)
    assert made.exchanges is LOCAL
    with pytest.raises(ValueError, match="shared by 2 lanes"):
        made(torch.zeros(4, WIDTH).double(), replace(ctx, packs=(shared,)), tables)


def test_json():
    assert config_from_json(config_to_json(tiny())) == tiny()
