"""The kernels of the indexer against the twin in float64: on CUDA, or interpreted."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from tests.ops.test_sparse_attention import ranges_of

from longshore.ops import backends, reference
from longshore.ops.indexer import choose, index_loss
from longshore.ops.sparse_attention import row_ranges

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    with backends.using_kernels("auto"):
        yield


@pytest.mark.parametrize(
    ("lengths", "heads", "width", "top_k"),
    [([150, 3, 40], 3, 20, 7), ([30, 1], 70, 16, 4), ([300], 2, 8, 70)],
)
def test_equals_its_twin(lengths, heads, width, top_k):
    draw = torch.Generator().manual_seed(0)
    rows, ranges = sum(lengths), ranges_of(lengths, 3, 2)
    shapes = ((rows, heads, width), (rows, heads), (sum(n // 2 for n in lengths), width))
    given = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    # Few bits, so that float32 finds the same ties and the same order.
    given = [(x * 4).round() / 4 for x in given]
    want = reference.choose(*given, ranges=ranges, top_k=top_k)
    here = [x.to(DEVICE, torch.float32) for x in given]
    there = row_ranges(*ranges.host, offsets=ranges.offsets, device=DEVICE)
    chosen = choose(*here, ranges=there, top_k=top_k)
    assert torch.equal(chosen.cpu(), want)
    mass = torch.rand(want.shape, generator=draw, dtype=torch.float64)
    counted = torch.arange(rows) % 5 > 0
    values = []
    for op, inputs, rest in (
        (reference.index_loss, given, (want, mass, counted)),
        (index_loss, here, (chosen, mass.to(DEVICE, torch.float32), counted.to(DEVICE))),
    ):
        leaves = [x.detach().requires_grad_() for x in inputs]
        loss = op(*leaves, *rest)
        grads = torch.autograd.grad(loss, leaves)
        values.append([x.detach().double().cpu() for x in (loss, *grads)])
    for wanted, mine in zip(*values, strict=True):
        assert (mine - wanted).abs().max() <= 2e-5 * wanted.abs().max().clamp_min(1e-3)
    assert backends.chosen()["indexer"] == "triton"
