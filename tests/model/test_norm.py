import torch

from longshore.arch.part import Norm
from longshore.model.norm_rope import RMSNorm


def normed(x, weight, eps):
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


def test_example():
    norm = RMSNorm(2, Norm(1e-12))
    assert torch.allclose(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.8485, 1.1314]]), 1e-3)


def test_half_precision_is_normed_in_float32():
    norm = RMSNorm(96, Norm(1e-6)).bfloat16()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    # Squares that bfloat16 could not add up.
    x = (torch.randn(40, 96) * 1000).bfloat16()
    got = norm(x)
    assert got.dtype == torch.bfloat16
    error = (got.double() - normed(x, norm.weight, 1e-6)).abs() / got.double().abs()
    assert error.max() <= 2**-8


def test_float64_is_exact():
    norm = RMSNorm(7, Norm(1e-5)).double()
    x = torch.randn(5, 3, 7, dtype=torch.float64) * 1e-3
    want = normed(x, norm.weight, 1e-5)
    assert (norm(x) - want).abs().max() <= 1e-14 * want.abs().max()


def test_zero_centred_weights_are_added_to_one():
    plain, centred = RMSNorm(7, Norm(1e-6)).double(), RMSNorm(7, Norm(1e-6, True)).double()
    assert not centred.weight.any()
    with torch.no_grad():
        centred.weight.uniform_(-0.5, 0.5)
        plain.weight.copy_(1 + centred.weight)
    x = torch.randn(4, 7, dtype=torch.float64)
    assert torch.equal(centred(x), plain(x))
    assert centred.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
