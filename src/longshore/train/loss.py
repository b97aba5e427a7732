"""Losses: a value for each token, summed; step.py divides the sum by one count of the whole step.

In: what the head computed of each token, and the micro-batch. Out: a sum whose gradient does not
depend on the plan, because its divisor is counted over all lanes and rounds. The default is the
mean over the step's loss tokens of their negative log-likelihood (nll); `train.loss` names one of
losses.py or a user's function, whose parameters say what it reads. T tokens of a micro-batch, N
sequences of the step:

    nll, logprobs       (T)     of each label; logprobs = −nll
    entropy             (T)     of each token's distribution
    logsumexp           (T)     of its logits
    mean_logit          (T)     over the vocabulary
    sequence_tokens     (T)     loss tokens of the token's sequence, over all ranks
    hidden              (T, C)  what the output layer gets
    head                        a LogitsHead, for functions of the logits
    batch, counts               the micro-batch, and the totals of the step
    sequences                   SequenceSums of all N, for a loss with one value per sequence

    def weighted(nll, batch, scale=1.0):  # an option: train.loss_options={scale=0.2}
        return scale * nll * batch.token_fields["weight"]

    def weight(batch):                    # train.loss_count, of one lane and round
        return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()

Tokens of weight 1 and 3 with nll 2 and 4 then give (2 + 12) / 4. A function may return metrics
beside its values, `return nll, {"confident": nll < 0.1}`, whose names it declares before the first
step: `mine.metrics = ("confident",)`. A metric is a value for each token or sequence, whose mean is
logged, or a pair: values 1 2 5 with weights 1 1 0 have the mean 1.5.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.batch import IGNORE, MicroBatch, Targets
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Groups
from longshore.model.interface import Reader
from longshore.ops.cross_entropy import STATISTICS, OutputLayer, map_logits, token_statistics
from longshore.train.loss_fields import Needed

OF_NLL = ("nll", "logprobs")
OF_STATISTICS = ("entropy", "logsumexp", "mean_logit")
OF_HEAD = ("hidden", "head")
OF_SEQUENCES = ("sequences", "counts")
KNOWN = (*OF_NLL, *OF_STATISTICS, "sequence_tokens", *OF_HEAD, "batch", "counts", "sequences")
TEMPERATURE = "temperature"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSums:
    """Every sequence of a step, by its index in the plan; the same on all lanes."""

    logprobs: Tensor
    """float64 (N): the sum over a sequence's loss tokens."""
    tokens: Tensor
    """float64 (N): how many loss tokens it has."""
    fields: Mapping[str, Tensor]
    """(N) each: extra fields of sequences, and of tokens their sums over loss tokens.

    float64, but int64 for `pair`, whose values only name groups.
    """


Metric = Tensor | tuple[Tensor, Tensor]
"""Values to take the mean of; or values and weights."""


LossResult = tuple[Tensor, tuple[Metric, ...]]
"""A value for each token, or for each sequence; and metrics in the order of their names."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a loss reads of the whole step, besides the counts of a micro-batch."""

    sequence_tokens: Tensor | None = None
    """float64 (N): loss tokens of each sequence; None if the loss does not ask for it."""
    slopes: Tensor | None = None
    """float64 (N): of a loss of whole sequences, its derivative by each one's log-probability."""
    offsets: Tensor | None = None
    """float64 (N): what each loss token adds, so that the sum is the loss itself."""
    faults: dict[int, Any] = field(default_factory=dict)
    """By round, where the function was not finite, if the head's stage computed it."""
    totals: Tensor | None = None
    """float64 (2 + 2·M), sums of this rank that the rounds add to: rows of the function's result
    with a gradient and without one, then of each metric the weighted sum and the weights; None: not
    wanted."""

    def add(self, result: LossResult, counts: Tensor, *, is_trained: bool) -> None:
        """Adds the rows that count (bool) to the totals. is_trained: whether gradients may flow."""
        if self.totals is None:
            return
        values, metrics = result
        zeros = torch.zeros_like(counts)
        has_gradient = counts if values.requires_grad else zeros
        rows = [has_gradient, counts & ~has_gradient if is_trained else zeros]
        for metric in metrics:
            values, weights = metric if isinstance(metric, tuple) else (metric, counts)
            # `where`, so that not even a NaN of weight 0 counts
            rows += [torch.where(weights != 0, values * weights, 0.0), weights]
        sums = [row.detach().double().where(counts, 0.0).sum() for row in rows]
        self.totals.add_(torch.stack(sums))


