"""The topology: a rank's lane, its TP and PP coordinates, and its process groups.

In: the sizes of the axes and a default process group. Out: one frozen Topology, passed explicitly;
and for each CP size the group this rank is in.

Ranks are numbered in the mesh (pp, lanes, tp), the last axis fastest. With 3 lanes, tp 2 and pp 2
there are 12 ranks; rank 9 = (1·3 + 1)·2 + 1 has pp_rank 1, lane 1 and tp_rank 1. Lane 1 is held by
ranks 2, 3, 8 and 9, which see the same tokens; rank 2 is its first. Rank 9 sums gradients with
ranks 7, 9 and 11, the other lanes at its TP and PP coordinates.

Experts are divided over ep neighbouring ranks of a pipeline rank, whatever their lanes. With ep 3
the ranks 6 … 11 of pp_rank 1 form the EP groups 6 7 8 and 9 10 11; rank 9 has ep_rank 0, and the
same experts as rank 6, its other expert replica.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longshore.plan.shapes import ANY_SIZE_LANES, is_power_of_two
from longshore.plan.types import AXES, Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one rank; each orders its ranks by its own coordinate."""

    device: torch.device
    """Where the tensors are that are sent."""
    world: ProcessGroup = field(repr=False)
    """All ranks."""
    lanes: ProcessGroup = field(repr=False)
    """All lanes at this rank's TP and PP coordinates."""
    tp: ProcessGroup = field(repr=False)
    """The ranks of this rank's lane along TP."""
    pp: ProcessGroup = field(repr=False)
    """The ranks of this rank's lane along PP."""

    def close(self) -> None:
        """Destroys the groups, except the default one. Every rank calls it, after its last use."""
        destroy_groups((self.pp, self.tp, self.lanes, self.world))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups:
    """One rank's groups for layers of experts."""

    ep: ProcessGroup
    """The ranks that share one set of experts, by ep_rank."""
    replicas: DeviceMesh
    """The ranks with the same experts as this one, by rank: the axis "expert_replicas"."""
    copies: DeviceMesh
    """The same with a second axis, "shard", of one rank: each has all of these experts."""
    created: tuple[ProcessGroup, ...]
    """What is destroyed with them; a group of one rank may be that of another axis."""

    def close(self) -> None:
        """Every rank calls it, after its last use."""
        destroy_groups(reversed(self.created))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology(Axes):
    """One rank's place in the mesh, with the groups of its axes."""

    rank: int
    """Global rank."""
    mesh: DeviceMesh = field(repr=False)
    """The mesh with the axes AXES."""
    groups: Groups
    """The groups of these axes."""
    experts: ExpertGroups | None = field(repr=False)
    """Only where tp or ep is above 1; else the experts of a layer are on every lane."""

    @property
    def device(self) -> torch.device:
        return self.groups.device

    @property
    def backends(self) -> dict[str, str]:
        """The backend of each type of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
        return backends_of(self.groups.world)

    @property
    def lane(self) -> int:
        return self.lane_of(self.rank)

    @property
    def tp_rank(self) -> int:
        return self.tp_rank_of(self.rank)

    @property
    def pp_rank(self) -> int:
        return self.pp_rank_of(self.rank)

    @property
    def ep_rank(self) -> int:
        return self.ep_rank_of(self.rank)

    @property
    def is_first_of_lane(self) -> bool:
        """Whether this rank reads its lane's data."""
        return self.rank == self.rank_at(lane=self.lane)

    def close(self) -> None:
        """Destroys all its groups, except the default one. Every rank calls it, after its last use.

        Needed only if the default group lives on.
        """
        if self.experts is not None:
            self.experts.close()
        self.groups.close()

    def host_groups(self) -> Groups:
        """A second set of the same groups, on gloo and for CPU tensors, for another thread.

        Two threads must not share a group, because their collectives would mix. All ranks call it
        together; the caller closes them.
        """
        world = new_group_of([range(self.world_size)], backend="gloo")
        groups = {
            axis: world
            if getattr(self, axis) == self.world_size
            else new_group_of(self.blocks(axis), backend="gloo")
            for axis in AXES
        }
        return Groups(device=torch.device("cpu"), world=world, **groups)


