"""Losses: a value for each token, summed, and divided by one count of the whole step.

In: the negative log-likelihood of each token, and the micro-batch. Out: a sum whose gradient does
not depend on the plan, because it is scaled before backward by what all lanes and rounds hold.

The usual loss is the mean over the step's loss tokens. Another one names a function of its own,
`train.loss = "my_losses:weighted"`, and, where tokens are not what it divides by, a count:

    def weighted(nll, batch):             # (T) in, (T) out; where no loss counts it is ignored
        return nll * batch.token_fields["weight"]

    def weight(batch):                    # of one lane and round; sums over them are the divisor
        return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()

Tokens of weight 1 and 3 with nll 2 and 4 then give (2 + 12) / 4.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.batch import MicroBatch, Targets
from longshore.dist.collectives import sum_over
from longshore.dist.topology import Groups

PerToken = Callable[[Tensor, MicroBatch], Tensor]
Count = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """per_token: the value of each token. divisor: of a step, from a lane's micro-batches."""

    per_token: PerToken
    divisor: Callable[[list[MicroBatch], Groups], float]

    def summed(self, nll_T: Tensor, batch: MicroBatch) -> Tensor:
        """The sum over this lane's loss tokens."""
        assert batch.targets is not None
        values = self.per_token(nll_T, batch)
        if values.shape != nll_T.shape:
            raise ValueError(
                f"the loss function returned {tuple(values.shape)} for {len(nll_T)} tokens; "
                "it must return one value for each token"
            )
        return masked_sum(values, batch.targets)


def masked_sum(values_T: Tensor, targets: Targets) -> Tensor:
    """The sum over loss tokens; `where`, so that nothing of padding passes, not even NaN."""
    return torch.where(targets.loss_mask, values_T, 0.0).sum()


def make_loss(function: str = "", count: str = "tokens") -> Loss:
    """From names: "" is the usual loss; "tokens", "sequences" or a function count."""
    per_token = named_function(function, "train.loss") if function else _plain
    if count == "tokens":
        return Loss(per_token, _tokens)
    if count == "sequences":
        return Loss(per_token, _sequences)
    return Loss(per_token, _Counted(named_function(count, "train.loss_count")))


def _plain(nll_T: Tensor, batch: MicroBatch) -> Tensor:
    return nll_T


def _tokens(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.main


def _sequences(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.sequences if batches[0].counts.main else 0


@dataclass(frozen=True, slots=True)
class _Counted:
    """A count that only the data know: summed over rounds and lanes, in one small collective."""

    count: Count

    def __call__(self, batches: list[MicroBatch], groups: Groups) -> float:
        mine = sum(float(self.count(batch)) for batch in batches)
        total = torch.tensor([mine], dtype=torch.float64, device=groups.device)
        return float(sum_over(total, groups.lanes))


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
