"""The mixer against the same written out token by token."""

import math
from dataclasses import replace

import pytest
import torch
from tests.arch.test_costs_memory import saved_bytes
from tests.model.exact import assert_close
from torch.utils.flop_counter import FlopCounterMode

from longshore.arch.attention import AttentionConfig, causal_pairs
from longshore.arch.part import Norm
from longshore.arch.rope import RopeConfig
from longshore.batch import whole_context
from longshore.model.attention import Attention
from longshore.model.norm_rope import rope_tables

BASE = AttentionConfig(heads=4, kv_heads=2, head_dim=6)
WIDTH = 10


def mixer(config, norm):
    torch.manual_seed(1)
    made = Attention(config, WIDTH, norm=norm).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


def turned(head_D, position, rope):
    """Dims i and i + R turn by position · theta^(−i/R)."""
    if rope is None:
        return head_D
    half = (rope.rotary_dim or len(head_D)) // 2
    made = list(head_D)
    for i in range(half):
        angle = position * rope.theta ** (-i / half)
        a, b = head_D[i], head_D[i + half]
        made[i] = a * math.cos(angle) - b * math.sin(angle)
        made[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return torch.stack(made)


def normed(head_D, norm):
    if norm is None:
        return head_D
    scale_D = norm.weight + 1 if norm.norm.zero_centred else norm.weight
    return head_D / (head_D.square().mean() + 1e-6).sqrt() * scale_D


def written_out(made, x_TC):
    """One sequence, one head and one token at a time."""
    config = made.config
    size = config.head_dim
    q_TX, k_TX, v_TX = made.q_proj(x_TC), made.k_proj(x_TC), made.v_proj(x_TC)
    rows = []
    for t in range(len(x_TC)):
        first = 0 if config.window is None else max(0, t - config.window + 1)
        heads = []
        for head in range(config.heads):
            each = 2 * size if config.gate else size
            mine = slice(head * each, head * each + size)
            shared = head // (config.heads // config.kv_heads)
            theirs = slice(shared * size, (shared + 1) * size)
            q_D = turned(normed(q_TX[t, mine], made.q_norm), t, config.rope)
            seen = range(first, t + 1)
            keys = [turned(normed(k_TX[s, theirs], made.k_norm), s, config.rope) for s in seen]
            weights = torch.softmax(torch.stack([q_D @ k for k in keys]) / math.sqrt(size), 0)
            out_D = weights @ v_TX[first : t + 1, theirs]
            if config.gate:
                out_D = out_D / (1 + torch.exp(-q_TX[t, mine.stop : mine.stop + size]))
            heads.append(out_D)
        rows.append(made.o_proj(torch.cat(heads)))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        replace(BASE, window=1),
        replace(BASE, window=3, kv_heads=1),
        replace(BASE, qk_norm=True, kv_heads=4),
        replace(BASE, bias=True, output_bias=True, rope=None),
        replace(BASE, rope=RopeConfig(theta=50.0, rotary_dim=4)),
        replace(BASE, gate=True, bias=True, qk_norm=True, rope=RopeConfig(rotary_dim=2)),
    ],
)
def test_as_written_out(config):
    lengths = (1, 2, 9)
    made = mixer(config, Norm(1e-6, zero_centred=config.gate))
    torch.manual_seed(2)
    x_TC = torch.randn(sum(lengths), WIDTH, dtype=torch.float64)
    weight_TC = torch.randn_like(x_TC)
    ctx = whole_context(lengths)
    tables = rope_tables(config.ropes, ctx, torch.float64)

    def run(forward):
        inputs = x_TC.clone().requires_grad_()
        out_TC = forward(inputs)
        made.zero_grad()
        (out_TC * weight_TC).sum().backward()
        return [out_TC, inputs.grad, *(p.grad for p in made.parameters())]

    got = run(lambda x: made(x, ctx, tables))
    want = run(lambda x: torch.cat([written_out(made, part) for part in x.split(lengths)]))
    for a, b in zip(got, want, strict=True):
        # Without rope a bias of all keys moves no weight: its gradient is rounding alone.
        if b.abs().max() > 1e-12:
            assert_close(a, b)
        else:
            assert a.abs().max() < 1e-12


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rope", [None, RopeConfig()])
def test_what_a_gate_costs(bias, qk_norm, rope):
    config = replace(BASE, gate=True, bias=bias, qk_norm=qk_norm, rope=rope)
    made = mixer(config, Norm(1e-6))
    assert config.parameters(WIDTH) == sum(p.numel() for p in made.parameters())
    ctx = whole_context((1, 2, 7, 54))
    tables = rope_tables(config.ropes, ctx, torch.float64)
    x_TC = torch.randn(ctx.tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    measured = saved_bytes(made, lambda: made(x_TC, ctx, tables))
    known = x_TC.nbytes + sum(part.nbytes for table in tables.values() for part in table)
    saved = config.saved(WIDTH)
    # Norms on the CPU also keep the normed rows before their scale.
    copies = qk_norm * (config.heads + config.kv_heads) * config.head_dim
    assert measured - known == 8 * ctx.tokens * (saved.values + saved.stats + copies)


def test_flops_of_a_gate():
    config = replace(BASE, gate=True)
    made = mixer(config, Norm(1e-6))
    made.core = lambda ctx, apart, q, k, v: q
    ctx = whole_context((7,))
    x_TC = torch.randn(7, WIDTH, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        made(x_TC, ctx, rope_tables(config.ropes, ctx, torch.float64))
    core = 2 * 2 * config.heads * config.head_dim * causal_pairs(7)
    assert config.flops(WIDTH, 7) == counter.get_total_flops() + core


@torch.no_grad()
def test_gate_and_zero_centred_norms_as_transformers():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    theirs = Qwen3NextConfig(
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        attn_implementation="sdpa",
    )
    other = modeling.Qwen3NextAttention(theirs, 0).double()
    rope = RopeConfig(rotary_dim=2)
    config = replace(BASE, head_dim=8, gate=True, qk_norm=True, rope=rope)
    ours = mixer(config, Norm(1e-6, zero_centred=True))
    other.load_state_dict(ours.state_dict())
    x_TC = torch.randn(23, WIDTH, dtype=torch.float64)
    ctx = whole_context((23,))
    got = ours(x_TC, ctx, rope_tables(config.ropes, ctx, torch.float64))
    # transformers norms in float32.
    tables = modeling.Qwen3NextRotaryEmbedding(theirs)(x_TC[None], ctx.positions[None])
    want = other(x_TC[None], tables, None)[0][0]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
