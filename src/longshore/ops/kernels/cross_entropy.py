"""The output layer fused with its loss, with Triton kernels over the rows of a chunk of logits.

In and out: as in ops/cross_entropy.py, which picks this module. The products are torch's; between
them a kernel passes over a row of float32 logits once for the loss and once for the gradient,
which it writes in the dtype of the inputs. A row of logits [0, 0] with label 1 has the loss
−log ½ = 0.693 and the gradient [½, −½]; an ignored row has 0 and [0, 0], whatever it holds.

    two passes      logits and losses in forward; logits again, and gradients, in backward
    summed          logits, losses and gradients in forward, as if each loss had the gradient 1;
                    backward multiplies by the gradient that all losses of a sum share

The second has 3 products instead of 4. Between forward and backward it keeps the gradient of the
hidden states, in their dtype, and that of the weight, in float32. If the gradients are not all the
same, what comes out is NaN. Only labelled tokens matter there.

A label outside the vocabulary gives NaN: a kernel cannot raise an error.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.cross_entropy import add_product, chunks, masked, operand, product

BLOCK = 4096
"""Columns of a row that a program reads at a time."""
WARPS = 8


def linear_loss(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int,
    ignore: int,
    summed: bool,
) -> Tensor:
    """The loss of each token; summed: all labelled tokens will get the same gradient."""
    some = hidden_TC.requires_grad or weight_VC.requires_grad
    function = _SummedLoss if summed and some and torch.is_grad_enabled() else _TwoPassLoss
    return function.apply(hidden_TC, weight_VC, labels_T.contiguous(), chunk_tokens, ignore)


class _TwoPassLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TC: Tensor, weight_VC: Tensor, labels_T: Tensor, chunk_tokens: int,
        ignore: int,
    ) -> Tensor:  # fmt: skip
        keep_T = labels_T != ignore
        nll_T, lse_T = (hidden_TC.new_empty(len(hidden_TC), dtype=torch.float32) for _ in range(2))
        weight = operand(weight_VC, torch.float32)
        for rows in chunks(len(hidden_TC), chunk_tokens):
            hidden_nC = masked(hidden_TC[rows], keep_T[rows], torch.float32)
            logits_nV = product(hidden_nC, weight.T, torch.float32)
            _loss_kernel[(len(logits_nV),)](
                logits_nV, labels_T[rows], nll_T[rows], lse_T[rows], logits_nV.shape[1], ignore,
                BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            # Otherwise the next chunk's logits would be allocated next to these.
            del logits_nV
        ctx.save_for_backward(hidden_TC, weight_VC, labels_T, lse_T)
        ctx.chunk_tokens, ctx.ignore = chunk_tokens, ignore
        return nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TC, weight_VC, labels_T, lse_T = ctx.saved_tensors
        grad_T = grad_T.contiguous()

        def write(rows: slice, logits_nV: Tensor, dlogits_nV: Tensor) -> None:
            """(softmax − 1 at the label) · grad."""
            _gradient_kernel[(len(logits_nV),)](
                logits_nV, labels_T[rows], lse_T[rows], grad_T[rows], dlogits_nV,
                logits_nV.shape[1], ctx.ignore, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip

        keep_T, needed = labels_T != ctx.ignore, ctx.needs_input_grad
        dhidden_TC, dweight_VC = _gradients(
            hidden_TC, weight_VC, keep_T, needed, chunk_tokens=ctx.chunk_tokens, write=write
        )
        dweight_VC = None if dweight_VC is None else dweight_VC.to(weight_VC.dtype)
        return dhidden_TC, dweight_VC, None, None, None


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TC: Tensor, weight_VC: Tensor, labels_T: Tensor, chunk_tokens: int,
        ignore: int,
    ) -> Tensor:  # fmt: skip
        nll_T = hidden_TC.new_empty(len(hidden_TC), dtype=torch.float32)

        def write(rows: slice, logits_nV: Tensor, dlogits_nV: Tensor) -> None:
            _both(logits_nV, labels_T[rows], nll_T[rows], dlogits_nV, ignore=ignore)

        keep_T, needed = labels_T != ignore, ctx.needs_input_grad
        gradients = _gradients(
            hidden_TC, weight_VC, keep_T, needed, chunk_tokens=chunk_tokens, write=write
        )
        ctx.save_for_backward(keep_T, *gradients)
        ctx.weight_dtype = weight_VC.dtype
        return nll_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        keep_T, hidden_TC, weight_VC = ctx.saved_tensors
        common = _common(grad_T, keep_T)
        dhidden_TC = dweight_VC = None
        # `out` rounds once, without a float32 copy.
        if hidden_TC is not None:
            factors_T1 = common.where(keep_T, 0).unsqueeze(1)
            dhidden_TC = torch.mul(hidden_TC, factors_T1, out=torch.empty_like(hidden_TC))
        if weight_VC is not None:
            out = torch.empty_like(weight_VC, dtype=ctx.weight_dtype)
            dweight_VC = torch.mul(weight_VC, common, out=out)
        return dhidden_TC, dweight_VC, None, None, None


def _gradients(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    keep_T: Tensor,
    needed: tuple[bool, ...],
    *,
    chunk_tokens: int,
    write: Callable[[slice, Tensor, Tensor], None],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the hidden states and of the weight, the latter in float32, where needed.

    write(rows, logits, dlogits): fills in the gradient of a chunk's logits.
    """
    weight = operand(weight_VC, torch.float32)
    dhidden_TC = torch.empty_like(hidden_TC) if needed[0] else None
    dweight_VC = weight_VC.new_zeros(weight_VC.shape, dtype=torch.float32) if needed[1] else None
    for rows in chunks(len(hidden_TC), chunk_tokens):
        hidden_nC = masked(hidden_TC[rows], keep_T[rows], torch.float32)
        logits_nV = product(hidden_nC, weight.T, torch.float32)
        dlogits_nV = torch.empty_like(logits_nV, dtype=weight.dtype)
        write(rows, logits_nV, dlogits_nV)
        del logits_nV
        if dhidden_TC is not None:
            dhidden_TC[rows] = product(dlogits_nV, weight, torch.float32)
        if dweight_VC is not None:
            add_product(dweight_VC, dlogits_nV.T, hidden_nC)
        del dlogits_nV
    return dhidden_TC, dweight_VC


