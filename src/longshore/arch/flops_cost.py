"""A cost profile from a model's FLOPs, for models whose cost is no square of the length. No torch.

In: a decoder. Out: a CostProfile: what a single token takes, and beyond that a curve over lengths
of what a sequence takes together. A rate of 400 TFLOP/s is assumed, as in the built-in profile.

A layer with a window of 2 and heads of 1 dim, 4 FLOPs a pair: 1 token has 1 pair, 5 tokens have 9.
So the curve is 4 · (9 − 5) = 16 at length 5, and at length 10 36: it grows with the length alone.
"""

from dataclasses import replace

from longshore.arch.costs import forward_flops
from longshore.arch.decoder import DecoderConfig
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.plan.cost import BUILT_IN, CostProfile

RATE = 4e14
"""FLOP/s."""
KNOTS = 4
"""For each doubling of the length."""
LONGEST = 22
"""Doublings."""


def needs_curve(config: DecoderConfig) -> bool:
    """Whether squared lengths say nothing about the model."""
    layers = (*config.layers, *config.mtp)
    return any(isinstance(part, SparseAttentionConfig) for layer in layers for part in layer.parts)


def flops_cost(config: DecoderConfig) -> CostProfile:
    """Forward and backward; what is gathered and launched as in the built-in profile."""
    token = forward_flops(config, 1)
    lengths = sorted({round(2 ** (i / KNOTS)) for i in range(KNOTS * LONGEST + 1)})
    beyond = [forward_flops(config, length) - length * token for length in lengths]
    highest, curve = 0.0, []
    for length, flops in zip(lengths, beyond, strict=True):
        highest = max(highest, float(flops))
        curve.append((length, highest))
    linear = 3 * token / RATE
    return replace(
        BUILT_IN,
        linear=linear,
        quadratic=3 / RATE,
        gather=(
            BUILT_IN.gather[0] / BUILT_IN.linear * linear,
            BUILT_IN.gather[1] / BUILT_IN.linear * linear,
        ),
        pack=BUILT_IN.pack / BUILT_IN.linear * linear,
        curve=tuple(curve),
    )
