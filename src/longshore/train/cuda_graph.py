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
"""

from collections.abc import Callable, Set
from functools import partial

import torch
from torch import Tensor

from longshore.arch.part import Part
from longshore.batch import SeqContext
from longshore.model.decoder import Block, Decoder
from longshore.model.interface import Output
from longshore.model.rope import Tables
from longshore.plan.graph_use import GraphSetting, GraphWay, graph_way
from longshore.train.graph_piece import GraphMemory
from longshore.train.graph_shape import GraphedBlock, GraphShape, RecordingError, graphed_block


class GraphedLayers:
    """Puts itself in the place of the blocks' forward, after FSDP has wrapped them.

    failed: why a shape is not replayed, if one is not.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        kinds: Set[type[Part]],
        setting: GraphSetting,
        memory: GraphMemory,
        most_bytes: int,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.setting, self.memory, self.most_bytes, self.tell = setting, memory, most_bytes, tell
        self.shapes: dict[tuple[GraphWay, int], GraphShape] = {}
        self.failed: list[str] = []
        self.blocks = 0
        self._packs: object = None
        self._shape: GraphShape | None = None
        for block in model.layers.values():
            assert isinstance(block, Block)
            if (graphed := graphed_block(block, kinds)) is not None:
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
        if shape.is_off and not shape.has(graphed):
            return graphed.eager(x_TC, ctx, tables)
        if self.bytes > self.most_bytes and not shape.has(graphed):
            self._turn_off(
                shape,
                f"graphs take {self.bytes / 2**30:.1f} GiB, more than the "
                f"{self.most_bytes / 2**30:.1f} GiB of graph.memory_gib",
            )
            return graphed.eager(x_TC, ctx, tables)
        try:
            return shape.run(graphed, x_TC, ctx, tables)
        except RecordingError as error:
            self._turn_off(shape, str(error))
            return graphed.eager(x_TC, ctx, tables)

    def _turn_off(self, shape: GraphShape, reason: str) -> None:
        """Runs a shape eagerly from now on; layers that are recorded still serve this round."""
        shape.is_off = True
        self.failed.append(f"{shape}: {reason}")
        self.tell(f"CUDA graphs: {shape} runs without graphs: {reason}")

    def _begin(self, ctx: SeqContext, tables: Tables) -> None:
        """Of a micro-batch: what serves it, with its boundaries and tables copied."""
        self._end()
        self._packs, self._shape = ctx.packs, None
        sizes = [pack.group.cp_size for pack in ctx.packs]
        way = graph_way(sizes, sum(len(pack.lengths) for pack in ctx.packs), self.setting)
        if way == "eager":
            return
        shape = self.shapes.setdefault((way, ctx.tokens), GraphShape(way, ctx.tokens, self.memory))
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
        if shape.is_off:
            shape.pieces.clear()
        else:
            self.tell(
                f"CUDA graphs: recorded {self.blocks} layers for {shape}; "
                f"{self.bytes / 2**30:.1f} GiB in all"
            )
