"""The kernels of sparse attention against the twin in float64: on CUDA, or interpreted."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from tests.ops.test_sparse_attention import inputs, ranges_of, some_entries

from longshore.ops import backends, reference
from longshore.ops.sparse_attention import row_ranges, sparse_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    with backends.using_kernels("auto"):
        yield


def results(op, given, grad, **options):
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    out, mass = op(**leaves, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), grad.to(out))
    return [x.double().cpu() for x in (out.detach(), *grads) + (() if mass is None else (mass,))]


@pytest.mark.parametrize(
    ("lengths", "window", "ratio", "top_k", "sizes"),
    [
        ([5, 1, 40], 7, 0, None, {"heads": 3, "width": 20}),
        ([70, 3, 9], 40, 4, None, {"heads": 2, "width": 16}),
        ([90, 2], 3, 2, 5, {"heads": 17, "width": 8}),
        ([4, 1], 2, 8, 3, {"heads": 1, "width": 16}),
        ([9, 12], 4, 4, 2, {"heads": 2, "width": 300}),
    ],
)
def test_equals_its_twin(lengths, window, ratio, top_k, sizes):
    given = inputs(lengths, ratio, **sizes)
    ranges = ranges_of(lengths, window, ratio)
    chosen = None if top_k is None else some_entries(ranges, top_k)
    grad = torch.randn(given["q_THD"].shape, dtype=torch.float64)
    options = {"scale": 0.3, "needs_mass": chosen is not None}
    wanted = results(
        reference.sparse_attention, given, grad, ranges=ranges, chosen_TK=chosen, **options
    )
    here = {name: x.to(DEVICE, torch.float32) for name, x in given.items()}
    there = row_ranges(*ranges.host, offsets=ranges.offsets, device=DEVICE)
    options |= {"ranges": there, "chosen_TK": None if chosen is None else chosen.to(DEVICE)}
    for mine, want in zip(results(sparse_attention, here, grad, **options), wanted, strict=True):
        assert mine.shape == want.shape
        if want.numel():
            assert (mine - want).abs().max() <= 2e-5 * want.abs().max().clamp_min(1e-3)
    assert backends.chosen()["sparse attention"] == "triton"
