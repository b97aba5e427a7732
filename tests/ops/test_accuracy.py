"""Ops in float32 at gates, logits and lengths where rounding shows, beside what others make of it.

The truth is the op in float64, which other tests hold equal to its twin.
"""

import pytest
import torch
from tests.ops.twins import bounds_of, gated_delta_rule, run
from torch.nn.functional import normalize

from longshore.ops import attention as attention_blocks
from longshore.ops.attention import attention
from longshore.ops.delta_rule import prepare_delta
from longshore.ops.reference import attention as plain_attention
from longshore.ops.reference import ssd as recurrent_ssd
from longshore.ops.ssd import prepare_ssd, ssd

TINY = 1e-6


def exact(given):
    return {name: tensor.double() for name, tensor in given.items()}


def errors(got, want):
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        for a, b in zip(got, want, strict=True)
    ]


def repeated(tokens, *, period, rate):
    """A few tokens over and over, with almost no decay."""
    torch.manual_seed(0)
    few = {"q_THK": 16, "k_THK": 16, "v_THV": 16}
    given = {name: torch.randn(period, 2, width) for name, width in few.items()}
    given = {name: x.repeat(tokens // period + 1, 1, 1)[:tokens] for name, x in given.items()}
    given["q_THK"], given["k_THK"] = (normalize(given[n], dim=-1) for n in ("q_THK", "k_THK"))
    return given | {"g_TH": torch.full((tokens, 2), rate), "beta_TH": torch.full((tokens, 2), 0.9)}


@pytest.mark.parametrize(
    ("period", "rate", "chunk"), [(1, -1e-6, None), (7, -1e-4, None), (1, -1e-6, 64)]
)
def test_the_delta_rule_does_not_drift(period, rate, chunk):
    given = repeated(4096, period=period, rate=rate)
    want = gated_delta_rule(**exact(given))
    assert max(errors(gated_delta_rule(**given, chunk=chunk), want)) <= 3 * TINY


@pytest.mark.parametrize("period", [1, 7])
def test_the_delta_rule_does_not_drift_over_lanes(period):
    """The states of 8 pieces composed from their transitions, as lanes do."""
    given = repeated(4096, period=period, rate=-1e-6)
    transitions, finals = prepare_delta(**given, bounds=bounds_of([512] * 8)).ends()
    state = torch.zeros_like(finals[0])
    for transition, final in zip(transitions, finals, strict=True):
        state = transition @ state + final
    want = gated_delta_rule(**exact(given))[1][0]
    assert max(errors([state], [want])) <= 6 * TINY


def states(tokens, rate):
    torch.manual_seed(0)
    return {
        "x_THP": 1 + torch.randn(tokens, 2, 4) / 8,
        "dt_TH": torch.full((tokens, 2), 0.1),
        "A_H": torch.full((2,), rate),
        "B_TGN": 1 + torch.randn(tokens, 1, 4) / 8,
        "C_TGN": 1 + torch.randn(tokens, 1, 4) / 8,
    }


@pytest.mark.parametrize("rate", [-1e-2, -1e-4, -1e-6])
def test_a_scan_that_hardly_fades_does_not_drift(rate):
    given = states(4096, rate)
    assert max(errors(ssd(**given), ssd(**exact(given)))) <= 3 * TINY
    pieces = prepare_ssd(**given, bounds=bounds_of([512] * 8)).ends()
    want = prepare_ssd(**exact(given), bounds=bounds_of([512] * 8)).ends()
    assert max(errors(pieces, want)) <= 3 * TINY


def theirs(q_THK, k_THK, v_THV, g_TH, beta_TH):
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    rows = (x[None] for x in (q_THK, k_THK, v_THV))
    out, final = modeling.torch_chunk_gated_delta_rule(
        *rows,
        g=g_TH[None],
        beta=beta_TH[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=False,
    )
    return out[0], final


GATES = {
    "no decay": lambda u: 0 * u,
    "almost none": lambda u: -1e-7 * u,
    "almost all": lambda u: -30 * u,
    "all": lambda u: -1e4 * u,
    "some or all": lambda u: torch.where(u > 0.9, -1e4, -1e-4),
}
BETAS = {"small": lambda u: 1e-4 * u, "any": lambda u: u, "one": lambda u: 0 * u + 1}


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta", BETAS)
def test_the_delta_rule_as_accurate_as_transformers(gate, beta):
    """Outputs, states and gradients, at gates from wide open to shut, with keys that repeat."""
    torch.manual_seed(1)
    q, k = normalize(torch.randn(300, 2, 8), dim=-1), normalize(torch.randn(5, 2, 8), dim=-1)
    given = {
        "q_THK": q,
        "k_THK": k[torch.randint(0, 5, (300,))],
        "v_THV": 100 * torch.randn(300, 2, 8),
        "g_TH": GATES[gate](torch.rand(300, 2)),
        "beta_TH": BETAS[beta](torch.rand(300, 2)),
    }
    want = run(gated_delta_rule, exact(given))
    ours, others = (errors(run(f, given), want) for f in (gated_delta_rule, theirs))
    for name, our, other in zip(["out", "final", *given], ours, others, strict=True):
        assert our <= 2 * other + TINY, (name, our, other)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-7, 1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("step", [1e-4, 1.0, 100.0])
def test_the_scan_as_accurate_as_its_recurrence(rate, step):
    torch.manual_seed(1)
    given = states(200, -rate)
    given["dt_TH"] = step * torch.rand(200, 2)
    want = run(ssd, exact(given))
    ours, others = (errors(run(f, given), want) for f in (ssd, recurrent_ssd))
    for name, our, other in zip(["y", "final", *given], ours, others, strict=True):
        assert our <= 2 * other + TINY, (name, our, other)


@pytest.mark.parametrize("logit", [1.0, 1e4, 1e5])
@pytest.mark.parametrize("rows", [attention_blocks.MOST_ROWS, 16])
def test_attention_as_accurate_as_a_plain_softmax(logit, rows, monkeypatch):
    """Large scores that lie close together: their differences are what counts."""
    monkeypatch.setattr(attention_blocks, "MOST_ROWS", rows)
    torch.manual_seed(1)
    side = (logit * 8**0.5) ** 0.5
    common = normalize(torch.ones(8), dim=0)
    given = {
        "q_THD": side * common + torch.randn(40, 4, 8) / side,
        "k_SKD": side * common + torch.randn(40, 2, 8) / side,
        "v_SKV": torch.randn(40, 2, 8),
    }
    bounds = bounds_of([1, 9, 30])
    want = run(attention, exact(given), bounds=bounds)
    ours, others = (
        errors(run(f, given, bounds=bounds), want) for f in (attention, plain_attention)
    )
    for name, our, other in zip(["out", *given], ours, others, strict=True):
        assert our <= 2 * other + TINY, (name, our, other)
