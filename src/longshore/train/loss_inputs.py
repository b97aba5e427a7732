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
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longshore.batch import MicroBatch
from longshore.errors import SettingError
from longshore.model.interface import Reader
from longshore.ops.cross_entropy import OutputLayer
from longshore.ops.token_statistics import STATISTICS, map_logits, token_statistics

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

    name: as the user wrote it, for errors. temperature: that logits are divided by.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str = "",
        options: Mapping[str, Any] | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", "the loss")
        self.options = dict(options or {})
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

    def __call__(self, given: Tensor, batch: MicroBatch, step: StepInputs) -> Tensor:
        """The function's values, from nll (T) or statistics (T, 4)."""
        values: dict[str, Any]
        if given.ndim == 1:
            values = {"nll": given, "logprobs": -given}
        else:
            columns = dict(zip(STATISTICS, given.unbind(1), strict=True))
            logprobs = columns.pop("logprob")
            values = {"nll": -logprobs, "logprobs": logprobs, **columns}
        return self.call(values, batch, step)

    def call(self, values: Mapping[str, Any], batch: MicroBatch, step: StepInputs) -> Tensor:
        """The function with these values and with what it reads of the batch and the step."""
        every = {**values, "batch": batch, "counts": batch.counts}
        if "sequence_tokens" in self.names:
            assert step.sequence_tokens is not None
            tokens_T = step.of_tokens(step.sequence_tokens, batch, padding=1).clamp(min=1)
            every["sequence_tokens"] = tokens_T
        result = self.function(**{name: every[name] for name in self.names}, **self.options)
        return result  # type: ignore[no-any-return]

    def with_head(
        self, hidden_TC: Tensor, layer: OutputLayer, batch: MicroBatch, step: StepInputs
    ) -> Tensor:
        """The function's values, from hidden states and the head."""
        assert batch.targets is not None
        head = LogitsHead(hidden_TC, layer)
        values: dict[str, Any] = {"hidden": hidden_TC, "head": head}
        if self.names & {*OF_NLL, *OF_STATISTICS}:
            statistics = self.statistics(hidden_TC, layer, batch.targets.labels)
            columns = dict(zip(STATISTICS, statistics.unbind(1), strict=True))
            logprobs = columns.pop("logprob")
            values |= {"nll": -logprobs, "logprobs": logprobs, **columns}
            head.is_used = True
        result = self.call(values, batch, step)
        if head.is_used or not isinstance(result, Tensor):
            return result
        # The head's weight gets a gradient in every round.
        return result + (torch.zeros_like(hidden_TC[:1]) @ layer.weight[:1].T).sum()


def refuse_vocabulary_part(name: str, layer: OutputLayer) -> None:
    """A TP rank has no whole rows of logits."""
    if layer.vocabulary is not None:
        raise SettingError(
            "{loss} is {given}, which reads hidden states or the head; ranks of tensor "
            "parallelism have a part of each token's logits, so set {tp} to 1, or write it with "
            "logprobs, entropy, logsumexp and mean_logit",
            given=name,
        )


HeadReader = Callable[[MicroBatch], Reader]


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
                "with a default or a value in loss_options",
            )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option in KNOWN or (option not in parameters and not takes_any):
            own = [p for p in parameters if p not in KNOWN]
            known = f"it has {', '.join(own)}" if own else "it has none"
            raise SettingError(
                "{loss_options}: {given} has no option {option!r}; {known}",
                given=name,
                option=option,
                known=known,
            )
    if "sequences" in names and (others := sorted(names - set(OF_SEQUENCES))):
        raise _refused(
            name,
            f"it reads sequences, and {', '.join(others)}; a loss of whole sequences reads only "
            "sequences and counts",
        )
    return frozenset(names)


def checked_temperature(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise SettingError(
            "{loss_options}: temperature is {value!r}; it must be a number above 0", value=value
        )
    return float(value)


def _refused(name: str, problem: str) -> SettingError:
    return SettingError("{loss} is {given}: {problem}", given=name, problem=problem)