NO_STEP = StepInputs()


def sequences_of(batch: MicroBatch) -> Tensor:
    """int64 (T): the index in the plan of each token's sequence; N for padding."""
    index_T = batch.ctx.sequence_index
    every = torch.tensor([*batch.ctx.sequences, batch.counts.sequences], device=index_T.device)
    return every[index_T]


def of_tokens(values_N: Tensor, batch: MicroBatch, *, padding: float) -> Tensor:
    """(T): the value of each token's sequence."""
    return torch.cat([values_N, values_N.new_tensor([padding])])[sequences_of(batch)]


class LogitsHead:
    """The output layer for a loss function: logits exist for one chunk of tokens at a time."""

    def __init__(self, hidden_TC: Tensor, layer: OutputLayer) -> None:
        self._hidden_TC, self._layer = hidden_TC, layer
        self.is_used = False

    @property
    def vocab_size(self) -> int:
        return len(self._layer.weight)

    def map_logits(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """(T, …): function(logits, *rows) chunk by chunk, called again in backward.

        rows: tensors (T, …), of which each call gets the chunk's. Logits are float32, or float64.
        """
        self.is_used = True
        layer = self._layer
        return map_logits(function, self._hidden_TC, layer.weight, rows, softcap=layer.softcap)


class LossCall:
    """A loss function with its options, and what it reads.

    name: as the user wrote it, for errors. temperature: that logits are divided by. metrics: names
    of what it returns beside its values; None: what its attribute `metrics` says.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str = "",
        options: Mapping[str, Any] | None = None,
        *,
        temperature: float = 1.0,
        metrics: Sequence[str] | None = None,
    ) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", "the loss")
        self.options = dict(options or {})
        self.metrics = _metric_names(function, self.name) if metrics is None else tuple(metrics)
        parameters = _parameters(function, self.name)
        if TEMPERATURE in self.options and TEMPERATURE not in parameters:
            temperature = checked_temperature(self.options.pop(TEMPERATURE))
        self.temperature = temperature
        self.names = _names_of(parameters, self.name, self.options)
        if temperature != 1 and self.reads_head:
            raise _refused(self.name, "it reads the logits itself, so it divides them itself")

    @property
    def reads_head(self) -> bool:
        """Whether it gets hidden states or the head, so that the head's stage calls it."""
        return bool(self.names & set(OF_HEAD))

    @property
    def of_sequences(self) -> bool:
        """Whether it is a loss of whole sequences."""
        return "sequences" in self.names

    @property
    def reads_nll_alone(self) -> bool:
        """Whether the losses of the labels are all that the head must compute for it."""
        return not self.names & {*OF_STATISTICS, *OF_HEAD} and self.temperature == 1

    def statistics(self, hidden_TC: Tensor, layer: OutputLayer, labels_T: Tensor) -> Tensor:
        """A Reader: (T, 4)."""
        return token_statistics(
            hidden_TC,
            layer.weight,
            labels_T,
            temperature=self.temperature,
            vocabulary=layer.vocabulary,
            softcap=layer.softcap,
        )

    def __call__(self, values: Mapping[str, Any], batch: MicroBatch, step: StepInputs) -> Any:  # noqa: ANN401
        """The function with these values and with what it reads of the batch and the step."""
        every = {**values, "batch": batch, "counts": batch.counts}
        if "sequence_tokens" in self.names:
            assert step.sequence_tokens is not None
            tokens_T = of_tokens(step.sequence_tokens, batch, padding=1).clamp(min=1)
            every["sequence_tokens"] = tokens_T
        return self.function(**{name: every[name] for name in self.names}, **self.options)


def _by_name(given: Tensor) -> dict[str, Any]:
    """What the head computed, nll (T) or statistics (T, 4), by the names of parameters."""
    if given.ndim == 1:
        return {"nll": given, "logprobs": -given}
    columns = dict(zip(STATISTICS, given.unbind(1), strict=True))
    logprobs = columns.pop("logprob")
    return {"nll": -logprobs, "logprobs": logprobs, **columns}


def logprobs_of(given: Tensor) -> Tensor:
    """(T), from the nll of tokens (T), or their statistics (T, 4)."""
    return -given if given.ndim == 1 else given[:, 0]


def checked_result(result: object, names: Sequence[str], *, rows: int, of: str) -> LossResult:
    """What a function returned, if it has the right shapes and the declared metrics.

    of: "token" or "sequence": what a row is.
    """
    values: object = result
    metrics: Mapping[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        values, metrics = result
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if not isinstance(values, Tensor) or shape != (rows,):
        raise ValueError(
            f"the loss function returned {shape} for {rows} {of}s; it must return one value for "
            f"each {of}"
        )
    if set(metrics) != set(names):
        raise ValueError(
            f"the loss function returned the metrics ({', '.join(metrics)}) and declares "
            f"({', '.join(names)}); set its attribute, function.metrics = {tuple(metrics)}, and "
            "return the same names for each micro-batch"
        )
    for name, metric in metrics.items():
        parts = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric,)
        if not all(isinstance(part, Tensor) and part.shape == (rows,) for part in parts):
            raise ValueError(
                f"the loss function's metric {name} must be a tensor with a value for each of the "
                f"{rows} {of}s, or two: values and weights"
            )
    return values, tuple(metrics[name] for name in names)


def _metric_names(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    names = getattr(function, "metrics", ())
    is_list = isinstance(names, list | tuple)
    if not is_list or not all(isinstance(each, str) and each.isidentifier() for each in names):
        raise _refused(name, f'its metrics are {names!r}; give names, such as ("accuracy",)')
    return tuple(dict.fromkeys(names))


def _parameters(function: Callable[..., Any], name: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise _refused(name, "the names of its parameters cannot be read") from None


def _names_of(
    parameters: Mapping[str, inspect.Parameter], name: str, options: Mapping[str, Any]
) -> frozenset[str]:
    """Which of the known names it reads; refuses what cannot be given to it."""
    names = set()
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise _refused(name, f"its parameter {parameter.name} cannot be given by name")
        if parameter.name in KNOWN:
            names.add(parameter.name)
        elif parameter.default is parameter.empty and parameter.name not in options:
            raise _refused(
                name,
                f"unknown parameter {parameter.name!r}; known are {', '.join(KNOWN)}, and others "
                "with a default or a value in train.loss_options",
            )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option in KNOWN or (option not in parameters and not takes_any):
            own = [p for p in parameters if p not in KNOWN]
            known = f"it has {', '.join(own)}" if own else "it has none"
            raise ValueError(f"train.loss_options: {name} has no option {option!r}; {known}")
    if "sequences" in names and (others := sorted(names - set(OF_SEQUENCES))):
        raise _refused(
            name,
            f"it reads sequences, and {', '.join(others)}; a loss of whole sequences reads only "
            "sequences and counts",
        )
    return frozenset(names)


def checked_temperature(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise ValueError(
            f"train.loss_options: temperature is {value!r}; it must be a number above 0"
        )
    return float(value)


def _refused(name: str, problem: str) -> ValueError:
    return ValueError(f"train.loss is {name}: {problem}")


PerToken = Callable[[Tensor, MicroBatch], Any]
"""From what the head computed, (T) or (T, …), and the micro-batch to values (T), and metrics."""
NONE = -1


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

    It gets 0 for them and its result is dropped; but `nll / w` with w = 0 has the derivative 1/0,
    and 0 · ∞ is NaN in backward. So in every operation of the function a NaN computed from a
    gradient of 0 becomes 0 again: with nll 2 3 5, w 2 0 1 and the mask 1 0 1, `nll / w` gives 1 0 5
    and the gradient 1/2 0 1.

    given: (T) or (T, …), of which rows of other tokens become 0. metrics: names of what it returns
    beside its values, which the step adds up.
    """
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    own = torch.where(mask_T.reshape(-1, *[1] * (given.ndim - 1)), given, 0.0)
    result = checked_result(function(own, batch), metrics, rows=len(given), of="token")
    step.add(result, mask_T, is_trained=own.requires_grad)
    values_T, _ = result
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


Divisor = Callable[[list[MicroBatch], Groups], float]


@dataclass(frozen=True, slots=True)
class Loss:
    """A value for each token, and what the sum of a step is divided by."""

    call: LossCall | None
    """The function of each token or sequence, and what it reads; None for the nll of tokens."""
    divisor: Divisor
    """What a step's sum is divided by, from a lane's micro-batches."""
    name: str = ""
    """The function's name, as the user wrote it."""
    fields: Needed = field(default_factory=dict)
    """Extra fields that the data must have."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what the function returns beside its values."""
        return () if self.call is None else self.call.metrics

    @property
    def is_plain(self) -> bool:
        """Whether the loss tokens' nll are only added up, so that they share one gradient."""
        return self.call is None

    def reader(self, step: StepInputs) -> Callable[[MicroBatch], Reader] | None:
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

            def function(given: Tensor, batch: MicroBatch) -> Any:  # noqa: ANN401
                return call(_by_name(given), batch, step)

            values_T, faults = masked_values(
                function, values, batch, metrics=call.metrics, step=step
            )
        return values_T.sum(), faults


def _second_pass(step: StepInputs, given: Tensor, batch: MicroBatch) -> Tensor:
    """What each token adds to a loss of whole sequences, see step.py."""
    assert step.slopes is not None
    assert step.offsets is not None
    slopes_T = of_tokens(step.slopes, batch, padding=0)
    return slopes_T * logprobs_of(given) + of_tokens(step.offsets, batch, padding=0)


def _read_head(call: LossCall, step: StepInputs, batch: MicroBatch) -> Reader:
    """Calls a function that reads hidden states or the head while the head's weight is there."""

    def read(hidden_TC: Tensor, layer: OutputLayer, _: Tensor) -> Tensor:
        if layer.vocabulary is not None:
            raise ValueError(
                f"train.loss is {call.name}, which reads hidden states or the head; ranks of "
                "tensor parallelism have a part of each token's logits, so set parallel.tp to 1, "
                "or write it with logprobs, entropy, logsumexp and mean_logit"
            )
        is_used = False

        def function(own_TC: Tensor, batch: MicroBatch) -> Any:  # noqa: ANN401
            nonlocal is_used
            assert batch.targets is not None
            head = LogitsHead(own_TC, layer)
            given: dict[str, Any] = {"hidden": own_TC, "head": head}
            if call.names & {*OF_NLL, *OF_STATISTICS}:
                given |= _by_name(call.statistics(own_TC, layer, batch.targets.labels))
                head.is_used = True
            result = call(given, batch, step)
            values = result[0] if isinstance(result, tuple) and result else result
            is_used = head.is_used and isinstance(values, Tensor) and values.requires_grad
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


def count_tokens(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.main


def count_sequences(batches: list[MicroBatch], groups: Groups) -> float:
    return batches[0].counts.sequences if batches[0].counts.main else 0


def user_count(count: Callable[[MicroBatch], Tensor], name: str) -> Divisor:
    """A user's count, summed over rounds and, in one small collective, over lanes."""

    def divisor(batches: list[MicroBatch], groups: Groups) -> float:
        # In a pipeline only the rank with the head has targets.
        mine = sum(float(count(batch)) for batch in batches if batch.targets is not None)
        total = torch.tensor([mine], dtype=torch.float64, device=groups.device)
        whole = float(sum_over(sum_over(total, groups.lanes), groups.pp))
        if not math.isfinite(whole):
            raise ValueError(
                f"train.loss_count={name}: its sum over all ranks and rounds of the step is "
                f"{whole}; it must be finite, so mask tokens without loss with torch.where, not "
                "by multiplication"
            )
        return whole

    return divisor
