"""What a rank has of a model: layers, parameters, and the bytes of both for each token. No torch.

In: a DecoderConfig, how lanes share it, and a stage of a Layout or a pipeline rank. Out: counts,
bytes saved for each token, and ModelBytes (weights, gradients, optimizer), upper bounds. Without a
pipeline the one stage has everything. A rank of 1F1B with the first of 4 stages saves 4 rounds at a
time; with the last, one.

Under tensor parallelism a rank has its part of what ranks divide (`Part.tp_units`), 1/tp of
embedding and head, and all of norms, routers, shared experts and MTP's projections. Between the
parts of a layer it has 1/tp of a lane's rows: so does a layer of experts. A part that ranks divide
saves the gathered rows, which all its projections read, and what its own heads or channels make of
them. With 4 heads of 16 dims at width 64 in bfloat16 a token's queries take 128 bytes, on 2 ranks
64; the rows that they are projected from take 128 on either.

Under expert parallelism a rank has 1/ep of the routed experts. A token's row travels to each rank
that has one of its experts, to min(top_k, ep) at most, and there it is copied for each of them: so
experts save top_k rows a token, as without EP. Routing is taken as even.

The model: weights and gradients in float32 (float64 for float64), two moments of the optimizer, and
a copy of the weights in `dtype` where that is smaller. How lanes share it:

    zero3   weights, gradients, moments sharded; two blocks, embedding and head are gathered
    zero2   weights and gradients gathered during a step; float32 weights and moments sharded
    none    every lane holds everything

With low-rank factors (LoRA) the base has neither gradients nor moments, and its weights are held in
`dtype` alone: 1000 parameters and 10 of factors in bfloat16 on one lane take 2·1000 + 18·10 bytes,
where training all would take 18·1000.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from longshore.arch.decoder import DecoderConfig, LayerConfig, LoRAConfig, decoder_on_tp_rank
from longshore.arch.part import Part, Product, Saved, Sharing
from longshore.plan.layout import Layout, Stage, make_order, one_stage
from longshore.plan.types import Axes
from longshore.settings import ShardMode, names_of

INPUT_BYTES = 48
"""Per token: id, label, position, index and masks, and the loss's copies of label and mask."""