def make_topology(
    *, lanes: int, tp: int = 1, pp: int = 1, ep: int = 1, device: torch.device | str
) -> Topology:
    """The topology of this rank, after init_process_group. All ranks call it together.

    All numbers are checked before a group is created.
    """
    return topology_of(Axes(lanes=lanes, tp=tp, pp=pp, ep=ep), device)


def topology_of(axes: Axes, device: torch.device | str) -> Topology:
    """make_topology with the axes of a run."""
    if not dist.is_initialized():
        raise RuntimeError("there is no default process group; call init_process_group first")
    axes.check_world_size(dist.get_world_size())
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        raise ValueError("device is 'cuda'; give this rank's own GPU, such as 'cuda:0'")
    if device.type == "cuda":
        # Before the mesh is created, which would choose a device by itself.
        torch.cuda.init()
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (axes.pp, axes.lanes, axes.tp), mesh_dim_names=AXES)
    world = dist.group.WORLD
    assert world is not None
    groups = Groups(device=device, world=world, **{axis: mesh.get_group(axis) for axis in AXES})
    experts = _expert_groups(axes, groups) if axes.splits_layers else None
    rank = dist.get_rank()
    return Topology(**asdict(axes), rank=rank, mesh=mesh, groups=groups, experts=experts)


def _expert_groups(axes: Axes, groups: Groups) -> ExpertGroups:
    """Groups of their own: on a shared NCCL communicator experts' rows would wait for FSDP's.

    Created here, where all ranks are, and not where a rank's stage has experts.
    """
    created: list[ProcessGroup] = []

    def create(blocks: list[list[int]], name: str) -> ProcessGroup:
        if can_split():
            group = dist.split_group(split_ranks=blocks, group_desc=name)
            assert group is not None, f"rank {dist.get_rank()} is in none of the blocks"
        else:
            backend = backends_of(groups.world)[groups.device.type]
            group = new_group_of(blocks, backend=backend)
        created.append(group)
        return group

    ones = [group for group in (groups.tp, groups.pp, groups.lanes) if group.size() == 1]
    alone = ones[0] if ones else create([[rank] for rank in range(axes.world_size)], "alone")
    ep, replicas = (
        alone if getattr(axes, name) == 1 else create(axes.blocks(name), name)
        for name in ("ep", "expert_replicas")
    )
    ranks = torch.tensor(dist.get_process_group_ranks(replicas))
    mesh = DeviceMesh.from_group(replicas, groups.device.type, mesh_dim_names=("expert_replicas",))
    copies = DeviceMesh.from_group(
        [replicas, alone],
        groups.device.type,
        ranks[:, None],
        mesh_dim_names=("expert_replicas", "shard"),
    )
    return ExpertGroups(ep=ep, replicas=mesh, copies=copies, created=tuple(created))


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The backend of each type of device, such as {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)


def can_split() -> bool:
    """Whether the default group has only NCCL, and its communicator already exists."""
    world = dist.group.WORLD
    return (
        world is not None
        and world.bound_device_id is not None
        and set(backends_of(world).values()) == {"nccl"}
    )


def new_group_of(blocks: Iterable[Sequence[int]], *, backend: str) -> ProcessGroup:
    """Creates the group of the block, of these disjoint blocks of ranks, that contains this rank.

    All ranks call it together with the same blocks, which cover all ranks.
    """
    group = new_group_if_in(blocks, backend=backend)
    assert group is not None, f"rank {dist.get_rank()} is in none of the blocks"
    return group


def new_group_if_in(blocks: Iterable[Sequence[int]], *, backend: str) -> ProcessGroup | None:
    """The same, for blocks that leave some ranks out; these get None.

    All ranks call new_group for every block, so that a group has the same new name on all of them;
    a rank waits only for the members of its own. With local synchronisation the name comes from
    the ranks and the number of open groups: a group opened again after it was closed would find
    the addresses of the closed one in the store, and fail. It is used only where it must be: below
    an eagerly connected NCCL group, ranks outside a group call a split that gloo members never
    join.
    """
    mine, rank, world = None, dist.get_rank(), dist.group.WORLD
    locally = backend == "gloo" and world is not None and world.bound_device_id is not None
    for block in blocks:
        group = dist.new_group(list(block), backend=backend, use_local_synchronization=locally)
        if rank in block:
            mine = group
    return mine


