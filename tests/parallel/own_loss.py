"""A mixer with a loss of its own: the squares of what it puts out, over real rows."""

from dataclasses import dataclass

from tests.parallel.my_mixer import Mean, MeanConfig, mean_of_pack

from longshore.model.interface import ThreeStepMixer, over_packs
from longshore.model.registry import register_mixer

WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class OwnLossConfig(MeanConfig):
    """Costs what the mean costs."""


class OwnLoss(ThreeStepMixer, Mean):
    """The running mean, and 0.5·Σ of squares of the rows that count."""

    def before(self, x_TC, tables):
        return (self.proj(x_TC),), ()

    def core(self, ctx, apart, *rows):
        mixed_TC = over_packs(mean_of_pack, ctx, self.exchanges, *rows)
        return mixed_TC, WEIGHT * mixed_TC[ctx.is_real].square().sum()

    def after(self, mixed, *kept):
        return mixed


register_mixer(OwnLossConfig, OwnLoss)
