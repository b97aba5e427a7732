import math
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from longshore.batch import Boundaries
from longshore.ops import attention as attention_blocks
from longshore.ops import attention as ops
from longshore.ops import attention_varlen, reference
from longshore.ops.attention import attention, attention_backward, attention_forward

ROUNDING = 1e-14


def joined(lengths):
    offsets = tuple(accumulate(lengths, initial=0))
    return Boundaries(offsets, torch.tensor(offsets, dtype=torch.int32), max(lengths, default=0))


def inputs(queries, keys, *, heads=4, kv_heads=2, width=6, value_width=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads, width), (keys, kv_heads, width), (keys, kv_heads, value_width))
    return [torch.randn(s, dtype=torch.float64, generator=draw).requires_grad_() for s in shapes]


def gradients(out, tensors, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return torch.autograd.grad(
        out, tensors, torch.randn(out.shape, dtype=out.dtype, generator=draw)
    )


def assert_close(got, want, tolerance=1e-9):
    assert got.shape == want.shape
    if want.numel():
        # A token that sees only itself gives q and k a gradient of exactly 0: allow its rounding.
        assert (got - want).abs().max() <= tolerance * want.abs().max() + ROUNDING


def assert_as_twin(tensors, **options):
    got, want = attention(*tensors, **options), reference.attention(*tensors, **options)
    assert_close(got, want)
    sinks = options.get("sinks")
    tensors = [*tensors, *([] if sinks is None else [sinks])]
    for one, other in zip(gradients(got, tensors), gradients(want, tensors), strict=True):
        assert_close(one, other)


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 40]), min_size=1, max_size=5))
    before = [draw(st.sampled_from([0, 0, 1, 4, 30])) for _ in lengths]
    kv_heads = draw(st.integers(1, 3))
    return {
        "lengths": lengths,
        "key_lengths": [n + more for n, more in zip(lengths, before, strict=True)],
        "heads": kv_heads * draw(st.integers(1, 3)),
        "kv_heads": kv_heads,
        "value_width": draw(st.sampled_from([1, 6, 9])),
        "window": draw(st.none() | st.integers(1, 45)),
        "scale": draw(st.none() | st.just(0.7)),
        "softcap": draw(st.none() | st.just(1.5)),
        "sinks": draw(st.booleans()),
    }


@pytest.mark.slow
@pytest.mark.property
@given(problem=problems())
@example(
    problem={
        "lengths": [1, 600, 2],
        "key_lengths": [1, 600, 2],
        "heads": 2,
        "kv_heads": 1,
        "value_width": 6,
        "window": None,
        "scale": None,
        "softcap": 2.0,
        "sinks": True,
    }
)
@example(
    problem={
        "lengths": [530, 1],
        "key_lengths": [700, 9],
        "heads": 2,
        "kv_heads": 2,
        "value_width": 4,
        "window": 100,
        "scale": None,
        "softcap": 2.0,
        "sinks": True,
    }
)
def test_as_the_twin(problem):
    bounds, key_bounds = joined(problem["lengths"]), joined(problem["key_lengths"])
    tensors = inputs(
        bounds.offsets[-1],
        key_bounds.offsets[-1],
        heads=problem["heads"],
        kv_heads=problem["kv_heads"],
        value_width=problem["value_width"],
    )
    sinks = torch.linspace(-1, 2, problem["heads"], dtype=torch.float64).requires_grad_()
    assert_as_twin(
        tensors,
        bounds=bounds,
        key_bounds=key_bounds,
        scale=problem["scale"],
        window=problem["window"],
        softcap=problem["softcap"],
        sinks=sinks if problem["sinks"] else None,
    )


