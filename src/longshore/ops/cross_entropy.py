"""The output layer fused with its loss, without materialising all logits.

In: hidden (T, C), the weight of the output layer (V, C), labels (T). Out: the negative
log-likelihood of each label (T), in float32 (float64 for float64), 0 where the label is `ignore`.

Tokens are processed in chunks: the logits of a chunk are computed, used and freed, and recomputed
in backward. 4096 tokens with a vocabulary of 8192 have 128 MiB of logits; in chunks of 256 tokens 8
MiB exist at a time. Only a log-sum-exp for each token is saved for backward.

On CUDA kernels read a row of logits once where torch passes over it several times, see
ops/kernels/cross_entropy.py. For a loss that is a plain sum they compute the gradient in forward.

Half precision: products accumulate in float32 and logits are float32; on CUDA the logits' gradient
is rounded to the inputs' dtype before it is multiplied. The weight's gradient is float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.backends import pick
from longshore.ops.sizes import kernel_logits_chunk, logits_chunk


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Some rows of the output layer's weight, where ranks have different ones."""

    start: int
    """The first row, in the whole vocabulary."""
    size: int
    """Of the whole vocabulary."""
    join: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """From the log-sum-exp of these rows' logits and the label's logit, 0 if it is not among them,
    both (T), those of all ranks' rows."""
    add: Callable[[Tensor], Tensor]
    """The sum of a tensor over the ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class OutputLayer:
    """From hidden states to logits."""

    weight: Tensor
    """(V, C)"""
    vocabulary: VocabularyPart | None = None
    """Where the weight's rows are only a part of it."""
    softcap: float | None = None
    """Logits are softcap · tanh(logits / softcap), as Gemma 2 has them; None: as they are."""


