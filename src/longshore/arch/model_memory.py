"""Bytes of a model's weights, gradients and optimizer on a rank. No torch.

In: a DecoderConfig and how lanes share it. Out: ModelBytes, upper bounds.

Weights and gradients in float32 (float64 for float64), two moments of the optimizer, and a copy of
the weights in `dtype` where that is smaller. How lanes share it:

    zero3   weights, gradients, moments sharded; two blocks, embedding and head are gathered
    zero2   weights and gradients gathered during a step; float32 weights and moments sharded
    none    every lane holds everything

With low-rank factors (LoRA) the base has neither gradients nor moments, and its weights are held in
`dtype` alone: 1000 parameters and 10 of factors in bfloat16 on one lane take 2·1000 + 18·10 bytes,
where training all would take 18·1000.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from longshore.arch.decoder import DecoderConfig
from longshore.arch.stage_memory import (
    WHOLE,
    ModelSplit,
    Parameters,
    layer_parameters,
    rank_layers,
    stage_parameters,
    whole_model,
)
from longshore.choices import ShardMode, names_of
from longshore.plan.layout import Layout

SHARD_MODES = names_of(ShardMode)
ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes of the model on a rank."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Blocks that are gathered temporarily, with their gradients."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered

    def __add__(self, other: "ModelBytes") -> "ModelBytes":
        return ModelBytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
            self.gathered + other.gathered,
        )


def model_bytes(
    config: DecoderConfig,
    *,
    lanes: int,
    shard: str,
    dtype: str,
    layout: Layout | None = None,
    pp_rank: int = 0,
    split: ModelSplit = WHOLE,
) -> ModelBytes:
    """Bytes of weights, gradients and optimizer on each of `lanes` that share them as `shard`.

    layout, pp_rank: the pipeline and which of its ranks; None for the whole model. split: over how
    many ranks its layers are split.
    """
    item = item_bytes(dtype)
    if shard not in SHARD_MODES:
        raise ValueError(f"shard is {shard!r}; known are {', '.join(SHARD_MODES)}")
    if lanes < 1:
        raise ValueError(f"lanes is {lanes}; it must be at least 1")
    stages = layout or whole_model(config)
    mine = (stages.stages[number] for number in stages.of_rank(pp_rank))
    counts = sum((stage_parameters(config, stage, split) for stage in mine), start=Parameters(0))
    layers = rank_layers(config, stages, pp_rank, split)
    blocks = [layer_parameters(layer, config.width, split, config.lora) for layer in layers]
    replicas = max(1, lanes * split.tp // split.ep)
    part = -(-counts.common // lanes) + -(-counts.experts // replicas)
    whole = _Shared(counts.total, part, [block.total for block in blocks])
    if config.lora is None:
        return _trained(whole, item, shard)
    factors = _Shared(
        counts.factors, -(-counts.factors // lanes), [block.factors for block in blocks]
    )
    return _frozen(whole, item, shard) + _trained(factors, item, shard)


@dataclass(frozen=True, slots=True)
class _Shared:
    """Parameters of a rank's stages: all, its part of them where lanes shard them, each block's."""

    count: int
    part: int
    blocks: list[int]

    @property
    def block(self) -> int:
        return max(self.blocks, default=0)

    @property
    def ends(self) -> int:
        return self.count - sum(self.blocks)


def _trained(of: _Shared, item: int, shard: str) -> ModelBytes:
    master = max(item, 4)
    copy = item * of.count if item < master else 0
    if shard == "none":
        return ModelBytes(master * of.count + copy, master * of.count, 2 * master * of.count, 0)
    weights, moments = master * of.part, 2 * master * of.part
    if shard == "zero2":
        gathered = copy or master * of.count
        return ModelBytes(weights + gathered, master * (of.part + of.count), moments, 0)
    gathered = item * (2 * of.block + of.ends) + master * (of.block + of.ends)
    return ModelBytes(weights, weights, moments, gathered)


def _frozen(of: _Shared, item: int, shard: str) -> ModelBytes:
    if shard == "none":
        return ModelBytes(item * of.count, 0, 0, 0)
    if shard == "zero2":
        return ModelBytes(item * (of.part + of.count), 0, 0, 0)
    return ModelBytes(item * of.part, 0, 0, item * (2 * of.block + of.ends))


def item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype is {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]
