"""All tensors of a model on rank 0, one by one, wherever they are sharded, cut or on other stages.

In: a rank's stages. Out: (name, tensor) in the order of the whole decoder, on rank 0's CPU; others
get empty ones. All ranks take part in each. A tensor comes in three steps:

    FSDP   each rank that shards its rows gathers them, so that it has its whole part
    PP     a rank that has a part sends it to the ranks of the same lane and TP rank
    TP/EP  of the first pipeline rank, those that have parts send them to rank 0, which joins them

q_proj.weight (64, 64) of a layer of stage 1, on 4 lanes × tp 2 × pp 2: a rank has 8 rows, and
gathers the 32 of its TP rank. Ranks 8 and 9 give these to ranks 0 and 1, and 1 gives its 32 to 0.
No rank has more of it than a part and, on rank 0, the whole.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.arch.cuts import Axis, TensorCut
from longshore.distributed.collectives import broadcast
from longshore.distributed.topology import Topology
from longshore.model.interface import LanguageModel
from longshore.parallel.fsdp import gathered
from longshore.parallel.pipeline import Model, cut_tensors_by_name, tensor_names, whole_name


class _RankPart(NamedTuple):
    """What one rank has of a tensor, without its values; shape: of the part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: TensorCut | None

    def new(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def gathered_tensors(
    model: Model, topology: Topology, *, only: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, then every buffer; only: those of these names, the same on all ranks."""
    mine: dict[str, tuple[Tensor, TensorCut | None]] = {}
    for name, tensor, cut in cut_tensors_by_name(model):
        mine.setdefault(name, (tensor, cut))
    if isinstance(model, LanguageModel):
        for name in filter(only, mine):
            yield name, _brought(mine[name], topology, owner=0)
        return
    owners: dict[str, int] = {}  # the pipeline rank that has each tensor; of copies the first
    for number, stage in enumerate(model.layout.stages):
        for name in tensor_names(model.config, stage):
            owners.setdefault(whole_name(model.config, name), model.layout.rank_of(number))
    for name in filter(only, tensor_names(model.config)):
        yield name, _brought(mine.get(name), topology, owner=owners[name])


def _brought(
    mine: tuple[Tensor, TensorCut | None] | None, topology: Topology, *, owner: int
) -> Tensor:
    """A tensor of pipeline rank `owner`, on rank 0."""
    values, part = None, None
    if topology.pp_rank == owner and mine is not None:
        values = gathered(mine[0].detach()).contiguous()
        part = _RankPart(tuple(values.shape), values.dtype, mine[1])
    if _number(topology) >= max(topology.tp, topology.ep):
        return torch.empty(0)
    if owner:
        part = _described(part, topology.groups.pp)[owner]
        if part is not None and _number(topology) < _ranks(part, topology):
            values = part.new(topology.device) if values is None else values
            broadcast(values, topology.groups.pp, source=owner)
    if topology.pp_rank or _number(topology) >= _ranks(part, topology):
        return torch.empty(0)
    if _axis(part) is None:
        assert values is not None
        return values.cpu()
    return _joined(values, part, topology)


def _number(topology: Topology) -> int:
    """This rank's number among those of its pipeline rank."""
    return topology.lane * topology.tp + topology.tp_rank


def _ranks(part: _RankPart | None, topology: Topology) -> int:
    """How many ranks, the first of a pipeline rank, have a tensor together."""
    axis = _axis(part)
    return 1 if axis is None else getattr(topology, axis)


def _axis(part: _RankPart | None) -> Axis | None:
    """What cuts a tensor; only a TP rank may have nothing of one."""
    if part is None:
        return "tp"
    return None if part.cut is None else part.cut.axis


def _described(part: _RankPart | None, group: ProcessGroup) -> list[_RankPart | None]:
    """The parts of all ranks of a group."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, part, group=group)
    return every


def _joined(values: Tensor | None, part: _RankPart | None, topology: Topology) -> Tensor:
    """The whole tensor on the group's first rank, from the parts of all of them."""
    group = topology.groups.tp
    if _axis(part) == "ep":
        assert topology.experts is not None
        group = topology.experts.ep
    whole = torch.empty(0)
    if topology.rank == 0:
        assert part is not None
        assert part.cut is not None
        whole = torch.empty(part.cut.whole_shape(part.shape), dtype=part.dtype)
    for source, theirs in enumerate(_described(part, group)):
        if theirs is None or theirs.cut is None or all(span.copy for span in theirs.cut.spans):
            continue
        received = values if source == group.rank() else theirs.new(topology.device)
        assert received is not None
        broadcast(received, group, source=source)
        if topology.rank == 0:
            dim, spans = theirs.cut.dim, theirs.cut.spans
            sizes = [span.stop - span.start for span in spans]
            for block, span, size in zip(received.split(sizes, dim), spans, sizes, strict=True):
                if not span.copy:
                    whole.narrow(dim, span.start, size).copy_(block)
    return whole
