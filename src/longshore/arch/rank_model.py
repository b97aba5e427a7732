"""What a rank has of a model in memory, layer by layer, whatever it is trained with. No torch.

In: a decoder, the layout and the pipeline rank, over how many ranks layers are split, the bytes of
a number. Out: a RankModel: parameters, and bytes of a token that kernels keep and need in each
layer. A layer of Qwen3-0.6B in bfloat16 has 15.7 million parameters and saves 38,976 bytes a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from longshore.arch.cuts import decoder_on_tp_rank
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.kernel_memory import part_memory
from longshore.arch.lora import LoRAConfig
from longshore.arch.part import Part, Saved
from longshore.arch.stage_memory import (
    INPUT_BYTES,
    ModelSplit,
    Parameters,
    block_working,
    factor_saved,
    layer_parameters,
    saved_bytes,
    stage_layers,
    stage_parameters,
)
from longshore.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A layer of one rank."""

    parameters: int
    """On the rank, gathered."""
    saved: int
    """Bytes of a token from forward to backward."""
    parts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """In the order of backward: what the part saved, and the moments' (bytes of a token, gradients
    that exist)."""
    input: int
    """Bytes of a token that recomputation keeps."""
    factors: int = 0
    """Parameters of low-rank factors, which alone are trained where there are some."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a rank has of the model, whatever it is trained with."""

    layers: tuple[LayerMemory, ...]
    """Of all its stages."""
    configs: tuple[LayerConfig, ...]
    """The same as data."""
    counts: Parameters
    """Parameters of its stages."""
    stages: Mapping[int, tuple[tuple[LayerMemory, ...], int]]
    """By number: the stage's layers, and bytes of a token that are saved beside them."""
    has_head: bool
    """Whether a stage computes the loss."""


@lru_cache(maxsize=1024)
def rank_model(
    config: DecoderConfig, layout: Layout, pp_rank: int, split: ModelSplit, item: int
) -> RankModel:
    local, numbers = decoder_on_tp_rank(config, split.tp), layout.of_rank(pp_rank)
    tables = sum(rope.rotary_dim or 0 for rope in config.ropes) * max(item, 4)
    stages: dict[int, tuple[tuple[LayerMemory, ...], int]] = {}
    configs: list[LayerConfig] = []
    for number in numbers:
        stage = layout.stages[number]
        own = stage_layers(local, stage)
        layers = tuple(
            _layer_memory(layer, config.width, item, split, config.float32_residual, config.lora)
            for layer in own
        )
        # Of each depth: embedding, norms' outputs, the joined input, the head's.
        passing = layout.streams(number - 1) - 1 if number else 0
        rows = (7 * len(stage.depths) + passing) * config.width * item // split.tp
        if config.residuals is not None:
            collapse = saved_bytes(config.residuals.collapse_saved(config.width), item)
            rows += (stage.norm + len(stage.depths)) * collapse // split.tp
        stages[number] = layers, INPUT_BYTES + tables + rows
        configs += own
    each = (stage_parameters(config, layout.stages[number], split) for number in numbers)
    return RankModel(
        layers=tuple(layer for layers, _ in stages.values() for layer in layers),
        configs=tuple(configs),
        counts=sum(each, start=Parameters(0)),
        stages=stages,
        has_head=any(layout.stages[number].head for number in numbers),
    )


@cache
def _layer_memory(
    layer: LayerConfig,
    width: int,
    item: int,
    split: ModelSplit,
    wide: bool,
    lora: LoRAConfig | None,
) -> LayerMemory:
    """layer: as a TP rank has it; wide: the residual stream is float32 at least."""
    row = layer.row(width)
    stream = Saved(0, row) if wide else Saved(row)
    # The collapsed row, which the norm reads, and what the mixing saves.
    mixing = Saved(width) + layer.residuals.saved(width) if layer.residuals else Saved(0)
    parts = []
    total = saved_bytes(factor_saved(layer, width, lora), item)
    working = block_working(layer, width, item=item, split=split)
    for part in reversed(layer.parts):
        memory = part_memory(part, width)
        own, gathered = stream + mixing, Saved(width) + memory.saved
        if isinstance(part, MoEConfig):
            own, gathered = own + gathered, Saved(0)
        kept = -(-saved_bytes(own, item) // split.tp) + saved_bytes(gathered, item)
        moments = tuple(
            (
                _rows(part, moment.rows, item, split.tp) + working,
                _local(part, moment.gradients, split),
            )
            for moment in memory.backward
        )
        parts.append((kept, moments))
        total += kept
    counts = layer_parameters(layer, width, split, lora)
    own_row = -(-saved_bytes(stream, item) // split.tp)
    return LayerMemory(counts.total, total, tuple(parts), own_row, counts.factors)


def _rows(part: Part, rows: Saved, item: int, tp: int) -> int:
    """A layer of experts has a rank's own rows; other parts have all of a lane's."""
    total = saved_bytes(rows, item)
    return -(-total // tp) if isinstance(part, MoEConfig) else total


def _local(part: Part, parameters: int, split: ModelSplit) -> int:
    return parameters // split.ep if isinstance(part, MoEConfig) else parameters