def test_a_sink_takes_its_share():
    """Scores are 0, as the sink of head 0 is: with 2 keys, each weighs 1/3; head 1 has no sink."""
    v, k, q = torch.tensor([3.0, 9.0]).view(2, 1, 1), torch.ones(2, 1, 3), torch.zeros(2, 2, 3)
    sinks = torch.tensor([0.0, -math.inf])
    out, lse = attention_forward(q, k, v, sinks=sinks)
    assert out[:, 0, 0].tolist() == pytest.approx([3 / 2, 12 / 3])
    assert out[:, 1, 0].tolist() == pytest.approx([3, 6])
    assert lse.exp().tolist() == [pytest.approx([2, 3]), pytest.approx([1, 2])]
    out, _ = attention_forward(q, k, v, sinks=torch.tensor([2000.0, -math.inf]))
    assert out[:, 0, 0].tolist() == [0, 0]


class NoSinks:
    """A backend that knows nothing of sinks, whose backward reads the log-sum-exp it is given."""

    @staticmethod
    def forward(q, k, v, spec):
        return attention_blocks.forward_by_blocks(q, k, v, None, spec)

    @staticmethod
    def backward(grad, q, k, v, out, lse, spec):
        """One sequence, as flash kernels do it."""
        shared, scale = q.shape[1] // k.shape[1], spec.scale
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        probs = (scores - lse[:, :, None]).exp().masked_fill(hidden, 0)
        dprobs = torch.einsum("nhv,mhv->hnm", grad, v)
        dscores = probs * (dprobs - (grad * out).sum(2).T[:, :, None])
        dq = torch.einsum("hnm,mhd->nhd", dscores, k) * scale
        dk = torch.einsum("hnm,nhd->mhd", dscores, q) * scale
        dv = torch.einsum("hnm,nhv->mhv", probs, grad)
        return dq, *(x.unflatten(1, (-1, shared)).sum(2) for x in (dk, dv))


def test_backends_that_know_no_sinks_serve_them(monkeypatch):
    monkeypatch.setattr(ops, "pick", lambda *args: NoSinks)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 30.0], dtype=torch.float64).requires_grad_()
    assert_as_twin(inputs(9, 9), sinks=sinks)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"softcap": 0.0}, "softcap is 0.0; give a number above 0"),
        ({"sinks": torch.zeros(2)}, r"sinks have the shape \(2,\); each of 4 heads has one"),
    ],
)
def test_wrong_score_options(options, text):
    with pytest.raises(ValueError, match=text):
        attention(*inputs(3, 3), **options)


def test_by_hand():
    """Scores are 0, so a query takes the mean of the values it sees."""
    v = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]).view(6, 1, 1)
    k, q = torch.ones(6, 1, 3), torch.zeros(3, 2, 3)
    options = {"bounds": joined([2, 1]), "key_bounds": joined([5, 1])}
    out, lse = attention_forward(q, k, v, **options)
    assert out[:, 0, 0].tolist() == pytest.approx([15 / 4, 31 / 5, 32])
    assert out[:, 1, 0].tolist() == out[:, 0, 0].tolist()
    assert lse.exp().tolist() == [pytest.approx([4, 5, 1])] * 2
    out = attention(q, k, v, window=3, **options)
    assert out[:, 0, 0].tolist() == pytest.approx([14 / 3, 28 / 3, 32])


def test_without_bounds_all_rows_are_one_run_aligned_at_the_end():
    assert_as_twin(inputs(7, 7))
    q, k, v = inputs(3, 7)
    whole_q = torch.cat([torch.zeros(4, 4, 6, dtype=torch.float64), q])
    assert_close(attention(q, k, v), attention(whole_q, k, v)[4:])
    with_bounds = attention(q, k, v, bounds=joined([3]), key_bounds=joined([7]))
    assert torch.equal(attention(q, k, v), with_bounds)
    assert torch.equal(attention(q, k, v, key_bounds=joined([7])), with_bounds)


