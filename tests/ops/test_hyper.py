"""Rows of hyper-connections: by hand, and kernels against plain torch in float64."""

import pytest
import torch

from longshore.ops import backends
from longshore.ops.pointwise import collapse, expand, project

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def test_by_hand():
    rows = torch.tensor([[1.0, 3.0]])
    half = torch.full((1, 2), 0.5)
    assert collapse(rows, half).tolist() == [[2.0]]
    mixed = expand(torch.tensor([[5.0]]), rows, torch.ones(1, 2), torch.full((1, 2, 2), 0.5))
    assert mixed.tolist() == [[7.0, 7.0]]
    # The root mean square of 1 and 7 is 5.
    projected = project(torch.tensor([[1.0, 7.0]]), torch.tensor([[1.0, 1.0]]), eps=0.0)
    assert projected.item() == pytest.approx(1.6)


def results(dtype, device, tokens, count, width):
    """Outputs and all gradients of the three, of the same numbers."""
    draws = torch.Generator().manual_seed(tokens * 100 + count * 10 + width)

    def leaf(*shape, kind=torch.float32):
        x = torch.randn(shape, generator=draws, dtype=torch.float64).bfloat16().double()
        low = kind if dtype != torch.float64 else torch.float64
        return x.to(device, low).requires_grad_()

    rows = leaf(tokens, count * width, kind=dtype)
    weight = leaf((2 + count) * count, count * width)
    pre, post, mix = leaf(tokens, count), leaf(tokens, count), leaf(tokens, count, count)
    output = leaf(tokens, width, kind=dtype)
    outs = (
        project(rows, weight, eps=1e-3),
        collapse(rows, pre),
        expand(output, rows, post, mix),
    )
    total = sum((out * torch.sin(torch.arange(out.numel(), device=device) + 1.0).view(out.shape))
                .double().sum() for out in outs)  # fmt: skip
    leaves = (rows, weight, pre, post, mix, output)
    return [x.detach().double().cpu() for x in (*outs, *torch.autograd.grad(total, leaves))]


@pytest.mark.parametrize(
    ("tokens", "count", "width"), [(1, 2, 3), (37, 4, 40), (70, 3, 5), (33, 1, 20)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_plain_torch(monkeypatch, dtype, tokens, count, width):
    pytest.importorskip("triton", reason="needs Triton")
    from longshore.ops.kernels import hyper as kernels

    monkeypatch.setattr(backends, "_interpreted", lambda: not CUDA)
    monkeypatch.setattr(kernels, "WIDE", 16)
    monkeypatch.setattr(kernels, "PART_TOKENS", 32)
    wanted = results(torch.float64, "cpu", tokens, count, width)
    with backends.using_kernels("auto"):
        ours = results(dtype, DEVICE, tokens, count, width)
        assert backends.chosen()["hyper-connections"] == "triton"
    within = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, want in zip(ours, wanted, strict=True):
        assert (mine - want).abs().max() <= within * want.abs().max().clamp_min(1e-3)
