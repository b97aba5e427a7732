"""The kernels of the loss against the twin in float64, on CUDA or in Triton's interpreter."""

import os
from types import SimpleNamespace

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton")

from tests.ranks.hybrids import deepseek  # noqa: E402
from tests.ranks.spine import MTP_WEIGHT, batches_of, make_samples  # noqa: E402

from longshore.model.decoder import Decoder  # noqa: E402
from longshore.model.init import init_decoder  # noqa: E402
from longshore.ops import backends, cross_entropy, reference  # noqa: E402
from longshore.ops.cross_entropy import linear_cross_entropy  # noqa: E402
from longshore.ops.kernels import cross_entropy as kernels  # noqa: E402
from longshore.parallel import pipeline as executor  # noqa: E402
from longshore.plan import make_plan  # noqa: E402
from longshore.train import step  # noqa: E402
from longshore.train.losses import make_loss  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Picked on the CPU too; and memory that nothing wrote is NaN."""
    if not CUDA:
        monkeypatch.setattr(backends, "_interpreted", lambda: True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        monkeypatch.setattr(kernels, "BLOCK", 64)
    for name in ("empty_like", "empty"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def poisoned(allocate):
    def allocate_nan(*args, **options):
        out = allocate(*args, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    return allocate_nan


def inputs(tokens, vocabulary, width=5, *, dtype=torch.float32, ignored=()):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(DEVICE, dtype)
    weight = torch.randn(vocabulary, width, generator=draw).to(DEVICE, dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=draw)
    labels[list(ignored)] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels.to(DEVICE)


def in_float64(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def assert_close(got, want, tolerance=TOLERANCE[torch.float32]):
    assert got.shape == want.shape
    assert got.isfinite().all()
    if want.numel():
        assert (got.double() - want).abs().max() <= tolerance * want.abs().max()


def assert_as_twin(hidden, weight, labels, *, summed, factor=None, **options):
    """factor: the gradient of every loss; None for other gradients of each."""
    got = linear_cross_entropy(hidden, weight, labels, summed=summed, **options)
    assert backends.chosen()["loss"] == "triton"
    exact = in_float64(hidden, weight)
    want = reference.linear_cross_entropy(*exact, labels)
    assert got.dtype == torch.float32
    assert_close(got, want, 1e-5)
    grad = torch.linspace(-1, 2, len(got), device=DEVICE) if factor is None else factor
    upstream = torch.as_tensor(grad, device=DEVICE).expand(len(got))
    grads = torch.autograd.grad(got, (hidden, weight), upstream)
    for one, other, x in zip(
        grads, torch.autograd.grad(want, exact, upstream.double()), (hidden, weight), strict=True
    ):
        assert one.dtype == x.dtype
        assert_close(one, other, TOLERANCE[x.dtype])
    assert (grads[0][labels == -100] == 0).all()


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk", "ignored"),
    [
        (1, 1, None, []),
        (1, 63, None, []),
        (7, 64, 3, [0, 6]),
        (13, 65, 5, [2]),
        (10, 201, 4, []),
        (3, 130, 1, [0, 1, 2]),
        (0, 9, None, []),
    ],
)
def test_as_the_twin(tokens, vocabulary, chunk, ignored, summed):
    tensors = inputs(tokens, vocabulary, ignored=ignored)
    factor = 0.25 if summed else None
    assert_as_twin(*tensors, summed=summed, factor=factor, chunk_tokens=chunk)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, summed):
    tensors = inputs(12, 100, 8, dtype=dtype, ignored=[3])
    assert_as_twin(*tensors, summed=summed, factor=0.3 if summed else None, chunk_tokens=5)


@pytest.mark.parametrize("summed", [False, True])
def test_large_logits_do_not_overflow(summed):
    hidden, weight, labels = inputs(6, 150)
    hidden = (hidden * 300).detach().requires_grad_()
    assert_as_twin(hidden, weight, labels, summed=summed, factor=1.0)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_ignored_rows_give_zero_whatever_they_hold(junk, summed):
    ignored, kept = [0, 4, 5, 8], [1, 2, 3, 6, 7]
    hidden, weight, labels = inputs(9, 70, ignored=ignored)
    with torch.no_grad():
        hidden[ignored] = junk
    upstream = torch.full((9,), 0.5, device=DEVICE)
    upstream[ignored] = junk
    nll = linear_cross_entropy(hidden, weight, labels, summed=summed, chunk_tokens=4)
    dhidden, dweight = torch.autograd.grad(nll, (hidden, weight), upstream)
    assert (nll[ignored] == 0).all()
    assert (dhidden[ignored] == 0).all()
    exact = in_float64(hidden[kept], weight)
    want = reference.linear_cross_entropy(*exact, labels[kept])
    clean = torch.autograd.grad(want.sum() / 2, exact)
    assert_close(dhidden[kept], clean[0])
    assert_close(dweight, clean[1])


def test_the_kernels_write_zeros_over_ignored_rows_of_nan():
    logits = torch.full((2, 70), torch.nan, device=DEVICE)
    labels = torch.tensor([-100, -100], device=DEVICE)
    nll, lse = torch.empty(2, device=DEVICE), torch.empty(2, device=DEVICE)
    dlogits = torch.empty(2, 70, device=DEVICE)
    kernels._both(logits, labels, nll, dlogits, ignore=-100)
    assert not nll.any()
    assert not dlogits.any()
    size = {"vocabulary": 70, "ignore": -100, "BLOCK": kernels.BLOCK}
    kernels._loss_kernel[(2,)](logits, labels, nll.fill_(torch.nan), lse, **size)
    dlogits.fill_(torch.nan)
    kernels._gradient_kernel[(2,)](logits, labels, lse, torch.ones_like(lse), dlogits, **size)
    assert not nll.any()
    assert not dlogits.any()


def test_a_label_outside_the_vocabulary_gives_nan():
    logits, labels = torch.zeros(2, 70, device=DEVICE), torch.tensor([70, -1], device=DEVICE)
    nll, dlogits = torch.zeros(2, device=DEVICE), torch.zeros(2, 70, device=DEVICE)
    kernels._both(logits, labels, nll, dlogits, ignore=-100)
    assert nll.isnan().all()
    assert dlogits.isnan().all()


@pytest.mark.parametrize("different", [0.5, torch.nan])
def test_gradients_that_differ_break_the_promise_of_a_sum(different):
    hidden, weight, labels = inputs(6, 20, ignored=[2])
    nll = linear_cross_entropy(hidden, weight, labels, summed=True)
    upstream = torch.ones(6, device=DEVICE)
    upstream[5] = different
    dhidden, dweight = torch.autograd.grad(nll, (hidden, weight), upstream)
    assert dweight.isnan().all()
    assert dhidden[labels != -100].isnan().all()
    assert (dhidden[2] == 0).all()


@pytest.mark.parametrize("summed", [False, True])
def test_no_label_gives_zeros(summed):
    hidden, weight, labels = inputs(5, 7, ignored=range(5))
    nll = linear_cross_entropy(hidden, weight, labels, summed=summed)
    assert nll.tolist() == [0] * 5
    for grad in torch.autograd.grad(nll, (hidden, weight), torch.arange(5.0, device=DEVICE)):
        assert (grad == 0).all()


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("wanted", [0, 1])
def test_only_one_gradient_wanted(wanted, summed):
    hidden, weight, labels = inputs(9, 20)
    nll = linear_cross_entropy(hidden, weight, labels, summed=summed)
    both = torch.autograd.grad(nll.sum(), (hidden, weight))
    tensors = [hidden.detach(), weight.detach()]
    tensors[wanted].requires_grad_()
    nll = linear_cross_entropy(*tensors, labels, summed=summed)
    (one,) = torch.autograd.grad(nll.sum(), tensors[wanted])
    assert torch.equal(one, both[wanted])


def test_without_gradients_only_losses_are_computed(monkeypatch):
    hidden, weight, labels = inputs(9, 20)
    want = linear_cross_entropy(hidden, weight, labels, summed=True)
    monkeypatch.setattr(kernels, "_both", None)
    with torch.no_grad():
        assert_close(linear_cross_entropy(hidden, weight, labels, summed=True), want.double())
    nll = linear_cross_entropy(hidden.detach(), weight.detach(), labels, summed=True)
    assert_close(nll, want.double())


def test_a_sum_has_three_products(monkeypatch):
    hidden, weight, labels = inputs(8, 20)
    calls = []
    for name in ("product", "add_product"):
        function = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *args, run=function: (calls.append(1), run(*args))[1]
        )
    for summed, products in ((True, 3), (False, 4)):
        calls.clear()
        linear_cross_entropy(hidden, weight, labels, summed=summed, chunk_tokens=4).sum().backward()
        assert len(calls) == 2 * products


def test_backward_twice():
    hidden, weight, labels = inputs(8, 20)
    total = linear_cross_entropy(hidden, weight, labels, summed=True).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    assert all(map(torch.equal, first, second))


def test_a_step_keeps_its_promise(monkeypatch):
    """A whole model with two depths: its losses are only summed, so nothing becomes NaN."""
    monkeypatch.setattr(backends, "_interpreted", lambda: False)
    monkeypatch.setattr(executor, "begin_round", lambda model, **options: None)
    plan = make_plan([9, 5, 3, 12], lanes=1, capacity=16)
    batches = batches_of(plan, make_samples(plan), 0, 2)
    here, gradients = SimpleNamespace(device=torch.device(DEVICE), tp=1), []
    for module in (kernels, None):
        monkeypatch.setattr(cross_entropy, "pick", lambda *args, module=module: module)
        model = Decoder(deepseek())
        init_decoder(model, seed=3)
        stepper = step.Stepper(model.to(DEVICE), None, here, "none", make_loss(), 0.0, MTP_WEIGHT)
        stepper.gradients(batches, batches[0].counts.main)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_close(gradient, gradients[1][name].double(), 1e-4)


def test_float64_and_plain_stay_with_torch():
    hidden, weight, labels = inputs(8, 20)
    nll = linear_cross_entropy(hidden.double(), weight.double(), labels, summed=True)
    assert nll.dtype == torch.float64
    assert backends.chosen()["loss"].startswith("plain torch (triton: float64")
    with backends.using_kernels("plain"):
        linear_cross_entropy(hidden, weight, labels, summed=True)
        assert backends.chosen()["loss"] == "plain torch (triton: train.kernels is plain)"


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("summed", [False, True])
def test_a_large_vocabulary_in_bfloat16(summed):
    """More than one block of columns, not a multiple of anything."""
    tensors = inputs(600, 20_011, 64, dtype=torch.bfloat16, ignored=[0, 599])
    assert_as_twin(*tensors, summed=summed, factor=0.3 if summed else None)


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_rows_past_two_to_the_31():
    rows, vocabulary = 9000, 262_144
    logits = torch.zeros(rows, vocabulary, device=DEVICE)
    labels = torch.arange(rows, device=DEVICE)
    nll = torch.zeros(rows, device=DEVICE)
    dlogits = torch.zeros(rows, vocabulary, device=DEVICE, dtype=torch.bfloat16)
    kernels._both(logits, labels, nll, dlogits, ignore=-100)
    assert (nll - torch.tensor(float(vocabulary)).log().item()).abs().max() < 1e-4
    assert (dlogits[-1].float().argmin() == rows - 1).item()
    assert (dlogits[:, -1] == dlogits[0, -1]).all()


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("summed", [False, True])
def test_half_of_the_logits_at_most(summed):
    tokens, vocabulary, width = 4096, 32768, 16
    hidden, weight, labels = inputs(tokens, vocabulary, width, dtype=torch.bfloat16)
    linear_cross_entropy(hidden, weight, labels, summed=summed).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, summed=summed).sum().backward()
    gradients = 2 * vocabulary * width * 4
    most = tokens // 2 * vocabulary * (4 + 2) + gradients + (8 << 20)
    assert torch.cuda.max_memory_allocated() - before < most
