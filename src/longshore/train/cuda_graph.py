"""CUDA graphs of layers: kernels recorded once for a shape, replayed for every later micro-batch.

In: a sharded decoder, which kinds of layers, and what serves which micro-batches
(plan/graph_use.py). Out: the same decoder, whose blocks replay graphs. With few tokens the host
cannot launch kernels as fast as a GPU runs them; a replay launches all of a layer at once.

A shape is a number of tokens and a way:

    whole     norm, mixer, residual and MLP in one graph: one pack of CP size 1, whose boundaries
              the loader has padded to graph.max_sequences by repeating the last
    halves    two graphs, up to the mixer's core and after it; the core, which reads the packs and
              reaches other lanes, runs eagerly between them

The first micro-batch of a shape runs eagerly, which also compiles its kernels; the second records;
from then on graphs are replayed. 28 layers at 2,048 tokens are 56 graphs, a forward and a backward
of each, and take the memory that one micro-batch takes. All shapes share that memory, because a
micro-batch runs forward and backward before the next begins. Experts, embedding, head, loss and
what FSDP does run eagerly; so do depths of multi-token prediction, and evaluation.

Boundaries, tables and rotary tables of a micro-batch are copied once, to where all layers' graphs
read them. The longest length is a constant: all tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Part
from longshore.arch.rope import RopeConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.batch import Boundaries, SeqContext
from longshore.model.decoder import Block, Decoder
from longshore.model.interface import Opaque, Output, Rows, ThreeStepMixer
from longshore.model.rope import Tables
from longshore.plan.graph_use import GraphSetting, GraphWay, graph_way
from longshore.train.graph_piece import GraphMemory, Owner, Piece, parameters_of

KINDS: dict[type[Part], str] = {
    AttentionConfig: "attention",
    MLAConfig: "attention",
    Mamba2Config: "mamba",
    DeltaNetConfig: "delta",
    MLPConfig: "mlp",
}
"""What graph.layers calls a part."""

EagerBlock = Callable[[Tensor, SeqContext, Tables], Output]


@dataclass(frozen=True, slots=True, eq=False)
class GraphedBlock:
    """A block, and what of it is replayed."""

    block: Block
    eager: EagerBlock
    """Runs it without graphs."""
    mixer: ThreeStepMixer | None
    """Where the mixer is replayed."""
    feeds: bool
    """Whether the rest of the block is."""
    owners: list[Owner]
    """Of the parameters that are read."""


class GraphedLayers:
    """Puts itself in the place of the blocks' forward, after FSDP has wrapped them.

    failed: why a shape is not replayed, if one is not.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        kinds: Sequence[str],
        setting: GraphSetting,
        memory: GraphMemory,
        most_bytes: int,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.setting, self.memory, self.most_bytes, self.tell = setting, memory, most_bytes, tell
        self.shapes: dict[tuple[GraphWay, int], Shape] = {}
        self.failed: list[str] = []
        self.blocks = 0
        self._packs: object = None
        self._shape: Shape | None = None
        for block in model.layers.values():
            assert isinstance(block, Block)
            if (graphed := _graphed(block, kinds)) is not None:
                self.blocks += 1
                block.forward = partial(self._run, graphed)  # type: ignore[method-assign]

    @property
    def bytes(self) -> int:
        """That all graphs have reserved."""
        return self.memory.recorder.bytes

    def _run(self, graphed: GraphedBlock, x_TC: Tensor, ctx: SeqContext, tables: Tables) -> Output:
        if not torch.is_grad_enabled():
            return graphed.eager(x_TC, ctx, tables)
        if ctx.packs is not self._packs:
            self._begin(ctx, tables)
        shape = self._shape
        if shape is None:
            return graphed.eager(x_TC, ctx, tables)
        if self.bytes > self.most_bytes and not shape.has(graphed):
            shape.is_off = True
            return graphed.eager(x_TC, ctx, tables)
        return shape.run(graphed, x_TC, ctx, tables)

    def _begin(self, ctx: SeqContext, tables: Tables) -> None:
        """Of a micro-batch: what serves it, with its boundaries and tables copied."""
        self._end()
        self._packs, self._shape = ctx.packs, None
        sizes = [pack.group.cp_size for pack in ctx.packs]
        way = graph_way(sizes, sum(len(pack.lengths) for pack in ctx.packs), self.setting)
        if way == "eager":
            return
        shape = self.shapes.setdefault((way, ctx.tokens), Shape(way, ctx.tokens, self.memory))
        shape.uses += 1
        if shape.uses == 1 or shape.is_off:
            return
        shape.load(ctx, tables)
        self._shape = shape

    def _end(self) -> None:
        """Of the micro-batch before, if it recorded."""
        shape = self._shape
        if shape is None or not shape.is_new:
            return
        shape.release()
        what = f"{shape.tokens:,} tokens, {shape.way}"
        if shape.is_off:
            shape.pieces.clear()
            reason = (
                f"graphs take {self.bytes / 2**30:.1f} GiB, more than the "
                f"{self.most_bytes / 2**30:.1f} GiB of graph.memory_gib"
            )
            self.failed.append(f"{what}: {reason}")
            self.tell(f"CUDA graphs: {what} is not replayed: {reason}")
        else:
            self.tell(
                f"CUDA graphs: recorded {self.blocks} layers for {what}; "
                f"{self.bytes / 2**30:.1f} GiB in all"
            )


