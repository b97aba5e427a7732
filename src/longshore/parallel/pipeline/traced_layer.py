"""The layers of a stage as a trace sees them: their parts on one TP rank, and their FSDP modules.

In: the model's config, a stage, a TP rank and ep. Out: for each layer and depth its parts, as the
rank has them, and how many parameters FSDP gathers for each wrapped module. These may differ
between TP ranks: a bias that follows a sum is on the first rank alone, and the vocabulary may not
divide.

Attention of 4 heads of 16 and an output bias, width 64, on 2 TP ranks: a rank has 4·32·64 = 8,192
parameters of its projections (KV heads as many as heads), and rank 0 the bias' 64 too.
"""

from dataclasses import dataclass, replace

from longshore.arch.cuts import TPRank, cuts_of, is_tp_split, norm_ranks, on_tp_rank
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.expert_cuts import expert_cut
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.parallel.pipeline.fsdp_trace import Wrapped
from longshore.plan.layout import Stage


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A mixer or a feed-forward part, as one TP rank has it."""

    config: Part
    """Of what the rank has."""
    name: str
    """Such as "layer 3 mixer"."""
    is_split: bool
    """Whether TP ranks sum what they compute."""
    shares_norm: bool
    """Whether ranks have different channels of one normed group."""
    own: Wrapped | None
    """What FSDP wraps inside: the decay rates of a scan, or the experts' router."""
    experts: Wrapped | None
    """The experts, where they are a module of FSDP of their own."""
    hyper: Wrapped | None
    """The weights of hyper-connections around it."""

    @property
    def ends_with_experts(self) -> bool:
        """Whether nothing that saves a tensor comes after the experts."""
        moe = self.config
        return isinstance(moe, MoEConfig) and not moe.shared_width and not moe.aux_weight


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer of the decoder or a depth, with its wrapped modules."""

    name: str
    """Such as "layer 3" or "depth 1"."""
    parts: tuple[TracedPart, ...]
    """The mixer, then the feed-forward part; one may be missing."""
    module: Wrapped
    """The block, or the depth."""
    is_depth: bool
    """Of multi-token prediction."""
    collapse: Wrapped | None
    """Of a depth with hyper-connections: what makes one row of several."""

    @property
    def ends_saved(self) -> bool:
        """Whether what follows its last part saves a tensor: a depth's norm, or a mixing."""
        return self.is_depth or self.parts[-1].hyper is not None

    @property
    def modules(self) -> list[Wrapped]:
        """In the order of named_modules()."""
        inside = [m for part in self.parts for m in (part.hyper, part.own, part.experts)]
        inside.append(self.collapse)
        return [self.module, *(module for module in inside if module is not None)]


def traced_layers(config: DecoderConfig, stage: Stage, at: TPRank, *, ep: int) -> list[TracedLayer]:
    """The stage's layers, then its depths."""
    joins = config.join_parameters
    layers = [
        _layer(config.layers[number], config.width, f"layer {number}", at, ep=ep)
        for number in stage.layers
    ]
    depths = [
        _layer(config.mtp[number], config.width, f"depth {number + 1}", at, ep=ep, joins=joins)
        for number in stage.depths
    ]
    return layers + depths


def last_collapse(config: DecoderConfig, stage: Stage, name: str) -> Wrapped | None:
    """What makes one row of several before the last norm, if that is in the stage."""
    if not stage.norm or config.residuals is None:
        return None
    return Wrapped(
        f"{name}'s collapse", config.residuals.collapse_parameters(config.width), uncast=True
    )


def root_parameters(config: DecoderConfig, stage: Stage, at: TPRank) -> int:
    """Embedding, or its copy; the last norm; the head, unless the embedding here serves as it."""
    own_head = stage.head and not (config.tied and stage.has_embedding)
    (span,) = at.vocabulary(config.vocab_size).spans
    rows = (span.stop - span.start) * (stage.has_embedding + own_head)
    return rows * config.width + config.width * stage.norm


def _layer(
    config: LayerConfig, width: int, name: str, at: TPRank, *, ep: int, joins: int = 0
) -> TracedLayer:
    """joins: parameters of a depth besides the layer's own; 0 for a layer."""
    parts, parameters = list[TracedPart](), joins
    residuals, collapse = config.residuals, None
    if joins and residuals is not None:
        amount = residuals.collapse_parameters(width)
        collapse = Wrapped(f"{name} collapse", amount, uncast=True)
        parameters -= amount
    for whole, kind in ((config.mixer, "mixer"), (config.mlp, "mlp")):
        if whole is not None:
            part = _part(whole, width, f"{name} {kind}", name, at, ep=ep)
            if residuals is not None:
                mixing = Wrapped(f"{part.name} hyper", residuals.parameters(width), uncast=True)
                part = replace(part, hyper=mixing)
            # With those of its norm; without those of modules that are wrapped inside.
            parameters += width + _parameters(whole, width, at)
            parameters -= part.own.parameters if part.own is not None else 0
            # The experts of all EP ranks were counted.
            parameters -= ep * part.experts.parameters if part.experts is not None else 0
            parts.append(part)
    return TracedLayer(name, tuple(parts), Wrapped(name, parameters), bool(joins), collapse)


def _part(whole: Part, width: int, name: str, layer: str, at: TPRank, *, ep: int) -> TracedPart:
    local = on_tp_rank(whole, at.tp)
    own = experts = None
    match local:
        case Mamba2Config(heads=heads):
            own = Wrapped(f"{layer} decay", 3 * heads, uncast=True)
        case DeltaNetConfig(value_heads=heads):
            own = Wrapped(f"{layer} decay", 2 * heads, uncast=True)
        case SparseAttentionConfig():
            own = Wrapped(f"{layer} biases", local.uncast_parameters, uncast=True)
        case MoEConfig():
            own = Wrapped(f"{layer} router", local.experts * width, uncast=True)
            if at.tp > 1 or ep > 1:
                (span,) = expert_cut(local.experts, ep=ep, ep_rank=0).spans
                each = 3 * width * local.width * (span.stop - span.start)
                experts = Wrapped(f"{layer} experts", each, over="expert_replicas")
    return TracedPart(
        config=local,
        name=name,
        is_split=is_tp_split(whole),
        shares_norm=isinstance(whole, Mamba2Config) and norm_ranks(whole, at.tp) > 1,
        own=own,
        experts=experts,
        hyper=None,
    )


def _parameters(whole: Part, width: int, at: TPRank) -> int:
    """Of a part on a rank: those of its config, less vectors that only another rank has."""
    cuts = cuts_of(whole, width, tp=at.tp, rank=at.rank) if at.tp > 1 else {}
    missing = sum(cut.size for cut in cuts.values() if not cut.spans)
    return on_tp_rank(whole, at.tp).parameters(width) - missing
