import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.test_cross_entropy import LiveBytes, assert_close, inputs

from longshore.ops import reference
from longshore.ops.cross_entropy import VocabularyPart, map_logits, token_statistics


def test_by_hand():
    hidden, weight = torch.tensor([[1.0], [5.0]]), torch.tensor([[0.0], [math.log(3)]])
    got = token_statistics(hidden, weight, torch.tensor([1, -100])).tolist()
    assert got[0] == pytest.approx([-0.28768, 0.56234, 1.38629, 0.54931], abs=1e-5)
    assert got[1] == [0, 0, 0, 0]


def gradients(values, tensors):
    draw = torch.Generator().manual_seed(1)
    grad = torch.randn(values.shape, generator=draw, dtype=values.dtype)
    return torch.autograd.grad(values, tensors, grad)


@pytest.mark.property
@given(
    tokens=st.integers(0, 30),
    vocabulary=st.integers(1, 20),
    chunk_tokens=st.none() | st.integers(1, 40),
    ignored=st.sets(st.integers(0, 29)),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_as_the_twin(tokens, vocabulary, chunk_tokens, ignored, temperature, softcap):
    ignored = [row for row in ignored if row < tokens]
    hidden, weight, labels = inputs(tokens, vocabulary, ignored=ignored)
    options = {"temperature": temperature, "softcap": softcap}
    got = token_statistics(hidden, weight, labels, chunk_tokens=chunk_tokens, **options)
    want = reference.token_statistics(hidden, weight, labels, **options)
    assert_close(got, want)
    for one, other in zip(
        gradients(got, (hidden, weight)), gradients(want, (hidden, weight)), strict=True
    ):
        assert_close(one, other)


def test_large_logits_do_not_overflow():
    hidden, weight, labels = inputs(20, 7)
    hidden = (hidden * 1e4).detach().requires_grad_()
    got = token_statistics(hidden, weight, labels)
    assert_close(got, reference.token_statistics(hidden, weight, labels))
    assert all(part.isfinite().all() for part in gradients(got, (hidden, weight)))


def test_padding_may_hold_anything():
    hidden, weight, labels = inputs(9, 7, ignored=[2, 5])
    rows = hidden.detach().clone()
    rows[[2, 5]] = torch.nan
    rows.requires_grad_()
    got = token_statistics(rows, weight, labels)
    assert_close(got, token_statistics(hidden, weight, labels))
    assert all(part.isfinite().all() for part in gradients(got, (rows, weight)))


def test_parts_of_the_vocabulary_give_the_whole():
    """Two ranks in turn: each is told what the other would say."""
    hidden, weight, labels = inputs(12, 10, ignored=[3])
    want = token_statistics(hidden, weight, labels, temperature=0.7)
    logits = (hidden @ weight.T / 0.7).detach().masked_fill((labels == -100)[:, None], 0)
    everything = gradients(want, (hidden, weight))
    hidden_parts, weight_parts = [], []
    for span in (slice(0, 6), slice(6, 10)):
        lse = logits.logsumexp(1)
        own = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        sums = torch.stack([(logits.softmax(1) * logits).sum(1), logits.sum(1)])
        part = VocabularyPart(span.start, 10, lambda *_: (lse, own), lambda _: sums)  # noqa: B023
        rows = weight.detach()[span].clone().requires_grad_()
        got = token_statistics(hidden, rows, labels, temperature=0.7, vocabulary=part)
        assert_close(got, want)
        dhidden, dweight = gradients(got, (hidden, rows))
        hidden_parts.append(dhidden)
        weight_parts.append(dweight)
    assert_close(sum(hidden_parts), everything[0])
    assert_close(torch.cat(weight_parts), everything[1])


def of_logits(logits, scale, picked):
    return scale * logits.logsumexp(1).square() + logits.gather(1, picked).sum(1)


@pytest.mark.property
@given(
    tokens=st.integers(0, 20),
    chunk_tokens=st.none() | st.integers(1, 25),
    softcap=st.sampled_from([None, 1.5]),
)
def test_functions_of_logits(tokens, chunk_tokens, softcap):
    hidden, weight, _ = inputs(tokens, 7)
    scale = torch.linspace(1, 2, tokens, dtype=torch.float64).requires_grad_()
    rows = (scale, torch.arange(2 * tokens).reshape(tokens, 2) % 7)
    got = map_logits(of_logits, hidden, weight, rows, chunk_tokens=chunk_tokens, softcap=softcap)
    want = reference.map_logits(of_logits, hidden, weight, rows, softcap=softcap)
    assert_close(got, want)
    tensors = (hidden, weight, scale)
    for one, other in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
        assert_close(one, other)


def test_a_row_without_gradient_has_none():
    """1/0 in its function reaches neither its own row nor the weight."""
    hidden, weight, _ = inputs(6, 5)
    scale = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    got = map_logits(lambda logits, w: logits.sum(1) / w, hidden, weight, (scale,))
    total = torch.where(scale > 0, got, 0.0).sum()
    for part in torch.autograd.grad(total, (hidden, weight)):
        assert part.isfinite().all()


@pytest.mark.parametrize("op", ["statistics", "map"])
def test_logits_never_exist_whole(op):
    hidden, weight, labels = inputs(512, 300, width=4)
    with LiveBytes() as memory:
        if op == "map":
            values = map_logits(lambda logits: logits.logsumexp(1), hidden, weight)
        else:
            values = token_statistics(hidden, weight, labels)
        values.sum().backward()
    assert memory.peak < 512 * 300 * 8 / 2


def test_what_does_not_fit_is_refused():
    hidden, weight, labels = inputs(6, 5)
    with pytest.raises(ValueError, match="temperature is 0; it must be finite and above 0"):
        token_statistics(hidden, weight, labels, temperature=0)
    with pytest.raises(ValueError, match="chunk_tokens is 0; give 1 or more"):
        token_statistics(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"returned \(5,\) for a chunk of 6 tokens"):
        map_logits(lambda logits: logits.sum(0), hidden, weight, chunk_tokens=6)
    with pytest.raises(ValueError, match="tensor 1 behind the function has 5 rows"):
        map_logits(lambda logits, row: row, hidden, weight, (labels[:5],))
