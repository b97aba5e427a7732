"""The stages of a decoder's pipeline: a balanced layout, and what each stage costs. No torch.

In: a DecoderConfig and the pipeline size, or a layout by hand. Out: a Layout whose most expensive
stage is cheapest, counted in FLOPs of a sequence's forward.

Four equal layers on 2 ranks whose head costs as much as two of them: `Ettt|tL`.
"""

from collections import Counter

from longshore.arch.decoder import DecoderConfig
from longshore.errors import SettingError
from longshore.plan.layout import Layout, balanced_layout, parse_layout

USUAL_LENGTH = 4096
"""Tokens of the sequence by which stages are balanced."""


def make_layout(
    decoder: DecoderConfig, *, pp: int, vpp: int, text: str = "", length: int = USUAL_LENGTH
) -> Layout:
    """The layout that `text` describes; without text one balanced by FLOPs."""
    layers, depths = len(decoder.layers), len(decoder.mtp)
    if not text:
        costs = [*layer_flops(decoder, length), head_flops(decoder, length)]
        embed = embed_flops(decoder, length)
        return balanced_layout(costs, pp=pp, vpp=vpp, depths=depths, embed=embed)
    layout = parse_layout(text, pp=pp, layers=layers, depths=depths)
    if layout.vpp != vpp:
        raise SettingError(
            f"{{layout}} is {text!r}, which has {layout.vpp} stages for each of {pp} pipeline "
            f"ranks, but {{vpp}} is {vpp}; set {{vpp}} to {layout.vpp}"
        )
    return layout


def layer_flops(decoder: DecoderConfig, length: int) -> list[int]:
    """Forward FLOPs of each layer, then of each depth with its join, for one sequence."""
    width = decoder.width
    kinds = {kind: kind.flops(width, length) for kind in Counter((*decoder.layers, *decoder.mtp))}
    join = 2 * length * 2 * width * width
    layers = [kinds[layer] for layer in decoder.layers]
    return layers + [kinds[layer] + join for layer in decoder.mtp]


def head_flops(decoder: DecoderConfig, length: int) -> int:
    """Forward FLOPs of the head, which runs once and once more for each depth."""
    return (1 + len(decoder.mtp)) * 2 * length * decoder.width * decoder.vocab_size


def embed_flops(decoder: DecoderConfig, length: int) -> int:
    """A look-up has no products; it counts as one for each channel, so that it is not free."""
    return 2 * length * decoder.width
