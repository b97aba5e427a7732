"""Losses: a value for each token, summed, and divided by one count of the full step.

In: the negative log-likelihood (nll) of each token, and the micro-batch. Out: a sum whose gradient
does not depend on the plan, because its divisor is counted over all lanes and rounds.

The default loss is the mean over the step's loss tokens. A user's loss names a function,
`train.loss = "my_losses:weighted"`, and, if the divisor is not the loss tokens, a count:

    def weighted(nll, batch):             # (T) in, (T) out; where no loss counts both are 0
        return nll * batch.token_fields["weight"]

    def weight(batch):                    # of one lane and round; sums over them are the divisor
        return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()

Tokens of weight 1 and 3 with nll 2 and 4 then give (2 + 12) / 4.

Tokens without loss must not disturb the others. A user's function gets nll 0 there and its result
is dropped; but `nll / w` with w = 0 has the derivative 1/0, and 0 · ∞ is NaN in backward. So in
every operation of the function a NaN computed from a gradient of 0 becomes 0 again: with nll 2 3 5,
w 2 0 1 and the mask 1 0 1, `nll / w` gives 1 0 5 and the gradient 1/2 0 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.batch import IGNORE, MicroBatch, Targets
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Groups
from longshore.user_code import load_function

PerToken = Callable[[Tensor, MicroBatch], Tensor]
NONE = -1


class Faults(NamedTuple):
    """The first row at which a user's loss function is not finite although nll is, or −1.

    Both are int64, 0-dim, on the device.
    """

    value: Tensor
    """Where its value is not finite."""
    gradient: Tensor
    """Where its gradient is not finite; known after backward."""


def masked_values(function: PerToken, nll_T: Tensor, batch: MicroBatch) -> tuple[Tensor, Faults]:
    """The function's values of loss tokens; other tokens affect neither forward nor backward."""
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
    checked_T = mask_T & nll_T.detach().isfinite()
    value = _first(checked_T & ~values_T.detach().isfinite())
    faults = Faults(value, torch.full_like(value, NONE))

    def check_gradient(grad_T: Tensor) -> None:
        faults.gradient.copy_(_first(checked_T & ~grad_T.isfinite()))

    if given_T.requires_grad:
        _keep_zeros(values_T, given_T)
        given_T.register_hook(check_gradient)
    # 0 · given: parameters get a gradient in every round, whatever the function reads.
    return torch.where(mask_T, values_T, 0.0 * given_T), faults


def _first(bad_T: Tensor) -> Tensor:
    """The first row that is True, without waiting for the device."""
    return torch.where(bad_T.any(), bad_T.to(torch.int8).argmax(), NONE)


def _keep_zeros(values_T: Tensor, given_T: Tensor) -> None:
    """Hooks all operations between the two so that a gradient of 0 stays 0."""
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
    """For elementwise operations; a NaN of any other operation stays, and is reported."""
    if len(outer) != 1 or outer[0] is None:
        return None
    gradient = outer[0]
    is_zero = gradient.isfinite().all() & (gradient == 0)
    return tuple(
        part
        if part is None or part.shape != gradient.shape
        else torch.where(is_zero & part.isnan(), 0.0, part)
        for part in inner
    )


Count = Callable[[MicroBatch], Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A value for each token, and what the sum of a step is divided by."""

    per_token: PerToken | None
    """The value of each token; None for its nll."""
    divisor: Callable[[list[MicroBatch], Groups], float]
    """Of a step, from a lane's micro-batches."""
    name: str = ""
    """Of the function, as the user wrote it."""

    @property
    def is_plain(self) -> bool:
        """Whether the loss tokens' nll are only added up, so that they share one gradient."""
        return self.per_token is None

    def summed(self, nll_T: Tensor, batch: MicroBatch) -> tuple[Tensor, Faults | None]:
        """The sum over this lane's loss tokens, and where the user's function is not finite."""
        assert batch.targets is not None
        if self.per_token is None:
            return masked_sum(nll_T, batch.targets), None
        values_T, faults = masked_values(self.per_token, nll_T, batch)
        return values_T.sum(), faults


def masked_sum(values_T: Tensor, targets: Targets) -> Tensor:
    """The sum over loss tokens; `where`, so that not even a NaN of padding passes."""
    return torch.where(targets.loss_mask, values_T, 0.0).sum()


def without_uncounted_labels(batch: MicroBatch) -> MicroBatch:
    """The batch in which only loss tokens have a label, in the main loss and at every depth.

    For a plain sum: then all tokens that have a label also have the same gradient. Labels 5 7 9
    with the mask 0 1 1 become −100 7 9.
    """
    return replace(
        batch,
        targets=_counted(batch.targets),
        mtp=tuple(replace(depth, targets=_counted(depth.targets)) for depth in batch.mtp),
    )


def _counted(targets: Targets | None) -> Targets | None:
    if targets is None:
        return None
    return replace(targets, labels=targets.labels.where(targets.loss_mask, IGNORE))


def make_loss(function: str = "", count: str = "tokens") -> Loss:
    """From names. function: "" is nll. count: "tokens", "sequences" or a function."""
    per_token = load_function(function, "loss") if function else None
    if count == "tokens":
        return Loss(per_token, _tokens, function)
    if count == "sequences":
        return Loss(per_token, _sequences, function)
    divisor = _UserCount(load_function(count, "loss_count"), count)
    return Loss(per_token, divisor, function)


def _tokens(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.main


def _sequences(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.sequences if batches[0].counts.main else 0


@dataclass(frozen=True, slots=True)
class _UserCount:
    """A user's count, summed over rounds and, in one small collective, over lanes."""

    count: Count
    name: str

    def __call__(self, batches: list[MicroBatch], groups: Groups) -> float:
        # Of a pipeline's ranks only the one with the head has targets.
        mine = sum(float(self.count(batch)) for batch in batches if batch.targets is not None)
        total = torch.tensor([mine], dtype=torch.float64, device=groups.device)
        divisor = float(sum_over(sum_over(total, groups.lanes), groups.pp))
        if not math.isfinite(divisor):
            raise ValueError(
                f"train.loss_count={self.name}: its sum over all ranks and rounds of the step is "
                f"{divisor}; it must be finite, so mask tokens without loss with torch.where, not "
                "by multiplication"
            )
        return divisor
