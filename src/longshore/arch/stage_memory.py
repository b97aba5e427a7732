"""What a stage of a pipeline has: layers, parameters, and bytes saved for each token. No torch.

In: a DecoderConfig and a stage of a Layout, or a pipeline rank. Out: counts. Without a pipeline the
one stage has everything. A rank of 1F1B with the first of 4 stages saves 4 rounds at a time; with
the last, one.
"""

from collections.abc import Mapping
from itertools import accumulate

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.part import Saved
from longshore.plan.layout import Layout, Stage, one_stage
from longshore.plan.order import make_order

INPUT_BYTES = 48
"""Per token: id, label, position, index and masks, and the loss's copies of label and mask."""


def whole_model(config: DecoderConfig) -> Layout:
    """The layout without a pipeline."""
    return one_stage(layers=len(config.layers), depths=len(config.mtp))


def stage_parameters(config: DecoderConfig, stage: Stage) -> int:
    """Parameters of a stage; a tied head needs none of its own beside the embedding."""
    width = config.width
    layers = sum(layer.parameters(width) for layer in stage_layers(config, stage))
    joins = len(stage.depths) * (2 * width + 3) * width
    tables = stage.has_embedding + (stage.head and not (config.tied and stage.has_embedding))
    return layers + joins + tables * config.vocab_size * width + stage.norm * width


def stage_layers(config: DecoderConfig, stage: Stage) -> tuple[LayerConfig, ...]:
    return (*(config.layers[i] for i in stage.layers), *(config.mtp[i] for i in stage.depths))


def rank_layers(config: DecoderConfig, layout: Layout, pp_rank: int) -> list[LayerConfig]:
    stages = (layout.stages[number] for number in layout.of_rank(pp_rank))
    return [layer for stage in stages for layer in stage_layers(config, stage)]


def stage_saved(
    config: DecoderConfig, layout: Layout, number: int, *, item: int, recompute: bool
) -> int:
    """Bytes that a stage saves of one token of one round."""
    width, stage = config.width, layout.stages[number]
    layers = stage_layers(config, stage)
    blocks = sum(saved_bytes(layer.saved(width), item) for layer in layers)
    tables = sum(saved_bytes(Saved(0, rope.rotary_dim or 0), item) for rope in config.ropes)
    saved = INPUT_BYTES + tables + (len(layers) * width * item if recompute else blocks)
    if stage.head:
        saved += saved_bytes(Saved(2 * width, 2), item)
    # Of each depth: embedding, two norms' outputs and statistics, the joined input, the head's.
    saved += len(stage.depths) * saved_bytes(Saved(7 * width, 3), item)
    # Streams of earlier depths pass through.
    passing = layout.streams(number - 1) - 1 if number else 0
    return saved + passing * width * item


def most_in_flight(layout: Layout, pp_rank: int, saved: Mapping[int, int]) -> int:
    """The most that a rank has saved at one time, where rounds are many."""
    actions = make_order(4 * layout.pp, pp=layout.pp, vpp=layout.vpp)[pp_rank]
    changes = (saved[a.stage] * (1 if a.kind == "forward" else -1) for a in actions)
    return max(accumulate(changes))


def saved_bytes(saved: Saved, item: int) -> int:
    return saved.values * item + saved.stats * max(item, 4)