@dataclass(eq=False)
class Shape:
    """The graphs of one number of tokens and one way."""

    way: GraphWay
    tokens: int
    memory: GraphMemory
    uses: int = 0
    """Micro-batches of this shape so far."""
    is_new: bool = False
    """Whether the present micro-batch records."""
    is_off: bool = False
    """Whether it runs eagerly after all."""
    pieces: dict[tuple[Block, str], Piece] = field(default_factory=dict)
    """By block and place."""
    bounds: Boundaries | None = None
    """Of the pack, at fixed addresses."""
    tables: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rotary tables, at fixed addresses."""
    ctx: SeqContext | None = None
    """What cores read: the micro-batch's context with these boundaries."""
    core_rows: dict[Block, int] = field(default_factory=dict)
    """How many of the first half's rows are for the core."""

    def has(self, graphed: GraphedBlock) -> bool:
        return any(block is graphed.block for block, _ in self.pieces)

    def load(self, ctx: SeqContext, tables: Tables) -> None:
        """Copies what a micro-batch's graphs read beside their inputs."""
        self.is_new = self.is_new or not self.pieces
        coming = [tensor for pair in tables.values() for tensor in pair]
        if not self.tables:
            self.tables = {rope: (cos.clone(), sin.clone()) for rope, (cos, sin) in tables.items()}
        fixed = [tensor for pair in self.tables.values() for tensor in pair]
        if self.way == "whole":
            (pack,) = ctx.packs
            bounds = pack.padded
            assert bounds.fixed, "the loader pads the boundaries of what is replayed whole"
            if self.bounds is None:
                self.bounds = bounds.map_tensors(lambda path, tensor: tensor.clone())
            fixed += _tensors(self.bounds)
            coming += _tensors(bounds)
            rows = bounds.offsets[-1]
            self.bounds = replace(self.bounds, offsets=bounds.offsets, longest=rows)
            self.ctx = replace(ctx, packs=(replace(pack, padded=self.bounds),))
        torch._foreach_copy_(fixed, coming)

    def run(self, graphed: GraphedBlock, x_TC: Tensor, ctx: SeqContext, tables: Tables) -> Output:
        block, mixer = graphed.block, graphed.mixer
        if mixer is not None:
            apart = mixer.apart()
            if self.way == "whole":
                rows = self._piece(graphed, "whole", self._whole)(x_TC, *apart)
            else:
                rows = self._halves(graphed, x_TC, ctx, apart)
            return Output(rows[0]) if graphed.feeds else self._feed_eagerly(block, rows, ctx)
        if block.mixer is None or block.mixer_norm is None:
            return Output(self._piece(graphed, "feed", self._feed)(x_TC)[0])
        if self.memory.recompute:
            return graphed.eager(x_TC, ctx, tables)
        x_TC, normed_TC = block.mixer_norm.add(x_TC, None)
        mixed_TC = block.mixer(normed_TC, ctx, tables)
        return Output(self._piece(graphed, "feed", self._feed)(x_TC, mixed_TC)[0])

    def _feed_eagerly(self, block: Block, rows: Rows, ctx: SeqContext) -> Output:
        x_TC, mixed_TC = rows
        if not self.memory.recompute:
            return block.feed(x_TC, mixed_TC, ctx)
        fed: Output = checkpoint(
            block.feed, x_TC, mixed_TC, ctx, use_reentrant=False, preserve_rng_state=False
        )
        return fed

    def _halves(self, graphed: GraphedBlock, x_TC: Tensor, ctx: SeqContext, apart: Rows) -> Rows:
        assert graphed.mixer is not None
        x_TC, *rows = self._piece(graphed, "before", self._before)(x_TC)
        count = self.core_rows[graphed.block]
        mixed = graphed.mixer.core(ctx, apart, *rows[:count])
        # Its gradients wait in their parameters while the other half runs backward.
        after = self._piece(graphed, "after", self._after, keeps_gradients=True)
        return after(x_TC, mixed, *rows[count:])

    def _piece(
        self,
        graphed: GraphedBlock,
        name: str,
        function: Callable[[GraphedBlock, Rows], Rows],
        *,
        keeps_gradients: bool = False,
    ) -> Callable[..., Rows]:
        """The piece of this name, which records at its first call."""
        piece = self.pieces.get((graphed.block, name))
        if piece is not None:
            return piece

        def record(*inputs: Tensor) -> Rows:
            piece = Piece(
                partial(function, graphed),
                graphed.owners,
                self.memory,
                keeps_gradients=keeps_gradients,
            )
            piece.record(inputs)
            self.pieces[graphed.block, name] = piece
            return piece(*inputs)

        return record

    def _whole(self, graphed: GraphedBlock, inputs: Rows) -> Rows:
        mixer, (x_TC, *apart) = graphed.mixer, inputs
        assert mixer is not None
        assert self.ctx is not None
        x_TC, rows, kept = self._projected(graphed, x_TC)
        return self._finished(graphed, x_TC, mixer.core(self.ctx, tuple(apart), *rows), kept)

    def _before(self, graphed: GraphedBlock, inputs: Rows) -> Rows:
        (x_TC,) = inputs
        x_TC, rows, kept = self._projected(graphed, x_TC)
        self.core_rows[graphed.block] = len(rows)
        return x_TC, *rows, *kept

    def _after(self, graphed: GraphedBlock, inputs: Rows) -> Rows:
        x_TC, mixed, *kept = inputs
        return self._finished(graphed, x_TC, mixed, tuple(kept))

    def _feed(self, graphed: GraphedBlock, inputs: Rows) -> Rows:
        x_TC, *mixed = inputs
        mixed_TC = mixed[0] if mixed else None
        return (graphed.block.feed(x_TC, mixed_TC, NO_CONTEXT).values,)

    def _projected(self, graphed: GraphedBlock, x_TC: Tensor) -> tuple[Tensor, Rows, Rows]:
        assert graphed.mixer is not None
        assert graphed.block.mixer_norm is not None
        x_TC, normed_TC = graphed.block.mixer_norm.add(x_TC, None)
        rows, kept = graphed.mixer.before(normed_TC, self.tables)
        return x_TC, rows, kept

    def _finished(self, graphed: GraphedBlock, x_TC: Tensor, mixed: Tensor, kept: Rows) -> Rows:
        assert graphed.mixer is not None
        mixed_TC = graphed.mixer.after(mixed, *kept)
        if not graphed.feeds:
            return x_TC, mixed_TC
        return (graphed.block.feed(x_TC, mixed_TC, NO_CONTEXT).values,)

    def release(self) -> None:
        """After the micro-batch that recorded: other shapes may use its memory."""
        self.is_new = False
        self.memory.addresses.clear()
        for piece in self.pieces.values():
            piece.release()


