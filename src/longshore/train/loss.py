"""Losses: a value for each token, summed, and divided by one count of the whole step.

In: the negative log-likelihood of each token, and the micro-batch. Out: a sum whose gradient does
not depend on the plan, because it is scaled before backward by what all lanes and rounds hold.

The usual loss is the mean over the step's loss tokens. Another one names a function of its own,
`train.loss = "my_losses:weighted"`, and, where tokens are not what it divides by, a count:

    def weighted(nll, batch):             # (T) in, (T) out; where no loss counts both are 0
        return nll * batch.token_fields["weight"]

    def weight(batch):                    # of one lane and round; sums over them are the divisor
        return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()

Tokens of weight 1 and 3 with nll 2 and 4 then give (2 + 12) / 4.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.batch import MicroBatch, Targets
from longshore.dist.collectives import sum_over
from longshore.dist.topology import Groups
from longshore.train.masked_loss import Faults, PerToken, masked_values

Count = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """per_token: the value of each token, None for its nll. name: of that function, as given.

    divisor: of a step, from a lane's micro-batches.
    """

    per_token: PerToken | None
    divisor: Callable[[list[MicroBatch], Groups], float]
    name: str = ""

    def summed(self, nll_T: Tensor, batch: MicroBatch) -> tuple[Tensor, Faults | None]:
        """The sum over this lane's loss tokens, and where the user's function went wrong."""
        assert batch.targets is not None
        if self.per_token is None:
            return masked_sum(nll_T, batch.targets), None
        values_T, faults = masked_values(self.per_token, nll_T, batch)
        return values_T.sum(), faults


def masked_sum(values_T: Tensor, targets: Targets) -> Tensor:
    """The sum over loss tokens; `where`, so that nothing of padding passes, not even NaN."""
    return torch.where(targets.loss_mask, values_T, 0.0).sum()


def make_loss(function: str = "", count: str = "tokens") -> Loss:
    """From names: "" is the usual loss; "tokens", "sequences" or a function count."""
    per_token = named_function(function, "train.loss") if function else None
    if count == "tokens":
        return Loss(per_token, _tokens, function)
    if count == "sequences":
        return Loss(per_token, _sequences, function)
    counted = _Counted(named_function(count, "train.loss_count"), count)
    return Loss(per_token, counted, function)


def _tokens(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.main


def _sequences(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.sequences if batches[0].counts.main else 0


@dataclass(frozen=True, slots=True)
class _Counted:
    """A count that only the data know: summed over rounds and lanes, in one small collective."""

    count: Count
    name: str

    def __call__(self, batches: list[MicroBatch], groups: Groups) -> float:
        mine = sum(float(self.count(batch)) for batch in batches)
        total = torch.tensor([mine], dtype=torch.float64, device=groups.device)
        divisor = float(sum_over(total, groups.lanes))
        if not math.isfinite(divisor):
            raise ValueError(
                f"train.loss_count={self.name}: its sum over all ranks and rounds of the step is "
                f"{divisor}; it must be finite, so leave out tokens without loss by torch.where, "
                "not by multiplying with the mask"
            )
        return divisor


def named_function(name: str, what: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{what} is {name!r}, which cannot be imported ({error}); "
            "write module:function, with the module on PYTHONPATH"
        ) from error
    if not callable(found):
        raise ValueError(f"{what} is {name!r}, which is not a function")
    return found  # type: ignore[no-any-return]