ALONE = Axes(lanes=1, shard="none")
AUTO = Sharing("auto", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetting:
    """How a rank trains."""

    axes: Axes = ALONE
    """How ranks share the model; shard is decided."""
    dtype: str = "bfloat16"
    """Dtype of the arithmetic."""
    recompute: bool = False
    """Whether blocks are recomputed: they save only their input."""
    layout: Layout | None = None
    """The stages; None without a pipeline."""
    pp_rank: int = 0
    """Which pipeline rank it is."""
    sharing: Sharing = AUTO
    """How lanes share a pack."""

    def stages(self, config: DecoderConfig) -> Layout:
        return self.layout or whole_model(config)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Counts on a rank."""

    common: int
    """All but routed experts; FSDP shards them over the lanes."""
    experts: int = 0
    """Routed experts that are an FSDP unit of their own, sharded over lanes · tp / ep ranks."""
    factors: int = 0
    """Low-rank factors, which alone are trained where there are some; not in `total`."""

    @property
    def total(self) -> int:
        return self.common + self.experts

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(
            self.common + other.common,
            self.experts + other.experts,
            self.factors + other.factors,
        )


def whole_model(config: DecoderConfig) -> Layout:
    """The layout without a pipeline."""
    return one_stage(layers=len(config.layers), depths=len(config.mtp))


def stage_parameters(config: DecoderConfig, stage: Stage, axes: Axes = ALONE) -> Parameters:
    """Parameters of a stage; a tied head needs none of its own beside the embedding."""
    width, local = config.width, decoder_on_tp_rank(config, axes.tp)
    layers = [
        layer_parameters(layer, width, axes, config.lora) for layer in stage_layers(local, stage)
    ]
    joins = len(stage.depths) * config.join_parameters
    tables = stage.has_embedding + (stage.head and not (config.tied and stage.has_embedding))
    rows = -(-config.vocab_size // axes.tp)
    ends = Parameters(joins + tables * rows * width + stage.norm * config.norm_parameters)
    return sum(layers, start=ends)


def layer_parameters(
    layer: LayerConfig, width: int, axes: Axes, lora: LoRAConfig | None = None
) -> Parameters:
    """layer: as a TP rank has it."""
    count = layer.parameters(width)
    factors = lora.rank * sum(each.k + each.n for each in _products(layer, width)) if lora else 0
    routed = sum(part.expert_parameters(width) for part in layer.parts) if axes.splits_layers else 0
    return Parameters(count - routed, routed // axes.ep, factors)


def _products(layer: LayerConfig, width: int) -> list[Product]:
    """Products of linear layers that may have factors, a router's too: targets may have fewer."""
    return [each for part in layer.parts for each in part.products(width)]


def factor_saved(layer: LayerConfig, width: int, lora: LoRAConfig | None) -> Saved:
    """What factors save of a token: the row between them, and what a part adds."""
    if lora is None:
        return Saved(0)
    more = sum(part.factor_values() for part in layer.parts)
    return Saved(lora.rank * len(_products(layer, width)) + more)


def stage_layers(config: DecoderConfig, stage: Stage) -> tuple[LayerConfig, ...]:
    return (*(config.layers[i] for i in stage.layers), *(config.mtp[i] for i in stage.depths))


def rank_layers(config: DecoderConfig, how: RankSetting) -> list[LayerConfig]:
    """The layers of a pipeline rank, as a TP rank has them."""
    local, layout = decoder_on_tp_rank(config, how.axes.tp), how.stages(config)
    stages = (layout.stages[number] for number in layout.of_rank(how.pp_rank))
    return [layer for stage in stages for layer in stage_layers(local, stage)]


def stage_saved(config: DecoderConfig, number: int, how: RankSetting) -> int:
    """Bytes that a stage saves of one token of one round."""
    layout, item, tp = how.stages(config), item_bytes(how.dtype), how.axes.tp
    width, stage = config.width, layout.stages[number]
    layers = stage_layers(decoder_on_tp_rank(config, tp), stage)
    own_row = -(-width * item // tp)
    block_row = -(-config.row_width * item // tp)
    lora = config.lora
    blocks = sum(block_saved(layer, width, item=item, axes=how.axes, lora=lora) for layer in layers)
    tables = sum(saved_bytes(Saved(0, rope.rotary_dim or 0), item) for rope in config.ropes)
    saved = INPUT_BYTES + tables + (len(layers) * block_row if how.recompute else blocks)
    if config.residuals is not None:
        collapses = stage.norm + len(stage.depths)
        collapse = config.residuals.collapse_saved(width)
        saved += collapses * _rows_saved(collapse, Saved(0), item, tp)
    if stage.head:
        saved += _rows_saved(Saved(width, 1), Saved(width, 1), item, tp)
    # Of each depth: embedding, two norms' outputs and statistics, the joined input, the head's.
    saved += len(stage.depths) * _rows_saved(Saved(6 * width, 2), Saved(width, 1), item, tp)
    # Streams of earlier depths pass through.
    passing = layout.streams(number - 1) - 1 if number else 0
    return saved + passing * own_row


def sent_width(config: DecoderConfig, layout: Layout, stage: int) -> int:
    """Values that a stage sends to the next of each token, or gets back as gradients."""
    if layout.is_normed(stage):
        return layout.streams(stage) * config.width
    return config.row_width


def block_saved(
    layer: LayerConfig,
    width: int,
    *,
    item: int,
    axes: Axes,
    lora: LoRAConfig | None = None,
) -> int:
    """Bytes of one token; layer: as a TP rank has it. What parts save, and norms' inputs and rows.

    Experts read the norm's output, of the rank's own rows; other parts all rows, gathered.
    """
    total = saved_bytes(factor_saved(layer, width, lora), item)
    for part in layer.parts:
        own, gathered = Saved(width, 1), Saved(width) + part.saved(width)
        if part.routed_experts:
            own, gathered = own + gathered + part.dispatch_saved(axes.ep), Saved(0)
        own += layer.mixing_saved(width)
        total += _rows_saved(own, gathered, item, axes.tp)
    return total


def block_working(layer: LayerConfig, width: int, *, item: int, axes: Axes) -> int:
    """Bytes of one token that exist only while a block runs, besides what it saves.

    A split part's sum and the gradient of its gathered rows; rows on their way to experts and back.
    """

    def of(part: Part) -> int:
        if part.routed_experts:
            return -(-2 * width * item * part.dispatched(axes.ep) // axes.tp)
        return 2 * width * item if axes.tp > 1 else 0

    # The gradients of residual rows: of the rows themselves, mixed, and in float32.
    rows = layer.row(width) * (2 * item + max(item, 4)) if layer.residuals else 0
    return max(map(of, layer.parts)) - (-rows // axes.tp)


def _rows_saved(own: Saved, gathered: Saved, item: int, tp: int) -> int:
    """Bytes of one token of a lane: of rows that TP ranks share, and of rows that all have."""
    return -(-saved_bytes(own, item) // tp) + saved_bytes(gathered, item)


def most_in_flight(layout: Layout, pp_rank: int, saved: Mapping[int, int]) -> int:
    """The most that a rank has saved at one time, where rounds are many."""
    actions = make_order(4 * layout.pp, pp=layout.pp, vpp=layout.vpp)[pp_rank]
    changes = (saved[a.stage] * (1 if a.kind == "forward" else -1) for a in actions)
    return max(accumulate(changes))


def saved_bytes(saved: Saved, item: int) -> int:
    return saved.values * item + saved.stats * max(item, 4)


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


def model_bytes(config: DecoderConfig, how: RankSetting) -> ModelBytes:
    """Bytes of weights, gradients and optimizer on a rank."""
    item, axes = item_bytes(how.dtype), how.axes
    lanes, shard = axes.lanes, axes.shard
    if shard not in SHARD_MODES:
        raise ValueError(f"shard is {shard!r}; known are {', '.join(SHARD_MODES)}")
    layout = how.stages(config)
    mine = (layout.stages[number] for number in layout.of_rank(how.pp_rank))
    counts = sum((stage_parameters(config, stage, axes) for stage in mine), start=Parameters(0))
    layers = rank_layers(config, how)
    blocks = [layer_parameters(layer, config.width, axes, config.lora) for layer in layers]
    part = -(-counts.common // lanes) + -(-counts.experts // axes.expert_replicas)
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