def test_key_heads_are_shared_by_neighbouring_query_heads():
    q, k, v = inputs(5, 5, heads=6, kv_heads=3)
    out = attention(q, k, v)
    for head in range(6):
        own = slice(head * 3 // 6, head * 3 // 6 + 1)
        alone = attention(q[:, head : head + 1], k[:, own], v[:, own])
        assert_close(out[:, head : head + 1], alone)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_run_is_the_same_in_every_bit_whatever_lies_beside_it(dtype, kv_heads):
    lengths = [3, 1, 65, 2, 33]
    bounds = joined(lengths)
    heads = 2 * kv_heads
    drawn = inputs(sum(lengths), sum(lengths), heads=heads, kv_heads=kv_heads, width=5)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in drawn)
    out = attention(q, k, v, bounds=bounds)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    for start, stop in pairwise(bounds.offsets):
        own = [x.detach()[start:stop].clone().requires_grad_() for x in (q, k, v)]
        alone = attention(*own)
        assert torch.equal(alone, out[start:stop])
        for got, want in zip(torch.autograd.grad(alone.square().sum(), own), grads, strict=True):
            assert torch.equal(got, want[start:stop])


def test_nothing_leaks_even_from_a_run_of_nan():
    q, k, v = inputs(9, 9)
    bounds = joined([4, 2, 3])
    poisoned = [x.detach().clone() for x in (q, k, v)]
    for x in poisoned:
        x[4:6] = torch.nan
        x.requires_grad_()
    out = attention(*poisoned, bounds=bounds)
    kept = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(out[kept], attention(q, k, v, bounds=bounds)[kept])
    assert out[4:6].isnan().all()
    for grad in torch.autograd.grad(out[kept].sum(), poisoned):
        assert grad[kept].isfinite().all()


def test_keys_that_no_query_sees_get_a_gradient_of_zero():
    bounds, key_bounds = joined([0, 2]), joined([3, 6])
    q, k, v = inputs(2, 9)
    _, dk, dv = gradients(
        attention(q, k, v, bounds=bounds, key_bounds=key_bounds, window=2), (q, k, v)
    )
    for grad in (dk, dv):
        assert (grad[:6] == 0).all()
        assert (grad[6:] != 0).all()


def test_the_cut_into_blocks_does_not_show(monkeypatch):
    tensors = inputs(90, 120)
    options = {"bounds": joined([70, 20]), "key_bounds": joined([80, 40])}
    for most, scores in ((7, 1 << 24), (512, 1)):
        monkeypatch.setattr(attention_blocks, "MOST_ROWS", most)
        monkeypatch.setattr(attention_blocks, "MOST_SCORES", scores)
        assert_as_twin(tensors, **options)
        assert_as_twin(tensors, window=11, **options)


def test_blocks_meet_only_the_keys_they_may_see():
    sequence = slice(10, 1210), slice(0, 1500)

    def cut(window):
        return [
            (rows.start, rows.stop, keys.start, keys.stop)
            for rows, keys, _ in attention_blocks._blocks(*sequence, heads=1, window=window)
        ]

    assert cut(None) == [(10, 522, 0, 812), (522, 1034, 0, 1324), (1034, 1210, 0, 1500)]
    assert cut(100) == [(10, 522, 201, 812), (522, 1034, 713, 1324), (1034, 1210, 1225, 1500)]


def test_the_pair_underneath():
    tensors = inputs(5, 8, value_width=3)
    plain = [x.detach() for x in tensors]
    options = {"bounds": joined([1, 4]), "key_bounds": joined([3, 5]), "window": 3}
    out, lse = attention_forward(*tensors, **options)
    assert not out.requires_grad
    want, want_lse = reference.attention_forward(*tensors, **options)
    assert_close(out, want)
    assert_close(lse, want_lse)
    grad = torch.ones_like(out)
    got = attention_backward(grad, *plain, out, lse, **options)
    for one, other in zip(got, torch.autograd.grad(want, tensors, grad), strict=True):
        assert_close(one, other)


