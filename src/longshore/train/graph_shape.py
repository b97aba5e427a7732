"""GraphShape: the graphs of all layers for one number of tokens and one way to serve it.

In: blocks and what of them is replayed, micro-batches of the shape. Out: what the blocks return.
The first micro-batch that comes here records the graphs, layer by layer, while it runs; later ones
replay them. With 28 dense layers the way `whole` has 28 pieces, the way `halves` 56.

Boundaries and rotary tables of a micro-batch are copied once, by `load`, to where the
graphs of all layers read them. The longest length is a constant: all tokens.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longshore.arch.part import Part
from longshore.arch.rope import RopeConfig
from longshore.batch import Boundaries, SeqContext
from longshore.model.decoder import Block
from longshore.model.interface import (
    Mixed,
    MixerLoss,
    Opaque,
    Output,
    Rows,
    ThreeStepMixer,
    with_loss,
)
from longshore.model.rope import Tables
from longshore.plan.graph_use import GraphWay
from longshore.train.graph_piece import GraphMemory, GraphPiece, Owner, parameters_of
from longshore.train.graph_recorder import RecordingError


@dataclass(frozen=True, slots=True, eq=False)
class GraphedBlock:
    """A block, and what of it is replayed."""

    block: Block
    """The layer."""
    mixer: ThreeStepMixer | None
    """Where the mixer is replayed."""
    feeds: bool
    """Whether the rest of the block is."""
    owners: list[Owner]
    """Of the parameters that are read."""

    @property
    def kind(self) -> type:
        """Of the mixer that is replayed; without one, of the feed-forward part."""
        return type(self.mixer if self.mixer is not None else self.block.mlp)


@dataclass(eq=False)
class GraphShape:
    """The graphs of one number of tokens and one way."""

    way: GraphWay
    """Whole layers, or halves of them."""
    tokens: int
    """Of a micro-batch, padding included."""
    memory: GraphMemory
    """What all shapes share."""
    uses: int = 0
    """Micro-batches of this shape so far."""
    is_new: bool = False
    """Whether the present micro-batch records."""
    is_off: bool = False
    """Whether it runs eagerly after all."""
    pieces: dict[tuple[Block, str], GraphPiece] = field(default_factory=dict)
    """By block and place."""
    bounds: Boundaries | None = None
    """Of the pack, at fixed addresses."""
    tables: dict[RopeConfig, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Rotary tables, at fixed addresses."""
    ctx: SeqContext | None = None
    """What cores read: the micro-batch's context with these boundaries."""
    core_rows: dict[Block, int] = field(default_factory=dict)
    """How many of the first half's rows are for the core."""

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens ({self.way})"

    def has(self, graphed: GraphedBlock) -> bool:
        return any(block is graphed.block for block, _ in self.pieces)

    def forget(self, graphed: GraphedBlock) -> None:
        """Drops a block's pieces: its other half could not be recorded."""
        self.pieces = {
            key: piece for key, piece in self.pieces.items() if key[0] is not graphed.block
        }

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
            known = {name: self.bounds.tables[name] for name in bounds.tables}
            self.bounds = replace(
                self.bounds, offsets=bounds.offsets, longest=bounds.offsets[-1], tables=known
            )
            fixed += _tensors(self.bounds)
            coming += _tensors(bounds)
            self.ctx = replace(ctx, packs=(replace(pack, padded=self.bounds),))
        if fixed:
            torch._foreach_copy_(fixed, coming)

    def run(self, graphed: GraphedBlock, x_TC: Tensor, ctx: SeqContext, tables: Tables) -> Output:
        block, mixer = graphed.block, graphed.mixer
        if mixer is not None:
            apart = mixer.apart(x_TC)
            if self.way == "whole":
                rows = self._piece(graphed, "whole", self._whole)(x_TC, *apart)
            else:
                rows = self._halves(graphed, x_TC, ctx, apart)
            return Output(rows[0]) if graphed.feeds else self._feed_eagerly(block, rows, ctx)
        if block.mixer is None or block.mixer_norm is None:
            return Output(self._piece(graphed, "feed", self._feed)(x_TC)[0])
        x_TC, normed_TC = block.mixer_norm.add(x_TC, None)
        mixed_TC, loss = with_loss(block.mixer(normed_TC, ctx, tables))
        losses = () if loss is None else (MixerLoss(loss),)
        output_TC = self._piece(graphed, "feed", self._feed)(x_TC, mixed_TC)[0]
        return Output(output_TC, mixer_losses=losses)

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
        mixed = _without_loss(graphed.mixer.core(ctx, apart, *rows[:count]))
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
            piece = GraphPiece(
                partial(function, graphed),
                graphed.owners,
                self.memory,
                keeps_gradients=keeps_gradients,
            )
            names = set(self.bounds.tables) if self.bounds else set()
            piece.record(inputs)
            more = set(self.bounds.tables) - names if self.bounds else set()
            if more and not self.memory.recorder.runs_again:
                raise RecordingError(f"the loader does not make the tables {sorted(more)}")
            self.pieces[graphed.block, name] = piece
            return piece(*inputs)

        return record

    def _whole(self, graphed: GraphedBlock, inputs: Rows) -> Rows:
        mixer, (x_TC, *apart) = graphed.mixer, inputs
        assert mixer is not None
        assert self.ctx is not None
        x_TC, rows, kept = self._projected(graphed, x_TC)
        mixed = _without_loss(mixer.core(self.ctx, tuple(apart), *rows))
        return self._finished(graphed, x_TC, mixed, kept)

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


def _without_loss(mixed: Mixed) -> Tensor:
    rows, loss = with_loss(mixed)
    assert loss is None, "config/check_graph.py names no mixer with a loss of its own"
    return rows


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


def graphed_block(block: Block, kinds: Set[type[Part]], *, recompute: bool) -> GraphedBlock | None:
    """What of a block is replayed; None for nothing.

    recompute: whether blocks are recomputed, which only whole blocks can be: one whose mixer runs
    eagerly is not replayed then.
    """
    config, mixer = block.config, block.mixer
    if config.residuals is not None:
        return None
    whole = mixer if type(config.mixer) in kinds and isinstance(mixer, ThreeStepMixer) else None
    # A mixer's graph ends with the sum, where no feed-forward part follows.
    feeds = type(config.mlp) in kinds or (whole is not None and config.mlp is None)
    if whole is None and (not feeds or (recompute and mixer is not None)):
        return None
    eager_parts = [
        part
        for part, is_in in ((mixer, whole is not None), (block.mlp, feeds))
        if part is not None and not is_in
    ]
    owners = parameters_of(block, without=eager_parts)
    return GraphedBlock(block, whole, feeds, owners)
