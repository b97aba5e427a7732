"""What the parts of a model are given and what they return: context, other lanes' rows, outputs.

In: a SeqContext. Out, for each of its packs, an `Exchange`: what a lane fetches of a pack that it
shares with others, and what it returns to them. Attention, scans, experts and mixers of a user's
own reach tokens of other lanes through it and in no other way:

    def running_mean(exchange, x_TC):                  # called once for each pack, with its rows
        pack_NC = exchange.gather(x_TC)                # all rows of the pack, in order
        return exchange.shard(mean(pack_NC, exchange.pack.padded))        # this lane's rows of it

    over_packs(running_mean, ctx, self.exchanges, x_TC)               # in a ThreeStepMixer's core

A decoder of two layers of experts and one depth of multi-token prediction returns, with labels,
Output(nll_T, (Routed, Routed), (nll_T,)); a dense one Output(nll_T, (), ()).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longshore.arch.cuts import TensorCut
from longshore.arch.decoder import DecoderConfig
from longshore.batch import Boundaries, PackContext, SeqContext
from longshore.model.norm_rope import Tables
from longshore.ops.cross_entropy import OutputLayer
from longshore.plan.layout import Stage
from longshore.settings import AttentionKind, Kernels, ScanKind
from longshore.user_code import is_installed

Rows = tuple[Tensor, ...]

PendingRows = Callable[[], Rows]
"""Waits for rows that are on their way, so that what follows on the stream can use them; called
once. On CUDA the host does not wait."""


class Exchange:
    """One pack of a lane, and how its rows reach other lanes. Here the lane holds the whole pack.

    The order of a pack's rows is natural where each sequence's tokens follow each other. A lane
    that shares a pack holds two chunks of each sequence; see plan/shapes.py.
    """

    size = 1
    """Lanes that share the pack: its CP size."""
    rank = 0
    """The index of this lane among them."""

    def __init__(self, pack: PackContext) -> None:
        self.pack = pack

    @property
    def bounds(self) -> Boundaries:
        """Where each chunk, or at CP size 1 each sequence, begins among the lane's own rows."""
        return self.pack.padded

    @property
    def visible_bounds(self) -> Boundaries:
        """Boundaries of the rows of `begin_visible`: one span for each span of `bounds`."""
        return self.pack.padded

    def begin_visible(self, rows: Rows) -> PendingRows:
        """For each chunk of the lane, all rows of its sequence up to the chunk's last; no autograd.

        What is computed before the wait runs at the same time. Collectives are issued here, not in
        the wait: begin them in the order of `forward_steps`. Whoever calls it keeps only the lane's
        own rows for backward, and calls it again there.
        """
        return lambda: rows

    def begin_return_visible(self, grads: Rows) -> PendingRows:
        """The gradients of the lane's own rows, from those of what all lanes were given."""
        return lambda: grads

    def gather(self, rows: Tensor) -> Tensor:
        """All rows of the pack in natural order; differentiable."""
        return rows

    def shard(self, rows: Tensor) -> Tensor:
        """The lane's own rows, from those of the whole pack in natural order."""
        return rows

    def to_heads(self, parts: Rows) -> Rows:
        """Parts (T, heads, …) of the lane's rows as (N, heads / size, …), in natural order.

        All rows of the pack with this lane's share of the heads; heads may differ between parts.
        """
        return parts

    def from_heads(self, rows: Tensor) -> Tensor:
        """The reverse of to_heads, for one tensor."""
        return rows

    def rows_before(self, rows: Tensor, count: int) -> Tensor | None:
        """(2·S, count, …): the rows before each chunk of the lane, 0 before a sequence begins.

        None if there are no such rows: the lane holds whole sequences, or count is 0.
        """
        return None

    def gather_uneven(self, rows: Tensor, *, most: int, order: Tensor) -> Tensor:
        """Rows of all lanes, of which each has its own number, up to `most`; differentiable.

        order: the index of each row of the result among size·most, lane after lane. The lane has
        all of them here.
        """
        return rows

    def gather_chunks(self, values: Tensor) -> Tensor:
        """(2·size, S, …): a value of each chunk of every sequence, chunks in natural order.

        values: (2·S, …), for each sequence that of this lane's early chunk, then of its late one.
        """
        by_chunk: Tensor = values.unflatten(0, (-1, 2))
        return by_chunk.transpose(0, 1)

    def sum_counts(self, counts: Tensor) -> None:
        """Adds up integer counts of the pack's sequences over the lanes that share it, in place."""


