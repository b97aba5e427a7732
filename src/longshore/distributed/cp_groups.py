"""The process groups of context parallelism: for each CP size, the one this rank is in.

In: a topology and the legal CP sizes. Out: a group for each size, by first lane and size.

A group of size k is the lanes first_lane … first_lane + k − 1, first_lane a multiple of k, at one
TP and PP coordinate; its rank 0 is on first_lane. With 6 lanes and sizes 1, 2, 4 and 6, lane 5 is
in the groups (5, 1), (4, 2) and (0, 6), written as (first_lane, cp_size); only lanes 0 … 3 have a
group of 4. A rank has at most one group of each size: log2(lanes) + 1 with powers of two.
"""

from collections.abc import Iterable
from operator import index
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed import ProcessGroup

from longshore.distributed.topology import (
    Axes,
    Topology,
    can_split,
    destroy_groups,
    new_group_if_in,
)
from longshore.plan.shapes import ANY_SIZE_LANES, is_power_of_two


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
    """This rank's CP groups, open until `close()`. All ranks open and close them together."""

    def __init__(self, topology: Topology, sizes: Iterable[int]) -> None:
        self._place = f"rank {topology.rank} (lane {topology.lane} of {topology.lanes})"
        self._groups: dict[tuple[int, int], ProcessGroup] = {}
        self._left_over: list[ProcessGroup] = []
        ascending = check_cp_sizes(sizes, topology.lanes)
        make = _split if can_split() else _create
        for size in ascending:
            group = make(topology, size)
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
                f"{self._place} has no CP group of size {cp_size} from lane {first_lane}; {others}"
            ) from None

    def close(self) -> None:
        """Destroys all groups. Every rank calls it, after its last collective in them."""
        groups = [*self._groups.values(), *self._left_over]
        self._groups.clear()
        self._left_over.clear()
        destroy_groups(reversed(groups))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _create(topology: Topology, size: int) -> ProcessGroup | None:
    """This rank's group of one size; all ranks create the groups in the same order."""
    blocks = [b for lanes in cp_blocks(topology.lanes, size) for b in topology.lane_blocks(lanes)]
    return new_group_if_in(blocks, backend=topology.backends[topology.device.type])


def _split(topology: Topology, size: int) -> ProcessGroup | None:
    """The same by one split of the communicator of all ranks.

    torch names a split by its ranks and the number of groups a rank has, so lanes left over get an
    unused group too: without it the next names would differ.
    """
    return dist.split_group(split_ranks=splits(topology, size), group_desc=f"cp_{size}")


def splits(axes: Axes, size: int) -> list[list[int]]:
    """Blocks that contain every rank once: the CP groups of a size, then the lanes left over."""
    covered = axes.lanes // size * size
    left = [range(covered, axes.lanes)] if covered < axes.lanes else []
    return [
        block
        for lanes in [*cp_blocks(axes.lanes, size), *left]
        for block in axes.lane_blocks(lanes)
    ]