def linear_cross_entropy(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int | None = None,
    ignore: int = -100,
    summed: bool = False,
    vocabulary: VocabularyPart | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The loss of each token, 0 at ignored ones, whatever their rows contain.

    chunk_tokens: None for chunks of at most 1/16 of all tokens and 512 MiB of logits; kernels take
    larger ones. summed: the caller promises that the losses of all tokens that are not ignored get
    the same gradient, as if they are only added up and scaled; kernels then save a product, and
    give NaN gradients if the promise is broken. On the CPU a label outside the vocabulary is a
    ValueError; on CUDA a device assertion or a loss of NaN, since looking would make the host wait.
    vocabulary: the weight's rows are only a part of it. softcap: see OutputLayer. Both by plain
    torch.
    """
    words = len(weight_VC) if vocabulary is None else vocabulary.size
    check_inputs(hidden_TC, weight_VC, labels_T, ignore, words=words)
    dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
    by_torch = vocabulary is not None or softcap is not None
    kernels = None if by_torch else pick("loss", hidden_TC, weight_VC)
    if chunk_tokens is None:
        chunk_of = logits_chunk if kernels is None else kernel_logits_chunk
        chunk_tokens = chunk_of(len(hidden_TC), len(weight_VC) * dtype.itemsize)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; give 1 or more, or None")
    if kernels is not None:
        by_kernels: Tensor = kernels.linear_loss(
            hidden_TC, weight_VC, labels_T, chunk_tokens=chunk_tokens, ignore=ignore, summed=summed
        )
        return by_kernels
    nll_T: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TC, weight_VC, labels_T, chunk_tokens, ignore, vocabulary, softcap
    )
    return nll_T


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_TC: Tensor,
        weight_VC: Tensor,
        labels_T: Tensor,
        chunk_tokens: int,
        ignore: int,
        vocabulary: VocabularyPart | None,
        softcap: float | None,
    ) -> Tensor:
        keep_T, is_here_T, labels_T = local_labels(labels_T, weight_VC, ignore, vocabulary)
        dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        own_T, lse_T = (hidden_TC.new_empty(len(hidden_TC), dtype=dtype) for _ in range(2))
        weight = operand(weight_VC, dtype)
        for rows in chunks(len(hidden_TC), chunk_tokens):
            hidden_nC = masked(hidden_TC[rows], keep_T[rows], dtype)
            logits_nV = cap_(product(hidden_nC, weight.T, dtype), softcap)
            own_n = logits_nV.gather(1, labels_T[rows, None]).squeeze(1)
            own_T[rows] = own_n.where(is_here_T[rows], 0)
            # In place: torch.logsumexp would allocate a second chunk.
            top_n1 = logits_nV.amax(1, keepdim=True)
            lse_n = logits_nV.sub_(top_n1).exp_().sum(1).log_().add_(top_n1.squeeze(1))
            lse_T[rows] = lse_n
            # Otherwise the next chunk's logits would be allocated next to these.
            del logits_nV
        if vocabulary is not None:
            lse_T, own_T = vocabulary.join(lse_T, own_T)
        ctx.save_for_backward(hidden_TC, weight_VC, labels_T, keep_T, is_here_T, lse_T)
        ctx.chunk_tokens, ctx.softcap = chunk_tokens, softcap
        return (lse_T - own_T).where(keep_T, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        hidden_TC, weight_VC, labels_T, keep_T, is_here_T, lse_T = ctx.saved_tensors
        dtype = lse_T.dtype
        grad_T = grad_T.where(keep_T, 0)
        own_T = grad_T.where(is_here_T, 0)
        weight = operand(weight_VC, dtype)
        dhidden_TC = torch.empty_like(hidden_TC) if ctx.needs_input_grad[0] else None
        dweight_VC = weight_VC.new_zeros(weight_VC.shape, dtype=dtype)
        for rows in chunks(len(hidden_TC), ctx.chunk_tokens):
            hidden_nC = masked(hidden_TC[rows], keep_T[rows], dtype)
            logits_nV = cap_(product(hidden_nC, weight.T, dtype), ctx.softcap)
            slope_nV = cap_slope(logits_nV, ctx.softcap)
            dlogits_nV = _dlogits(logits_nV, lse_T[rows], grad_T[rows])
            dlogits_nV.scatter_add_(1, labels_T[rows, None], -own_T[rows, None])
            if slope_nV is not None:
                dlogits_nV.mul_(slope_nV)
            dlogits_nV = dlogits_nV.to(weight.dtype)
            if dhidden_TC is not None:
                dhidden_TC[rows] = product(dlogits_nV, weight, dtype)
            if ctx.needs_input_grad[1]:
                add_product(dweight_VC, dlogits_nV.T, hidden_nC)
            del logits_nV, slope_nV, dlogits_nV
        dweight = dweight_VC.to(weight_VC.dtype) if ctx.needs_input_grad[1] else None
        return dhidden_TC, dweight, None, None, None, None, None


def local_labels(
    labels_T: Tensor, weight_VC: Tensor, ignore: int, vocabulary: VocabularyPart | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which labels count, which of them are among the weight's rows, and the row of each.

    Elsewhere the row is 0, which then counts nowhere.
    """
    keep_T = labels_T != ignore
    start = 0 if vocabulary is None else vocabulary.start
    is_here_T = keep_T & (labels_T >= start) & (labels_T < start + len(weight_VC))
    return keep_T, is_here_T, (labels_T - start).where(is_here_T, 0)


def _dlogits(logits_nV: Tensor, lse_n: Tensor, grad_n: Tensor) -> Tensor:
    """softmax · grad, written over the logits; at the label 1 · grad is still to be subtracted."""
    return logits_nV.sub_(lse_n.unsqueeze(1)).exp_().mul_(grad_n.unsqueeze(1))


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap), with its derivative by autograd."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def cap_(logits: Tensor, softcap: float | None) -> Tensor:
    """`softcapped`, in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def cap_slope(capped: Tensor, softcap: float | None) -> Tensor | None:
    """The derivative of capped logits by the logits; None where they are not capped."""
    return None if softcap is None else 1 - (capped / softcap).square_()


def chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, min(start + chunk_tokens, tokens))


def masked(hidden_nC: Tensor, keep_n: Tensor, dtype: torch.dtype) -> Tensor:
    """0 in ignored rows: padding may hold anything, and 0 · NaN is NaN."""
    return operand(hidden_nC.where(keep_n.unsqueeze(1), 0), dtype)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand of a product: unchanged on CUDA, elsewhere in the dtype of the logits."""
    return x if x.is_cuda else x.to(dtype)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in `dtype`."""
    return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def check_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, *, words: int
) -> None:
    """Refuses shapes, dtypes and labels that do not fit; words: of the whole vocabulary."""
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"the shapes are {shapes}; give (tokens, width) and (vocabulary, width)")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; give one dtype")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels are {tuple(labels.shape)}; give one for each row, {shapes}")
    if labels.device.type != "cpu":
        return
    wrong = ((labels < 0) | (labels >= words)) & (labels != ignore)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"label {int(labels[row])} of row {row} is outside the vocabulary of {words}; "
            f"give 0…{words - 1}, or {ignore} for a row without a label"
        )
