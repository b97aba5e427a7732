from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longshore.batch import Boundaries
from longshore.ops import attention_varlen
from longshore.ops.backends import ATTENTION, AttentionBackend, pick_attention


def on_cuda(dtype=torch.bfloat16, *, tokens=4, width=64):
    """What a backend asks of a tensor on a GPU, without a GPU."""
    return SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 0), dtype=dtype, shape=(tokens, 2, width)
    )


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_on_the_cpu_blocks_serve_every_dtype():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = torch.zeros(4, 2, 64, dtype=dtype)
        picked = pick_attention(x, x)
        assert picked.name == "blocks"
        assert picked.reason == "varlen: the tensors are on cpu, not on CUDA"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_cuda_is_for_varlen(dtype):
    picked = pick_attention(on_cuda(dtype), on_cuda(dtype))
    assert (picked.name, picked.reason) == ("varlen", "the first choice")
    assert picked.forward is attention_varlen.forward
    assert picked.backward is attention_varlen.backward


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("q", "v", "why"),
    [
        (on_cuda(torch.float32), on_cuda(torch.float32), "torch.float32 is not half precision"),
        (on_cuda(torch.float64), on_cuda(torch.float64), "torch.float64 is not half precision"),
        (on_cuda(), on_cuda(width=32), "values have width 32 and queries 64"),
        (on_cuda(width=60), on_cuda(width=60), "width of 60 is not a multiple of 8"),
        (on_cuda(width=264), on_cuda(width=264), "width of 264 is not a multiple of 8 up to 256"),
        (on_cuda(tokens=0), on_cuda(tokens=0), "there are no rows"),
    ],
)
def test_the_rest_on_cuda_is_for_blocks(q, v, why):
    picked = pick_attention(q, v)
    assert picked.name == "blocks"
    assert why in picked.reason


def test_old_devices_are_for_blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than compute capability 8.0" in pick_attention(on_cuda(), on_cuda()).reason


def test_the_order_decides_and_the_last_takes_all():
    x = torch.zeros(1, 1, 8)
    assert [backend.name for backend in ATTENTION] == ["varlen", "blocks"]
    assert ATTENTION[-1].refusal(x, x) is None
    blocks = ATTENTION[-1]
    first = AttentionBackend("first", lambda q, v: None, blocks.forward, blocks.backward)
    never = AttentionBackend("never", lambda q, v: "it is new", blocks.forward, blocks.backward)
    assert pick_attention(x, x, among=(first, *ATTENTION)).name == "first"
    assert pick_attention(x, x, among=(never, blocks)).reason == "never: it is new"
    with pytest.raises(ValueError, match="never: it is new"):
        pick_attention(x, x, among=(never,))


@pytest.mark.parametrize("window", [None, 3])
def test_varlen_calls_its_ops_by_their_schema(window):
    """With tensors that have shapes and no numbers; the numbers are compared on a GPU."""
    with FakeTensorMode():
        q, k = (torch.empty(n, h, 64, dtype=torch.bfloat16) for n, h in ((5, 4), (9, 2)))
        bounds = Boundaries((0, 5), torch.empty(2, dtype=torch.int32), 5)
        key_bounds = Boundaries((0, 9), torch.empty(2, dtype=torch.int32), 9)
        options = {"bounds": bounds, "key_bounds": key_bounds, "scale": 0.1, "window": window}
        out, lse = attention_varlen.forward(q, k, k, **options)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (4, 5), torch.float32)
        grads = attention_varlen.backward(out, q, k, k, out, lse, **options)
        assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
