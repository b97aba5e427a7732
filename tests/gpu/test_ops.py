"""The ops on a GPU, in half precision, against their twins in float64."""

import warnings
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch

from longshore.batch import Boundaries
from longshore.ops import backends, reference
from longshore.ops.attention import attention, attention_forward
from longshore.ops.backends import chosen, using_kernels
from longshore.ops.cross_entropy import linear_cross_entropy
from longshore.ops.pointwise import rotate
from longshore.user_code import is_installed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def joined(lengths):
    offsets = tuple(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    return Boundaries(offsets, cu_seqlens, max(lengths))


def normal(*shape, dtype=torch.bfloat16, seed=0):
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=draw, device="cuda").to(dtype).requires_grad_()


def inputs(queries, keys, *, heads=8, kv_heads=2, width=64, dtype=torch.bfloat16):
    return [
        normal(rows, count, width, dtype=dtype, seed=seed)
        for seed, (rows, count) in enumerate(((queries, heads), (keys, kv_heads), (keys, kv_heads)))
    ]


def in_float64(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_close(got, want, tolerance):
    assert got.shape == want.shape
    assert got.isfinite().all()
    error = ((got.double() - want).abs().max() / want.abs().max()).item()
    assert error <= tolerance, f"the largest error is {error} of the largest value"


@contextmanager
def nothing_waits():
    """Raises where the host waits for the device, as to read a tensor back."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


PROBLEMS = {
    "odd lengths": ([1, 2, 333, 700, 17], [1, 2, 333, 700, 17]),
    "shorter queries": ([1, 5, 129, 64], [7, 300, 129, 513]),
    "runs without rows": ([0, 9, 0, 40, 0], [0, 9, 30, 40, 0]),
    "length 1 alone": ([1, 1, 1], [1, 1, 1]),
    "length 1 over more keys": ([1, 1], [40, 3]),
}


@contextmanager
def served_by(name):
    """Attention by this backend alone."""
    before = backends.BACKENDS["attention"]
    own = tuple(backend for backend in before if backend.name == name)
    if own and own[0].package and not is_installed(own[0].package):
        pytest.skip(f"{own[0].package} is not installed")
    backends.BACKENDS["attention"] = own
    try:
        yield
        assert chosen()["attention"].startswith(name)
    finally:
        backends.BACKENDS["attention"] = before


# flash-attn-4 compiles for seconds at each ratio of heads, kind of mask and pair of widths.
KINDS = [
    *(
        ("torch varlen", heads, (64, 64), window)
        for heads in ((8, 2), (4, 4), (3, 1))
        for window in (None, 1, 100)
    ),
    ("torch varlen", (4, 2), (192, 128), None),
    ("torch varlen", (4, 2), (64, 40), 100),
    *(("flash-attn-4", (8, 2), (64, 64), window) for window in (None, 1, 100)),
    ("flash-attn-4", (4, 4), (128, 128), None),
    ("flash-attn-4", (16, 2), (256, 256), None),
    ("flash-attn-4", (4, 4), (192, 128), None),
]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_attention(name, kind):
    backend, (heads, kv_heads), (width, value_width), window = kind
    lengths, key_lengths = PROBLEMS[name]
    q, k, _ = inputs(sum(lengths), sum(key_lengths), heads=heads, kv_heads=kv_heads, width=width)
    tensors = [q, k, normal(sum(key_lengths), kv_heads, value_width, seed=5)]
    options = {"bounds": joined(lengths), "key_bounds": joined(key_lengths), "window": window}
    exact = in_float64(tensors)
    want, want_lse = reference.attention_forward(*exact, **options)
    grad = normal(*want.shape, seed=7).detach()
    wanted = torch.autograd.grad(want, exact, grad.double())
    poison()
    with served_by(backend):
        out, lse = attention_forward(*tensors, **options)
        got = torch.autograd.grad(attention(*tensors, **options), tensors, grad)
    assert_close(out, want, 1e-2)
    assert_close(lse, want_lse, 1e-3)
    # Where every token sees itself alone, q and k have a gradient of exactly 0.
    alone = window == 1 or max(key_lengths) == 1
    for one, other in zip(got[:2], wanted[:2], strict=True):
        if alone:
            assert one.abs().max() <= 2e-2
        else:
            assert_close(one, other, 2e-2)
    assert_close(got[2], wanted[2], 2e-2)


@pytest.mark.parametrize("backend", ["torch varlen", "flash-attn-4"])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_with_sinks(backend, window):
    """By kernels that know no sinks."""
    tensors, bounds = inputs(400, 400, heads=8, kv_heads=2, width=64), joined([300, 1, 99])
    tensors.append(normal(8, seed=9))
    exact = in_float64(tensors)
    options = {"bounds": bounds, "window": window}
    want = reference.attention(*exact[:3], sinks=exact[3], **options)
    grad = normal(*want.shape, seed=7).detach()
    wanted = torch.autograd.grad(want, exact, grad.double())
    with served_by(backend):
        out = attention(*tensors[:3], sinks=tensors[3], **options)
        got = torch.autograd.grad(out, tensors, grad)
    assert_close(out, want, 1e-2)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 2e-2)


def poison():
    """Leaves NaN in the memory that the next tensors are made in."""
    torch.cuda.synchronize()
    chunks = [
        torch.full((size,), torch.nan, device="cuda") for size in (1 << 10, 1 << 16, 1 << 22) * 8
    ]
    del chunks


def test_varlen_attention_without_bounds():
    tensors = inputs(50, 90)
    assert_close(attention(*tensors), reference.attention(*in_float64(tensors)), 1e-2)


def test_varlen_attention_of_strided_rows_and_an_expanded_gradient():
    fused = normal(70, 12, 64)
    parts = [fused[:, :8], fused[:, 8:10], fused[:, 10:]]
    (exact,) = in_float64([fused])
    (got,) = torch.autograd.grad(attention(*parts).sum(), fused)
    want = reference.attention(exact[:, :8], exact[:, 8:10], exact[:, 10:])
    assert_close(got, torch.autograd.grad(want.sum(), exact)[0], 2e-2)


def test_varlen_attention_of_values_between_multiples_of_16_bytes():
    """As those of MLA whose keys have 12 dims without position and 4 with one."""
    q, k, joint = normal(70, 8, 16), normal(70, 8, 16, seed=1), normal(70, 8, 28, seed=2)
    exact = in_float64([q, k, joint])
    with using_kernels("plain"):
        got = torch.autograd.grad(attention(q, k, joint[..., 12:]).sum(), (q, k, joint))
        assert chosen()["attention"] == "torch varlen"
    want = reference.attention(exact[0], exact[1], exact[2][..., 12:]).sum()
    for grad, exact_grad in zip(got, torch.autograd.grad(want, exact), strict=True):
        assert_close(grad, exact_grad, 5e-2)


# flash-attn-4 multiplies values of the next run by 0, so a NaN there would spread.
@pytest.mark.parametrize(
    ("name", "garbage"), [("torch varlen", torch.nan), ("flash-attn-4", 100.0)]
)
def test_no_run_sees_another(name, garbage):
    tensors = inputs(400, 400)
    bounds = joined([100, 260, 40])
    grad = normal(400, 8, 64, seed=7).detach()
    kept = torch.cat([torch.arange(100), torch.arange(360, 400)])

    def results():
        out = attention(*tensors, bounds=bounds)
        return [x[kept] for x in (out, *torch.autograd.grad(out, tensors, grad))]

    with served_by(name):
        clean = results()
        for x in (*tensors, grad):
            x.data[100:360] = garbage
        out, *grads = results()
    assert torch.equal(out, clean[0])
    # The backward passes add in no fixed order.
    for one, other in zip(grads, clean[1:], strict=True):
        assert_close(one, other.double(), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_on_the_gpu(dtype):
    tensors = inputs(600, 640, dtype=dtype)
    options = {"bounds": joined([1, 599]), "key_bounds": joined([9, 631]), "window": 77}
    exact = in_float64(tensors)
    got, want = attention(*tensors, **options), reference.attention(*exact, **options)
    assert chosen()["attention"].startswith("plain torch")
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert_close(got, want, tolerance)
    for one, other in zip(
        torch.autograd.grad(got.square().sum(), tensors),
        torch.autograd.grad(want.square().sum(), exact),
        strict=True,
    ):
        assert_close(one, other, tolerance)


def test_the_host_never_waits():
    tensors = inputs(400, 400)
    bounds = joined([100, 260, 40])
    cos, sin = normal(400, 16).detach(), normal(400, 16).detach()
    hidden, weight = normal(400, 32), normal(1000, 32)
    labels = torch.arange(400, device="cuda")
    for _ in range(2):
        with nothing_waits():
            attention(*tensors, bounds=bounds, window=9).sum().backward()
            attention(*tensors).sum().backward()
            rotate(tensors[0], cos, sin).sum().backward()
            linear_cross_entropy(hidden, weight, labels).sum().backward()
            linear_cross_entropy(hidden, weight, labels, summed=True).sum().backward()
    with nothing_waits(), pytest.raises(RuntimeError, match="synchronizing"):
        labels[0].item()


def test_attention_in_a_cuda_graph():
    q, k, v = (x.detach() for x in inputs(400, 400))
    bounds = joined([100, 260, 40])
    attention(q, k, v, bounds=bounds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, bounds=bounds)
        plain = attention(q, k, v)
    q.copy_(q.flip(0))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, bounds=bounds))
    assert torch.equal(plain, attention(q, k, v))


def test_rotate():
    x, angles = normal(300, 4, 64), normal(300, 24, dtype=torch.float32, seed=3).detach() * 9
    (exact,) = in_float64([x])
    got = rotate(x, angles.cos(), angles.sin())
    want = reference.rotate(exact, angles.double().cos(), angles.double().sin())
    assert_close(got, want, 5e-3)
    (dx,) = torch.autograd.grad(got.sum(), x)
    assert_close(dx, torch.autograd.grad(want.sum(), exact)[0], 5e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_linear_cross_entropy(dtype, tolerance):
    hidden, weight = normal(501, 64, dtype=dtype), normal(3000, 64, dtype=dtype, seed=1)
    labels = torch.randint(3000, (501,), device="cuda")
    labels[[0, 7, 500]] = -100
    hidden.data[7] = torch.nan
    clean = hidden.detach().clone()
    clean[7] = 0
    exact = in_float64([clean, weight])
    got = linear_cross_entropy(hidden, weight, labels)
    want = reference.linear_cross_entropy(*exact, labels)
    assert got.dtype == torch.float32
    assert_close(got, want, 1e-5)
    grad = torch.linspace(-1, 2, 501, device="cuda")
    grads = torch.autograd.grad(got, (hidden, weight), grad)
    wanted = torch.autograd.grad(want, exact, grad.double())
    for one, other in zip(grads, wanted, strict=True):
        assert_close(one, other, tolerance)
    assert (grads[0][[0, 7, 500]] == 0).all()


def test_linear_cross_entropy_in_plain_torch_holds_an_eighth_of_the_logits_at_most():
    tokens, vocabulary = 4096, 32768
    hidden, weight = normal(tokens, 16), normal(vocabulary, 16, seed=1)
    labels = torch.arange(tokens, device="cuda")
    with using_kernels("plain"):
        linear_cross_entropy(hidden, weight, labels).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, labels).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocabulary * 4 / 8
