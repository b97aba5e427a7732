"""Losses: a value for each token, summed, and divided by one count of the full step.

In: what the head computed of each token, and the micro-batch. Out: a sum whose gradient does not
depend on the plan, because its divisor is counted over all lanes and rounds.

The default loss is the mean over the step's loss tokens of their negative log-likelihood (nll). A
user's loss names a function, `train.loss = "my_losses:weighted"`, or one of losses.py, and,
if the divisor is not the loss tokens, a count. What it reads is said by the names of its
parameters, see loss_inputs.py:

    def weighted(nll, batch):             # (T) in, (T) out; where no loss counts both are 0
        return nll * batch.token_fields["weight"]

    def weight(batch):                    # of one lane and round; sums over them are the divisor
        return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()

Tokens of weight 1 and 3 with nll 2 and 4 then give (2 + 12) / 4.

Tokens without loss must not disturb the others. A user's function gets 0 for them and its result
is dropped; but `nll / w` with w = 0 has the derivative 1/0, and 0 · ∞ is NaN in backward. So in
every operation of the function a NaN computed from a gradient of 0 becomes 0 again: with nll 2 3 5,
w 2 0 1 and the mask 1 0 1, `nll / w` gives 1 0 5 and the gradient 1/2 0 1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.batch import IGNORE, MicroBatch, Targets
from longshore.data.source import Field
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Groups
from longshore.model.interface import Reader
from longshore.ops.cross_entropy import OutputLayer
from longshore.train.loss_fields import NeededField, check_needed
from longshore.train.loss_inputs import (
    HeadReader,
    LossCall,
    StepInputs,
    checked_result,
    refuse_vocabulary_part,
)
from longshore.train.losses import ready_loss
from longshore.user_code import load_function

PerToken = Callable[[Tensor, MicroBatch], Any]
"""From what the head computed, (T) or (T, …), and the micro-batch to values (T), and metrics."""
NONE = -1
NO_STEP = StepInputs()


class Faults(NamedTuple):
    """The first row at which a user's loss function is not finite although nll is, or −1.

    Both are int64, 0-dim, on the device.
    """

    value: Tensor
    """Where its value is not finite."""
    gradient: Tensor
    """Where its gradient is not finite; known after backward."""


def masked_values(
    function: PerToken,
    given: Tensor,
    batch: MicroBatch,
    *,
    metrics: Sequence[str] = (),
    step: StepInputs = NO_STEP,
) -> tuple[Tensor, Faults]:
    """The function's values of loss tokens; other tokens affect neither forward nor backward.

    given: (T) or (T, …), of which rows of other tokens become 0. metrics: names of what it returns
    beside its values, which the step adds up.
    """
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    own = torch.where(mask_T.reshape(-1, *[1] * (given.ndim - 1)), given, 0.0)
    result = checked_result(function(own, batch), metrics, rows=len(given), of="token")
    step.add(result, mask_T, is_trained=own.requires_grad)
    values_T = result.values
    checked_T = mask_T & _finite_rows(given.detach())
    value = _first(checked_T & ~values_T.detach().isfinite())
    faults = Faults(value, torch.full_like(value, NONE))

    def check_gradient(grad: Tensor) -> None:
        faults.gradient.copy_(_first(checked_T & ~_finite_rows(grad)))

    if own.requires_grad:
        _keep_zeros(values_T, own)
        own.register_hook(check_gradient)
    # 0 · own: parameters get a gradient in every round, whatever the function reads.
    return torch.where(mask_T, values_T, 0.0 * own.reshape(len(own), -1).sum(1)), faults


def _finite_rows(values: Tensor) -> Tensor:
    return values.isfinite().reshape(len(values), -1).all(1)


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

    function: LossCall | Callable[..., Tensor] | None
    """The value of each token, see loss_inputs.py; None for its nll."""
    divisor: Callable[[list[MicroBatch], Groups], float]
    """Of a step, from a lane's micro-batches."""
    name: str = ""
    """Of the function, as the user wrote it."""
    fields: tuple[NeededField, ...] = ()
    """Extra fields that the data must have."""
    call: LossCall | None = field(init=False)
    """The function, and what it reads; None for nll."""

    def __post_init__(self) -> None:
        call = self.function
        if call is not None and not isinstance(call, LossCall):
            call = LossCall(call, self.name)
        object.__setattr__(self, "call", call)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what the function returns beside its values."""
        return () if self.call is None else self.call.metrics

    @property
    def is_plain(self) -> bool:
        """Whether the loss tokens' nll are only added up, so that they share one gradient."""
        return self.call is None

    def reader(self, step: StepInputs) -> HeadReader | None:
        """What the head computes for each micro-batch; None: the nll of its labels."""
        call = self.call
        if call is None or call.reads_nll_alone:
            return None
        if call.reads_head:
            return partial(_read_head, call, step)
        return lambda batch: call.statistics

    def summed(
        self, values: Tensor, batch: MicroBatch, step: StepInputs = NO_STEP
    ) -> tuple[Tensor, Faults | None]:
        """The sum over this lane's loss tokens, and where the user's function is not finite."""
        assert batch.targets is not None
        call = self.call
        if call is None:
            return masked_sum(values, batch.targets), None
        if call.reads_head:  # the head's stage has called it
            return values.sum(), step.faults.pop(batch.round, None)
        if call.of_sequences:
            values_T, faults = masked_values(partial(_second_pass, step), values, batch)
        else:
            function = partial(call, step=step)
            values_T, faults = masked_values(
                function, values, batch, metrics=call.metrics, step=step
            )
        return values_T.sum(), faults


