"""FSDP2 over the lanes: how parameters are split, gathered and their gradients summed.

In: a model on the device `meta` or with whole parameters, a topology, a mode. Out: the same model
with DTensor parameters. Gradients are plain sums over the lanes, in float32 at least.

    zero3   parameters, gradients and optimizer state are split; parameters are gathered for each
            layer, and gradients summed, in every round
    zero2   the same, but parameters stay gathered during a step and gradients are summed once, in
            the plan's last round
    none    every lane keeps all of it; gradients are summed once, in the plan's last round

With 4 lanes a weight of 10 rows is split into 3, 3, 3 and 1. A tensor of fewer rows than lanes,
such as 2 experts (2, 64, 32), is split along the first dim that the lanes divide, here into
(2, 16, 32): shards are padded to one size, and all lanes would send as much as the 2 that have one.

With tensor or expert parallelism a layer's experts are wrapped on their own, over the ranks that
have the same ones: with 4 lanes and ep 2, lanes 0 and 2 split the even half of the experts.
"""

from collections.abc import Iterable
from functools import partial, reduce

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from longshore.distributed.collectives import gather
from longshore.distributed.topology import Topology
from longshore.model.feed_forward import Experts
from longshore.model.interface import LanguageModel
from longshore.model.norm_rope import Float32Parameters
from longshore.settings import ShardMode


def shard(
    model: LanguageModel,
    parts: Iterable[nn.Module],
    topology: Topology,
    *,
    mode: ShardMode,
    dtype: torch.dtype,
) -> None:
    """Wraps each part, then the model, which holds what no part does.

    dtype: of the arithmetic; parameters keep their own, and gradients are summed in the widest.
    What is frozen may be in one group with what is trained, and narrower.
    """
    mesh = _replicas(topology) if mode == "none" else topology.mesh["lanes"]
    uncast = [part for part in model.modules() if isinstance(part, Float32Parameters)]
    experts: list[nn.Module] = []
    if topology.experts is not None:
        experts = [part for part in model.modules() if isinstance(part, Experts)]
        expert_mesh = topology.experts.copies if mode == "none" else topology.experts.replicas
    for module in [*uncast, *experts, *parts, model]:
        kept = reduce(torch.promote_types, {each.dtype for each in module.parameters()})
        is_uncast = isinstance(module, Float32Parameters)
        over = expert_mesh if module in experts else mesh
        wrapped = fully_shard(
            module,
            mesh=over,
            shard_placement_fn=partial(split_dim, ranks=over.size(over.ndim - 1)),
            reshard_after_forward=mode == "zero3" and not is_uncast,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=kept if is_uncast else dtype,
                reduce_dtype=kept,
                cast_forward_inputs=False,
            ),
        )
        # Losses are divided before backward, by a count of the whole step: here they only add up.
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
    model.computing_dtype = dtype


def split_dim(parameter: Tensor, *, ranks: int) -> Shard:
    """The first, unless there are fewer rows than ranks, and another dim splits evenly."""
    if len(parameter) >= ranks:
        return Shard(0)
    return Shard(next((dim for dim, size in enumerate(parameter.shape) if size % ranks == 0), 0))


def _replicas(topology: Topology) -> DeviceMesh:
    """All lanes as replicas, each of which holds the one shard there is."""
    sizes = (topology.pp, topology.lanes, 1, topology.tp)
    mesh = init_device_mesh(
        topology.device.type, sizes, mesh_dim_names=("pp", "replicas", "shard", "tp")
    )
    return mesh["replicas", "shard"]


def begin_round(model: LanguageModel, *, mode: ShardMode, is_last: bool) -> None:
    """Says what the round's backward does. is_last: of the plan, the same on all lanes."""
    assert isinstance(model, FSDPModule)
    syncs = mode == "zero3" or is_last
    # FSDP walks over all modules for each of these, which takes milliseconds.
    if model.round_setting == (syncs, is_last):
        return
    model.round_setting = (syncs, is_last)
    model.set_requires_gradient_sync(syncs)
    model.set_reshard_after_backward(syncs)
    model.set_is_last_backward(is_last)


def keep_gathered_memory(model: nn.Module) -> None:
    """Lets the gathered parameters stay where they are in memory from step to step.

    FSDP gathers into the same tensors every time, but frees their memory in between. CUDA graphs
    read parameters at fixed addresses. Costs the memory of the gathered parameters at all times;
    not for zero3, which saves just that.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The one use of FSDP's private attributes, the same in torch 2.11 to 2.13: its public
            # methods say when a parameter is resharded, and resharding always frees the memory.
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                parameter.free_unsharded_param = lambda: None  # type: ignore[method-assign]


def shard_span(parameter: Tensor) -> tuple[Tensor, int, int]:
    """This rank's part of a parameter, the dim that FSDP splits, and the part's first index."""
    if not isinstance(parameter, DTensor):
        return parameter, 0, 0
    mesh, local, placement = parameter.device_mesh, parameter.to_local(), parameter.placements[-1]
    assert isinstance(placement, Shard)
    size, ranks = parameter.shape[placement.dim], mesh.size(mesh.ndim - 1)
    start = mesh.get_local_rank(mesh.ndim - 1) * -(-size // ranks)
    return local, placement.dim, min(start, size)


def gathered(parameter: Tensor) -> Tensor:
    """All of a parameter. DTensor's own gather crashes on CUDA tensors over gloo."""
    local, dim, _ = shard_span(parameter)
    if not isinstance(parameter, DTensor) or not is_split(parameter):
        return local
    mesh, size = parameter.device_mesh, parameter.shape[dim]
    rows = local.movedim(dim, 0)
    padded = rows.new_zeros(-(-size // mesh.size(mesh.ndim - 1)), *rows.shape[1:])
    padded[: len(rows)] = rows
    return gather(padded, mesh.get_group(mesh.ndim - 1))[:size].movedim(0, dim)


def local_part(tensor: Tensor) -> Tensor:
    """This lane's part of a parameter or of its gradient, in its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(parameter: Tensor) -> bool:
    """Whether lanes hold different parts of it, so that a norm must be summed over them."""
    if not isinstance(parameter, DTensor):
        return False
    return any(
        placement.is_shard() and size > 1
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    )
