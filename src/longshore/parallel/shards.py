"""Where a rank's tensors lie in the whole ones, however they are sharded.

In: a parameter, a gradient or an optimizer state, and its cut. Out: Boxes, blocks of the rank's
memory with their offsets in the whole tensor. Tensor and expert parallelism cut a tensor into spans
of one dim (arch/cuts.py), FSDP splits what is left over the lanes, mostly its rows; a box is what
both leave. What fills, saves, exports or counts tensors works on boxes, and knows no axis.

in_proj.weight (132, 16) of Mamba2, 4 heads of 8, 2 groups of 16, on 2 TP ranks and 2 lanes: TP rank
1 has rows 16…32, 48…64, 80…96, 112…128 and 130…132, 66 in all, and its lane 0 the first 33:

    Box(rows 0…16, offsets (16, 0)), Box(rows 16…32, offsets (48, 0)), Box(row 32, offsets (80, 0))
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longshore.arch.cuts import Span, TensorCut
from longshore.distributed.topology import Topology
from longshore.model.interface import LanguageModel
from longshore.parallel.fsdp import is_split, local_part, shard_span

Blocks = Callable[[str, torch.Size, tuple[slice, ...]], Tensor]
"""A block of the whole tensor of a name and shape: a range of each of its dims."""


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """A block of a whole tensor that this rank has."""

    local: Tensor
    """The block, in the rank's memory."""
    offsets: tuple[int, ...]
    """Its first index in the whole tensor; () for a 0-dim one."""
    copy: int = 0
    """Which copy it is, where several ranks cut out the same span."""
    copies: int = 1
    """How many ranks did."""

    @property
    def index(self) -> tuple[slice, ...]:
        """The block in the whole tensor."""
        pairs = zip(self.offsets, self.local.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)


def boxes_of(tensor: Tensor, cut: TensorCut | None = None) -> tuple[torch.Size, tuple[Box, ...]]:
    """The shape of the whole tensor, and this rank's blocks of it."""
    shape = tensor.shape if cut is None else torch.Size(cut.whole_shape(tensor.shape))
    local, split, start = shard_span(tensor)
    if not tensor.dim():
        return shape, (Box(local, ()),)
    if cut is None:
        cut = TensorCut(0, len(tensor), (Span(0, len(tensor)),))
    boxes, at = list[Box](), 0
    for span in cut.spans:
        stop = at + span.stop - span.start
        # Of the cut dim, what FSDP leaves of the span, in indices of the rank's own tensor.
        begin = start if split == cut.dim else 0
        first, last = max(at, begin), min(stop, begin + local.shape[cut.dim])
        if first < last and local.numel():
            offsets = [start if dim == split else 0 for dim in range(tensor.dim())]
            offsets[cut.dim] = span.start + first - at
            block = local.narrow(cut.dim, first - begin, last - first)
            boxes.append(Box(block, tuple(offsets), span.copy, span.copies))
        at = stop
    return shape, tuple(boxes)


def replica_of(tensor: Tensor, cut: TensorCut | None, topology: Topology) -> tuple[int, int]:
    """Which of how many ranks this is that have the same boxes, apart from spans with copies."""
    ranks, rank = topology.lanes, topology.lane
    if cut is not None and cut.axis == "ep":
        # Neighbouring ranks of a stage have different experts.
        ranks = topology.lanes * topology.tp // topology.ep
        rank = (topology.lane * topology.tp + topology.tp_rank) // topology.ep
    if isinstance(tensor, DTensor) and is_split(tensor):
        ranks, rank = 1, 0
    if cut is None:
        return rank * topology.tp + topology.tp_rank, ranks * topology.tp
    return rank, ranks


def cuts_by_name(model: nn.Module) -> dict[str, TensorCut]:
    """The cuts of all parameters that have one, by the parameter's name in the model or stages."""
    return {
        f"{prefix}.{name}" if prefix else name: cut
        for prefix, part in model.named_modules()
        if isinstance(part, LanguageModel)
        for name, cut in part.cuts.items()
    }


def trained_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, TensorCut | None]]:
    """All parameters that are trained, each with its cut."""
    cuts = cuts_by_name(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter, cuts.get(name)


def counted_part(gradient: Tensor, cut: TensorCut | None, topology: Topology) -> list[Tensor]:
    """What of a gradient this rank counts, so that all ranks together count each value once."""
    if replica_of(gradient, cut, topology)[0]:
        return []
    if cut is None or all(span.copies == 1 for span in cut.spans):
        return [local_part(gradient)]
    return [box.local for box in boxes_of(gradient, cut)[1] if not box.copy]


def fill(model: nn.Module, device: torch.device, blocks: Blocks) -> None:
    """Gives a model on `meta` its content; each rank asks only for the blocks that it has."""
    model.to_empty(device=device)
    cuts = cuts_by_name(model)
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            shape, boxes = boxes_of(tensor, cuts.get(name))
            for box in boxes:
                box.local.copy_(blocks(name, shape, box.index))
