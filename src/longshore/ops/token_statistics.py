"""Statistics of each token's distribution, from the output layer, without materialising all logits.

In: hidden (T, C), the weight of the output layer (V, C), labels (T), and a temperature that the
logits are divided by. Out: four numbers for each token (T, 4), in float32 (float64 for float64), 0
where the label is `ignore`:

    logprob       of the label
    entropy       −Σ p·log p over the vocabulary
    logsumexp     of the logits: what z-loss squares
    mean_logit    over the vocabulary: logsumexp − mean_logit is label smoothing's second term

Logits 0 and log 3 with label 1 give log 3/4 = −0.288, 0.562, log 4 = 1.386 and log 3 / 2 = 0.549.

Chunks are computed, used and freed, and recomputed in backward, as in ops/cross_entropy.py. With
p the softmax of a row, H its entropy and g the gradients of the four, that of a logit is

    p·(g_logsumexp − g_logprob − g_entropy·(log p + H)) + g_mean/V, and at the label g_logprob more.

`map_logits` is for all else: a function of the logits, called with one chunk after another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.cross_entropy import (
    VocabularyPart,
    add_product,
    cap_,
    cap_slope,
    check_inputs,
    chunks,
    local_labels,
    masked,
    operand,
    product,
    softcapped,
)
from longshore.ops.sizes import logits_chunk

STATISTICS = ("logprob", "entropy", "logsumexp", "mean_logit")
"""The columns, in their order."""


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
    """(T, 4): the STATISTICS of each token, 0 at ignored ones, whatever their rows contain."""
    words = len(weight_VC) if vocabulary is None else vocabulary.size
    check_inputs(hidden_TC, weight_VC, labels_T, ignore, words=words)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it must be finite and above 0")
    values_T4: Tensor = _TokenStatistics.apply(  # type: ignore[no-untyped-call]
        hidden_TC,
        weight_VC,
        labels_T,
        temperature,
        _chunk(chunk_tokens, hidden_TC, weight_VC),
        ignore,
        vocabulary,
        softcap,
    )
    return values_T4


def _chunk(chunk_tokens: int | None, hidden_TC: Tensor, weight_VC: Tensor) -> int:
    if chunk_tokens is None:
        dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
        return logits_chunk(len(hidden_TC), len(weight_VC) * dtype.itemsize)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; give 1 or more, or None")
    return chunk_tokens


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
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
    def backward(ctx: Any, grad_T4: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
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
        dhidden_TC[rows] = product(dlogits_nV, weight, dtype).to(dhidden_TC.dtype)
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

    mapped: Tensor = _MapLogits.apply(  # type: ignore[no-untyped-call]
        of_capped, chunk, hidden_TC, weight_VC, *rows
    )
    return mapped


class _MapLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
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
