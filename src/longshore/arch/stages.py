"""The stages of a decoder's pipeline: a balanced layout, and what each stage costs. No torch.

In: a DecoderConfig and the pipeline size, or a layout by hand. Out: a Layout whose most expensive
stage is cheapest, counted in FLOPs of a sequence's forward; and what part of a round's cost each
stage has.

Where experts are split over ranks, lanes meet before them and after them. What lies between such
meetings is token-wise: the feed-forward part of a layer with experts, and the head, which comes
after the last. A feed-forward part without experts runs on from its mixer. So in a decoder whose
layers all have experts, everything but the mixers and the embedding is token-wise.

Four equal layers on 2 ranks whose head costs as much as two of them: `Ettt|tL`. Both stages then
have half of what grows with tokens, but the first has three quarters of what grows with squares.
"""

from collections import Counter
from dataclasses import replace

from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.stage_memory import sent_width
from longshore.errors import SettingError
from longshore.plan.layout import Layout, balanced_layout, parse_layout
from longshore.plan.stage_costs import StageCosts, share_out

USUAL_LENGTH = 4096
"""Tokens of the sequence by which stages are balanced."""


def make_layout(
    decoder: DecoderConfig, *, pp: int, vpp: int, text: str = "", length: int = USUAL_LENGTH
) -> Layout:
    """Which parts of a decoder each pipeline stage has: as `text` says, or balanced by FLOPs.

    pp, vpp: pipeline ranks, and stages for each. text: such as "Ettt|tL". length: of the sequence
    whose forward FLOPs are balanced.
    """
    layers, depths = len(decoder.layers), len(decoder.mtp)
    if not text:
        costs = [*layer_flops(decoder, length), head_flops(decoder, length)]
        embed = embed_flops(decoder, length)
        layout = balanced_layout(costs, pp=pp, vpp=vpp, depths=depths, embed=embed)
        return replace(layout, id_layers=decoder.hashed_layers)
    layout = parse_layout(text, pp=pp, layers=layers, depths=depths)
    if layout.vpp != vpp:
        raise SettingError(
            f"{{layout}} is {text!r}, which has {layout.vpp} stages for each of {pp} pipeline "
            f"ranks, but {{vpp}} is {vpp}; set {{vpp}} to {layout.vpp}"
        )
    return replace(layout, id_layers=decoder.hashed_layers)


def layer_flops(decoder: DecoderConfig, length: int) -> list[int]:
    """Forward FLOPs of each layer, then of each depth with its join, for one sequence."""
    width = decoder.width
    kinds = {kind: kind.flops(width, length) for kind in Counter((*decoder.layers, *decoder.mtp))}
    join = 2 * length * 2 * width * width
    layers = [kinds[layer] for layer in decoder.layers]
    return layers + [kinds[layer] + join for layer in decoder.mtp]


def expert_flops(decoder: DecoderConfig, length: int) -> list[int]:
    """Forward FLOPs of each layer's feed-forward part, if it has experts, then of each depth's."""
    parts = [layer.mlp for layer in (*decoder.layers, *decoder.mtp)]
    return [
        part.flops(decoder.width, length) if isinstance(part, MoEConfig) else 0 for part in parts
    ]


def head_flops(decoder: DecoderConfig, length: int) -> int:
    """Forward FLOPs of the head, which runs once and once more for each depth."""
    return (1 + len(decoder.mtp)) * 2 * length * decoder.width * decoder.vocab_size


def embed_flops(decoder: DecoderConfig, length: int) -> int:
    """A look-up has no products; it counts as one for each channel, so that it is not free."""
    return 2 * length * decoder.width


def stage_costs(
    decoder: DecoderConfig, layout: Layout, *, recompute: bool, length: int = USUAL_LENGTH
) -> StageCosts:
    """How the stages share a round's cost; recompute: blocks run again in backward.

    A backward takes twice the forward, and a recomputed block once more. length: of the sequence
    whose FLOPs are counted.
    """
    again = 3 if recompute else 2
    experts = expert_flops(decoder, length)
    layers, twice = layer_flops(decoder, length), layer_flops(decoder, 2 * length)
    # What grows with the square shows in the second difference: (2n)² − 2·n² = 2·n².
    squares = [max(0, (b - 2 * a) // 2) for a, b in zip(layers, twice, strict=True)]
    linear, quadratic, tokenwise = [], [], []
    for stage in layout.stages:
        places = [*stage.layers, *(len(decoder.layers) + depth for depth in stage.depths)]
        square = sum(squares[place] for place in places)
        blocks = sum(layers[place] for place in places) - square
        ends = stage.head * head_flops(decoder, length) + stage.embed * embed_flops(decoder, length)
        linear.append((blocks + ends, again * blocks + 2 * ends))
        quadratic.append((square, again * square))
        apart = sum(experts[place] for place in places)
        head = stage.head * head_flops(decoder, length) if apart else 0
        tokenwise.append((apart + head, again * apart + 2 * head))
    # In messages of row_width, as many as the rows of a token take.
    streams = [
        -(-sent_width(decoder, layout, stage) // decoder.row_width)
        for stage in range(len(layout.stages))
    ]
    return share_out(
        linear=linear, quadratic=quadratic, streams=streams, pp=layout.pp, tokenwise=tokenwise
    )
