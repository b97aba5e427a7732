"""The losses by name: `train.loss="grpo"` with `train.loss_options={kl=0.01}`.

In: a name and options. Out: ReadyLoss: the function, what a step's sum is divided by, and the
fields that the data must have; or None where the name is no ready loss. `ready_loss("dpo", {})` is
divided by sequences and needs pair, sign and ref_logprobs.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from longshore.batch import MicroBatch
from longshore.choices import LossName, names_of
from longshore.errors import SettingError
from longshore.train.loss_fields import NeededField, needed_fields
from longshore.train.loss_inputs import TEMPERATURE, LossCall, Metric, checked_temperature
from longshore.train.losses.cross_entropy import smoothed_cross_entropy
from longshore.train.losses.distillation import METRICS as DISTILL_METRICS
from longshore.train.losses.distillation import distill
from longshore.train.losses.policy_gradient import metric_names, policy_gradient
from longshore.train.losses.preference import METRICS as DPO_METRICS
from longshore.train.losses.preference import dpo

Options = dict[str, Any]
Result = tuple[Tensor, dict[str, Metric]]
Average = Literal["tokens", "sequences"]


@dataclass(frozen=True, slots=True)
class ReadyLoss:
    """A loss by name, with its options."""

    call: LossCall | None
    """The function; None for plain nll."""
    count: str
    """What a step's sum is divided by."""
    fields: tuple[NeededField, ...] = ()
    """Extra fields that the data must have."""


def ready_loss(name: str, options: Mapping[str, Any]) -> ReadyLoss | None:
    """The loss of a name, "" included, or None for a user's module:function."""
    if not name:
        if options:
            raise SettingError("{loss_options} are given without a {loss}; leave them out")
        return ReadyLoss(None, "tokens")
    return _MAKERS[name](dict(options)) if name in names_of(LossName) else None


def _cross_entropy(options: Options) -> ReadyLoss:
    _check_options("cross_entropy", options, _defaults(smoothed_cross_entropy) | {TEMPERATURE: 1.0})
    _check_range(options, "label_smoothing", 0, 1)
    _check_range(options, "z_loss", 0, math.inf)
    changes = any(options.get(name) for name in _defaults(smoothed_cross_entropy))
    if not changes and options.get(TEMPERATURE, 1) == 1:
        return ReadyLoss(None, "tokens")
    return ReadyLoss(LossCall(smoothed_cross_entropy, "cross_entropy", options), "tokens")


def _policy_gradient(name: str, average: Average, options: Options) -> ReadyLoss:
    known = _defaults(policy_gradient)
    own: Options = {"average": average, "entropy_bonus": 0.0, "entropy_average": average}
    _check_options(name, options, known | own | {"log_entropy": True, TEMPERATURE: 1.0})
    for clip in ("clip_low", "clip_high", "kl"):
        _check_range(options, clip, 0, math.inf)
    average = _average(options, "average", average)
    of_entropy = _average(options, "entropy_average", average)
    bonus, temperature = options.pop("entropy_bonus", 0.0), options.pop(TEMPERATURE, 1.0)
    logs = options.pop("log_entropy", True)
    metrics = metric_names(**options)
    call = LossCall(
        _averaged(options, average=average, of_entropy=of_entropy, bonus=bonus, logs=logs),
        name,
        {TEMPERATURE: temperature} if temperature != 1 else {},
        metrics=(*metrics, "entropy") if logs or bonus else metrics,
    )
    return ReadyLoss(call, average, needed_fields(name, options))


def _average(options: Options, option: str, default: Average) -> Average:
    average: Average = options.pop(option, default)
    if average not in ("tokens", "sequences"):
        raise SettingError(
            "{loss_options}: {option} is {given!r}; it must be tokens or sequences",
            option=option,
            given=average,
        )
    return average


def _averaged(
    options: Options, *, average: Average, of_entropy: Average, bonus: float, logs: bool
) -> Callable[..., Result]:
    """The function with as few parameters as its options need: each costs time."""

    def plain(logprobs: Tensor, batch: MicroBatch) -> Result:
        return policy_gradient(logprobs, batch, **options)

    def with_entropy(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> Result:
        values, metrics = plain(logprobs, batch)
        return values - bonus * entropy, {**metrics, "entropy": entropy}

    def of_sequences(logprobs: Tensor, sequence_tokens: Tensor, batch: MicroBatch) -> Result:
        values, metrics = plain(logprobs, batch)
        return values / sequence_tokens, metrics

    def of_sequences_with_entropy(
        logprobs: Tensor, entropy: Tensor, sequence_tokens: Tensor, batch: MicroBatch
    ) -> Result:
        values, metrics = plain(logprobs, batch)
        values = values / sequence_tokens if average == "sequences" else values
        # The sum is divided by the step's sequences or tokens, as `average` says.
        sequences, tokens = batch.counts.sequences, batch.counts.main
        each = 1 / tokens if of_entropy == "tokens" else 1 / (sequences * sequence_tokens)
        each = each * (sequences if average == "sequences" else tokens)
        return values - bonus * each * entropy, {**metrics, "entropy": entropy}

    if not (logs or bonus):
        return plain if average == "tokens" else of_sequences
    return with_entropy if average == of_entropy == "tokens" else of_sequences_with_entropy


def _dpo(options: Options) -> ReadyLoss:
    _check_options("dpo", options, _defaults(dpo) | {TEMPERATURE: 1.0})
    _check_range(options, "beta", 0, math.inf)
    _check_range(options, "label_smoothing", 0, 0.5)
    call = LossCall(dpo, "dpo", options, metrics=DPO_METRICS)
    return ReadyLoss(call, "sequences", needed_fields("dpo", options))


def _distill(options: Options) -> ReadyLoss:
    _check_options("distill", options, _defaults(distill))
    checked_temperature(options.get(TEMPERATURE, 1.0))
    call = LossCall(distill, "distill", options, metrics=DISTILL_METRICS)
    return ReadyLoss(call, "tokens", needed_fields("distill", options))


def _grpo(options: Options) -> ReadyLoss:
    return _policy_gradient("grpo", "sequences", options)


def _ppo(options: Options) -> ReadyLoss:
    return _policy_gradient("ppo", "tokens", options)


_MAKERS: dict[str, Callable[[Options], ReadyLoss]] = {
    "cross_entropy": _cross_entropy,
    "dpo": _dpo,
    "grpo": _grpo,
    "ppo": _ppo,
    "distill": _distill,
}


def _defaults(function: Callable[..., Any]) -> Options:
    """The options of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _check_options(name: str, options: Options, known: Options) -> None:
    for option, value in options.items():
        if option not in known:
            raise SettingError(
                "{loss_options}: {name} has no option {option!r}; it has {known}",
                name=name,
                option=option,
                known=", ".join(known),
            )
        kind = type(known[option])
        fits = isinstance(value, bool) if kind is bool else not isinstance(value, bool)
        if not fits or not isinstance(value, int | float if kind is float else kind):
            wanted = {bool: "true or false", float: "a number", str: "a name"}[kind]
            raise SettingError(
                "{loss_options}: {option} is {value!r}; it must be {wanted}",
                option=option,
                value=value,
                wanted=wanted,
            )


def _check_range(options: Options, option: str, least: float, most: float) -> None:
    value = options.get(option)
    if value is not None and not (least <= value <= most and math.isfinite(value)):
        limits = f"from {least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
        raise SettingError(
            "{loss_options}: {option} is {value}; it must be {limits}",
            option=option,
            value=value,
            limits=limits,
        )
