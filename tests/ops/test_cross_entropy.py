import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from longshore.ops import reference
from longshore.ops.cross_entropy import linear_cross_entropy
from longshore.ops.sizes import kernel_logits_chunk, logits_chunk, loss_bytes


class LiveBytes(TorchDispatchMode):
    """Adds up what is alive of all memory taken since it began, after each operator."""

    def __init__(self):
        super().__init__()
        self.alive = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {self.key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and self.key(x) not in known:
                storage = x.untyped_storage()
                self.alive[self.key(x)] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return made

    @staticmethod
    def key(x):
        return x.untyped_storage()._cdata


def inputs(tokens, vocabulary, width=5, *, dtype=torch.float64, ignored=()):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=torch.float64, generator=draw)
    weight = torch.randn(vocabulary, width, dtype=torch.float64, generator=draw)
    labels = torch.randint(vocabulary, (tokens,), generator=draw)
    labels[list(ignored)] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def assert_close(got, want, tolerance=1e-9):
    assert got.shape == want.shape
    if want.numel():
        assert (got - want).abs().max() <= tolerance * want.abs().max()


def assert_as_twin(hidden, weight, labels, **options):
    got = linear_cross_entropy(hidden, weight, labels, **options)
    options.pop("chunk_tokens", None)
    want = reference.linear_cross_entropy(hidden, weight, labels, **options)
    assert got.dtype == want.dtype
    assert_close(got, want)
    grad = torch.linspace(-1, 2, len(got), dtype=got.dtype)
    for one, other in zip(
        torch.autograd.grad(got, (hidden, weight), grad),
        torch.autograd.grad(want, (hidden, weight), grad),
        strict=True,
    ):
        assert_close(one, other)


def test_by_hand():
    hidden = torch.tensor([[1.0], [0.0], [2.0]])
    weight = torch.tensor([[0.0], [1.0]])
    labels = torch.tensor([1, 0, -100])
    want = [-torch.tensor(1.0).sigmoid().log().item(), torch.tensor(2.0).log().item(), 0]
    assert linear_cross_entropy(hidden, weight, labels).tolist() == pytest.approx(want)


@pytest.mark.property
@given(
    tokens=st.integers(0, 40),
    vocabulary=st.integers(1, 20),
    chunk_tokens=st.none() | st.integers(1, 50),
    ignored=st.sets(st.integers(0, 39)),
    softcap=st.sampled_from([None, 1.5]),
)
def test_as_the_twin(tokens, vocabulary, chunk_tokens, ignored, softcap):
    here = [row for row in ignored if row < tokens]
    rows = inputs(tokens, vocabulary, ignored=here)
    assert_as_twin(*rows, chunk_tokens=chunk_tokens, softcap=softcap)


def test_large_logits_do_not_overflow():
    hidden, weight, labels = inputs(20, 7)
    assert_as_twin((hidden * 1e4).detach().requires_grad_(), weight, labels)


def test_another_label_may_be_ignored():
    hidden, weight, labels = inputs(20, 7)
    assert_as_twin(hidden, weight, labels, ignore=3)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
def test_ignored_rows_give_zero_whatever_they_hold(junk):
    ignored = [0, 7, 8, 19]
    hidden, weight, labels = inputs(20, 7, ignored=ignored)
    with torch.no_grad():
        hidden[ignored] = junk
    got = linear_cross_entropy(hidden, weight, labels)
    assert (got[ignored] == 0).all()
    upstream = torch.ones(20, dtype=torch.float64)
    upstream[ignored] = junk
    dhidden, dweight = torch.autograd.grad(got, (hidden, weight), upstream)
    assert (dhidden[ignored] == 0).all()
    kept = [row for row in range(20) if row not in ignored]
    clean = linear_cross_entropy(hidden.detach()[kept], weight, labels[kept])
    assert_close(dweight, torch.autograd.grad(clean.sum(), weight)[0])
    assert dhidden[kept].isfinite().all()


def test_all_rows_ignored():
    hidden, weight, labels = inputs(5, 7, ignored=range(5))
    got = linear_cross_entropy(hidden, weight, labels)
    assert got.tolist() == [0] * 5
    for grad in torch.autograd.grad(got.sum(), (hidden, weight)):
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_in_float32(dtype):
    hidden, weight, labels = inputs(33, 11, dtype=dtype)
    got = linear_cross_entropy(hidden, weight, labels)
    want = reference.linear_cross_entropy(hidden.double(), weight.double(), labels)
    assert got.dtype == torch.float32
    assert_close(got.double(), want, 1e-6)
    grads = torch.autograd.grad(got.sum(), (hidden, weight))
    assert [g.dtype for g in grads] == [dtype, dtype]


