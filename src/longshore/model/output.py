"""What a model gives back besides hidden states: named tuples, so that FSDP finds the tensors.

A decoder of two layers of experts and one depth of multi-token prediction gives, with labels,
Output(nll_T, (Routed, Routed), (nll_T,)); a dense one Output(nll_T, (), ()).
"""

from typing import NamedTuple

from torch import Tensor


class Routed(NamedTuple):
    """What the experts of one layer did with this lane's real tokens.

    auxiliary: the sum, over tokens, of their balance loss; 0-dim. counts: how many tokens each
    expert got, (E), without gradient. depth: of multi-token prediction, 0 in the decoder itself;
    it says which tokens were counted, see Counts.tokens_at.
    """

    auxiliary: Tensor
    counts: Tensor
    depth: int = 0


class Output(NamedTuple):
    """values: hidden states, logits or losses. routed: of each layer of experts, in their order.

    mtp: the losses (T) of each depth of multi-token prediction.
    """

    values: Tensor
    routed: tuple[Routed, ...] = ()
    mtp: tuple[Tensor, ...] = ()
