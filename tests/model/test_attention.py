"""The mixer against the same written out token by token."""

import math
from dataclasses import replace

import pytest
import torch
from tests.model.exact import assert_close

from longshore.batch import whole_context
from longshore.model.attention import Attention
from longshore.model.config import AttentionConfig
from longshore.model.part import Norm
from longshore.model.rope import rope_tables
from longshore.model.rope_config import RopeConfig

BASE = AttentionConfig(heads=4, kv_heads=2, head_dim=6)
WIDTH = 10


def mixer(config):
    torch.manual_seed(1)
    made = Attention(config, WIDTH, norm=Norm(1e-6)).double()
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
    return head_D / (head_D.square().mean() + 1e-6).sqrt() * norm.weight


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
            mine = slice(head * size, (head + 1) * size)
            shared = head // (config.heads // config.kv_heads)
            theirs = slice(shared * size, (shared + 1) * size)
            q_D = turned(normed(q_TX[t, mine], made.q_norm), t, config.rope)
            seen = range(first, t + 1)
            keys = [turned(normed(k_TX[s, theirs], made.k_norm), s, config.rope) for s in seen]
            weights = torch.softmax(torch.stack([q_D @ k for k in keys]) / math.sqrt(size), 0)
            heads.append(weights @ v_TX[first : t + 1, theirs])
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
    ],
)
def test_as_written_out(config):
    lengths = (1, 2, 9)
    made = mixer(config)
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
