"""Tensor parallelism with sequence parallelism, put onto a decoder from outside.

In: a decoder with whole parameters (or on `meta`) and a topology. Out: the same decoder with this
TP rank's part of each parameter, and with the exchanges of rows between the ranks.

Between the layers a rank has T/tp of its lane's T rows. A part that ranks split, such as attention,
gets all rows and makes a part of the sum:

    rows T/tp → norm → gather → T rows → this rank's heads → reduce_scatter → rows T/tp

Backward is the mirror image. Norms, routers and experts work on the rank's own rows. Embedding and
head are split by the vocabulary: a rank embeds the tokens it knows and the sum is scattered; the
head gathers the rows, and every rank learns the loss of all T tokens. A part of a kind that ranks
do not split, such as a user's own mixer, gets all rows on every rank, which keeps its own T/tp.

With 2 ranks and 6 tokens rank 1 holds rows 3:6; attention of 4 heads gathers 6 rows, attends with
heads 2 and 3, and gets rows 3:6 of the sum of both ranks' outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from longshore.arch.cuts import TensorCut, TPRank
from longshore.arch.decoder import check_tp
from longshore.arch.part import Part
from longshore.batch import SeqContext
from longshore.distributed.collectives import gather, reduce_scatter, sum_over
from longshore.distributed.topology import Topology
from longshore.model.decoder import Block, Decoder
from longshore.model.interface import Routed, call_part, eager
from longshore.model.lora import add_same_factors, is_factor
from longshore.model.registry import make_feed_forward, make_mixer
from longshore.ops.cross_entropy import VocabularyPart
from longshore.parallel.fsdp import local_part
from longshore.parallel.shards import boxes_of, trained_parameters

BUCKET = 1 << 26
"""Values of gradients that are summed in one collective."""


def split_tensors(model: Decoder, topology: Topology) -> None:
    """Leaves this TP rank's part of every parameter, and adds what ranks exchange; in place."""
    if topology.tp == 1:
        return
    check_tp(model.config, topology.tp)
    for name, block in list(model.named_modules()):
        if isinstance(block, Block):
            _split_block(block, name, model, topology)
    model.row_ranks = topology.tp
    at, group = TPRank(topology.tp, topology.tp_rank), topology.groups.tp
    cut = at.vocabulary(model.config.vocab_size)
    if model.embed is not None:
        model.embed = SplitEmbedding(model.embed, cut, group)
        model.cuts["embed.weight"] = cut
    if (head := model.head) is not None:
        if isinstance(head.weight, Tensor):
            head.register_parameter("weight", _cut_value(head.weight, cut))
            model.cuts["head.weight"] = cut
        join, add = partial(_over_vocabulary, group), partial(sum_over, group=group)
        head.vocabulary = VocabularyPart(cut.spans[0].start, cut.size, join, add)
        head.all_rows = partial(gather, group=group)


def _split_block(block: Block, name: str, model: Decoder, topology: Topology) -> None:
    mixer, mlp, group = block.config.mixer, block.config.mlp, topology.groups.tp
    if block.mixer is not None and mixer is not None:
        block.call_mixer = partial(_replicated, group)
        if mixer.tp_units():
            local = partial(_local, make=make_mixer, model=model, topology=topology)
            block.mixer = local(block.mixer, mixer, name=f"{name}.mixer")
            block.call_mixer = partial(_split, group)
    if block.mlp is not None and mlp is not None:
        block.call_mlp = partial(_on_own_rows if mlp.routed_experts else _replicated, group)
        if mlp.tp_units():
            local = partial(_local, make=make_feed_forward, model=model, topology=topology)
            block.mlp = local(block.mlp, mlp, name=f"{name}.mlp")
            block.call_mlp = partial(_split, group)


def _local(
    whole: nn.Module,
    part: Part,
    *,
    name: str,
    make: Callable[..., nn.Module],
    model: Decoder,
    topology: Topology,
) -> nn.Module:
    """The module of what this rank has, with its part of the whole module's values.

    name: the module's in the model, to whose cuts this adds.
    """
    tp, width = topology.tp, model.config.width
    with torch.device("meta"):
        local = make(part.on_tp_rank(tp), width, norm=model.config.norm)
    if (ranks := part.norm_ranks(tp)) > 1:
        mean = partial(_mean_over, topology.groups.tp, ranks)
        local.norm.mean_over_ranks = mean  # type: ignore[union-attr]
    add_same_factors(local, whole)
    cuts = part.tp_cuts(width, TPRank(tp, topology.tp_rank))
    cuts |= _factor_cuts(whole, cuts)
    for below, parameter in whole.named_parameters():
        owner, _, leaf = below.rpartition(".")
        value = _cut_value(parameter, cuts.get(below))
        local.get_submodule(owner).register_parameter(leaf, value)
    model.cuts |= {f"{name}.{below}": cut for below, cut in cuts.items() if cut.spans}
    return local


def _factor_cuts(whole: nn.Module, cuts: Mapping[str, TensorCut]) -> dict[str, TensorCut]:
    """Cuts of low-rank factors: b has the weight's rows, a its columns; the other is whole."""
    factors = {}
    for name, _ in whole.named_parameters():
        if is_factor(name):
            cut = cuts.get(f"{name[: -len('.lora.a')]}.weight")
            if cut is not None and cut.dim == (1 if name.endswith("a") else 0):
                factors[name] = cut
    return factors


