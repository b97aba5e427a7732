"""Our attention against flash-attn-4 called directly.

In: heads, key heads, width, value width, and the lengths of packs. Out: TFLOP/s of forward and
backward, counting only the pairs a token may see: forward 2·H·pairs·(D + V), backward 2·H·pairs·
(3·D + 2·V).
"""

import inspect
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from longshore.batch import Boundaries
from longshore.ops.attention import attention
from longshore.ops.backends import chosen

Shape = tuple[int, int, int, int]


def compare(shape: Shape, packs: list[list[int]]) -> dict[str, Any]:
    heads, _, width, value_width = shape
    pairs = sum(n * (n + 1) // 2 for pack in packs for n in pack)
    flops = 2 * heads * pairs * (4 * width + 3 * value_width)
    inputs = [(_tensors(shape, sum(pack)), _bounds(pack)) for pack in packs]
    ours = _seconds(lambda: _run(_ours, inputs))
    backend = chosen()["attention"]
    result = {"ours_tflops": flops / ours / 1e12, "ours_ms": ours * 1e3, "backend": backend}
    direct = _direct_function()
    if direct is not None:
        theirs = _seconds(lambda: _run(direct, inputs))
        # Alternating, and the better of two for both.
        ours = min(ours, _seconds(lambda: _run(_ours, inputs)))
        theirs = min(theirs, _seconds(lambda: _run(direct, inputs)))
        result |= {
            "ours_tflops": flops / ours / 1e12,
            "direct_tflops": flops / theirs / 1e12,
            "ratio": theirs / ours,
        }
    return result


def _tensors(shape: Shape, rows: int) -> list[Tensor]:
    heads, kv_heads, width, value_width = shape
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    sizes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    inputs = [torch.randn(rows, *size, device=device, dtype=dtype).requires_grad_()
              for size in sizes]  # fmt: skip
    return [*inputs, torch.randn(rows, heads, value_width, device=device, dtype=dtype)]


def _bounds(lengths: list[int]) -> Boundaries:
    offsets = (0, *accumulate(lengths))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    return Boundaries(offsets, cu_seqlens, max(lengths))


def _run(function: Callable[..., Tensor], inputs: list[tuple[list[Tensor], Boundaries]]) -> None:
    for (q, k, v, grad), bounds in inputs:
        torch.autograd.grad(function(q, k, v, bounds), (q, k, v), grad)


def _ours(q: Tensor, k: Tensor, v: Tensor, bounds: Boundaries) -> Tensor:
    return attention(q, k, v, bounds=bounds)


def _direct_function() -> Callable[..., Tensor] | None:
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError:
        return None
    known = inspect.signature(flash_attn_varlen_func).parameters

    def direct(q: Tensor, k: Tensor, v: Tensor, bounds: Boundaries) -> Tensor:
        options = {
            "cu_seqlens_q": bounds.cu_seqlens,
            "cu_seqlens_k": bounds.cu_seqlens,
            "max_seqlen_q": bounds.longest,
            "max_seqlen_k": bounds.longest,
            "causal": True,
        }
        options = {name: value for name, value in options.items() if name in known}
        out = flash_attn_varlen_func(q, k, v, **options)
        output: Tensor = out[0] if isinstance(out, tuple) else out
        return output

    return direct


def _seconds(function: Callable[[], None], times: int = 10) -> float:
    has_gpu = torch.cuda.is_available()
    wait: Callable[[], None] = torch.cuda.synchronize if has_gpu else lambda: None
    for _ in range(3):
        function()
    results = []
    for _ in range(times):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        results.append(time.perf_counter() - begin)
    return statistics.median(results)
