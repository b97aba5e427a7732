"""Measures each kind of part, and fits what it costs beside its matrix products.

In: "cuda" or "cpu", and measured products. Out: a PartCost for each Reference, a part of a preset:
its micro-batches are timed whole, what the products predict is subtracted, and the rest is fitted
by amounts of work (least squares of the relative error, no coefficient below 0). References come in
the order of importance, one of each kind first, so that a small budget still sees every kind; on
CUDA they are parts of large presets, on a CPU of tiny ones.

    references("cpu")[0]        attention of tiny-qwen3 at width 64
    rests of 3 and 6 ms at lengths 128 and 512: so much a value, so much a FLOP

The modules are those of the library, a block with one part, an embedding, or a head with its loss,
with weights in the dtype of the arithmetic, as FSDP hands them to a block; parameters that FSDP
never casts stay float32.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from longshore.advisor.machine import PartCost, ProductTimes
from longshore.advisor.step_time import (
    Work,
    embedding_work,
    fit_nonnegative,
    head_work,
    part_works,
)
from longshore.advisor.timing import Clock, Timer, free
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Part
from longshore.arch.presets import preset
from longshore.batch import SeqContext, whole_context
from longshore.model.decoder import Block, Head
from longshore.model.init import fill_of
from longshore.model.norm_rope import Float32Parameters, rope_tables
from longshore.model.registry import table_makers
from longshore.ops.boundaries import chunk_rows

Case = tuple[int, ...]
"""The lengths of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A part of a preset."""

    name: str
    """In words."""
    decoder: DecoderConfig
    """Whose width, vocabulary and norms count."""
    part: Part | None
    """None for the decoder's embedding or head, by `kind`."""
    kind: str
    """One of advisor/machine.py's KINDS."""


def references(device: str) -> list[Reference]:
    """All that is measured on this kind of device."""
    return _on_cuda() if device == "cuda" else _on_cpu()


