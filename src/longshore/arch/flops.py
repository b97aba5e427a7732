"""FLOPs of a step and the number of parameters of a decoder. Torch-free.

In: a DecoderConfig and the sequences' real lengths. Out: exact integers. A product of (m, k) and
(k, n) matrices is 2·m·k·n FLOPs, and attention counts only the pairs a token may see, n(n+1)/2 of a
sequence of n, whatever a kernel really computes. Backward is twice the forward: each product has
two gradients. Recomputation is not counted, and only matrix products are.

A decoder with one MLP of width 8, hidden width 4 and vocabulary 10, for 3 tokens: MLP
2·3·(3·4·8) = 576, head 2·3·4·10 = 240, so 816 forward and 2,448 for a step.
"""

from collections import Counter
from collections.abc import Sequence

from longshore.arch.decoder import DecoderConfig


def step_flops(config: DecoderConfig, lengths: Sequence[int]) -> int:
    """FLOPs of forward and backward over these sequences, together or in any packs."""
    return 3 * sum(
        count * forward_flops(config, length) for length, count in Counter(lengths).items()
    )


def forward_flops(config: DecoderConfig, length: int) -> int:
    """FLOPs of one sequence's forward, with the logits of every token at every depth."""
    width, depths = config.width, len(config.mtp)
    kinds = Counter((*config.layers, *config.mtp))
    layers = sum(count * layer.flops(width, length) for layer, count in kinds.items())
    joins = depths * 2 * length * 2 * width * width
    return layers + joins + (1 + depths) * 2 * length * width * config.vocab_size


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the decoder; a tied head has none of its own."""
    width = config.width
    layers = sum(layer.parameters(width) for layer in (*config.layers, *config.mtp))
    joins = len(config.mtp) * (2 * width + 3) * width
    return layers + joins + config.vocab_size * width * (1 if config.tied else 2) + width
