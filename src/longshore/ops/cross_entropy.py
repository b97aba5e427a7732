"""The output layer fused with its loss, or with a function of its logits, never holding all logits.

In: hidden (T, C), the weight of the output layer (V, C), labels (T). Out, in float32 (float64 for
float64), and 0 where the label is `ignore`: the negative log-likelihood of each label (T), or four
statistics of each token's distribution (T, 4). `map_logits` is for all else.

Tokens are processed in chunks: the logits of a chunk are computed, used and freed, and recomputed
in backward. 4096 tokens with a vocabulary of 8192 have 128 MiB of logits; in chunks of 256 tokens 8
MiB exist at a time. Only a log-sum-exp for each token is saved for backward.

Logits 0 and log 3 with label 1 have a loss of −log 3/4 = 0.288, an entropy of 0.562, a log-sum-exp
of log 4 = 1.386 and a mean of log 3 / 2 = 0.549.

Half precision: products accumulate in float32 and logits are float32; on CUDA the logits' gradient
is rounded to the inputs' dtype before it is multiplied. The weight's gradient is float32. There
kernels read a row of logits once where torch passes over it several times
(ops/kernels/cross_entropy.py).
"""

from collections.abc import Callable, Iterator, Sequence
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
    """Words of the whole vocabulary."""
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
    _check_inputs(hidden_TC, weight_VC, labels_T, ignore, vocabulary)
    by_torch = vocabulary is not None or softcap is not None
    kernels = None if by_torch else pick("loss", hidden_TC, weight_VC)
    if kernels is not None:
        chunk = _chunk(chunk_tokens, hidden_TC, weight_VC, kernel_logits_chunk)
        return kernels.linear_loss(
            hidden_TC, weight_VC, labels_T, chunk_tokens=chunk, ignore=ignore, summed=summed
        )
    chunk = _chunk(chunk_tokens, hidden_TC, weight_VC)
    return _LinearCrossEntropy.apply(
        hidden_TC, weight_VC, labels_T, chunk, ignore, vocabulary, softcap
    )


def _chunk(
    chunk_tokens: int | None,
    hidden_TC: Tensor,
    weight_VC: Tensor,
    default: Callable[[int, int], int] = logits_chunk,
) -> int:
    if chunk_tokens is None:
        dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        return default(len(hidden_TC), len(weight_VC) * dtype.itemsize)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; give 1 or more, or None")
    return chunk_tokens


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TC, weight_VC, labels_T, keep_T, is_here_T, lse_T = ctx.saved_tensors
        dtype = lse_T.dtype
        grad_T = grad_T.where(keep_T, 0)
        own_T = grad_T.where(is_here_T, 0)
        weight = operand(weight_VC, dtype)
        dhidden_TC = torch.empty_like(hidden_TC) if ctx.needs_input_grad[0] else None
        dweight_VC = _zeros(weight_VC, dtype) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden_TC), ctx.chunk_tokens):
            hidden_nC = masked(hidden_TC[rows], keep_T[rows], dtype)
            logits_nV = cap_(product(hidden_nC, weight.T, dtype), ctx.softcap)
            slope_nV = cap_slope(logits_nV, ctx.softcap)
            # (softmax − 1 at the label) · grad, written over the logits.
            dlogits_nV = logits_nV.sub_(lse_T[rows, None]).exp_().mul_(grad_T[rows, None])
            dlogits_nV.scatter_add_(1, labels_T[rows, None], -own_T[rows, None])
            if slope_nV is not None:
                dlogits_nV.mul_(slope_nV)
            _add_gradients(dlogits_nV, weight, (hidden_nC, rows), (dhidden_TC, dweight_VC))
            del logits_nV, slope_nV, dlogits_nV
        dweight = None if dweight_VC is None else dweight_VC.to(weight_VC.dtype)
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


def _check_inputs(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore: int, vocabulary: VocabularyPart | None
) -> None:
    """Refuses shapes, dtypes and labels that do not fit."""
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"the shapes are {shapes}; give (tokens, width) and (vocabulary, width)")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}; give one dtype")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels are {tuple(labels.shape)}; give one for each row, {shapes}")
    if labels.device.type != "cpu":
        return
    words = len(weight) if vocabulary is None else vocabulary.size
    wrong = ((labels < 0) | (labels >= words)) & (labels != ignore)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"label {int(labels[row])} of row {row} is outside the vocabulary of {words}; "
            f"give 0…{words - 1}, or {ignore} for a row without a label"
        )


STATISTICS = ("logprob", "entropy", "logsumexp", "mean_logit")
"""The columns, in their order: of the label; −Σ p·log p over the vocabulary; of the logits, what
z-loss squares; over the vocabulary, where logsumexp − mean_logit is label smoothing's second term.
"""


