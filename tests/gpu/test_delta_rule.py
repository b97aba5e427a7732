"""The delta rule by flash-linear-attention, in half precision, against its twin in float64."""

from itertools import accumulate

import pytest
import torch
from torch.nn.functional import logsigmoid

from longshore.batch import Boundaries
from longshore.ops import backends
from longshore.ops import reference as twin
from longshore.ops.delta_rule import L2_EPS, prepare_heads

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def joined(lengths):
    offsets = tuple(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    return Boundaries(offsets, cu_seqlens, max(lengths))


def inputs(lengths, *, key_heads, value_heads):
    draw = torch.Generator("cuda").manual_seed(0)
    tokens = sum(lengths)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device="cuda")

    return {
        "q_TRK": normal(tokens, key_heads, 64).bfloat16(),
        "k_TRK": normal(tokens, key_heads, 64).bfloat16(),
        "v_THV": normal(tokens, value_heads, 128).bfloat16(),
        "g_TH": logsigmoid(normal(tokens, value_heads) + 2),
        "beta_TH": normal(tokens, value_heads).sigmoid(),
        "initial": normal(len(lengths), value_heads, 64, 128),
    }


def by_fla(*, initial=None, bounds, **rows):
    return prepare_heads(**rows, bounds=bounds).run(initial)


def by_twin(q_TRK, k_TRK, v_THV, g_TH, beta_TH, *, initial=None, bounds):
    served = v_THV.shape[1] // k_TRK.shape[1]
    q_THK, k_THK = (
        (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()).repeat_interleave(served, dim=1)
        for x in (q_TRK, k_TRK)
    )
    return twin.gated_delta_rule(q_THK, k_THK, v_THV, g_TH, beta_TH, bounds=bounds, initial=initial)


def results(function, tensors, grads, *, bounds):
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outs = function(**leaves, bounds=bounds)
    grads = [grad.to(out.dtype) for grad, out in zip(grads, outs, strict=True)]
    return [*outs, *torch.autograd.grad(outs, list(leaves.values()), grads)]


@pytest.mark.parametrize("lengths", [[130], [1, 1], [1, 64, 65, 7], [0, 33, 0, 100, 1, 0]], ids=str)
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 4)])
@pytest.mark.parametrize("with_initial", [True, False])
def test_equals_its_twin(lengths, key_heads, value_heads, with_initial):
    tensors = inputs(lengths, key_heads=key_heads, value_heads=value_heads)
    if not with_initial:
        del tensors["initial"]
    if backends.pick("delta rule", tensors["k_TRK"], tensors["v_THV"]) is None:
        pytest.skip(backends.chosen()["delta rule"])
    bounds = joined(lengths)
    draw = torch.Generator("cuda").manual_seed(1)
    grads = [
        torch.randn(shape, generator=draw, device="cuda")
        for shape in ((sum(lengths), value_heads, 128), (len(lengths), value_heads, 64, 128))
    ]
    values = results(by_fla, tensors, grads, bounds=bounds)
    exact = {name: x.double() for name, x in tensors.items()}
    wanted = results(by_twin, exact, grads, bounds=bounds)
    names = ("out", "final", *tensors)
    for name, value, want in zip(names, values, wanted, strict=True):
        assert value.shape == want.shape
        assert value.isfinite().all()
        # The decay of a span's first row, without a state before it, has a gradient of exactly 0.
        limit = 2e-2 * (want.abs().max().item() or 1e-3)
        if name == "g_TH":
            # A sum over the rows after it of differences of products of bfloat16 numbers; with a
            # state before it, of 64 · 128 products of either sign (3.3 % of the largest was seen).
            size = want.abs().max().item()
            limit = 3e-2 * max(size, (64 * 128) ** 0.5) if with_initial else 5e-2 * (size or 1e-3)
        assert (value.double() - want).abs().max() <= limit, name


def test_garbage_in_one_span_reaches_no_other():
    tensors = inputs([40, 90, 7], key_heads=2, value_heads=4)
    if backends.pick("delta rule", tensors["k_TRK"], tensors["v_THV"]) is None:
        pytest.skip(backends.chosen()["delta rule"])
    bounds = joined([40, 90, 7])
    clean, _ = by_fla(**tensors, bounds=bounds)
    tensors["v_THV"][40:130] = torch.nan
    other, _ = by_fla(**tensors, bounds=bounds)
    assert torch.equal(clean[:40], other[:40])
    assert torch.equal(clean[130:], other[130:])


def test_the_host_never_waits():
    tensors = inputs([40, 0, 90], key_heads=2, value_heads=4)
    if backends.pick("delta rule", tensors["k_TRK"], tensors["v_THV"]) is None:
        pytest.skip(backends.chosen()["delta rule"])
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    by_fla(**leaves, bounds=joined([40, 0, 90]))[0].sum().backward()
    bounds = joined([30, 0, 100])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_fla(**leaves, bounds=bounds)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