class Exchanges:
    """Makes the exchange of each pack. Here a pack that lanes share is refused."""

    attention: AttentionKind = "auto"
    """How attention serves a shared pack; see model/attention.py."""
    scan: ScanKind = "auto"
    """How a scan serves one; see model/recurrent.py."""

    def shared(self, pack: PackContext) -> Exchange:
        """The exchange of a pack that several lanes share."""
        raise ValueError(
            f"a pack is shared by {pack.group.cp_size} lanes, but this model is not set up for "
            "context parallelism; call parallelize(model, …), or plan with max_cp=1"
        )

    def each(self, ctx: SeqContext) -> Iterator[Exchange]:
        """In the order of the packs, which is the same on all lanes that share one."""
        for pack in ctx.packs:
            yield Exchange(pack) if pack.group.cp_size == 1 else self.shared(pack)

    def sum_counts(self, ctx: SeqContext, counts_SE: Tensor) -> None:
        """Adds up integer counts (S + 1, …) of sequences over all that have tokens of them."""
        for exchange in self.each(ctx):
            exchange.sum_counts(counts_SE[exchange.pack.sequences])


LOCAL = Exchanges()
"""Serves packs that the lane holds whole: what every module begins with. parallel/apply.py puts the
exchanges of CP groups in its place; model/ itself knows no process group."""


def over_packs(
    part: Callable[..., Tensor], ctx: SeqContext, exchanges: Exchanges, *tensors: Tensor
) -> Tensor:
    """part(exchange, *rows) for each pack, where rows are the pack's in each of the tensors (T, …).

    Returns the results one after the other: (T, …).
    """
    outputs = [
        part(exchange, *(tensor[exchange.pack.rows] for tensor in tensors))
        for exchange in exchanges.each(ctx)
    ]
    return joined(outputs)


def joined(parts: list[Tensor], *, dim: int = 0) -> Tensor:
    """The parts one after the other; a single one as it is, not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


PackStep = tuple[Literal["gather", "attend", "reduce"], int]
"""What attention does next, and the index of the pack it does it with."""


def forward_steps(cp_sizes: Sequence[int]) -> list[PackStep]:
    """When attention begins the gathers of its packs: one travels while another is attended to.

    CP sizes 8, 4 and 1: gather 8, attend 1, gather 4, attend 8, attend 4.

    No deadlock, and one order of NCCL's communicators on all ranks: collectives are begun in the
    order of (pass, gather before reduce, falling cp_size, first_lane). That key depends on the
    collective alone, never on the lane that begins it, so all lanes follow one total order, however
    different their packs are; groups need not even be nested.
    """
    shared, whole = _shared_and_whole(cp_sizes)
    steps: list[PackStep] = [("gather", pack) for pack in shared[:1]]
    steps += [("attend", pack) for pack in whole]
    for index, pack in enumerate(shared):
        steps += [("gather", ahead) for ahead in shared[index + 1 : index + 2]]
        steps.append(("attend", pack))
    return steps


def backward_steps(cp_sizes: Sequence[int]) -> list[PackStep]:
    """CP sizes 8, 4 and 1: gather 8, gather 4, attend 1, attend 8, reduce 8, attend 4, reduce 4.

    All gathers come first: they bring at most what one pack of the largest size, over all of the
    lane's tokens, would bring. One gather ahead, as forward, would break the total order: of sizes
    4, 3 and 2 a lane with all three would begin reduce 4 before gather 2, one without the pack of
    size 3 after it.
    """
    shared, whole = _shared_and_whole(cp_sizes)
    steps: list[PackStep] = [("gather", pack) for pack in shared]
    steps += [("attend", pack) for pack in whole]
    for pack in shared:
        steps += [("attend", pack), ("reduce", pack)]
    return steps


def _shared_and_whole(cp_sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices of the packs that lanes share, and of those that the lane holds whole."""
    assert list(cp_sizes) == sorted(cp_sizes, reverse=True), "packs are ordered by falling CP size"
    shared = [pack for pack, size in enumerate(cp_sizes) if size > 1]
    return shared, list(range(len(shared), len(cp_sizes)))


