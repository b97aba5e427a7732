"""Parallelism goes onto a model from outside, in one ordered list.

In: a decoder (on `meta`, or with its parameters), a topology, the CP groups, the choices. Out: the
same decoder, ready to train on its lane's micro-batches.

    cores → recomputation of blocks → compilation → FSDP

The order matters: a block recomputes inside its FSDP hooks, so that its parameters are gathered
once for both; compilation sees the block alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from longshore.distributed.cp_groups import CPGroups
from longshore.distributed.topology import Topology
from longshore.model.attention import Attention
from longshore.model.decoder import Decoder
from longshore.model.delta_net import DeltaNet
from longshore.model.mamba2 import Mamba2
from longshore.model.mla import MLA
from longshore.model.moe import MoE
from longshore.model.registry import MIXERS
from longshore.parallel.context.attention import ContextAttention, Kind
from longshore.parallel.context.balance import ContextCounts
from longshore.parallel.context.latent import ContextLatent
from longshore.parallel.context.scan import ContextScan, ScanKind
from longshore.parallel.fsdp import Mode, shard

Recompute = Literal["none", "blocks"]

CoreMaker = Callable[[CPGroups, "Choices"], Callable[..., Any]]

CORES: dict[type[nn.Module], CoreMaker] = {
    Attention: lambda groups, choices: ContextAttention(groups, choices.attention),
    MLA: lambda groups, _: ContextLatent(groups),
    Mamba2: lambda groups, choices: ContextScan(groups, choices.scan),
    DeltaNet: lambda groups, choices: ContextScan(groups, choices.scan),
    MoE: lambda groups, choices: ContextCounts(groups),
}
"""What each mixer does where tokens of several lanes meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user may choose. dtype: of the arithmetic; parameters keep their own."""

    mode: Mode
    dtype: torch.dtype
    attention: Kind = "auto"
    scan: ScanKind = "auto"
    recompute: Recompute = "none"
    compile: bool = False


def parallelize(
    model: Decoder, topology: Topology, groups: CPGroups, *, choices: Choices
) -> Decoder:
    """Applies all of it, in place."""
    blocks = [*model.layers.values(), *model.mtp.values()]
    set_cores(model, groups, choices)
    if choices.recompute == "blocks":
        for block in blocks:
            _recompute(block)
    if choices.compile:
        for block in blocks:
            block.compile(dynamic=True)
    shard(model, blocks, topology, mode=choices.mode, dtype=choices.dtype)
    return model


def register_mixer(config: type, module: type[nn.Module], *, core: CoreMaker) -> None:
    """Makes layers of a new kind: its config, its module, and what that does over several lanes."""
    if config in MIXERS:
        raise ValueError(f"{config.__name__} has a module already, {MIXERS[config].__name__}")
    MIXERS[config] = module
    CORES[module] = core


def set_cores(model: nn.Module, groups: CPGroups, choices: Choices) -> None:
    """Puts the cores that know of CP into every mixer."""
    for module in model.modules():
        if make := CORES.get(type(module)):
            module.core = make(groups, choices)  # type: ignore[assignment]


def _recompute(block: nn.Module) -> None:
    """Keeps the block's input alone and runs it again in backward.

    The whole block: its last product runs on every lane, so all lanes begin to recompute at the
    same place, whatever packs they hold.
    """
    block.forward = partial(
        checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
    )
