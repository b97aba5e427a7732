"""A mixer with a loss of its own: the squares of what it puts out, over real rows."""

from dataclasses import dataclass

from tests.parallel.my_mixer import Mean, MeanConfig

from longshore.model.registry import register_mixer

WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class OwnLossConfig(MeanConfig):
    """Costs what the mean costs; with its loss it is whole on every rank, and runs eagerly."""

    graph_layer = ""

    def tp_units(self):
        return ()

    def tp_cuts(self, width, at):
        return {}


class OwnLoss(Mean):
    """The running mean, and 0.5·Σ of squares of the rows that count."""

    def core(self, ctx, apart, *rows):
        mixed_TC = self.out_proj(Mean.core(self, ctx, apart, *rows).flatten(-2))
        return mixed_TC, WEIGHT * mixed_TC[ctx.is_real].square().sum()

    def after(self, mixed, *kept):
        return mixed


register_mixer(OwnLossConfig, OwnLoss)