def cases_of(kind: str, device: str, *, quick: bool = False) -> list[Case]:
    """Micro-batches to measure a part with: totals, and for mixers lengths."""
    is_mixer = kind in ("attention", "mla", "mamba", "delta")
    totals: tuple[int, ...] = (2048, 8192, 32768) if device == "cuda" else (32, 128, 512)
    if quick:
        totals = totals[:-1]
    if not is_mixer:
        more = (4096, 16384) if device == "cuda" and not quick else (64, 256)
        return [(tokens,) for tokens in sorted({*totals, *more})]
    most, less = totals[-1], totals[-2]
    shares = (8, 128) if quick else (8, 32, 128)
    tails = [tail(most, most // share, seed=share) for share in shares]
    return [*((tokens,) for tokens in totals), *tails, tail(less, most // 32, seed=less)]


def tail(total: int, median: int, *, seed: int) -> Case:
    """Lognormal lengths of this median that make up the total: of no round size, as in data."""
    random, lengths = np.random.default_rng(seed), list[int]()
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(random.lognormal(np.log(median), 1.0)))))
    return tuple(lengths)


def _on_cuda() -> list[Reference]:
    small, large = preset("qwen3-0.6b"), preset("qwen3-8b")
    moe, mamba = preset("qwen3-30b-a3b", layers=1), preset("nemotron-h-8b", layers=8)
    delta, llama = preset("qwen3-next-80b-a3b", layers=4), preset("llama-3.2-1b")
    deepseek = preset("deepseek-v3", layers=3, mtp=())
    few = replace(_experts(delta).without_shared(), experts=32)
    return [
        *(_part(name, decoder, 0, "mixer") for name, decoder in (("qwen3-0.6b", small),)),
        _part("qwen3-0.6b", small, 0, "mlp"),
        _end_part("qwen3-0.6b", small, "head"),
        _end_part("qwen3-0.6b", small, "embedding"),
        _part("qwen3-30b-a3b", moe, 0, "mlp"),
        _part("nemotron-h-8b", mamba, 0, "mixer"),
        _part("qwen3-next-80b-a3b", delta, 0, "mixer"),
        _part("qwen3-8b", large, 0, "mixer"),
        _part("qwen3-8b", large, 0, "mlp"),
        _end_part("qwen3-8b", large, "head"),
        Reference("32 experts of qwen3-next-80b-a3b", delta, few, "experts"),
        _part("llama-3.2-1b", llama, 0, "mixer"),
        _part("qwen3-next-80b-a3b", delta, 3, "mixer"),
        _part("deepseek-v3", deepseek, 0, "mixer"),
        _part("nemotron-h-8b", mamba, 1, "mlp"),
        _end_part("nemotron-h-8b", mamba, "embedding"),
    ]


def _on_cpu() -> list[Reference]:
    qwen, moe = preset("tiny-qwen3"), preset("tiny-qwen3-moe")
    hybrid, deepseek = preset("tiny-hybrid"), preset("tiny-deepseek-v3")
    return [
        _part("tiny-qwen3", qwen, 0, "mixer"),
        _part("tiny-qwen3", qwen, 0, "mlp"),
        _end_part("tiny-qwen3", qwen, "head"),
        _end_part("tiny-qwen3", qwen, "embedding"),
        _part("tiny-qwen3-moe", moe, 0, "mlp"),
        _part("tiny-hybrid", hybrid, 0, "mixer"),
        _part("tiny-hybrid", hybrid, 1, "mixer"),
        _part("tiny-deepseek-v3", deepseek, 0, "mixer"),
        _part("tiny-deepseek-v3", deepseek, 1, "mlp"),
    ]


def _part(name: str, decoder: DecoderConfig, index: int, place: str) -> Reference:
    layer: LayerConfig = decoder.layers[index]
    part = layer.mixer if place == "mixer" else layer.mlp
    assert part is not None, (name, index, place)
    part = part.without_shared() if isinstance(part, MoEConfig) else part
    return Reference(f"{part.timed_as} of {name}", decoder, part, part.timed_as)


def _end_part(name: str, decoder: DecoderConfig, kind: str) -> Reference:
    return Reference(f"{kind} of {name}", decoder, None, kind)


def _experts(decoder: DecoderConfig) -> MoEConfig:
    moe = decoder.layers[0].mlp
    assert isinstance(moe, MoEConfig)
    return moe


STD = 0.02


@dataclass(frozen=True, slots=True)
class Runnable:
    """One micro-batch of one module."""

    forward: Callable[[], object]
    both: Callable[[], object]


def make_module(reference: Reference, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The module of a reference, with first values."""
    decoder, part = reference.decoder, reference.part
    with torch.device(device):
        if part is None:
            if reference.kind == "embedding":
                return nn.Embedding(decoder.vocab_size, decoder.width, dtype=dtype)
            return Head(decoder, tied=False).to(dtype)
        is_mixer = reference.kind in ("attention", "mla", "mamba", "delta")
        layer = LayerConfig(part, None) if is_mixer else LayerConfig(None, part)
        block = Block(layer, decoder.width, norm=decoder.norm)
    _fill(block, layer, decoder)
    for module in block.modules():
        if not isinstance(module, Float32Parameters):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return block


def runnable(
    reference: Reference,
    module: nn.Module,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Runnable:
    """The functions of a module for one micro-batch."""
    decoder, tokens = reference.decoder, sum(lengths)
    if reference.kind in ("embedding", "head"):
        return _end(reference, module, tokens, device=device, dtype=dtype)
    hidden_TC = torch.randn(tokens, decoder.width, device=device).to(dtype).requires_grad_()
    grad_TC = torch.randn_like(hidden_TC)
    ctx = _context(decoder, lengths, device)
    tables = rope_tables(decoder.ropes, ctx, dtype)

    def forward() -> tuple[Tensor, list[Tensor]]:
        output = module(hidden_TC, ctx, tables)
        losses = [routed.auxiliary for routed in output.routed]
        return output.values, [*losses, *(loss.total for loss in output.mixer_losses)]

    def both() -> None:
        values, losses = forward()
        losses = [loss for loss in losses if loss.requires_grad]
        torch.autograd.backward([values, *losses], [grad_TC, *map(torch.ones_like, losses)])
        _forget(module, hidden_TC)

    return Runnable(forward, both)


def _end(
    reference: Reference,
    module: nn.Module,
    tokens: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Runnable:
    decoder = reference.decoder
    ids_T = torch.randint(decoder.vocab_size, (tokens,), device=device)
    if reference.kind == "embedding":
        grad_TC = torch.randn(tokens, decoder.width, device=device).to(dtype)

        def look_up() -> None:
            module(ids_T).backward(grad_TC)
            _forget(module)

        return Runnable(lambda: module(ids_T), look_up)
    hidden_TC = torch.randn(tokens, decoder.width, device=device).to(dtype).requires_grad_()

    def loss() -> None:
        module(hidden_TC, ids_T, summed=True).sum().backward()
        _forget(module, hidden_TC)

    return Runnable(lambda: module(hidden_TC, ids_T, summed=True), loss)


def _context(decoder: DecoderConfig, lengths: Sequence[int], device: torch.device) -> SeqContext:
    """With the tables that the loader would have made."""
    ctx = whole_context(lengths)
    for maker in table_makers(decoder, scan="auto", device=device):
        for pack in ctx.packs:
            maker(pack)
    return ctx.to(device)


def _forget(module: nn.Module, *inputs: Tensor) -> None:
    """No gradient is left to add the next one to."""
    for tensor in (*module.parameters(), *inputs):
        tensor.grad = None


def _fill(block: Block, layer: LayerConfig, decoder: DecoderConfig) -> None:
    """As model/init.py does it, but with the device's random numbers."""
    config = DecoderConfig(vocab_size=8, width=decoder.width, layers=(layer,))
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            fill = fill_of(config, f"layers.0.{name}")
            if fill.constant is not None:
                is_zero = fill.norm and decoder.zero_centred
                parameter.fill_(0.0 if is_zero else fill.constant)
            elif fill.by_row is not None:
                numbers = torch.arange(len(parameter), dtype=torch.float64)
                parameter.copy_(fill.by_row(numbers, len(parameter)))
            else:
                parameter.normal_(std=STD)


AMOUNTS = {
    "attention": ("call", "value", "core", "sequence"),
    "mla": ("call", "value", "core", "sequence"),
    "mamba": ("call", "value", "core", "sequence"),
    "delta": ("call", "value", "core", "sequence"),
    "mlp": ("call", "value"),
    "experts": ("weight", "core"),
    "embedding": ("weight", "value"),
    "head": ("weight", "value"),
}
"""What the rest of a kind is fitted by. Of amounts that only grow together one is chosen: experts'
FLOPs grow with their values, and a reference has one number of weights."""
TINY = 16
"""Tokens at which the host is measured: the device never keeps it waiting."""


@dataclass(frozen=True, slots=True)
class PartSample:
    """One timed micro-batch."""

    work: Work
    """What was done."""
    forward: float
    """Seconds of forward alone."""
    both: float
    """Seconds of forward and backward."""
    plain_forward: float
    """What the measured products predict of `forward`."""
    plain: float
    """What the measured products predict of `both`."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A part's cost, and how well it fits."""

    cost: PartCost
    samples: tuple[PartSample, ...]
    error: float
    """Median relative error of its own micro-batches."""


def measure_part(
    reference: Reference,
    products: ProductTimes,
    timer: Timer,
    *,
    dtype: torch.dtype,
    clock: Clock,
    quick: bool,
) -> Fitted:
    """Builds, times and fits one part; its memory is free afterwards."""
    clock.tell(reference.name)
    device = timer.device
    module = make_module(reference, device=device, dtype=dtype)
    samples = []
    for lengths in cases_of(reference.kind, device.type, quick=quick):
        run = runnable(reference, module, lengths, device=device, dtype=dtype)
        work = work_of(reference, lengths, item=dtype.itemsize, scan_chunk=chunk_rows(device))
        pairs = [products.seconds(work.rows, each.k, each.n) for each in work.products]
        plain = sum(first for first, _ in pairs)
        both = plain + sum(second for _, second in pairs)
        samples.append(
            PartSample(work, timer.seconds(run.forward), timer.seconds(run.both), plain, both)
        )
    small = runnable(reference, module, (TINY,), device=device, dtype=dtype)
    host, host_forward = (timer.host_seconds(run) for run in (small.both, small.forward))
    del module, run, small
    free(device)
    return fit_part(reference.name, samples, host=host, host_forward=host_forward)


def work_of(reference: Reference, lengths: Case, *, item: int, scan_chunk: int) -> Work:
    """A layer of experts must have no shared one."""
    decoder, tokens = reference.decoder, sum(lengths)
    if reference.part is not None:
        part, width = reference.part, decoder.width
        (work,) = part_works(part, width, lengths, item=item, scan_chunk=scan_chunk)
        return work
    make = embedding_work if reference.kind == "embedding" else head_work
    return make(decoder, tokens)


def fit_part(
    name: str, samples: Sequence[PartSample], *, host: float, host_forward: float
) -> Fitted:
    """The cost of a part from its timed micro-batches."""
    first = samples[0].work
    names = AMOUNTS[first.kind]
    amounts = [[amount_of(sample.work)[name] for name in names] for sample in samples]
    totals = [sample.both for sample in samples]
    rests = [sample.both - sample.plain for sample in samples]
    fitted = dict(zip(names, fit_nonnegative(amounts, rests, totals=totals), strict=True))
    shares = [
        (sample.forward - sample.plain_forward) / rest
        for sample, rest in zip(samples, rests, strict=True)
        if rest > 0
    ]
    forward = min(max(statistics.median(shares), 0.0), 1.0) if shares else 1 / 3
    cost = PartCost(
        kind=first.kind,
        reference=name,
        origin="measured",
        head_dim=first.head_dim,
        channels=first.channels,
        **{key: fitted.get(key, 0.0) for key in ("call", "value", "core", "sequence", "weight")},
        forward=forward,
        host=host,
        host_forward=min(host_forward, host),
    )
    errors = []
    for sample, row in zip(samples, amounts, strict=True):
        rest = sum(fitted[key] * amount for key, amount in zip(names, row, strict=True))
        errors.append(abs((sample.plain + rest) / sample.both - 1))
    return Fitted(cost, tuple(samples), statistics.median(errors))


def amount_of(work: Work) -> dict[str, float]:
    """The amounts of work, by the names of PartCost's coefficients."""
    return {
        "call": 1.0,
        "value": work.values,
        "core": work.core,
        "sequence": work.sequences,
        "weight": work.weights,
    }