HostTableMaker = Callable[..., None]
"""maker(pack, setting=TableSetting): makes tables that a mixer reads among a pack's boundaries.

The class of a mixer names its makers in `table_makers(config)`; the packing step calls all of them
on the host, equal ones once. A table moves to the device with its boundaries, where the op looks
for it by name, and makes it if it is missing: what a maker leaves out costs time, and nothing else.
"""


@dataclass(frozen=True, slots=True)
class TableSetting:
    """What decides which tables ops will look for."""

    scan: ScanKind
    """How lanes share a scan."""
    device: torch.device
    """Where the ops run."""
    kernels: Kernels
    """auto, or plain for none but torch's own."""

    def has(self, package: str) -> bool:
        """Whether kernels of this package may serve; a call's tensors may still be refused."""
        return self.device.type == "cuda" and self.kernels == "auto" and is_installed(package)


class UntracedContext:
    """A context that torch.compile carries through a block without reading its fields.

    It reads every field of a frozen dataclass that it meets (torch 2.11 does), and would recompile
    a block for each number of sequences; a plain object it passes on as it is.
    """

    def __init__(self, ctx: SeqContext) -> None:
        self.ctx = ctx


Context = SeqContext | UntracedContext
"""What the parts of a block are given; a method marked @eager gets the SeqContext."""

Returned = TypeVar("Returned")


def eager(method: Callable[..., Returned]) -> Callable[..., Returned]:
    """A method that reads the context: a compiled block runs it eagerly.

    Packs change in every round, and a compiled block must not specialise on them.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(method)
    def run(*args: object) -> Returned:
        return method(*(arg.ctx if isinstance(arg, UntracedContext) else arg for arg in args))

    return run  # type: ignore[no-any-return]


Mixed = Tensor | tuple[Tensor, Tensor]
"""What a mixer returns: its rows; and, if it has a loss of its own, that loss (0-dim): the sum over
this lane's real rows (ctx.is_real), times its weight. The step divides it by the real tokens of all
lanes and adds it to the loss."""


def with_loss(mixed: Mixed) -> tuple[Tensor, Tensor | None]:
    """The rows, and the mixer's own loss or None."""
    return mixed if isinstance(mixed, tuple) else (mixed, None)


PartCall = Callable[..., tuple[Tensor, Any]]
"""call(part, x_TC, ctx, …): how a block calls its mixer or feed-forward part. Returns the rows, and
the mixer's own loss or what experts did, or None."""


def call_part(part: nn.Module, *args: object) -> tuple[Tensor, Any]:
    """The PartCall of a rank that has all of its lane's rows."""
    return with_loss(part(*args))


class ThreeStepMixer(nn.Module):
    """A mixer whose core alone reads the context: `before` and `after` take each token by itself.

    train/cuda_graph.py replays the steps on their own where the core cannot be.
    """

    exchanges: Exchanges = LOCAL
    """How the lane reaches rows of shared packs; set by parallel/apply.py."""

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        """Rows for the core, and rows that `after` reads beside the core's output."""
        raise NotImplementedError

    def apart(self, x: Tensor) -> Rows:
        """Tensors for the core that are made of parameters which FSDP gathers on their own.

        x: any tensor; a module that FSDP wraps must be called with an argument.
        """
        return ()

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Mixed:
        """What mixes the tokens of each sequence; see Mixed for a mixer with a loss."""
        raise NotImplementedError

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x_TC: Tensor, ctx: Context, tables: Tables) -> Mixed:
        rows, kept = self.before(x_TC, tables)
        mixed, loss = with_loss(self._eager_core(ctx, *rows))
        output_TC = self.after(mixed, *kept)
        return output_TC if loss is None else (output_TC, loss)

    @eager
    def _eager_core(self, ctx: SeqContext, *rows: Tensor) -> Mixed:
        return self.core(ctx, self.apart(rows[0]), *rows)


