"""What one stage does in an action, in order: FSDP's collectives, those of TP and EP, shared packs.

In: a stage, the model's config, a TP rank, and the stage's actions one after another. Out: for each
action a list of steps, the same on all lanes: collectives of FSDP, collectives that carry a lane's
rows over TP or EP ranks, and slots, where a part of a layer exchanges rows of the packs that a lane
shares; trace.py fills in each lane's packs and rows.

A layer of attention and experts under zero3, with TP 2:

    forward    gather layer 0 | gather rows, slot mixer, reduce_scatter rows |
               gather layer 0 router, gather layer 0 experts, sum counts, slot mlp, sum balance loss
    backward   gather layer 0, reduce layer 0 experts, reduce layer 0 router |
               gather rows, slot mixer, reduce_scatter rows | reduce layer 0

With recomputation the steps of forward stand in backward again, before the first that needs a saved
tensor: the gather that answers the layer's last reduce_scatter comes earlier, and the layer's last
sum over TP does not come again, because recomputation ends with the last saved tensor. A depth has
a norm at its end, so all of it is computed again; so is a layer with hyper-connections, whose last
part is followed by their mixing.

The experts' router, the decay rates of scans and the weights of hyper-connections are wrapped on
their own (model/norm.py's Float32Parameters), with TP or EP the experts too, over the ranks that
have the same ones; what belongs to no layer, embedding, last norm and head, is the stage's root.
"""

from typing import NamedTuple

from longshore.arch.cuts import TPRank
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Part
from longshore.choices import Recompute, ShardMode
from longshore.parallel.pipeline.fsdp_trace import Over, ShardedStage, Wrapped
from longshore.parallel.pipeline.pack_collectives import COUNT_BYTES
from longshore.parallel.pipeline.traced_layer import (
    TracedLayer,
    TracedPart,
    last_collapse,
    root_parameters,
    traced_layers,
)
from longshore.plan.layout import Stage
from longshore.plan.order import Action


class Slot(NamedTuple):
    """Where a part of a layer shares packs."""

    part: Part
    """As a TP rank has it."""
    round: int
    forward: bool
    """Also in a backward that computes the forward again."""
    where: str


class ShardCollective(NamedTuple):
    """A collective of FSDP over all ranks of an axis."""

    kind: str
    over: Over
    bytes: int
    """Of all parameters."""
    what: str


class RowBytes(NamedTuple):
    """What a rank receives from each other rank; a lane's T rows are T/tp on a rank."""

    row: int = 0
    """For each of the T/tp rows."""
    sequence: int = 0
    """For each sequence that the lane has a part of, and once for padding."""
    once: int = 0
    """Besides."""

    def of(self, rows: int, sequences: int) -> int:
        return rows * self.row + (sequences + 1) * self.sequence + self.once


class RowCollective(NamedTuple):
    """A collective of activations over all ranks of an axis."""

    kind: str
    over: Over
    each: RowBytes | None
    """None: the plan does not tell, it depends on where tokens are routed."""
    round: int
    what: str


Step = Slot | ShardCollective | RowCollective


