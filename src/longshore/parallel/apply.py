"""Parallelism goes onto a model from outside, in one ordered list.

In: a model (on `meta`, or with its parameters), a topology, the CP groups, the choices. Out: the
same model, ready to train on its lane's micro-batches.

Nothing here replaces a `forward`: a step fills slots that modules have for it (`call_mixer` of a
block, `vocabulary` of the head, `exchange` of experts, `exchanges` of whatever reaches other lanes,
`recompute` of a layer), or puts in a module with the same parameters (the embedding under TP).
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from longshore.distributed.topology import CPGroups, Topology
from longshore.model.decoder import Decoder
from longshore.model.interface import Exchanges, LanguageModel
from longshore.parallel.context import CPExchanges
from longshore.parallel.expert import split_experts
from longshore.parallel.fsdp import shard
from longshore.parallel.tensor import split_tensors
from longshore.settings import AttentionKind, Recompute, ScanKind, ShardMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user may choose."""

    mode: ShardMode
    """How parameters, gradients and optimizer states are sharded."""
    dtype: torch.dtype
    """The dtype of the arithmetic; parameters keep their own."""
    attention: AttentionKind = "auto"
    """How attention serves a pack that lanes share."""
    scan: ScanKind = "auto"
    """How Mamba2 and delta net serve one."""
    recompute: Recompute = "none"
    """What is computed again in backward."""
    compile: bool = False
    """Whether blocks go through torch.compile."""


AnyModel = TypeVar("AnyModel", bound=LanguageModel)


def parallelize(
    model: AnyModel, topology: Topology, groups: CPGroups, *, choices: Choices
) -> AnyModel:
    """Puts TP, EP, CP, compilation, recomputation and FSDP onto a model, in place, in this order.

    CUDA graphs come after it; see train/cuda_graph.py.
    """
    _check_dtype(model, choices.dtype)
    if isinstance(model, Decoder):
        split_tensors(model, topology)  # makes parameters smaller, so before all else
        split_experts(model, topology)
    elif topology.tp > 1 or topology.experts is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be split by tensor or expert parallelism, which are "
            "for Longshore's own decoders; use tp 1 and ep 1"
        )
    row_ranks = topology.groups.tp if topology.tp > 1 else None
    exchanges = CPExchanges(
        groups=groups, attention=choices.attention, scan=choices.scan, row_ranks=row_ranks
    )
    set_exchanges(model, exchanges)
    for block in model.blocks():  # Layer says which of these is inside of which
        if choices.compile:
            block.compile(dynamic=True)
        block.recompute = choices.recompute == "blocks"
    shard(model, model.blocks(), topology, mode=choices.mode, dtype=choices.dtype)
    return model


def _check_dtype(model: LanguageModel, dtype: torch.dtype) -> None:
    """FSDP casts whole blocks, so that none of their parameters can stay wide."""
    if model.wide_names and torch.promote_types(dtype, torch.float32) != dtype:
        given = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{model.wide_names[0]} must be computed in float32, and train.dtype {given} would "
            "round it; set train.dtype=float32, or choose another model"
        )


def set_exchanges(model: nn.Module, exchanges: Exchanges) -> None:
    """Lets every part of the model that has `exchanges` reach rows of other lanes."""
    for module in model.modules():
        if isinstance(getattr(module, "exchanges", None), Exchanges):
            module.exchanges = exchanges  # type: ignore[assignment]