def test_half_precision_is_computed_in_float32():
    tensors = [x.detach().bfloat16().requires_grad_() for x in inputs(6, 6)]
    out, lse = attention_forward(*tensors)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    as_float = [x.detach().float() for x in tensors]
    assert torch.equal(out, attention(*as_float).bfloat16())
    grads = gradients(attention(*tensors), tensors)
    assert [g.dtype for g in grads] == [torch.bfloat16] * 3


def test_under_checkpointing_and_used_twice():
    tensors = inputs(7, 7)
    bounds = joined([5, 2])

    def twice(q, k, v):
        once = attention(q, k, v, bounds=bounds)
        return attention(once, k, v, bounds=bounds, window=2)

    plain = twice(*tensors)
    again = checkpoint(twice, *tensors, use_reentrant=False)
    assert torch.equal(plain, again)
    for one, other in zip(gradients(plain, tensors), gradients(again, tensors), strict=True):
        assert torch.equal(one, other)


def test_backward_twice_gives_the_same():
    tensors = inputs(4, 4)
    out = attention(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    second = torch.autograd.grad(out.sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_refused():
    tensors = inputs(2, 2)
    (dq,) = torch.autograd.grad(attention(*tensors).square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_strided_inputs_and_expanded_gradients():
    q, k, v = inputs(5, 5)
    fused = torch.cat([q, k, v], 1).detach().requires_grad_()
    out = attention(fused[:, :4], fused[:, 4:6], fused[:, 6:])
    assert torch.equal(out, attention(q, k, v))
    (got,) = torch.autograd.grad(out.sum(), fused)
    want = torch.autograd.grad(reference.attention(q, k, v).sum(), (q, k, v))
    assert_close(got, torch.cat(want, 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window": 0}, "window is 0"),
        ({"bounds": joined([3])}, "3, but there are 5 rows"),
        ({"key_bounds": joined([2, 3])}, "bounds have 1 sequences and key_bounds 2"),
        (
            {"bounds": joined([3, 2]), "key_bounds": joined([2, 3])},
            "sequence 0 has 3 queries and 2 keys",
        ),
    ],
)
def test_bad_bounds_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        attention(*inputs(5, 5), **change)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((5, 4, 6), (5, 3, 6), (5, 3, 6)), "there are 4 query heads and 3 key heads"),
        (((5, 4, 6), (5, 2, 8), (5, 2, 6)), "q and k must have the same width"),
        (((5, 4, 6), (5, 2, 6), (4, 2, 6)), "k and v the same rows"),
        (((5, 24), (5, 2, 6), (5, 2, 6)), r"each must be \(rows, heads, width\)"),
        (((6, 4, 6), (5, 4, 6), (5, 4, 6)), "sequence 0 has 6 queries and 5 keys"),
    ],
)
def test_bad_shapes_are_refused(shapes, words):
    with pytest.raises(ValueError, match=words):
        attention(*(torch.zeros(shape) for shape in shapes))


def test_mixed_dtypes_are_refused():
    q, k, v = inputs(2, 2)
    with pytest.raises(ValueError, match="one dtype"):
        attention(q, k.float(), v)


def half(*shape):
    return torch.arange(math.prod(shape)).view(shape).bfloat16()


@pytest.mark.parametrize(
    "x",
    [
        half(3, 2, 28)[..., 12:],
        half(3, 2, 28)[..., :16],
        half(1).expand(3, 2, 16),
        half(16, 2, 3).permute(2, 1, 0),
        half(3 * 2 * 16 + 1)[1:].view(3, 2, 16),
    ],
)
def test_flash_kernels_get_heads_at_multiples_of_16_bytes(x):
    """The values of MLA with keys of 12 and 4 dims are the first of these."""
    rows = attention_varlen.aligned_rows(x)
    assert torch.equal(rows, x)
    assert rows.data_ptr() % 16 == 0
    assert all(stride * 2 % 16 == 0 for stride in rows.stride()[:2])
    assert attention_varlen.aligned_rows(rows) is rows
