"""Every choice of a recipe, listed once, and checks of numbers that configs share. No torch.

In: nothing. Out: Literal types, for annotations, and `names_of`, for checks and for help:
names_of(Recompute) is ("none", "blocks"). `check_counts` and `check_more_than` raise for a field of
a config: "AttentionConfig.heads is 0; it must be a whole number of 1 or more".
"""

import math
import operator
from typing import Any, Literal, get_args

ModelCode = Literal["longshore", "transformers"]

LossOn = Literal["assistant", "all"]
TooLong = Literal["reject", "truncate"]

Sync = Literal["round", "step"]
CPSizes = Literal["pow2", "any"]

ShardMode = Literal["zero3", "zero2", "none"]
ShardChoice = Literal["auto", ShardMode]
AttentionKind = Literal["auto", "gather", "heads"]
ScanKind = Literal["auto", "heads", "states"]

ScheduleName = Literal["cosine", "linear", "constant"]
DTypeChoice = Literal["auto", "bfloat16", "float32", "float64"]
Recompute = Literal["none", "blocks"]
Kernels = Literal["auto", "plain"]
LossName = Literal["cross_entropy", "dpo", "grpo", "ppo", "distill"]
DeviceChoice = Literal["auto", "cpu", "cuda"]
GraphLayer = Literal["attention", "mamba", "delta", "mlp"]
DisplayChoice = Literal["auto", "live", "plain", "none"]


def names_of(choice: Any) -> tuple[str, ...]:  # noqa: ANN401 - Literal types have no type
    """The names of one of the types above, in their order."""
    names: tuple[str, ...] = get_args(choice)
    assert names, choice
    return names


def check_counts(config: object, *names: str, optional: bool = False) -> None:
    """Raises for anything but whole numbers of 1 or more; None passes if it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        try:
            count = operator.index(value)
        except TypeError:
            count = 0
        if count < 1 or isinstance(value, bool):
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a whole number of "
                "1 or more"
            )
        object.__setattr__(config, name, count)


def check_more_than(least: float, config: object, *names: str, optional: bool = False) -> None:
    """Raises for anything but finite numbers above `least`; None passes if it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if not is_positive(value) or value <= least:
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a finite number above "
                f"{least:g}"
            )


def is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an int beyond all floats
        return False