def test_the_gradient_of_the_weight_adds_up_in_float32():
    """In bfloat16, 256 + 1 is 256: many small gradients after a large one would be lost."""
    tokens = 512
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    upstream = torch.ones(tokens)
    upstream[0] = 1024.0
    got = linear_cross_entropy(hidden, weight, labels, chunk_tokens=1)
    (grad,) = torch.autograd.grad(got, weight, upstream)
    exact = torch.tensor([[-0.5], [0.5]]) * upstream.sum()
    assert torch.equal(grad, exact.bfloat16())


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_one_gradient_wanted(wanted):
    hidden, weight, labels = inputs(18, 7)
    both = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).sum(), (hidden, weight))
    tensors = [hidden.detach(), weight.detach()]
    tensors[wanted].requires_grad_()
    (one,) = torch.autograd.grad(linear_cross_entropy(*tensors, labels).sum(), tensors[wanted])
    assert torch.equal(one, both[wanted])


def test_under_checkpointing():
    hidden, weight, labels = inputs(18, 7)
    plain = linear_cross_entropy(hidden, weight, labels)
    again = checkpoint(linear_cross_entropy, hidden, weight, labels, use_reentrant=False)
    for one, other in zip(
        torch.autograd.grad(plain.sum(), (hidden, weight)),
        torch.autograd.grad(again.sum(), (hidden, weight)),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [16, 37, 500])
def test_logits_are_never_all_alive(tokens, dtype):
    vocabulary = 4096
    hidden, weight, labels = inputs(tokens, vocabulary, 1, dtype=dtype)
    row = vocabulary * dtype.itemsize
    most = tokens * row / 8
    with LiveBytes() as forward:
        loss = linear_cross_entropy(hidden, weight, labels)
    assert row <= forward.peak < most
    with LiveBytes() as backward:
        loss.sum().backward()
    # The gradient of the weight is no logits, and here as large as one row of them.
    assert row <= backward.peak - weight.nbytes < most


def test_the_twin_holds_all_logits():
    """So that the count above is known to count."""
    hidden, weight, labels = inputs(64, 512, 1)
    with LiveBytes() as forward:
        reference.linear_cross_entropy(hidden, weight, labels)
    assert forward.peak >= 64 * 512 * 8


def test_tokens_of_a_chunk_of_logits():
    assert logits_chunk(4096, 4 * 8192) == 256
    assert logits_chunk(32768, 4 * 152_064) == 882
    assert logits_chunk(32768, 8 * 152_064) == 441
    assert logits_chunk(32768, 4 * 10_000_000) == 16
    assert logits_chunk(15, 4 * 8) == logits_chunk(0, 4 * 8) == 1


def test_tokens_of_a_chunk_of_logits_with_kernels():
    assert kernel_logits_chunk(4096, 4 * 8192) == 2048
    assert kernel_logits_chunk(32768, 4 * 152_064) == 2048
    assert kernel_logits_chunk(16384, 4 * 262_144) == 1280
    assert kernel_logits_chunk(32768, 4 * 10_000_000) == 33
    assert kernel_logits_chunk(257, 4 * 8) == kernel_logits_chunk(512, 4 * 8) == 256
    assert kernel_logits_chunk(100, 4 * 8) == 100
    assert kernel_logits_chunk(0, 4 * 8) == 1


@given(st.integers(257, 1 << 20), st.integers(1, 1 << 19))
def test_with_kernels_chunks_are_half_of_all_tokens_and_of_a_size(tokens, vocabulary):
    rows = kernel_logits_chunk(tokens, 4 * vocabulary)
    assert rows * 4 * vocabulary <= 1280 << 20
    assert rows % 256 == 0
    assert rows < tokens / 2 + 256


def test_memory_of_the_loss():
    sizes = {"vocabulary": 152_064, "width": 1024, "item": 2}
    head = 152_064 * 1024 * 4
    plain = 2 * 882 * 152_064 * 4 + head
    assert loss_bytes(32768, **sizes, kernels=False) == plain
    chunk, hidden = 2048 * 152_064 * (4 + 2), 32768 * 1024 * 2
    assert loss_bytes(32768, **sizes, kernels=True) == chunk + head + hidden
    assert loss_bytes(32768, **sizes, heads=3, kernels=True) == chunk + 3 * (head + hidden)


def test_on_the_cpu_a_sum_changes_nothing():
    hidden, weight, labels = inputs(33, 11, dtype=torch.float32, ignored=[3])
    each = [linear_cross_entropy(hidden, weight, labels, summed=summed) for summed in (False, True)]
    assert torch.equal(*each)
    upstream = torch.linspace(-1, 2, 33)
    for one, other in zip(
        *(torch.autograd.grad(nll, (hidden, weight), upstream) for nll in each), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("label", "words"), [(7, "label 7 of row 2"), (-1, "label -1 of row 2")])
def test_labels_outside_the_vocabulary_are_refused(label, words):
    hidden, weight, labels = inputs(5, 7)
    labels[2] = label
    with pytest.raises(ValueError, match=f"{words} is outside the vocabulary of 7"):
        linear_cross_entropy(hidden, weight, labels)


def test_bad_arguments_are_refused():
    hidden, weight, labels = inputs(5, 7)
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=0)
    with pytest.raises(ValueError, match="one for each row"):
        linear_cross_entropy(hidden, weight, labels[:4])
    with pytest.raises(ValueError, match="give one dtype"):
        linear_cross_entropy(hidden.float(), weight, labels)
    with pytest.raises(ValueError, match=r"give \(tokens, width\)"):
        linear_cross_entropy(hidden, weight[:, :3], labels)
