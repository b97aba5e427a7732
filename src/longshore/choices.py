"""Every choice of a recipe, listed once; the parts that act on it read it from here. No torch.

In: nothing. Out: Literal types, for annotations, and `names_of`, for checks and for help:

    names_of(Recompute)     ("none", "blocks")

config/schema.py explains the names. Policies are registered in plan/policy.py.
"""

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