NO_CONTEXT = Opaque(None)  # type: ignore[arg-type]
"""A dense MLP takes each token by itself, and reads no context."""


def _tensors(bounds: Boundaries) -> list[Tensor]:
    """All of the boundaries, those of tables too, in a fixed order."""
    tensors: list[tuple[str, Tensor]] = []

    def collect(path: str, tensor: Tensor) -> Tensor:
        tensors.append((path, tensor))
        return tensor

    bounds.map_tensors(collect)
    return [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]


def _graphed(block: Block, kinds: Sequence[str]) -> GraphedBlock | None:
    """What of a block is replayed; None for nothing."""

    def chosen(part: Part | None) -> bool:
        name = KINDS.get(type(part)) if part is not None else None
        return name is not None and name in kinds

    config, mixer = block.config, block.mixer
    whole = mixer if chosen(config.mixer) and isinstance(mixer, ThreeStepMixer) else None
    # A mixer's graph ends with the sum, where no feed-forward part follows.
    feeds = chosen(config.mlp) or (whole is not None and config.mlp is None)
    if whole is None and not feeds:
        return None
    eager_parts = [
        part
        for part, is_in in ((mixer, whole is not None), (block.mlp, feeds))
        if part is not None and not is_in
    ]
    owners = parameters_of(block, without=eager_parts)
    return GraphedBlock(block, block.forward, whole, feeds, owners)
