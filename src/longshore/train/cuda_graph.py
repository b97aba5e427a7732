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

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from longshore.arch.part import Part
from longshore.arch.rope import RopeConfig
from longshore.batch import Boundaries, SeqContext
from longshore.model.decoder import Block, Decoder
from longshore.model.interface import (
    Mixed,
    MixerLoss,
    Output,
    Rows,
    ThreeStepMixer,
    UntracedContext,
    with_loss,
)
from longshore.model.norm_rope import Float32Parameters, Tables
from longshore.plan.graph_use import GRAPH_WAYS, GraphSetting, GraphWay, graph_way

Outputs = tuple[Tensor, ...]
Replay = Callable[[], None]


class RecordingError(RuntimeError):
    """A function that cannot be replayed: it waits for the GPU, or reads numbers on the host."""


class CudaRecorder:
    """Records the kernels that a function launches on tensors whose addresses stay.

        replay, (y,) = recorder.record(lambda: (x * 2,))
        x.copy_(values)
        replay()                 y is now values · 2

    All recordings share one pool of memory. A tensor that nothing refers to any more may be reused
    by a later recording, even though replays still write it: whoever records says with `weak` which
    tensors later recordings may overwrite. Within a recording nothing overlaps by itself.
    """

    runs_again = False
    """Whether a replay calls the function, as that of tests on CPUs does."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes that all recordings have reserved."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        with torch.cuda.stream(self._stream), _fla_without_cache():
            # The loader's thread copies and pins meanwhile, so the rest of the process is free.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                if not isinstance(error, RuntimeError):
                    raise
                raise RecordingError(str(error).strip().partition("\n")[0]) from error
            graph.capture_end()
        self.bytes += torch.cuda.memory_reserved() - before
        return graph.replay, outputs

    @staticmethod
    def weak(tensor: Tensor) -> Tensor:
        """The same memory, without a claim to it."""
        size = 1 + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        about = {
            "shape": (size * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
        memory = SimpleNamespace(__cuda_array_interface__=about)
        whole = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride())


@contextmanager
def _fla_without_cache() -> Iterator[None]:
    """flash-linear-attention keeps tables of the last boundaries it saw, by the tensor's identity.

    A recording must compute them itself: its boundaries change in place.
    """
    utils = sys.modules.get("fla.utils")
    before = getattr(utils, "FLA_DISABLE_TENSOR_CACHE", None)
    if utils is not None:
        utils.FLA_DISABLE_TENSOR_CACHE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if utils is not None:
            utils.FLA_DISABLE_TENSOR_CACHE = before  # type: ignore[attr-defined]


Function = Callable[[Rows], Rows]


class Owner(NamedTuple):
    """Where a parameter is: FSDP puts another tensor there when it gathers."""

    module: nn.Module
    name: str
    path: str

    def get(self) -> Tensor:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter


def parameters_of(module: nn.Module, without: Sequence[nn.Module] = ()) -> list[Owner]:
    """All parameters but those of modules that FSDP wraps on their own, and of `without`."""
    owners: list[Owner] = []

    def walk(part: nn.Module, path: str) -> None:
        if isinstance(part, Float32Parameters) or part in without:
            return
        owners.extend(
            Owner(part, name, f"{path}.{name}")
            for name, parameter in part._parameters.items()
            if parameter is not None
        )
        for name, child in part.named_children():
            walk(child, f"{path}.{name}")

    walk(module, "")
    return owners


@dataclass(eq=False)
class GraphMemory:
    """What pieces share."""

    recorder: CudaRecorder
    """Records all pieces."""
    recompute: bool
    """Whether backward runs the function once more instead of reading what forward saved."""
    moving: bool
    """Whether parameters change their addresses."""
    addresses: set[tuple[object, ...]] = field(default_factory=set)
    """Where the pieces of the micro-batch that is being recorded have inputs and outputs."""
    gradients: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    """Where gradients of outputs are copied to, by their number and shape."""
    copies: dict[tuple[object, ...], nn.Parameter] = field(default_factory=dict)
    """Copies of parameters that move, by their path in the layer and their shape; layers share
    them."""

    def gradient_of(self, number: int, output: Tensor) -> Tensor:
        key, device = (number, tuple(output.shape), output.dtype), output.device
        if key not in self.gradients:
            self.gradients[key] = torch.empty(output.shape, dtype=output.dtype, device=device)
        return self.gradients[key]

    def fixed(self, owner: Owner) -> nn.Parameter:
        """A leaf for recordings: a copy of a parameter that moves, else its own memory."""
        parameter = owner.get()
        if not self.moving:
            return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        key = (owner.path, tuple(parameter.shape), parameter.dtype)
        if key not in self.copies:
            copy = torch.empty_like(parameter, requires_grad=False)
            self.copies[key] = nn.Parameter(copy, requires_grad=parameter.requires_grad)
        return self.copies[key]


class GraphPiece:
    """A differentiable function of tensors and parameters, recorded forward and backward.

        piece = GraphPiece(lambda x: (x * layer.weight,), parameters_of(layer), memory)
        piece.record((x,))
        (y,) = piece(x)            replays; y.backward() replays the other recording

    The function sees tensors at fixed addresses: an input that comes from elsewhere is copied there
    first. What a forward saves for its backward lies in the recorder's pool until the piece runs
    again, so a piece must run backward before its next forward. Gradients may be overwritten by the
    next replay: autograd and FSDP have read them by then, because they cast them to a wider dtype;
    where that is no copy, the piece makes one. keeps_gradients: it copies those of parameters too,
    which then last beyond the next replay of another piece.
    """

    def __init__(
        self,
        function: Function,
        owners: list[Owner],
        memory: GraphMemory,
        *,
        keeps_gradients: bool = False,
    ) -> None:
        self.function, self.owners, self.memory = function, owners, memory
        self.keeps_gradients = keeps_gradients
        self.inputs: Rows = ()
        self.outputs: Rows = ()
        self._fixed: list[nn.Parameter] = []
        self._used: list[Owner] = []
        self._wants: list[bool] = []
        self._first_used = 0
        self._leaves: Rows = ()
        self._graph: Rows = ()

    def record(self, inputs: Rows) -> None:
        """Both passes. inputs: of the shapes, dtypes and strides of all later calls."""
        memory = self.memory
        self._wants = [tensor.requires_grad for tensor in inputs]
        self._fixed = [memory.fixed(owner) for owner in self.owners]

        def run() -> Rows:
            # In the pool, so that other shapes may use the memory too.
            self.inputs = self.inputs or tuple(map(self._fixed_input, inputs))
            return self._forward()

        with self._parameters_fixed():
            self.replay_forward, self.outputs = memory.recorder.record(run)
        memory.addresses.update(map(_address, (*self.inputs, *self.outputs)))
        self._output_grads = [
            memory.gradient_of(number, output) for number, output in enumerate(self.outputs)
        ]
        with self._parameters_fixed():
            self.replay_backward, grads = memory.recorder.record(self._backward)
        self._grads = tuple(map(memory.recorder.weak, grads))

    def _fixed_input(self, tensor: Tensor) -> Tensor:
        """Where the function reads an input: where it is, if it always comes from there."""
        is_fixed = _address(tensor) in self.memory.addresses
        return tensor.detach() if is_fixed else torch.empty_like(tensor, requires_grad=False)

    def release(self) -> None:
        """Lets later recordings overwrite what lies between this piece's forward and backward."""
        weak = self.memory.recorder.weak
        self.inputs, self.outputs = tuple(map(weak, self.inputs)), tuple(map(weak, self.outputs))
        self._leaves = self._graph = ()

    def __call__(self, *inputs: Tensor) -> Rows:
        parameters = [owner.get() for owner in self._used]
        if parameters and not self.memory.moving:
            here = parameters[0].data_ptr() == self._fixed[self._first_used].data_ptr()
            assert here, "parameters have moved; graphs read them where they were"
        outputs: Rows = _Replayed.apply(self, *inputs, *parameters)  # type: ignore[no-untyped-call]
        return outputs

    def run_forward(self, inputs: Rows) -> Rows:
        self._copy_parameters()
        _copy_moved(self.inputs, inputs)
        self.replay_forward()
        return tuple(output.detach() for output in self.outputs)

    def run_backward(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs, then of the parameters that are used."""
        self._copy_parameters()
        here = [pair for pair in zip(self._output_grads, grads, strict=True) if pair[1] is not None]
        for fixed, grad in zip(self._output_grads, grads, strict=True):
            if grad is None:
                fixed.zero_()
        _copy_moved([fixed for fixed, _ in here], [grad for _, grad in here])  # type: ignore[misc]
        self.replay_backward()
        coming = iter(self._grads)
        of_inputs = [_own(next(coming)) if wants else None for wants in self._wants]
        return *of_inputs, *(_own(grad, copy=self.keeps_gradients) for grad in coming)

    def _forward(self) -> Rows:
        """What is recorded. It reads attributes, so that a recorder may also run it again."""
        self._leaves = tuple(
            tensor.detach().requires_grad_(wants)
            for tensor, wants in zip(self.inputs, self._wants, strict=True)
        )
        with torch.set_grad_enabled(not self.memory.recompute):
            self._graph = self.function(self._leaves)
        return tuple(output.detach() for output in self._graph)

    def _backward(self) -> Rows:
        if self.memory.recompute:
            with torch.enable_grad():
                self._graph = self.function(self._leaves)
        wanted = [leaf for leaf in self._leaves if leaf.requires_grad]
        owners = [owner for owner in self.owners if owner.get().requires_grad]
        grads = torch.autograd.grad(
            self._graph,
            [*wanted, *(owner.get() for owner in owners)],
            grad_outputs=self._output_grads,
            retain_graph=not self.memory.recompute,
            allow_unused=True,
        )
        of_inputs, of_parameters = grads[: len(wanted)], grads[len(wanted) :]
        pairs = zip(owners, of_parameters, strict=True)
        used = [(owner, grad) for owner, grad in pairs if grad is not None]
        self._used = [owner for owner, _ in used]
        self._first_used = self.owners.index(self._used[0]) if used else 0
        rows = (
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(wanted, of_inputs, strict=True)
        )
        return *rows, *(grad for _, grad in used)

    @contextmanager
    def _parameters_fixed(self) -> Iterator[None]:
        """Puts leaves of their own where the function looks for its parameters."""
        gathered = [owner.get() for owner in self.owners]
        for owner, fixed in zip(self.owners, self._fixed, strict=True):
            owner.module._parameters[owner.name] = fixed
        try:
            yield
        finally:
            for owner, parameter in zip(self.owners, gathered, strict=True):
                owner.module._parameters[owner.name] = parameter  # type: ignore[assignment]

    @torch.no_grad()
    def _copy_parameters(self) -> None:
        if self.memory.moving:
            _copy_moved(self._fixed, [owner.get() for owner in self.owners])


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: GraphPiece, *tensors: Tensor) -> Rows:  # noqa: ANN401
        ctx.piece = piece
        ctx.set_materialize_grads(False)
        return piece.run_forward(tensors[: len(piece.inputs)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, *ctx.piece.run_backward(grads)


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _copy_moved(fixed: Sequence[Tensor], coming: Sequence[Tensor]) -> None:
    """Copies what does not lie there already."""
    pairs = [
        pair for pair in zip(fixed, coming, strict=True) if pair[0].data_ptr() != pair[1].data_ptr()
    ]
    if len(pairs) > 2:
        torch._foreach_copy_([to for to, _ in pairs], [tensor for _, tensor in pairs])
        return
    for to, tensor in pairs:
        to.copy_(tensor)


def _own(grad: Tensor, *, copy: bool = False) -> Tensor:
    """A gradient that may become a parameter's: FSDP keeps wide ones, and copies others."""
    return grad.clone() if copy or grad.element_size() > 2 else grad.detach()


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
        """Bytes that all graphs have reserved."""
        return self.memory.recorder.bytes

    def take_runs(self) -> list[int]:
        """The counts of `runs` in the order of GRAPH_WAYS; counting starts anew."""
        runs, self.runs = self.runs, Counter()
        return [runs[way] for way in GRAPH_WAYS]

    def _run(
        self, graphed: "GraphedBlock", x_TC: Tensor, ctx: SeqContext, tables: Tables
    ) -> Output:
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

    def _is_off(self, shape: "GraphShape", graphed: "GraphedBlock") -> bool:
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
        """Chooses what serves a micro-batch, and copies its boundaries and tables."""
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
        """Ends the micro-batch before, if it recorded."""
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
    """Where the parameters that are read are."""

    @property
    def kind(self) -> type:
        """The class of the mixer that is replayed; without one, of the feed-forward part."""
        return type(self.mixer if self.mixer is not None else self.block.mlp)


@dataclass(eq=False)
class GraphShape:
    """The graphs of one number of tokens and one way.

    A micro-batch's boundaries and rotary tables are copied once, by `load`, to where the graphs of
    all layers read them. The longest length is a constant: all tokens.
    """

    way: GraphWay
    """Whole layers, or halves of them."""
    tokens: int
    """Tokens of a micro-batch, padding included."""
    memory: GraphMemory
    """What all shapes share."""
    uses: int = 0
    """Micro-batches of this shape so far."""
    is_new: bool = False
    """Whether the present micro-batch records."""
    is_off: bool = False
    """Whether it runs eagerly after all."""
    pieces: dict[tuple[Block, str], GraphPiece] = field(default_factory=dict)
    """The pieces, by block and name."""
    bounds: Boundaries | None = None
    """The pack's boundaries, at fixed addresses."""
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
    assert loss is None, "config/check.py names no mixer with a loss of its own"
    return rows


NO_CONTEXT = UntracedContext(None)  # type: ignore[arg-type]
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