def token_statistics(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    ignore: int = -100,
    vocabulary: VocabularyPart | None = None,
    softcap: float | None = None,
) -> Tensor:
    """(T, 4): the STATISTICS of each token, 0 at ignored ones, whatever their rows contain.

    temperature: what the logits are divided by. With p the softmax of a row, H its entropy and g
    the gradients of the four, the gradient of a logit is
    p·(g_logsumexp − g_logprob − g_entropy·(log p + H)) + g_mean/V, and at the label g_logprob more.
    """
    _check_inputs(hidden_TC, weight_VC, labels_T, ignore, vocabulary)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be finite and above 0")
    chunk = _chunk(chunk_tokens, hidden_TC, weight_VC)
    return _TokenStatistics.apply(
        hidden_TC, weight_VC, labels_T, temperature, chunk, ignore, vocabulary, softcap
    )


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TC: Tensor,
        weight_VC: Tensor,
        labels_T: Tensor,
        temperature: float,
        chunk_tokens: int,
        ignore: int,
        vocabulary: VocabularyPart | None,
        softcap: float | None,
    ) -> Tensor:
        keep_T, is_here_T, labels_T = local_labels(labels_T, weight_VC, ignore, vocabulary)
        dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        own_T, lse_T, expected_T, sum_T = (
            hidden_TC.new_empty(len(hidden_TC), dtype=dtype) for _ in range(4)
        )
        weight = operand(weight_VC, dtype)
        for rows in chunks(len(hidden_TC), chunk_tokens):
            hidden_nC = masked(hidden_TC[rows], keep_T[rows], dtype)
            logits_nV = cap_(product(hidden_nC, weight.T, dtype), softcap).div_(temperature)
            own_n = logits_nV.gather(1, labels_T[rows, None]).squeeze(1)
            own_T[rows] = own_n.where(is_here_T[rows], 0)
            sum_T[rows] = logits_nV.sum(1)
            lse_n = logits_nV.logsumexp(1)
            lse_T[rows] = lse_n
            p_nV = (logits_nV - lse_n.unsqueeze(1)).exp_()
            expected_T[rows] = p_nV.mul_(logits_nV).sum(1)
            del logits_nV, p_nV
        words = len(weight_VC)
        if vocabulary is not None:
            words, local_T = vocabulary.size, lse_T
            lse_T, own_T = vocabulary.join(lse_T, own_T)
            # Each rank's part of an expectation over all of the vocabulary, then their sum.
            expected_T, sum_T = vocabulary.add(
                torch.stack([expected_T * (local_T - lse_T).exp(), sum_T])
            )
        entropy_T = lse_T - expected_T
        values = torch.stack([own_T - lse_T, entropy_T, lse_T, sum_T / words], dim=1)
        ctx.save_for_backward(hidden_TC, weight_VC, labels_T, keep_T, is_here_T, lse_T, entropy_T)
        ctx.chunk_tokens, ctx.words = chunk_tokens, words
        ctx.temperature, ctx.softcap = temperature, softcap
        return values.where(keep_T.unsqueeze(1), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T4: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TC, weight_VC, labels_T, keep_T, is_here_T, lse_T, entropy_T = ctx.saved_tensors
        dtype = lse_T.dtype
        grad_T4 = grad_T4.where(keep_T.unsqueeze(1), 0) / ctx.temperature
        logprob_T, grad_entropy_T, grad_lse_T, mean_T = grad_T4.unbind(1)
        own_T = logprob_T.where(is_here_T, 0)
        weight = operand(weight_VC, dtype)
        dhidden_TC = torch.empty_like(hidden_TC) if ctx.needs_input_grad[0] else None
        dweight_VC = _zeros(weight_VC, dtype) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden_TC), ctx.chunk_tokens):
            hidden_nC = masked(hidden_TC[rows], keep_T[rows], dtype)
            logits_nV = cap_(product(hidden_nC, weight.T, dtype), ctx.softcap)
            slope_nV = cap_slope(logits_nV, ctx.softcap)
            logp_nV = logits_nV.div_(ctx.temperature).sub_(lse_T[rows, None])
            p_nV = logp_nV.exp()
            shared_n = grad_lse_T[rows] - logprob_T[rows] - grad_entropy_T[rows] * entropy_T[rows]
            # −inf · 0: a word without probability has no part in the entropy.
            factor_nV = logp_nV.where(p_nV > 0, 0).mul_(-grad_entropy_T[rows, None])
            dlogits_nV = factor_nV.add_(shared_n.unsqueeze(1)).mul_(p_nV)
            dlogits_nV.add_(mean_T[rows, None] / ctx.words)
            dlogits_nV.scatter_add_(1, labels_T[rows, None], own_T[rows, None])
            if slope_nV is not None:
                dlogits_nV.mul_(slope_nV)
            _add_gradients(dlogits_nV, weight, (hidden_nC, rows), (dhidden_TC, dweight_VC))
            del logits_nV, slope_nV, logp_nV, p_nV, factor_nV, dlogits_nV
        dweight = None if dweight_VC is None else dweight_VC.to(weight_VC.dtype)
        return dhidden_TC, dweight, None, None, None, None, None, None


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(like.shape, dtype=dtype)


