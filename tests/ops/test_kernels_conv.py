"""The Triton kernels of the convolution, on a GPU or interpreted, against its twin in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from tests.ops.twins import bounds_of

from longshore.batch import Boundaries
from longshore.ops import backends, conv
from longshore.ops import reference as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    torch.manual_seed(0)


def here(lengths):
    bounds = bounds_of(lengths)
    return Boundaries(bounds.offsets, bounds.cu_seqlens.to(DEVICE), bounds.longest)


def inputs(lengths, *, taps=4, channels=5):
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "x_TC": (sum(lengths), channels),
        "weight_CK": (channels, taps),
        "bias_C": (channels,),
        "before": (len(lengths), taps - 1, channels),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def results(function, tensors, grad, **settings):
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves, **settings)
    grads = torch.autograd.grad(out, list(leaves.values()), grad)
    return [x.detach().cpu().double() for x in (out, *grads)]


def assert_close(values, wanted, tolerance):
    for value, want in zip(values, wanted, strict=True):
        assert value.shape == want.shape
        if want.numel():
            assert (value - want).abs().max() <= tolerance * want.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("lengths", [[1], [7], [1, 2, 5, 1], [0, 3, 0, 0, 1, 0], [3, 41, 1, 19]])
@pytest.mark.parametrize(
    ("taps", "left_out"), [(4, ()), (4, ("before",)), (2, ("bias_C",)), (7, ())]
)
@pytest.mark.parametrize("activation", [True, False])
def test_equals_its_twin(lengths, taps, left_out, activation):
    tensors = {k: v for k, v in inputs(lengths, taps=taps).items() if k not in left_out}
    grad = torch.randn(tensors["x_TC"].shape)
    there = {name: x.to(DEVICE) for name, x in tensors.items()}
    exact = {name: x.double() for name, x in tensors.items()}
    values = results(
        conv.causal_conv, there, grad.to(DEVICE), bounds=here(lengths), activation=activation
    )
    assert backends.chosen()["conv"] == "triton"
    want = results(
        twin.causal_conv, exact, grad.double(), bounds=bounds_of(lengths), activation=activation
    )
    assert_close(values, want, 1e-5)


def test_strided_rows_many_channels_and_no_bounds():
    wide = torch.randn(50, 400, device=DEVICE)
    x, weight = wide[:, 30:330], torch.randn(300, 4, device=DEVICE)
    values = conv.causal_conv(x, weight, activation=True)
    want = twin.causal_conv(x.cpu().double(), weight.cpu().double(), activation=True)
    assert_close([values.cpu().double()], [want], 1e-5)


def test_half_precision():
    tensors = {name: x.bfloat16() for name, x in inputs([5, 30]).items()}
    there = {name: x.to(DEVICE) for name, x in tensors.items()}
    exact = {name: x.double() for name, x in tensors.items()}
    grad = torch.randn(35, 5).bfloat16()
    values = results(
        conv.causal_conv, there, grad.to(DEVICE), bounds=here([5, 30]), activation=True
    )
    want = results(
        twin.causal_conv, exact, grad.double(), bounds=bounds_of([5, 30]), activation=True
    )
    assert_close(values, want, 1e-2)


def test_no_bit_of_a_span_depends_on_another(monkeypatch):
    tensors = {name: x.to(DEVICE) for name, x in inputs([3, 1, 5]).items()}
    poisoned = {name: x.clone() for name, x in tensors.items()}
    poisoned["x_TC"][3] = torch.nan
    poisoned["before"][1] = torch.inf
    grad = torch.randn(9, 5, device=DEVICE)
    options = {"bounds": here([3, 1, 5]), "activation": True}
    plain_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: plain_empty(*a, **k).fill_(torch.nan))
    y, dx, *_, dbefore = results(conv.causal_conv, tensors, grad, **options)
    y2, dx2, *_, dbefore2 = results(conv.causal_conv, poisoned, grad, **options)
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    assert y[kept].isfinite().all()
    assert torch.equal(y[kept], y2[kept])
    assert torch.equal(dx[kept], dx2[kept])
    assert torch.equal(dbefore[[0, 2]], dbefore2[[0, 2]])
