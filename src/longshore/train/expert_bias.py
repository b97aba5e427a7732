"""The bias that evens out how many tokens each expert gets, without a loss.

In: what the experts of each layer did in the rounds of a step. Out: each router's bias, moved by
its config's bias_update up for experts with fewer tokens than the mean, down for those with more.
All lanes see the sums over all lanes, so their biases stay alike; one small collective a step.

4 experts with 10, 2, 6 and 6 tokens in a step, bias_update 0.001: the bias moves by −0.001, +0.001,
0 and 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Topology
from longshore.model.interface import Routed
from longshore.model.moe import MoE


class RoutingCounts:
    """Tokens each expert got, by layer of experts, summed over this lane's rounds on the device."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def add(self, routed: Sequence[Routed]) -> None:
        """Of one round: the forward's, not those of a recomputation, nor of an evaluation."""
        counts = [layer.counts.to(torch.int64, copy=True) for layer in routed]
        if not self.layers:
            self.layers = counts
            return
        assert len(counts) == len(self.layers), "a round has other layers of experts than the first"
        for total, more in zip(self.layers, counts, strict=True):
            total += more

    def over_lanes(self, topology: Topology) -> tuple[Tensor, ...]:
        """The same over all lanes, in one small collective; () where there are no experts."""
        if not self.layers:
            return ()
        joined = sum_over(torch.cat(self.layers), topology.groups.lanes)
        return tuple(joined.split([len(layer) for layer in self.layers]))


def update_bias(model: nn.Module, counts: Sequence[Tensor]) -> None:
    """Moves every bias once, after the rounds of an optimizer step; the same on all lanes.

    counts: of the model's layers of experts, in their order, over all lanes.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(layers) == len(counts), "there are no counts of every layer of experts"
    for layer, counts_E in zip(layers, counts, strict=True):
        bias_E, step = layer.router.bias, layer.config.bias_update
        if step:
            assert bias_E is not None
            # In integers: mean − counts, times the number of experts.
            fewer_E = (counts_E.sum() - len(counts_E) * counts_E).sign()
            bias_E.add_(fewer_E.to(bias_E.dtype), alpha=step)
