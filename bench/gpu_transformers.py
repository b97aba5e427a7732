"""Hugging Face transformers in its strongest form, beside bench/gpu.py's Qwen3-0.6B.

In: the lengths of packs. Out: tokens/s and peak memory of forward and backward, without optimizer.
Qwen3ForCausalLM with random weights in bf16, sequences packed without padding: attention is torch's
`varlen_attn`, registered through transformers' interface, position ids start again with each
sequence, norms and feed-forwards are compiled. The loss is transformers' own, with all logits. If
a pack does not fit into memory, packs are halved.
"""

import inspect
import statistics
import time
from collections.abc import Callable
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
SPANS: ContextVar[tuple[Tensor, int]] = ContextVar("spans")


def measure_transformers(
    packs: list[list[int]], *, smoke: bool, warmup: int = 2, times: int = 5
) -> dict[str, Any]:
    model = make_model(smoke=smoke)
    has_gpu = torch.cuda.is_available()
    while True:
        try:
            if has_gpu:
                torch.cuda.reset_peak_memory_stats()
            results = [_pass(model, packs) for _ in range(warmup + times)][warmup:]
            break
        except torch.OutOfMemoryError:
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
            packs = halved(packs)
    tokens, elapsed = sum(map(sum, packs)), statistics.median(results)
    return {
        "tokens_per_s": tokens / elapsed,
        "ms": elapsed * 1e3,
        "tokens": tokens,
        "largest_pack": max(map(sum, packs)),
        "memory_gib": torch.cuda.max_memory_allocated() / GIB if has_gpu else None,
    }


def halved(packs: list[list[int]]) -> list[list[int]]:
    """Each pack's sequences over two; a pack of one sequence stays."""
    if all(len(pack) == 1 for pack in packs):
        raise RuntimeError("not even one sequence fits into memory")
    return [part for pack in packs for part in (pack[::2], pack[1::2]) if part]


def make_model(*, smoke: bool) -> Any:  # noqa: ANN401 - transformers has no types here
    """The 0.6B shape, its norms and feed-forwards compiled."""
    from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

    AttentionInterface.register("packed_varlen", packed_attention)
    size: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "attn_implementation": "packed_varlen",
    }  # fmt: skip
    if smoke:
        size |= {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
                 "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 16}  # fmt: skip
    config = Qwen3Config(
        **size,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
        use_cache=False,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16).train()
    if not smoke:
        for name, module in model.named_modules():
            if name.endswith((".mlp", "norm")):
                module.compile(dynamic=True)
    return model


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """(1, heads, T, D) to (1, T, heads, D)."""
    cu_seqlens, longest = SPANS.get()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.is_cuda:
        return _varlen(q, k, v, cu_seqlens, longest, scaling)[None], None
    parts = []
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        one_q, one_k, one_v = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            one_q, one_k, one_v, is_causal=True, scale=scaling, enable_gqa=True
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)[None], None


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    # Causal: torch 2.10 has is_causal, later ones a window of (left, right).
    options: dict[str, Any] = {"scale": scale}
    options |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    options = {name: value for name, value in options.items() if name in known}
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)
    return out[0] if isinstance(out, tuple) else out


def _pass(model: Any, packs: list[list[int]]) -> float:  # noqa: ANN401
    """Seconds of forward and backward over all packs."""
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    inputs = [_inputs(pack, model.config.vocab_size, device) for pack in packs]
    model.zero_grad(set_to_none=True)
    wait()
    begin = time.perf_counter()
    for ids, positions, spans in inputs:
        SPANS.set(spans)
        model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
    wait()
    return time.perf_counter() - begin


def _inputs(
    lengths: list[int], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor, tuple[Tensor, int]]:
    ids = torch.randint(vocab_size, (1, sum(lengths)), device=device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    offsets = torch.tensor((0, *accumulate(lengths)), dtype=torch.int32, device=device)
    return ids, positions, (offsets, max(lengths))