def _second_pass(step: StepInputs, given: Tensor, batch: MicroBatch) -> Tensor:
    """Of a loss of whole sequences, see sequence_loss.py."""
    assert step.slopes is not None
    assert step.offsets is not None
    logprobs_T = -given if given.ndim == 1 else given[:, 0]
    slopes_T = step.of_tokens(step.slopes, batch, padding=0)
    return slopes_T * logprobs_T + step.of_tokens(step.offsets, batch, padding=0)


def _read_head(call: LossCall, step: StepInputs, batch: MicroBatch) -> Reader:
    """Calls a function that reads hidden states or the head while the head's weight is there."""

    def read(hidden_TC: Tensor, layer: OutputLayer, _: Tensor) -> Tensor:
        refuse_vocabulary_part(call.name, layer)
        is_used = False

        def function(own_TC: Tensor, batch: MicroBatch) -> Any:  # noqa: ANN401
            nonlocal is_used
            result, is_used = call.with_head(own_TC, layer, batch, step)
            values = result[0] if isinstance(result, tuple) and result else result
            is_used = is_used and isinstance(values, Tensor) and values.requires_grad
            return result

        values_T, step.faults[batch.round] = masked_values(
            function, hidden_TC, batch, metrics=call.metrics, step=step
        )
        if is_used:
            return values_T
        # The head's weight gets a gradient in every round.
        return values_T + (torch.zeros_like(hidden_TC[:1]) @ layer.weight[:1].T).sum()

    return read


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


def make_loss(
    function: str = "", count: str = "auto", options: Mapping[str, Any] | None = None
) -> Loss:
    """From names. function: "" is nll, or one of losses.py, or a user's module:function.

    count: "tokens", "sequences", a user's function, or "auto", which is tokens unless the loss has
    values of sequences. options: of the function, by the names of its parameters.
    """
    ready = ready_loss(function, options or {})
    if ready is not None:
        call, auto, fields = ready.call, ready.count, ready.fields
    else:
        call = LossCall(load_function(function, "train.loss"), function, options)
        auto, fields = ("sequences" if call.of_sequences else "tokens"), ()
    count = auto if count == "auto" else count
    if count in ("tokens", "sequences"):
        divisor: Callable[[list[MicroBatch], Groups], float]
        divisor = _tokens if count == "tokens" else _sequences
    else:
        divisor = _UserCount(load_function(count, "train.loss_count"), count)
    return Loss(call, divisor, function, fields)


def check_fields(loss: Loss, declared: Sequence[Field]) -> None:
    """Refuses data that do not have the fields of a ready loss as it reads them."""
    check_needed(loss.name, loss.fields, declared)


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
