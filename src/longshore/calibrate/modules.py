"""The modules that calibration runs: a block with one part, an embedding, a head with its loss.

In: a Reference and the lengths of a micro-batch. Out: `Runnable`: forward alone, and forward with
backward, as functions without arguments. The modules are those of the library, with weights in the
dtype of the arithmetic, as FSDP hands them to a block; parameters that FSDP never casts stay
float32.

    runnable(reference, (128, 128), device=device, dtype=torch.float32).both()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.batch import SeqContext, whole_context
from longshore.calibrate.references import Reference
from longshore.model.decoder import Block, Head
from longshore.model.host_tables import table_makers
from longshore.model.init import fill_of
from longshore.model.norm import Float32Parameters
from longshore.model.rope import rope_tables

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