class Routed(NamedTuple):
    """What the experts of one layer did with this lane's real tokens.

    A named tuple, as Output is, so that FSDP finds the tensors.
    """

    auxiliary: Tensor
    """The sum, over tokens, of their balance loss; 0-dim."""
    counts: Tensor
    """How many tokens each expert got, (E), without gradient."""
    depth: int = 0
    """The depth of multi-token prediction whose tokens were counted; 0 in the decoder itself."""


class MixerLoss(NamedTuple):
    """The loss that the mixer of one layer has of its own."""

    total: Tensor
    """0-dim: the sum over this lane's real rows, times its weight."""
    depth: int = 0
    """The depth of multi-token prediction whose rows were counted; 0 in the decoder itself."""


Reader = Callable[[Tensor, OutputLayer, Tensor], Tensor]
"""What a loss reads of the head: a tensor (T, …) from hidden states (T, C), the output layer, and
labels (T)."""


class Output(NamedTuple):
    """What a model returns."""

    values: Tensor
    """Hidden states, logits, losses or what a Reader returned."""
    routed: tuple[Routed, ...] = ()
    """What each layer of experts did, in their order."""
    mtp: tuple[Tensor, ...] = ()
    """The losses (T) of each depth of multi-token prediction."""
    mixer_losses: tuple[MixerLoss, ...] = ()
    """The losses of layers whose mixer has one of its own, in their order."""


class Layer(nn.Module):
    """What FSDP gathers, and what is compiled, recomputed or replayed, as one: a block or a depth.

    A call goes from the outside in: hooks, FSDP's among them → replay → recompute → compiled → run.
    So parameters are gathered once for a forward, and once for a backward with its recomputation,
    and no compiled code has hooks inside.
    """

    replay: Callable[..., Output] | None = None
    """Serves a call from CUDA graphs, or by `eager`; set by train/cuda_graph.py."""
    recompute: bool = False
    """Whether backward runs the layer again, from its inputs alone; set by parallel/apply.py. Whole
    layers: their last product runs on every lane, so all lanes begin to recompute at the same
    place, whatever packs they hold."""
    compiled: Callable[..., Any] | None = None
    """What serves for `run`; set by `compile`."""

    def forward(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        return (self.replay or self.eager)(*args, **options)

    def eager(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """A call without CUDA graphs."""
        run = self.compiled or self.run
        if not self.recompute:
            return run(*args, **options)
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **options)

    def run(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """What the layer computes."""
        raise NotImplementedError

    def compile(self, **options: Any) -> None:  # noqa: ANN401
        """Compiles `run` with options of torch.compile; hooks stay outside."""
        self.compiled = torch.compile(self.run, **options)


class LanguageModel(nn.Module):
    """What the trainer calls a model: a stage of the decoder, or a whole model of others.

    forward(x, ctx, labels, mtp, *, summed, token_ids) -> Output: see Decoder, model/decoder.py.
    """

    config: DecoderConfig
    """What it costs, and how many layers and depths it has."""
    stage: Stage
    """Which part of the whole model this is."""
    reads_ids: bool = False
    """Whether a stage without the embedding wants token ids, too."""
    wide_names: tuple[str, ...] = ()
    """Parameters that must be computed in float32 at least, but are not kept so by FSDP."""
    computing_dtype: torch.dtype
    """What a sharded model computes in; its parameters may be wider. Set by parallel/fsdp.py."""
    round_setting: tuple[bool, bool] | None = None
    """Whether FSDP sums gradients in this round, and whether it is the last; set by begin_round."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: dict[str, TensorCut] = {}
        """What TP or EP left of parameters on this rank, by name; set by parallel/."""

    def blocks(self) -> list[Layer]:
        """Its layers, each with its slots for parallel/apply.py."""
        raise NotImplementedError