def _cut_value(parameter: Tensor, cut: TensorCut | None) -> nn.Parameter | None:
    """The parameter's spans one after the other; None if this rank has none."""
    trains = parameter.requires_grad
    if cut is None:
        return nn.Parameter(parameter.detach(), requires_grad=trains)
    if not cut.spans:
        return None
    parts = [parameter.detach().narrow(cut.dim, s.start, s.stop - s.start) for s in cut.spans]
    return nn.Parameter(torch.cat(parts, dim=cut.dim), requires_grad=trains)


# A compiled block runs collectives eagerly.
_all_rows: Callable[..., Tensor] = torch.compiler.disable(gather)
_own_rows_of_sum: Callable[..., Tensor] = torch.compiler.disable(reduce_scatter)


def _split(group: ProcessGroup, part: nn.Module, x: Tensor, *args: object) -> tuple[Tensor, Any]:
    """Calls a part of which each rank has some: all rows in, its own rows of the ranks' sum out."""
    rows, more = call_part(part, _all_rows(x, group), *args)
    assert more is None, "a part that ranks split has no loss of its own"
    return _own_rows_of_sum(rows, group), None


def _replicated(
    group: ProcessGroup, part: nn.Module, x: Tensor, *args: object
) -> tuple[Tensor, Any]:
    """Calls a part that every rank has whole: all rows in, its own rows out.

    Every rank has computed the part's loss, or routed all rows, so each counts its share of them.
    """
    rows, more = call_part(part, _all_rows(x, group), *args)
    if isinstance(more, Routed):
        mine = _own_share(more.auxiliary, group)
        counts = more.counts if group.rank() == 0 else torch.zeros_like(more.counts)
        more = more._replace(auxiliary=mine, counts=counts)
    elif more is not None:
        more = _own_share(more, group)
    return rows.chunk(group.size())[group.rank()], more  # the others' have no gradient here


@eager
def _on_own_rows(
    group: ProcessGroup, part: nn.Module, x: Tensor, ctx: SeqContext
) -> tuple[Tensor, Routed]:
    """Calls experts: each rank routes its own rows; all learn the balance loss of all rows."""
    rows, routed = part(x, ctx.share(group.rank(), group.size()))
    total: Tensor = _SumForward.apply(routed.auxiliary, group)  # type: ignore[no-untyped-call]
    return rows, routed._replace(auxiliary=total)


class _SumForward(torch.autograd.Function):
    """A sum over the ranks, each of which backpropagates its own part of it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ANN401
        return sum_over(value.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return grad, None


def _own_share(value: Tensor, group: ProcessGroup) -> Tensor:
    """A value that all ranks computed alike, of which each backpropagates 1/tp."""
    share = value / group.size()
    return share + (value - share).detach()


def _mean_over(group: ProcessGroup, ranks: int, square_T1: Tensor) -> Tensor:
    """The mean over the `ranks` neighbours that have parts of the same channels."""
    first = group.rank() // ranks * ranks
    all_RT1 = gather(square_T1[None], group)
    return all_RT1[first : first + ranks].mean(0)


class SplitEmbedding(nn.Embedding):
    """(T) → (T/tp, C): each rank embeds the tokens of its part of the vocabulary."""

    def __init__(self, whole: nn.Embedding, cut: TensorCut, group: ProcessGroup) -> None:
        (span,) = cut.spans
        pad = whole.padding_idx
        if pad is not None:
            pad = pad - span.start if span.start <= pad < span.stop else None
        rows = span.stop - span.start
        super().__init__(rows, whole.embedding_dim, padding_idx=pad, device="meta")
        self.register_parameter("weight", _cut_value(whole.weight, cut))
        self.span, self.group = span, group

    def forward(self, ids_T: Tensor) -> Tensor:
        is_mine = (ids_T >= self.span.start) & (ids_T < self.span.stop)
        rows_TC = super().forward((ids_T - self.span.start).where(is_mine, 0))
        return reduce_scatter(rows_TC.where(is_mine[:, None], 0.0), self.group)


def _over_vocabulary(group: ProcessGroup, lse_T: Tensor, own_T: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp over all ranks' logits, and the label's logit, which one of them has."""
    all_R2T = gather(torch.stack([lse_T, own_T])[None], group)
    return all_R2T[:, 0].logsumexp(0), all_R2T[:, 1].sum(0)


@torch.no_grad()
def sum_gradients(model: nn.Module, topology: Topology) -> None:
    """Adds up the gradients of what several TP ranks have alike, once a step; each gets the sum.

    Each rank has a part of the gradient of a parameter that all have whole, from its rows or heads.
    So it is with spans of which several have a copy, such as a KV head of 4 ranks with 2 KV heads.
    """
    group = topology.groups.tp
    whole, copied = list[Tensor](), list[tuple[Tensor, int]]()
    for parameter, cut in trained_parameters(model):
        assert parameter.grad is not None
        if cut is None:
            whole.append(local_part(parameter.grad))
        elif cut.axis == "tp":
            boxes = boxes_of(parameter.grad, cut)[1]
            copied += [(box.local, box.copies) for box in boxes if box.copies > 1]
    for bucket in _buckets([gradient for gradient in whole if gradient.numel()]):
        _write(sum_over(torch.cat([part.flatten() for part in bucket]), group), bucket)
    for copies in sorted({copies for _, copies in copied}):
        blocks = [block for block, count in copied if count == copies]
        first = topology.tp_rank // copies * copies
        for bucket in _buckets(blocks):
            every = gather(torch.cat([part.flatten() for part in bucket])[None], group)
            _write(every[first : first + copies].sum(0), bucket)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, together at most BUCKET values, or one that is larger."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(part.numel() for part in bucket)
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _write(flat: Tensor, parts: list[Tensor]) -> None:
    for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(values.view(part.shape))