def _common(grad_T: Tensor, keep_T: Tensor) -> Tensor:
    """The gradient that all labelled tokens share, 0 if there is none, NaN if they differ."""
    if not len(grad_T):
        return grad_T.new_zeros(())
    low = grad_T.where(keep_T, torch.inf).amin()
    high = grad_T.where(keep_T, -torch.inf).amax()
    return low.where(low == high, torch.zeros_like(low).where(low > high, torch.nan))


def _both(
    logits_nV: Tensor, labels_n: Tensor, nll_n: Tensor, dlogits_nV: Tensor, *, ignore: int
) -> None:
    """Writes the loss of each row and softmax − 1 at the label."""
    _both_kernel[(len(logits_nV),)](
        logits_nV, labels_n, nll_n, dlogits_nV, logits_nV.shape[1], ignore,
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


# A chunk may begin at any row: whether its pointer is aligned must not compile another kernel.
@triton.jit(do_not_specialize=["ignore"], do_not_specialize_on_alignment=["labels", "nll", "lse"])
def _loss_kernel(logits, labels, nll, lse, vocabulary, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label == ignore:
        tl.store(nll + row, 0.0)
        tl.store(lse + row, 0.0)
    else:
        own, total = _row_loss(logits + row * vocabulary, label, vocabulary, BLOCK)
        tl.store(nll + row, total - own)
        tl.store(lse + row, total)


@triton.jit(do_not_specialize=["ignore"], do_not_specialize_on_alignment=["labels", "lse", "grad"])
def _gradient_kernel(logits, labels, lse, grad, dlogits, vocabulary, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    out = dlogits + row * vocabulary
    if label == ignore:
        _write_zeros(out, vocabulary, BLOCK)
    else:
        total, factor = tl.load(lse + row), tl.load(grad + row)
        _write_gradient(logits + row * vocabulary, out, label, total, factor, vocabulary, BLOCK)


@triton.jit(do_not_specialize=["ignore"], do_not_specialize_on_alignment=["labels", "nll"])
def _both_kernel(logits, labels, nll, dlogits, vocabulary, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    out = dlogits + row * vocabulary
    if label == ignore:
        tl.store(nll + row, 0.0)
        _write_zeros(out, vocabulary, BLOCK)
    else:
        here = logits + row * vocabulary
        own, total = _row_loss(here, label, vocabulary, BLOCK)
        tl.store(nll + row, total - own)
        _write_gradient(here, out, label, total, 1.0, vocabulary, BLOCK)


@triton.jit
def _row_loss(logits, label, vocabulary, BLOCK: tl.constexpr):
    """The label's logit and the log-sum-exp; NaN if the label is outside the vocabulary."""
    columns = tl.arange(0, BLOCK)
    # Of the columns so far: the largest, and in each place the sum of exp(logit − largest).
    top = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        sums = sums * tl.exp(top - higher) + tl.exp(x - higher)
        top = higher
    is_known = (label >= 0) & (label < vocabulary)
    own = tl.load(logits + label, mask=is_known, other=float("nan"))
    total = tl.where(is_known, top + tl.log(tl.sum(sums, 0)), float("nan"))
    return own, total


@triton.jit
def _write_gradient(logits, out, label, total, factor, vocabulary, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0)
        gradient = (tl.exp(x - total) - tl.where(at == label, 1.0, 0.0)) * factor
        tl.store(out + at, gradient.to(out.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def _write_zeros(out, vocabulary, BLOCK: tl.constexpr):
    zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
    columns = tl.arange(0, BLOCK)
    for start in range(0, vocabulary, BLOCK):
        at = start + columns
        tl.store(out + at, zeros, mask=at < vocabulary)
