from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longshore.batch import Boundaries
from longshore.ops import attention_varlen, backends
from longshore.ops.attention import AttentionSpec
from longshore.ops.backends import Backend, chosen, kernels_line, pick, use_kernels, using_kernels


class OnCuda(SimpleNamespace):
    """What a backend asks of a tensor on a GPU, without a GPU."""

    def __len__(self):
        return self.shape[0]


def on_cuda(dtype=torch.bfloat16, *, tokens=4, width=64):
    device = torch.device("cuda", 0)
    return OnCuda(is_cuda=True, device=device, dtype=dtype, shape=(tokens, 2, width))


@pytest.fixture(autouse=True)
def nothing_served(monkeypatch):
    """Tests change what tensors on CUDA are served by."""
    monkeypatch.setattr(backends, "_served", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(backends, "capability", lambda device: (9, 0))


def test_on_the_cpu_plain_torch_serves_every_dtype():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.zeros(4, 2, 64, dtype=dtype)
        assert pick("attention", x, x) is None
        assert chosen()["attention"].startswith("plain torch (flash-attn-4: the tensors are on cpu")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_cuda_is_for_varlen(dtype):
    """Also with narrower values, which it pads."""
    for width in (64, 40):
        with using_kernels("plain"):
            assert (
                pick("attention", on_cuda(dtype), on_cuda(dtype, width=width)) is attention_varlen
            )
            assert chosen() == {"attention": "torch varlen"}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("q", "v", "why"),
    [
        (on_cuda(torch.float32), on_cuda(torch.float32), "torch.float32 is not half precision"),
        (on_cuda(torch.float64), on_cuda(torch.float64), "torch.float64 is not half precision"),
        (on_cuda(), on_cuda(width=72), "values of width 72 are wider than queries of 64"),
        (on_cuda(width=60), on_cuda(width=60), "width of 60 is not a multiple of 8"),
        (on_cuda(width=264), on_cuda(width=264), "width of 264 is not a multiple of 8 up to 256"),
        (on_cuda(tokens=0), on_cuda(tokens=0), "there are no rows"),
    ],
)
def test_the_rest_on_cuda_is_for_plain_torch(q, v, why):
    assert pick("attention", q, v) is None
    assert why in chosen()["attention"]


def test_old_devices_are_for_plain_torch(monkeypatch):
    monkeypatch.setattr(backends, "capability", lambda device: (7, 5))
    assert pick("attention", on_cuda(), on_cuda()) is None
    assert "older than compute capability 8.0" in chosen()["attention"]


def test_tensors_on_a_device_that_is_not_current_are_for_torch(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on."""
    own = Backend("own", "longshore.ops.conv", lambda x: None)
    foreign = Backend("foreign", "longshore.ops.pointwise", lambda x: None, package="torch")
    monkeypatch.setitem(backends.BACKENDS, "op", (foreign, own))
    answers = []
    for current in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        pick("op", on_cuda())
        answers.append(chosen()["op"])
    assert answers == ["foreign", "own", "foreign"]
    monkeypatch.setitem(backends.BACKENDS, "op", (foreign,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pick("op", on_cuda()) is None
    assert "the tensors are on cuda:0, but cuda:1 is current" in chosen()["op"]


def test_the_order_decides_and_every_refusal_is_said(monkeypatch):
    first = Backend("first", "longshore.ops.pointwise", lambda x: None)
    never = Backend("never", "nowhere", lambda x: "it is new")
    foreign = Backend("foreign", "nowhere", lambda x: None, package="no_such_package.part")
    x = torch.zeros(1)
    monkeypatch.setattr(backends, "BACKENDS", {"op": (never, foreign, first), "other": (never,)})
    monkeypatch.setattr(backends, "_chosen", {})
    assert pick("op", x).__name__ == "longshore.ops.pointwise"
    assert pick("other", x) is None
    assert kernels_line() == "op by first; other by plain torch (never: it is new)"
    monkeypatch.setattr(backends, "BACKENDS", {"op": (foreign,)})
    assert pick("op", x) is None
    assert chosen()["op"] == "plain torch (foreign: no_such_package.part is not installed)"


def test_on_cuda_a_backend_is_asked_once_for_each_kind_of_call(monkeypatch):
    calls = []
    first = Backend("first", "longshore.ops.pointwise", lambda x: calls.append(x.shape))
    none = Backend("none", "nowhere", lambda x: "never")
    monkeypatch.setattr(backends, "BACKENDS", {"op": (first,)})
    monkeypatch.setattr(backends, "_chosen", {})
    for x in (on_cuda(), on_cuda(), on_cuda(tokens=0), on_cuda(torch.float16), on_cuda()):
        assert pick("op", x).__name__ == "longshore.ops.pointwise"
    assert calls == [(4, 2, 64), (0, 2, 64), (4, 2, 64)]
    monkeypatch.setitem(backends.BACKENDS, "op", (none,))
    assert pick("op", on_cuda()) is None
    monkeypatch.setitem(backends.BACKENDS, "op", (first,))
    assert pick("op", on_cuda()) is not None
    backends._chosen.clear()
    pick("op", on_cuda())
    assert chosen() == {"op": "first"}
    with using_kernels("plain"):
        pick("op", on_cuda())
    assert len(calls) == 5


def test_plain_rules_out_what_is_not_torch(monkeypatch):
    package = Backend("package", "longshore.ops.pointwise", lambda x: None, package="torch")
    monkeypatch.setattr(backends, "BACKENDS", {"op": (package,)})
    x = torch.zeros(1)
    assert pick("op", x) is not None
    with using_kernels("plain"):
        assert pick("op", x) is None
        assert chosen()["op"] == "plain torch (package: train.kernels is plain)"
    assert pick("op", x) is not None
    use_kernels("auto")


@pytest.mark.parametrize("value_width", [64, 40])
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_calls_its_ops_by_their_schema(window, value_width):
    """With tensors that have shapes and no numbers; the numbers are compared on a GPU."""
    with FakeTensorMode():
        q, k = (torch.empty(n, h, 64, dtype=torch.bfloat16) for n, h in ((5, 4), (9, 2)))
        v = torch.empty(9, 2, value_width, dtype=torch.bfloat16)
        bounds = Boundaries((0, 5), torch.empty(2, dtype=torch.int32), 5)
        key_bounds = Boundaries((0, 9), torch.empty(2, dtype=torch.int32), 9)
        spec = AttentionSpec(bounds, key_bounds, 0.1, window)
        out, lse = attention_varlen.forward(q, k, v, spec)
        assert (out.shape, lse.shape, lse.dtype) == ((5, 4, value_width), (4, 5), torch.float32)
        grads = attention_varlen.backward(out, q, k, v, out, lse, spec)
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
