"""All tensors of a model on rank 0, one by one, wherever they are sharded or on other stages.

In: a rank's stages. Out: (name, tensor) in the order of the whole decoder, on the CPU. All ranks
take part in each; only rank 0 gets those of other stages.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from longshore.arch.decoder import DecoderConfig
from longshore.distributed.collectives import broadcast
from longshore.distributed.topology import Topology
from longshore.model.decoder import Decoder
from longshore.parallel.fsdp import gathered
from longshore.parallel.pipeline.stages import Model, layout_of, tensors_by_name, whole_name
from longshore.plan.layout import Layout, Stage


def gathered_tensors(model: Model, topology: Topology) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, gathered, then every buffer."""
    layout = layout_of(model)
    if layout.pp == 1:
        for name, tensor in tensors_by_name(model):
            yield name, gathered(tensor.detach()).cpu()
        return
    mine: dict[str, Tensor] = {}
    for name, tensor in tensors_by_name(model):
        mine.setdefault(name, tensor)
    owners = _owners(model.config, layout)
    for name, like in _on_meta(model.config, None, next(model.parameters()).dtype):
        yield name, _brought(mine.get(name), like, topology, owner=owners[name]).cpu()


def _brought(mine: Tensor | None, like: Tensor, topology: Topology, *, owner: int) -> Tensor:
    """A tensor of a pipeline rank, gathered there and brought to the first rank of lane 0."""
    whole = None
    if topology.pp_rank == owner:
        assert mine is not None
        whole = gathered(mine.detach()).contiguous()
    if topology.lane == 0 and owner:
        if whole is None:
            whole = torch.empty(like.shape, dtype=like.dtype, device=topology.device)
        broadcast(whole, topology.groups.pp, source=owner)
    return torch.empty(0) if whole is None else whole


def _owners(config: DecoderConfig, layout: Layout) -> dict[str, int]:
    """The pipeline rank that has each tensor; of copies the first."""
    owners: dict[str, int] = {}
    for number, stage in enumerate(layout.stages):
        for name, _ in _on_meta(config, stage, torch.float32):
            owners.setdefault(whole_name(config, name), layout.rank_of(number))
    return owners


def _on_meta(
    config: DecoderConfig, stage: Stage | None, dtype: torch.dtype
) -> list[tuple[str, Tensor]]:
    """The tensors of a stage, or of the whole decoder, without memory."""
    with torch.device("meta"):
        model = Decoder(config, stage).to(dtype)
    return list(chain(model.named_parameters(), model.named_buffers()))
