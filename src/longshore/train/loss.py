"""A loss function of a user, kept from tokens that have no loss.

In: the function, the negative log-likelihood of each token (T), and the micro-batch. Out: its
values (T), 0 where no loss counts, and the rows at which it is to blame for what is not finite.

A token without loss reaches the function as 0, and what comes back there is dropped. That is not
enough: `nll / w` with w = 0 has the derivative 1/0, and 0 · ∞ is NaN. So a NaN that is born of a
gradient of 0 is 0 again, in every operation of the function: for `sums[sequence] / w` it would
otherwise pass to all tokens of the sequence.

With nll 2 3 5, w 2 0 1 and a mask 1 0 1, `nll / w` gives 1 0 5 and the gradient 1/2 0 1.

Losses: a value for each token, summed, and divided by one count of the whole step.

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.batch import MicroBatch, Targets
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Groups

PerToken = Callable[[Tensor, MicroBatch], Tensor]
NONE = -1


class Faults(NamedTuple):
    """int64, 0-dim, on the device: the first row with loss whose value, or whose gradient, is not
    finite although its nll is; −1 if there is none. The gradient's is known after backward."""

    value: Tensor
    gradient: Tensor


def masked_values(function: PerToken, nll_T: Tensor, batch: MicroBatch) -> tuple[Tensor, Faults]:
    """What the function says of tokens with loss; others reach neither forward nor backward."""
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    given_T = torch.where(mask_T, nll_T, 0.0)
    values_T = function(given_T, batch)
    shape = tuple(values_T.shape) if isinstance(values_T, Tensor) else type(values_T).__name__
    if shape != tuple(nll_T.shape):
        raise ValueError(
            f"the loss function returned {shape} for {len(nll_T)} tokens; "
            "it must return one value for each token"
        )
    blamed_T = mask_T & nll_T.detach().isfinite()
    value = _first(blamed_T & ~values_T.detach().isfinite())
    faults = Faults(value, torch.full_like(value, NONE))

    def note(grad_T: Tensor) -> None:
        faults.gradient.copy_(_first(blamed_T & ~grad_T.isfinite()))

    if given_T.requires_grad:
        _keep_zeros(values_T, given_T)
        given_T.register_hook(note)
    # 0 · given: parameters get a gradient in every round, whatever the function reads.
    return torch.where(mask_T, values_T, 0.0 * given_T), faults


def _first(bad_T: Tensor) -> Tensor:
    """The first row that is True, without waiting for the device."""
    return torch.where(bad_T.any(), bad_T.to(torch.int8).argmax(), NONE)


def _keep_zeros(values_T: Tensor, given_T: Tensor) -> None:
    """Of all operations between the two, a gradient of 0 stays one."""
    known = {given_T.grad_fn, None}
    nodes = [values_T.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in known:
            continue
        known.add(node)
        assert node is not None
        if node.next_functions:
            node.register_hook(_zero_stays_zero)
        nodes += [before for before, _ in node.next_functions]


def _zero_stays_zero(
    inner: tuple[Tensor | None, ...], outer: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """For operations that work on each element; of others a NaN is left to be reported."""
    if len(outer) != 1 or outer[0] is None:
        return None
    gradient = outer[0]
    born = gradient.isfinite().all() & (gradient == 0)
    return tuple(
        part
        if part is None or part.shape != gradient.shape
        else torch.where(born & part.isnan(), 0.0, part)
        for part in inner
    )


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
