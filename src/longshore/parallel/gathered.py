"""All tensors of a model on rank 0, one by one, wherever they are sharded, cut or on other stages.

In: a rank's stages. Out: (name, tensor) in the order of the whole decoder, on rank 0's CPU; others
get empty ones. All ranks take part in each. A tensor comes in three steps:

    FSDP   each rank that shards its rows gathers them, so that it has its whole part
    PP     the parts go to the first pipeline rank, each from the rank with the same lane and TP
    TP/EP  there rank 0 gets the parts of its group, one after the other, and joins them

q_proj.weight (64, 64) of a layer of stage 1, on 4 lanes × tp 2 × pp 2: a rank has 8 rows, and
gathers the 32 of its TP rank. Ranks 8 and 9 give these to ranks 0 and 1, and 1 gives its 32 to 0.
No rank has more of it than a part and, on rank 0, the whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.arch.cuts import Axis, Span, TensorCut
from longshore.arch.decoder import DecoderConfig
from longshore.distributed.collectives import broadcast, gather_rows
from longshore.distributed.topology import Topology
from longshore.model.interface import LanguageModel
from longshore.parallel.fsdp import gathered
from longshore.parallel.pipeline import Model, cut_tensors_by_name, tensor_names, whole_name
from longshore.plan.layout import Layout

ROOM = 32
"""Numbers of a part's description that one collective has room for."""
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
AXES: tuple[Axis, ...] = ("tp", "ep")


@dataclass(frozen=True, slots=True)
class _PartOf:
    """What one rank has of a tensor, without its values; shape: of the part."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: TensorCut | None

    def encoded(self) -> list[int]:
        head = [DTYPES.index(self.dtype), len(self.shape), *self.shape]
        if self.cut is None:
            return head
        spans = ((span.start, span.stop, span.copy, span.copies) for span in self.cut.spans)
        cut = self.cut
        return [*head, cut.dim, cut.size, AXES.index(cut.axis), *chain.from_iterable(spans)]

    def new(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _decoded(numbers: Sequence[int]) -> _PartOf | None:
    if not numbers:
        return None
    dtype, dims, *rest = numbers
    shape, rest = tuple(rest[:dims]), rest[dims:]
    cut = None
    if rest:
        dim, size, axis, *ends = rest
        spans = tuple(Span(*ends[at : at + 4]) for at in range(0, len(ends), 4))
        cut = TensorCut(dim, size, spans, AXES[axis])
    return _PartOf(shape, DTYPES[dtype], cut)


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
    owners = _owners(model.config, model.layout)
    for name in filter(only, tensor_names(model.config)):
        yield name, _brought(mine.get(name), topology, owner=owners[name])


def _brought(
    mine: tuple[Tensor, TensorCut | None] | None, topology: Topology, *, owner: int
) -> Tensor:
    """A tensor of pipeline rank `owner`, on rank 0."""
    values, part = None, None
    if topology.pp_rank == owner and mine is not None:
        values = gathered(mine[0].detach()).contiguous()
        part = _PartOf(tuple(values.shape), values.dtype, mine[1])
    if _number(topology) >= max(topology.tp, topology.ep):
        return torch.empty(0)
    if owner:
        part = _described(part, topology.groups.pp, topology.device)[owner]
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
    """Of this rank among those of its pipeline rank."""
    return topology.lane * topology.tp + topology.tp_rank


def _ranks(part: _PartOf | None, topology: Topology) -> int:
    """How many ranks, the first of a pipeline rank, have a tensor together."""
    axis = _axis(part)
    return 1 if axis is None else getattr(topology, axis)


def _axis(part: _PartOf | None) -> Axis | None:
    """What cuts a tensor; only a TP rank may have nothing of one."""
    if part is None:
        return "tp"
    return None if part.cut is None else part.cut.axis


def _described(
    part: _PartOf | None, group: ProcessGroup, device: torch.device
) -> list[_PartOf | None]:
    """The parts of all ranks of a group."""
    numbers = [] if part is None else part.encoded()
    rows = torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, 1)
    return [_decoded(each.view(-1).tolist()) for each in gather_rows(rows, group, expected=ROOM)]


def _joined(values: Tensor | None, part: _PartOf | None, topology: Topology) -> Tensor:
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
    for source, theirs in enumerate(_described(part, group, topology.device)):
        if theirs is None or theirs.cut is None or all(span.copy for span in theirs.cut.spans):
            continue
        if source == group.rank():
            assert values is not None
            received = values
        else:
            received = theirs.new(topology.device)
        broadcast(received, group, source=source)
        if topology.rank == 0:
            _place(received, theirs.cut, whole)
    return whole


def _place(part: Tensor, cut: TensorCut, whole: Tensor) -> None:
    """Copies the spans of a part to where they are in the whole tensor."""
    at = 0
    for span in cut.spans:
        size = span.stop - span.start
        if not span.copy:
            whole.narrow(cut.dim, span.start, size).copy_(part.narrow(cut.dim, at, size))
        at += size


def _owners(config: DecoderConfig, layout: Layout) -> dict[str, int]:
    """The pipeline rank that has each tensor; of copies the first."""
    owners: dict[str, int] = {}
    for number, stage in enumerate(layout.stages):
        for name in tensor_names(config, stage):
            owners.setdefault(whole_name(config, name), layout.rank_of(number))
    return owners
