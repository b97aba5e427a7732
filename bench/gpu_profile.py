"""Where a step's GPU time goes, and how often something is compiled.

In: a function that runs one step. Out: milliseconds by group of kernels, "idle" for the time in
which the GPU ran none, and the 25 kernels with most time:

    {"attention": 310.2, "products": 402.8, …, "idle": 12.5}, [["nvjet_tst_…", 201.3, 448], …]
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Our own kernels first, by their names.
    ("norm, rope, gate", ("_norm_", "_rope_", "_gate_", "_column_sums")),
    ("loss", ("_both_kernel", "_loss_kernel", "_gradient_kernel")),
    ("experts", ("_spread_kernel", "_sum_rows_kernel", "_activate", "_clear_empty")),
    ("scan and conv", ("_steps_kernel", "_walk_kernel", "_outputs_kernel", "_gradients_kernel",
                       "_keys_kernel", "_conv_", "_backward_sums", "_backward_rows")),
    ("sparse attention", ("_forward_jit", "_backward_jit", "_mass_jit")),
    ("indexer", ("_scores_jit", "_chosen_jit", "_gradients_jit")),
    ("hyper-connections", ("_project_jit", "_rows_jit", "_weight_jit", "collapse_jit",
                           "expand_jit")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("attention", ("flash", "fmha", "attn", "attention")),
    ("loss", ("cross_entropy", "entropy", "logsumexp", "nll", "softmax", "loss")),
    ("experts", ("grouped", "expert", "permut", "scatter", "gather", "topk", "sort", "histogram",
                 "dispatch", "moe", "index")),
    ("scan and conv", ("ssd", "delta", "chunk", "conv", "scan", "cumsum", "solve_tril", "kda")),
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "wgmma", "splitk", "matmul", "addmm")),
    ("norm, rope, gate", ("norm", "rope", "rotary", "silu", "swiglu", "sigmoid", "gate", "relu")),
    ("copies, communication", ("memcpy", "memset", "copy", "nccl", "fill", "cat")),
    ("fused by the compiler", ("triton_",)),
    ("element-wise and reductions", ("elementwise", "reduce", "vectorized")),
)  # fmt: skip


def group_of(kernel: str) -> str:
    """The first group one of whose words is in the name."""
    name = kernel.lower()
    return next((group for group, parts in GROUPS if any(part in name for part in parts)), "other")


def grouped(
    step: Callable[[], object],
) -> tuple[dict[str, float], list[tuple[str, float, int]]]:
    """Runs the step twice, the second time under the profiler."""
    has_gpu = torch.cuda.is_available()
    kind = ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU
    wait: Callable[[], None] = torch.cuda.synchronize if has_gpu else lambda: None
    step()
    wait()
    # CUDA alone, so that recording the host's calls does not slow the launches.
    with torch.profiler.profile(activities=[kind]) as profiler:
        begin = time.perf_counter()
        step()
        wait()
        wall = (time.perf_counter() - begin) * 1e3
    by_kernel: dict[str, tuple[float, int]] = {}
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        if has_gpu and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        start, end = event.time_range.start / 1e3, event.time_range.end / 1e3
        spans.append((start, end))
        total, count = by_kernel.get(event.name, (0.0, 0))
        by_kernel[event.name] = (total + end - start, count + 1)
    groups: dict[str, float] = {}
    for name, (ms, _) in by_kernel.items():
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + ms
    groups = dict(sorted(groups.items(), key=lambda item: -item[1]))
    groups["idle"] = max(0.0, wall - _covered(spans))
    groups["wall"] = wall
    top = sorted(((name, ms, n) for name, (ms, n) in by_kernel.items()), key=lambda row: -row[1])
    return groups, top[:25]


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union: kernels of two streams may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def compilations() -> Iterator[Callable[[], dict[str, int]]]:
    """A function that counts what was compiled since the block began."""
    import torch._dynamo.utils as dynamo
    from torch._inductor import metrics

    torch._dynamo.reset()
    dynamo.clear_compilation_metrics()
    before = metrics.generated_kernel_count
    compiled: list[str] = []
    restore = _count_triton(compiled)

    def counts() -> dict[str, int]:
        graphs = dynamo.get_compilation_metrics()
        again = [one for one in graphs if getattr(one, "recompile_reason", None)]
        return {
            "dynamo": len(graphs),
            "recompiled": len(again),
            "inductor kernels": metrics.generated_kernel_count - before,
            "triton": len(compiled),
        }

    try:
        yield counts
    finally:
        restore()


def _count_triton(compiled: list[str]) -> Callable[[], None]:
    """Counts compilations of Triton's own kernels; returns what stops counting."""
    try:
        from triton import knobs
    except ImportError:
        return lambda: None
    before = knobs.runtime.jit_post_compile_hook

    def hook(*args: object, **named: object) -> None:
        compiled.append(str(named.get("repr", "")))

    knobs.runtime.jit_post_compile_hook = hook

    def restore() -> None:
        knobs.runtime.jit_post_compile_hook = before

    return restore
