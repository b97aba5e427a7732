"""How flash-linear-attention is called, with a stand-in that computes by the reference."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from tests.ops.twins import assert_same, bounds_of, run
from torch.nn.functional import logsigmoid

from longshore.ops import backends
from longshore.ops import reference as twin
from longshore.ops.backends import Backend
from longshore.ops.delta_rule import prepare_heads

LENGTHS = [[1], [7], [1, 70, 5], [0, 3, 17, 0, 130, 1, 0]]


def stand_in(calls):
    def chunk_gated_delta_rule(q, k, v, g, beta, *, initial_state, cu_seqlens, chunk_indices, **kw):
        calls.append((cu_seqlens.tolist(), chunk_indices.tolist()))
        assert kw == {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        assert cu_seqlens.dtype == chunk_indices.dtype == torch.int32
        lengths = [stop - start for start, stop in pairwise(cu_seqlens.tolist())]
        assert min(lengths) > 0
        served = v.shape[2] // k.shape[2]
        q, k = (
            (x[0] * (x[0].square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
                served, dim=1
            )
            for x in (q, k)
        )
        out, final = twin.gated_delta_rule(
            q, k, v[0], g[0], beta[0], bounds=bounds_of(lengths), initial=initial_state
        )
        return out[None], final

    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule
    return module


@pytest.fixture
def calls(monkeypatch):
    calls = []
    monkeypatch.delitem(sys.modules, "longshore.ops.delta_rule_fla", raising=False)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", stand_in(calls))
    backend = Backend("fla", "longshore.ops.delta_rule_fla", lambda k, v: None)
    monkeypatch.setitem(backends.BACKENDS, "delta rule", (backend,))
    yield calls
    sys.modules.pop("longshore.ops.delta_rule_fla", None)


def inputs(lengths):
    draw = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    shapes = {
        "q_TRK": (tokens, 2, 4),
        "k_TRK": (tokens, 2, 4),
        "v_THV": (tokens, 6, 3),
        "g_TH": (tokens, 6),
        "beta_TH": (tokens, 6),
        "initial": (len(lengths), 6, 4, 3),
    }
    tensors = {k: torch.randn(v, generator=draw, dtype=torch.float64) for k, v in shapes.items()}
    tensors["g_TH"] = logsigmoid(tensors["g_TH"])
    tensors["beta_TH"] = tensors["beta_TH"].sigmoid()
    return tensors


def by_run(*, initial=None, bounds, **rows):
    return prepare_heads(**rows, bounds=bounds).run(initial)


def by_ends(*, initial=None, bounds, **rows):
    prepared = prepare_heads(**rows, bounds=bounds)
    transition, final = prepared.ends()
    return *prepared.run(initial), transition, final


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("with_initial", [True, False])
def test_equals_plain_torch(lengths, with_initial, calls, monkeypatch):
    tensors = inputs(lengths)
    if not with_initial:
        del tensors["initial"]
    values = run(by_run, tensors, bounds=bounds_of(lengths))
    assert calls
    monkeypatch.setitem(backends.BACKENDS, "delta rule", ())
    assert_same(values, run(by_run, tensors, bounds=bounds_of(lengths)))


def test_whoever_asks_for_transitions_gets_plain_torch(calls, monkeypatch):
    tensors, bounds = inputs([3, 9]), bounds_of([3, 9])
    values = run(by_ends, tensors, bounds=bounds)
    assert not calls
    monkeypatch.setitem(backends.BACKENDS, "delta rule", ())
    for a, b in zip(values, run(by_ends, tensors, bounds=bounds), strict=True):
        assert torch.equal(a, b)


def test_spans_without_rows_are_left_out_and_tables_are_kept(calls):
    bounds = bounds_of([0, 3, 0, 70])
    tensors = inputs([0, 3, 0, 70])
    for _ in range(2):
        prepare_heads(**{k: v for k, v in tensors.items() if k != "initial"}, bounds=bounds).run()
    assert calls == [([0, 3, 73], [[0, 0], [1, 0], [1, 1]])] * 2
    assert "delta rule: spans with rows" in bounds.tables


def test_versions_with_a_wrong_backward():
    assert not backends.gated_is_wrong("3.3.1", (9, 0))
    assert backends.gated_is_wrong("3.4.0", (9, 0))
    assert backends.gated_is_wrong("3.7.0+cu128", (9, 0))
    assert not backends.gated_is_wrong("3.7.1", (9, 0))
    assert not backends.gated_is_wrong("3.6.0", (10, 0))
