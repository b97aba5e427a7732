"""What a loss function reads: the names of its parameters say it.

In: a function and its options. Out: LossCall, which knows what the head must compute for it, and
calls it with what it asked for. T tokens of a micro-batch, N sequences of the step:

    nll, logprobs       (T)     of each label; logprobs = −nll
    entropy             (T)     of each token's distribution
    logsumexp           (T)     of its logits
    mean_logit          (T)     over the vocabulary
    sequence_tokens     (T)     loss tokens of the token's sequence, over all ranks
    hidden              (T, C)  what the output layer gets
    head                        a LogitsHead, for functions of the logits
    batch, counts               the micro-batch, and the totals of the step
    sequences                   SequenceSums of all N, for a loss with one value per sequence

A function `mine(logprobs, entropy, batch, bonus=0.1)` reads two statistics and has one option,
`train.loss_options={bonus=0.2}`. All parameters of other names need an option or a default.

A function may return metrics beside its values, whose names it declares, so that all ranks know
them before the first step:

    def mine(nll):
        return nll, {"confident": nll < 0.1}

    mine.metrics = ("confident",)

A metric is a value for each token or sequence, whose mean over all loss tokens or sequences of the
step is logged; or a pair, values and weights: values 1 2 5 with weights 1 1 0 have the mean 1.5.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longshore.batch import MicroBatch
from longshore.model.interface import Reader
from longshore.ops.cross_entropy import STATISTICS, OutputLayer, map_logits, token_statistics

OF_NLL = ("nll", "logprobs")
OF_STATISTICS = ("entropy", "logsumexp", "mean_logit")
OF_HEAD = ("hidden", "head")
OF_SEQUENCES = ("sequences", "counts")
KNOWN = (*OF_NLL, *OF_STATISTICS, "sequence_tokens", *OF_HEAD, "batch", "counts", "sequences")
TEMPERATURE = "temperature"


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSums:
    """Every sequence of a step, by its place in the plan; the same on all lanes."""

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


class LossResult(NamedTuple):
    """What a loss function returned."""

    values: Tensor
    """One for each token, or for each sequence."""
    metrics: tuple[Metric, ...]
    """In the order of their declared names."""


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

    def add(self, result: "LossResult", counts: Tensor, *, is_trained: bool) -> None:
        """Adds the rows that count (bool) to the totals. is_trained: whether gradients may flow."""
        if self.totals is None:
            return
        zeros = torch.zeros_like(counts)
        has_gradient = counts if result.values.requires_grad else zeros
        rows = [has_gradient, counts & ~has_gradient if is_trained else zeros]
        for metric in result.metrics:
            values, weights = metric if isinstance(metric, tuple) else (metric, counts)
            # `where`, so that not even a NaN of weight 0 counts
            rows += [torch.where(weights != 0, values * weights, 0.0), weights]
        sums = [row.detach().double().where(counts, 0.0).sum() for row in rows]
        self.totals.add_(torch.stack(sums))

    def of_tokens(self, values_N: Tensor, batch: MicroBatch, *, padding: float) -> Tensor:
        """(T): the value of each token's sequence."""
        places = torch.tensor([*batch.ctx.sequences, len(values_N)], device=values_N.device)
        with_padding = torch.cat([values_N, values_N.new_tensor([padding])])
        return with_padding[places][batch.ctx.sequence_index]


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

    def __call__(self, given: Tensor, batch: MicroBatch, step: StepInputs) -> Any:  # noqa: ANN401
        """The function's result, from nll (T) or statistics (T, 4)."""
        values: dict[str, Any]
        if given.ndim == 1:
            values = {"nll": given, "logprobs": -given}
        else:
            columns = dict(zip(STATISTICS, given.unbind(1), strict=True))
            logprobs = columns.pop("logprob")
            values = {"nll": -logprobs, "logprobs": logprobs, **columns}
        return self.call(values, batch, step)

    def call(self, values: Mapping[str, Any], batch: MicroBatch, step: StepInputs) -> Any:  # noqa: ANN401
        """The function with these values and with what it reads of the batch and the step."""
        every = {**values, "batch": batch, "counts": batch.counts}
        if "sequence_tokens" in self.names:
            assert step.sequence_tokens is not None
            tokens_T = step.of_tokens(step.sequence_tokens, batch, padding=1).clamp(min=1)
            every["sequence_tokens"] = tokens_T
        return self.function(**{name: every[name] for name in self.names}, **self.options)

    def with_head(
        self, hidden_TC: Tensor, layer: OutputLayer, batch: MicroBatch, step: StepInputs
    ) -> tuple[Any, bool]:
        """The function's result, from hidden states and the head, and whether the head was used."""
        assert batch.targets is not None
        head = LogitsHead(hidden_TC, layer)
        values: dict[str, Any] = {"hidden": hidden_TC, "head": head}
        if self.names & {*OF_NLL, *OF_STATISTICS}:
            statistics = self.statistics(hidden_TC, layer, batch.targets.labels)
            columns = dict(zip(STATISTICS, statistics.unbind(1), strict=True))
            logprobs = columns.pop("logprob")
            values |= {"nll": -logprobs, "logprobs": logprobs, **columns}
            head.is_used = True
        return self.call(values, batch, step), head.is_used


def refuse_vocabulary_part(name: str, layer: OutputLayer) -> None:
    """A TP rank has no whole rows of logits."""
    if layer.vocabulary is not None:
        raise ValueError(
            f"train.loss is {name}, which reads hidden states or the head; ranks of tensor "
            "parallelism have a part of each token's logits, so set parallel.tp to 1, or write it "
            "with logprobs, entropy, logsumexp and mean_logit"
        )


HeadReader = Callable[[MicroBatch], Reader]


def checked_result(result: object, names: Sequence[str], *, rows: int, of: str) -> LossResult:
    """What a function returned, if it has the right shapes and the declared metrics.

    of: "token" or "sequence", of which there are so many rows.
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
    return LossResult(values, tuple(metrics[name] for name in names))


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