class StageTrace:
    """The actions of one stage in the order in which it is asked for them.

    at: the TP rank. ep: ranks that share one set of experts. item, kept: bytes of a number of the
    arithmetic and of a parameter as it is kept.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stage: Stage,
        *,
        at: TPRank,
        ep: int,
        name: str,
        mode: ShardMode,
        recompute: Recompute,
        item: int,
        kept: int,
        statistics: bool = False,
    ) -> None:
        """statistics: whether the main loss reads more of the logits than nll."""
        self.statistics = statistics
        self.stage, self.recompute, self.at, self.ep = stage, recompute, at, ep
        self.item, self.kept, self.wide = item, kept, max(item, 4)
        self.row = RowBytes(row=config.width * item)
        self.losses = 1 + len(config.mtp) if stage.head else 0
        self.root = Wrapped(f"{name}'s ends", root_parameters(config, stage, at))
        self.layers = traced_layers(config, stage, at, ep=ep)
        self.collapse = last_collapse(config, stage, name)
        modules = [self.root]
        for layer in self.layers:
            modules += layer.modules
        if self.collapse is not None:
            place = sum(len(layer.modules) for layer in self.layers if not layer.is_depth)
            modules.insert(1 + place, self.collapse)
        self.fsdp = ShardedStage(modules, mode=mode, emit=self._emit)
        self.steps: list[Step] = []
        self.action = Action("forward", 0, 0)

    def run(self, action: Action, *, is_last: bool) -> list[Step]:
        """is_last: whether the action belongs to the plan's last round."""
        self.steps, self.action = [], action
        if action.kind == "forward":
            self._forward()
        else:
            self._backward(is_last=is_last)
        return self.steps

    def _forward(self) -> None:
        self.fsdp.begin_forward(self.root)
        if self.stage.embed:
            self._tp("reduce_scatter", self.row, "embedding")
        layers = [layer for layer in self.layers if not layer.is_depth]
        for layer in layers:
            self._layer_forward(layer)
        self._own_module(self.collapse, again=False)
        for layer in self.layers[len(layers) :]:
            self._tp("reduce_scatter", self.row, f"{layer.name} embedding")
            self._layer_forward(layer)
        for number in range(self.losses):
            self._tp("gather", self.row, f"head {number}")
            both = RowBytes(row=2 * self.at.tp * self.wide)
            self._tp("gather", both, f"head {number}: log-sum-exp and logit")
            if self.statistics and not number:
                self._tp("sum_over", both, "head 0: expectation and sum of logits")
        self.fsdp.end_forward(self.root)

    def _layer_forward(self, layer: TracedLayer) -> None:
        self.fsdp.begin_forward(layer.module)
        self._inside(layer, again=False)
        self.fsdp.end_forward(layer.module)

    def _inside(self, layer: TracedLayer, *, again: bool) -> None:
        """The parts of a layer in forward, or computed again in backward."""
        for part in layer.parts:
            is_end = part is layer.parts[-1] and not layer.ends_saved
            self._own_module(part.hyper, again=again)
            forward = self._experts if isinstance(part.config, MoEConfig) else self._part
            forward(part, again=again, closes=not (again and is_end))
        self._own_module(layer.collapse, again=again)

    def _part(self, part: TracedPart, *, again: bool, closes: bool) -> None:
        """closes: whether the sum over TP after it is computed, too."""
        where = f"{part.name}{', again' if again else ''}"
        self._tp("gather", self.row, where)
        self._own_module(part.own, again=again)
        self._slot(part, where, forward=True)
        if part.shares_norm:
            self._tp("gather", self._squares(), f"{where}: mean squares")
        if part.is_split and closes:
            self._tp("reduce_scatter", self.row, where)

    def _experts(self, part: TracedPart, *, again: bool, closes: bool) -> None:
        where = f"{part.name}{', again' if again else ''}"
        assert isinstance(part.config, MoEConfig)
        self._own_module(part.own, again=again)
        if part.experts is not None:
            self.fsdp.begin_forward(part.experts)
        self._routed(("counts", "rows", "choices", "rows back"), where)
        if part.experts is not None and not again:
            self.fsdp.end_forward(part.experts)
        if part.config.aux_weight:
            counts = RowBytes(sequence=part.config.experts * COUNT_BYTES)
            self._tp("sum_over", counts, f"{where}: experts' counts over TP")
        self._slot(part, where, forward=True)
        if closes:
            self._tp("sum_over", RowBytes(once=self.wide), f"{where}: balance loss")

    def _own_module(self, module: Wrapped | None, *, again: bool) -> None:
        if module is not None:
            self.fsdp.begin_forward(module)
            if not again:
                self.fsdp.end_forward(module)

    def _backward(self, *, is_last: bool) -> None:
        fsdp = self.fsdp
        fsdp.begin_step_of_backward(is_last=is_last)
        if self.layers and not (self.stage.depths or self.stage.head):
            # The stage returns what its last block does, and the block's hook on it is the first.
            fsdp.begin_backward(self.layers[-1].module)
        fsdp.begin_backward(self.root)
        for number in reversed(range(self.losses)):
            self._tp("reduce_scatter", self.row, f"head {number}")
        layers = [layer for layer in self.layers if not layer.is_depth]
        for layer in reversed(self.layers[len(layers) :]):
            self._layer_backward(layer)
            self._tp("gather", self.row, f"{layer.name} embedding")
        self._own_backward(self.collapse)
        for layer in reversed(layers):
            self._layer_backward(layer)
        if self.stage.embed:
            self._tp("gather", self.row, "embedding")
        else:
            fsdp.end_backward(self.root)
        fsdp.end_step_of_backward()

    def _own_backward(self, module: Wrapped | None) -> None:
        """Of a module whose forward has the rows as its input."""
        if module is not None:
            self.fsdp.begin_backward(module)
            self.fsdp.end_backward(module)

    def _layer_backward(self, layer: TracedLayer) -> None:
        self.fsdp.begin_backward(layer.module)
        *before, last = layer.parts
        if self.recompute == "blocks" and layer.ends_saved:
            self._inside(layer, again=True)
        self._own_backward(layer.collapse)
        self._open_backward(last)
        if self.recompute == "blocks" and not layer.ends_saved:
            self._inside(layer, again=True)
        self._rest_of_backward(last)
        for part in reversed(before):
            self._open_backward(part)
            self._rest_of_backward(part)
        self.fsdp.end_backward(layer.module)

    def _open_backward(self, part: TracedPart) -> None:
        """What comes before the first saved tensor of a part is needed."""
        if part.is_split:
            self._tp("gather", self.row, part.name)
        elif part.experts is not None and part.ends_with_experts:
            self.fsdp.begin_backward(part.experts)

    def _rest_of_backward(self, part: TracedPart) -> None:
        if isinstance(part.config, MoEConfig):
            self._experts_backward(part)
        else:
            self._part_backward(part)
        self._own_backward(part.hyper)

    def _part_backward(self, part: TracedPart) -> None:
        if part.shares_norm:
            self._tp("reduce_scatter", self._squares(), f"{part.name}: mean squares")
        self._slot(part, part.name, forward=False)
        if part.own is not None:
            # Its forward has no inputs, so its gradients are summed at the end.
            self.fsdp.begin_backward(part.own)
        self._tp("reduce_scatter", self.row, part.name)

    def _experts_backward(self, part: TracedPart) -> None:
        self._slot(part, part.name, forward=False)
        if part.experts is not None:
            self.fsdp.begin_backward(part.experts)
        self._routed(("rows back", "choices", "rows"), part.name)
        if part.experts is not None:
            self.fsdp.end_backward(part.experts)
        assert part.own is not None
        self.fsdp.begin_backward(part.own)
        self.fsdp.end_backward(part.own)

    def _squares(self) -> RowBytes:
        """One number of every row of the lane."""
        return RowBytes(row=self.at.tp * self.wide)

    def _tp(self, kind: str, each: RowBytes, where: str) -> None:
        if self.at.tp > 1:
            what = f"{self._text()}, {where}"
            self.steps.append(RowCollective(kind, "tp", each, self.action.round, what))

    def _routed(self, names: tuple[str, ...], where: str) -> None:
        """Between the ranks that share a set of experts; only the size of counts is known."""
        for name in names if self.ep > 1 else ():
            each = RowBytes(once=2 * COUNT_BYTES) if name == "counts" else None
            what = f"{self._text()}, {where}: {name}"
            self.steps.append(RowCollective("all_to_all", "ep", each, self.action.round, what))

    def _slot(self, part: TracedPart, where: str, *, forward: bool) -> None:
        what = f"{self._text()}, {where}"
        self.steps.append(Slot(part.config, self.action.round, forward, what))

    def _emit(self, kind: str, module: Wrapped) -> None:
        is_arithmetic = kind == "gather" and not module.uncast
        amount = module.parameters * (self.item if is_arithmetic else self.kept)
        what = f"{self._text()}, {module.name}"
        self.steps.append(ShardCollective(f"fsdp {kind}", module.over, amount, what))

    def _text(self) -> str:
        return f"{self.action.kind} of round {self.action.round}"