def _add_gradients(
    dlogits_nV: Tensor,
    weight: Tensor,
    chunk: tuple[Tensor, slice],
    totals: tuple[Tensor | None, Tensor | None],
) -> None:
    """From the gradient of a chunk's logits those of its hidden rows and of the weight."""
    (hidden_nC, rows), (dhidden_TC, dweight_VC) = chunk, totals
    dtype = dlogits_nV.dtype
    dlogits_nV = dlogits_nV.to(weight.dtype)
    if dhidden_TC is not None:
        dhidden_TC[rows] = product(dlogits_nV, weight, dtype)
    if dweight_VC is not None:
        add_product(dweight_VC, dlogits_nV.T, hidden_nC)


OfLogits = Callable[..., Tensor]
"""function(logits_nV, *rows_n) → (n, …): each row of the result from the same rows of the inputs"""


def map_logits(
    function: OfLogits,
    hidden_TC: Tensor,
    weight_VC: Tensor,
    rows: Sequence[Tensor] = (),
    *,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """(T, …): function(logits, *rows) of one chunk of tokens after another, differentiable.

    rows: tensors (T, …), of which each call gets its chunk's. Each row of the result may depend on
    the same row of the inputs alone. The function is called again in backward.
    """
    for number, tensor in enumerate(rows):
        if len(tensor) != len(hidden_TC):
            raise ValueError(
                f"tensor {number + 1} behind the function has {len(tensor)} rows, but there are "
                f"{len(hidden_TC)} tokens; give one row for each"
            )
    chunk = max(1, _chunk(chunk_tokens, hidden_TC, weight_VC))

    def of_capped(logits_nV: Tensor, *rows_n: Tensor) -> Tensor:
        return function(softcapped(logits_nV, softcap), *rows_n)

    return _MapLogits.apply(of_capped, chunk, hidden_TC, weight_VC, *rows)


class _MapLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: OfLogits,
        chunk_tokens: int,
        hidden_TC: Tensor,
        weight_VC: Tensor,
        *rows: Tensor,
    ) -> Tensor:
        dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        weight, parts = operand(weight_VC, dtype), []
        for span in [*chunks(len(hidden_TC), chunk_tokens)] or [slice(0)]:
            logits_nV = product(operand(hidden_TC[span], dtype), weight.T, dtype)
            values = function(logits_nV, *(tensor[span] for tensor in rows))
            _check_mapped(values, len(logits_nV))
            parts.append(values)
            del logits_nV
        ctx.save_for_backward(hidden_TC, weight_VC, *rows)
        ctx.function, ctx.chunk_tokens = function, chunk_tokens
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TC, weight_VC, *rows = ctx.saved_tensors
        dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        weight = operand(weight_VC, dtype)
        wanted = [i for i in range(len(rows)) if ctx.needs_input_grad[4 + i]]
        totals = {i: torch.empty_like(rows[i]) for i in wanted}
        dhidden_TC = torch.empty_like(hidden_TC) if ctx.needs_input_grad[2] else None
        dweight_VC = _zeros(weight_VC, dtype) if ctx.needs_input_grad[3] else None
        for span in chunks(len(hidden_TC), ctx.chunk_tokens):
            hidden_nC = operand(hidden_TC[span], dtype)
            logits_nV = product(hidden_nC, weight.T, dtype).requires_grad_()
            own = [tensor[span].detach() for tensor in rows]
            for i in wanted:
                own[i].requires_grad_()
            with torch.enable_grad():
                values = ctx.function(logits_nV, *own)
            if not values.requires_grad:
                raise ValueError(
                    "the function of logits returned values without a gradient; compute them from "
                    "the logits, without detach(), item() or torch.no_grad()"
                )
            inputs = [logits_nV, *(own[i] for i in wanted)]
            # A row whose result has no gradient has none itself, not even 0 · ∞.
            counts_n = grad[span].reshape(len(logits_nV), -1).ne(0).any(1)
            parts = torch.autograd.grad(values, inputs, grad[span], materialize_grads=True)
            dlogits_nV = parts[0].where(counts_n.unsqueeze(1), 0)
            for i, part in zip(wanted, parts[1:], strict=True):
                totals[i][span] = part
            _add_gradients(dlogits_nV, weight, (hidden_nC, span), (dhidden_TC, dweight_VC))
            del logits_nV, values, parts, dlogits_nV
        dweight = None if dweight_VC is None else dweight_VC.to(weight_VC.dtype)
        return None, None, dhidden_TC, dweight, *(totals.get(i) for i in range(len(rows)))


def _check_mapped(values: object, tokens: int) -> None:
    if not isinstance(values, Tensor) or values.ndim == 0 or len(values) != tokens:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"the function of logits returned {shape} for a chunk of {tokens} tokens; it must "
            "return one row for each"
        )
