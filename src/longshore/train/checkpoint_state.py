"""What of a model and its optimizer a checkpoint holds, and which of it each rank saves.

In: a rank's model, its optimizer and its place. Out: tensors by the names they are saved under, and
this rank's blocks of each, so that all ranks together save every value once.

A norm's weight of 64 on 2 lanes × tp 2 is whole on all 4 ranks: lane 1's TP rank 0 is number 2 of
them and saves 32…48. Its q_proj.weight (64, 64) is cut by tp, and no rank shards it: TP rank 0 has
rows 0…32 on both lanes, and lane 1 saves 16…32 of them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from longshore.arch.cuts import TensorCut
from longshore.distributed.topology import Topology
from longshore.parallel.pipeline.stages import Model, cut_tensors_by_name
from longshore.parallel.shards import Box, boxes_of, replica_of
from longshore.train.checkpoint_storage import TensorBlock

MOMENTS = ("exp_avg", "exp_avg_sq")


def state_of(
    model: Model, optimizer: AdamW, *, only: set[int] | None = None
) -> Iterator[tuple[str, Tensor, TensorCut | None]]:
    """Parameters, buffers and moments by name; there are no moments before the first update.

    only: the ids of the parameters to take, and of none else.
    """
    tensors = list(tensors_of(model, only=only))
    for name, tensor, cut in tensors:
        yield f"model.{name}", tensor, cut
    for name, tensor, cut in tensors:
        for kind in MOMENTS if tensor in optimizer.state else ():
            yield f"optimizer.{name}.{kind}", optimizer.state[tensor][kind], cut


def tensors_of(
    model: Model, *, only: set[int] | None = None
) -> Iterator[tuple[str, Tensor, TensorCut | None]]:
    """Parameters and buffers; only: see state_of. With LoRA what is trained alone.

    Models may also have frozen parameters of their own, which no base can restore.
    """
    has_base = model.config.lora is not None
    for name, tensor, cut in cut_tensors_by_name(model):
        if has_base and not tensor.requires_grad:
            continue
        if only is None or id(tensor) in only or not isinstance(tensor, nn.Parameter):
            yield name, tensor, cut


def own_blocks(tensor: Tensor, cut: TensorCut | None, topology: Topology) -> list[TensorBlock]:
    """What this rank saves: its share of each of its boxes, which other ranks may have too."""
    shape, boxes = boxes_of(tensor, cut)
    replica, replicas = replica_of(tensor, cut, topology)
    blocks = []
    for box in boxes:
        number, ranks = replica * box.copies + box.copy, replicas * box.copies
        values, offsets = _share(box, number, ranks)
        if values.numel():
            blocks.append(TensorBlock(values, offsets, tuple(shape)))
    return blocks


def _share(box: Box, number: int, ranks: int) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a box that one of `ranks` ranks saves, cut along the first dim long enough."""
    if not box.offsets:
        return (box.local if number == 0 else box.local.new_empty(0)), ()
    sizes = box.local.shape
    dim = max(range(len(sizes)), key=lambda dim: min(sizes[dim], ranks))
    each = -(-sizes[dim] // ranks)
    start = min(number * each, sizes[dim])
    offsets = list(box.offsets)
    offsets[dim] += start
    return box.local.narrow(dim, start, min(each, sizes[dim] - start)), tuple(offsets)


def make_moments(model: nn.Module, optimizer: AdamW, *, updates: int) -> None:
    """Creates the optimizer's state as its first step would, with this number of updates."""
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