def destroy_groups(groups: Iterable[ProcessGroup]) -> None:
    """Destroys each group once, except the default group and those destroyed with it."""
    if not dist.is_initialized():
        return
    for group in dict.fromkeys(groups):
        if group != dist.group.WORLD:
            dist.destroy_process_group(group)


def cp_blocks(lanes: int, cp_size: int) -> list[range]:
    """The lanes of each CP group of a size; lanes left over at the end are in none."""
    return [range(first, first + cp_size) for first in range(0, lanes - cp_size + 1, cp_size)]


def check_cp_sizes(sizes: Iterable[int], lanes: int) -> tuple[int, ...]:
    """The sizes, ascending, each once; raises for sizes that these lanes cannot have."""
    ascending = tuple(sorted({index(size) for size in sizes}))
    if not ascending:
        raise ValueError("there are no CP sizes; give at least one, such as 1")
    for size in ascending:
        if not 1 <= size <= lanes:
            raise ValueError(f"CP size {size}: it must be from 1 to the number of lanes, {lanes}")
    odd = [size for size in ascending if not is_power_of_two(size) and size != lanes]
    if odd and lanes > ANY_SIZE_LANES:
        raise ValueError(
            f"CP size {odd[0]}: with more than {ANY_SIZE_LANES} lanes it must be a power of two, "
            f"or all {lanes} lanes, because each size costs every rank one more process group"
        )
    return ascending


class CPGroups:
    """This rank's CP groups, open until `close()`. All ranks open and close them together.

    A group of size k is the lanes first_lane … first_lane + k - 1, first_lane a multiple of k, at
    one TP and PP coordinate; its rank 0 is on first_lane. With 6 lanes and sizes 1, 2, 4 and 6,
    lane 5 is in the groups (5, 1), (4, 2) and (0, 6), written as (first_lane, cp_size); only lanes
    0 … 3 have a group of 4.
    """

    def __init__(self, topology: Topology, sizes: Iterable[int]) -> None:
        self._name = f"rank {topology.rank} (lane {topology.lane} of {topology.lanes})"
        self._groups: dict[tuple[int, int], ProcessGroup] = {}
        self._left_over: list[ProcessGroup] = []
        by_split = can_split()
        for size in check_cp_sizes(sizes, topology.lanes):
            blocks, left_over = cp_ranks(topology, size)
            # torch names a split by its ranks and the number of groups a rank has, so lanes left
            # over get an unused group too: without it the next names would differ.
            group = (
                dist.split_group(split_ranks=blocks + left_over, group_desc=f"cp_{size}")
                if by_split
                else new_group_if_in(blocks, backend=topology.backends[topology.device.type])
            )
            first = topology.lane // size * size
            if group is not None and first + size <= topology.lanes:
                self._groups[first, size] = group
            elif group is not None:
                self._left_over.append(group)

    @property
    def keys(self) -> tuple[tuple[int, int], ...]:
        """(first_lane, cp_size) of this rank's groups, sizes ascending."""
        return tuple(self._groups)

    def group(self, first_lane: int, cp_size: int) -> ProcessGroup:
        """The group of cp_size lanes from first_lane on, which must hold this rank's lane."""
        try:
            return self._groups[first_lane, cp_size]
        except KeyError:
            sizes = ", ".join(f"{size} from lane {first}" for first, size in self._groups)
            others = f"it has groups of size {sizes}" if sizes else "all its groups are closed"
            raise ValueError(
                f"{self._name} has no CP group of size {cp_size} from lane {first_lane}; {others}"
            ) from None

    def close(self) -> None:
        """Destroys all groups. Every rank calls it, after its last collective in them."""
        groups = [*self._groups.values(), *self._left_over]
        self._groups.clear()
        self._left_over.clear()
        destroy_groups(reversed(groups))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def cp_ranks(axes: Axes, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each CP group of a size, and those of the lanes left over, per coordinate."""
    covered = axes.lanes // size * size
    blocks = [ranks for lanes in cp_blocks(axes.lanes, size) for ranks in axes.lane_blocks(lanes)]
    return blocks, axes.lane_blocks(range(covered, axes.lanes)) if covered < axes.lanes else []
