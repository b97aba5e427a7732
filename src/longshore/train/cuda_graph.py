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

from collections import Counter
from collections.abc import Callable, Set
from functools import partial

import torch
from torch import Tensor

from longshore.arch.part import Part
from longshore.batch import SeqContext
from longshore.model.decoder import Block, Decoder
from longshore.model.interface import Output
from longshore.model.rope import Tables
from longshore.plan.graph_use import GRAPH_WAYS, GraphSetting, GraphWay, graph_way
from longshore.train.graph_piece import GraphMemory
from longshore.train.graph_recorder import RecordingError
from longshore.train.graph_shape import GraphedBlock, GraphShape, graphed_block


class GraphedLayers:
    """Serves the calls of a decoder's blocks, inside of FSDP's hooks (`replay` of Layer).

    failed: what is not replayed after all, and why. runs: forward passes of its blocks since
    `take_runs`, by what served them; evaluation is not counted.
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
        self.runs: Counter[GraphWay] = Counter()
        self.blocks = 0
        self._off: set[tuple[GraphWay, type]] = set()
        self._packs: object = None
        self._shape: GraphShape | None = None
        for block in model.layers.values():
            assert isinstance(block, Block)
            graphed = graphed_block(block, kinds, recompute=memory.recompute)
            if graphed is not None:
                self.blocks += 1
                block.replay = partial(self._run, graphed)

    @property
    def bytes(self) -> int:
        """That all graphs have reserved."""
        return self.memory.recorder.bytes

    def take_runs(self) -> list[int]:
        """The counts of `runs` in the order of GRAPH_WAYS; counting starts anew."""
        runs, self.runs = self.runs, Counter()
        return [runs[way] for way in GRAPH_WAYS]

    def _run(self, graphed: GraphedBlock, x_TC: Tensor, ctx: SeqContext, tables: Tables) -> Output:
        eager: Callable[..., Output] = graphed.block.eager
        if not torch.is_grad_enabled():
            return eager(x_TC, ctx, tables)
        if ctx.packs is not self._packs:
            self._begin(ctx, tables)
        shape = self._shape
        if shape is not None and not self._is_off(shape, graphed):
            try:
                output = shape.run(graphed, x_TC, ctx, tables)
            except RecordingError as error:
                self._off.add((shape.way, graphed.kind))
                shape.forget(graphed)
                self._fail(f"{graphed.kind.__name__}, {shape.way}", str(error))
            else:
                self.runs[shape.way] += 1
                return output
        self.runs["eager"] += 1
        return eager(x_TC, ctx, tables)

    def _is_off(self, shape: GraphShape, graphed: GraphedBlock) -> bool:
        """Layers that are recorded still serve a round in which others can no longer be."""
        if shape.has(graphed):
            return False
        if not shape.is_off and self.bytes > self.most_bytes:
            shape.is_off = True
            self._fail(
                str(shape),
                f"graphs take {self.bytes / 2**30:.1f} GiB, more than the "
                f"{self.most_bytes / 2**30:.1f} GiB of graph.memory_gib",
            )
        return shape.is_off or (shape.way, graphed.kind) in self._off

    def _fail(self, what: str, reason: str) -> None:
        self.failed.append(f"{what}: {reason}")
        self.tell(f"CUDA graphs: {what} runs without graphs: {reason}")

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
        elif not shape.pieces:
            shape.is_off = True  # no layer of it can be recorded
        else:
            recorded = len({block for block, _ in shape.pieces})
            self.tell(
                f"CUDA graphs: recorded {recorded} layers for {shape}; "
                f"{self.bytes / 2**30:.1f} GiB in all"
            )
