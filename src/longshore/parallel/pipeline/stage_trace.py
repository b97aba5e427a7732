"""What one stage does in an action, in order: FSDP's collectives, and where packs are shared.

In: a stage, the model's config, and its actions one after another. Out: for each action a list of
FSDP collectives over the lanes, the same on all lanes, and of slots: a part of a layer that
exchanges rows of the packs a lane shares, which trace.py fills in for each lane.

A layer of attention and experts under zero3:

    forward    gather layer 0, slot mixer, gather layer 0 router, slot mlp
    backward   gather layer 0, reduce layer 0 router, slot mixer, reduce layer 0
    with recomputation the slots of forward stand after the first gather of backward, again

The experts' router and the decay rates of scans are wrapped on their own (model/norm.py's
Float32Parameters); what belongs to no layer, embedding, last norm and head, is the stage's root.
"""

from dataclasses import dataclass
from typing import NamedTuple

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.choices import Recompute, ShardMode
from longshore.parallel.pipeline.fsdp_trace import ShardedStage, Wrapped
from longshore.plan.layout import Stage
from longshore.plan.order import Action


class Slot(NamedTuple):
    """Where a part of a layer shares packs."""

    part: Part
    round: int
    forward: bool
    """Also in a backward that computes the forward again."""
    where: str


class LaneCollective(NamedTuple):
    """A collective of FSDP over all lanes."""

    kind: str
    bytes: int
    what: str


@dataclass(frozen=True, slots=True)
class _TracedLayer:
    """A layer of the decoder or a depth, with its wrapped modules."""

    config: LayerConfig
    """Its parts."""
    name: str
    """Such as "layer 3" or "depth 1"."""
    module: Wrapped
    """The block, or the depth."""
    decay: Wrapped | None
    """The decay rates of a scan."""
    router: Wrapped | None
    """Of experts."""


class StageTrace:
    """The actions of one stage in the order in which it is asked for them.

    item, kept: bytes of a number of the arithmetic and of a parameter as it is kept.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stage: Stage,
        *,
        name: str,
        mode: ShardMode,
        recompute: Recompute,
        item: int,
        kept: int,
    ) -> None:
        self.stage, self.recompute = stage, recompute
        self.item, self.kept = item, kept
        self.root = Wrapped(f"{name}'s ends", _root_parameters(config, stage))
        self.layers = [
            _layer(config.layers[number], config.width, f"layer {number}")
            for number in stage.layers
        ]
        joins = (2 * config.width + 3) * config.width
        self.layers += [
            _layer(config.mtp[number], config.width, f"depth {number + 1}", more=joins)
            for number in stage.depths
        ]
        modules = [self.root]
        for layer in self.layers:
            inside = (layer.module, layer.decay, layer.router)
            modules += [module for module in inside if module is not None]
        self.fsdp = ShardedStage(modules, mode=mode, emit=self._emit)
        self.steps: list[Slot | LaneCollective] = []
        self.action = Action("forward", 0, 0)

    def run(self, action: Action, *, is_last: bool) -> list[Slot | LaneCollective]:
        """is_last: whether the action belongs to the plan's last round."""
        self.steps, self.action = [], action
        if action.kind == "forward":
            self._forward()
        else:
            self._backward(is_last=is_last)
        return self.steps

    def _forward(self) -> None:
        self.fsdp.begin_forward(self.root)
        for layer in self.layers:
            self.fsdp.begin_forward(layer.module)
            self._inside(layer, again=False)
            self.fsdp.end_forward(layer.module)
        self.fsdp.end_forward(self.root)

    def _inside(self, layer: _TracedLayer, *, again: bool) -> None:
        """The parts of a layer in forward, or computed again in backward."""
        parts = (layer.config.mixer, "mixer", layer.decay), (layer.config.mlp, "mlp", layer.router)
        for part, name, module in parts:
            if module is not None:
                self.fsdp.begin_forward(module)
                if not again:
                    self.fsdp.end_forward(module)
            if part is not None:
                self._slot(part, f"{layer.name} {name}{', again' if again else ''}", forward=True)

    def _backward(self, *, is_last: bool) -> None:
        fsdp = self.fsdp
        fsdp.begin_step_of_backward(is_last=is_last)
        if self.layers and not (self.stage.depths or self.stage.head):
            # The stage returns what its last block does, and the block's hook on it is the first.
            fsdp.begin_backward(self.layers[-1].module)
        fsdp.begin_backward(self.root)
        for layer in reversed(self.layers):
            fsdp.begin_backward(layer.module)
            if self.recompute == "blocks":
                self._inside(layer, again=True)
            if layer.config.mlp is not None:
                self._slot(layer.config.mlp, f"{layer.name} mlp", forward=False)
            if layer.router is not None:
                fsdp.begin_backward(layer.router)
                fsdp.end_backward(layer.router)
            if layer.config.mixer is not None:
                self._slot(layer.config.mixer, f"{layer.name} mixer", forward=False)
            if layer.decay is not None:
                # Its forward has no inputs, so its gradients are summed at the end.
                fsdp.begin_backward(layer.decay)
            fsdp.end_backward(layer.module)
        if not self.stage.embed:
            fsdp.end_backward(self.root)
        fsdp.end_step_of_backward()

    def _slot(self, part: Part, where: str, *, forward: bool) -> None:
        self.steps.append(Slot(part, self.action.round, forward, f"{self._text()}, {where}"))

    def _emit(self, kind: str, module: Wrapped) -> None:
        is_arithmetic = kind == "gather" and not module.uncast
        amount = module.parameters * (self.item if is_arithmetic else self.kept)
        self.steps.append(LaneCollective(f"fsdp {kind}", amount, f"{self._text()}, {module.name}"))

    def _text(self) -> str:
        return f"{self.action.kind} of round {self.action.round}"


def _layer(config: LayerConfig, width: int, name: str, *, more: int = 0) -> _TracedLayer:
    """more: parameters besides the layer's own."""
    decay = router = None
    match config.mixer:
        case Mamba2Config(heads=heads):
            decay = Wrapped(f"{name} decay", 3 * heads, uncast=True)
        case DeltaNetConfig(value_heads=heads):
            decay = Wrapped(f"{name} decay", 2 * heads, uncast=True)
    if isinstance(config.mlp, MoEConfig):
        router = Wrapped(f"{name} router", config.mlp.experts * width, uncast=True)
    inside = sum(module.parameters for module in (decay, router) if module is not None)
    module = Wrapped(name, config.parameters(width) + more - inside)
    return _TracedLayer(config, name, module, decay, router)


def _root_parameters(config: DecoderConfig, stage: Stage) -> int:
    """Embedding, or its copy; the last norm; the head, unless the embedding here serves as it."""
    own_head = stage.head and not (config.tied and stage.has_embedding)
    return config.vocab_size * config.width * (stage.has_embedding + own_head) + (
        config.width * stage.norm
    )
