"""The process groups that one rank joins, and the GPU memory of their communicators. No torch.

In: the sizes of the axes. Out: one JoinedGroup for each group of the rank that joins most, which is
rank 0: it is in a CP group of every size, and its stage holds a copy of the embedding.

`joined_groups(lanes=2, tp=2, pp=2)` has world (8 ranks), pp, lanes and tp (2 each), CP groups of 1
and 2 lanes, those of experts (1 rank) and of their replicas (4), and twice world, pp, lanes and tp
on the host: 16 groups, 8 of them on the GPU. The
number grows with log2(lanes) and with nothing else: 2,048 times as many lanes add 11 CP groups.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longshore.plan.shapes import legal_cp_sizes

MIB = 1 << 20
PAIR_BYTES, LARGER_BYTES = 544 * MIB, 688 * MIB
"""An assumption, not measured here: GPU memory of an NCCL communicator of two ranks, and of more.

As reported for 4 A100s with NVLink after one all-reduce in each group (github.com/NVIDIA/nccl/
issues/964). It is linear in the number of channels, and beyond two nodes the number of ranks does
not matter (the maintainers in issue 864), because a ring has two neighbours and a tree three. An
all-to-all connects a rank with every other and may take several times as much (issue 1685).
"""

HOST_USERS = ("checkpoint", "loader")
"""Each has groups of its own on the host, because their threads run collectives of their own."""


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """One process group of a rank."""

    name: str
    """What it is for."""
    ranks: int
    """In the group."""
    blocks: int
    """Such groups in the whole job, of which a rank joins one."""
    on_gpu: bool
    """By NCCL; otherwise by gloo, on the host."""


def joined_groups(
    *,
    lanes: int,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp_sizes: tuple[int, ...] | None = None,
    copies: int = 1,
    replicated_stages: int = 0,
) -> tuple[JoinedGroup, ...]:
    """All groups of rank 0, in the order they are created.

    cp_sizes: the legal ones; default: powers of two, and all lanes. copies: pipeline ranks that
    hold the embedding, more than one where it is tied or there are extra depths. replicated_stages:
    a rank's stages where lanes do not shard the model (`none`); each has a mesh of its own.
    """
    world, stage = lanes * tp * pp, lanes * tp
    if stage % ep:
        raise ValueError(f"ep is {ep} and does not divide the {lanes} lanes × tp {tp} of a stage")
    sizes = legal_cp_sizes(lanes) if cp_sizes is None else cp_sizes
    axes = {"pp": pp, "lanes": lanes, "tp": tp}
    groups = [*_axes("", world, axes, on_gpu=True)]
    groups += [
        JoinedGroup(f"CP {size}", size, lanes // size * tp * pp, on_gpu=True) for size in sizes
    ]
    for stage_number in range(replicated_stages):
        mesh = {"pp": pp, "replicas": lanes, "shard": 1, "tp": tp}
        groups += [*_axes(f"stage {stage_number}: ", world, mesh, on_gpu=True)][1:]
    if copies > 1:
        groups.append(JoinedGroup("embedding copies", copies, stage, on_gpu=True))
    if tp > 1 or ep > 1:
        shared = {"experts": ep, "expert replicas": stage // ep}
        # A rank alone needs no group of its own where an axis has such a group.
        groups += [
            JoinedGroup(name, ranks, world // ranks, on_gpu=True)
            for name, ranks in shared.items()
            if ranks > 1 or 1 not in axes.values()
        ]
    for user in HOST_USERS:
        groups += _axes(f"{user}: ", world, axes, on_gpu=False)
    return tuple(groups)


def _axes(prefix: str, world: int, axes: dict[str, int], *, on_gpu: bool) -> Iterator[JoinedGroup]:
    """An axis that spans all ranks has no group of its own."""
    yield JoinedGroup(f"{prefix}world", world, 1, on_gpu)
    for name, ranks in axes.items():
        if ranks != world:
            yield JoinedGroup(f"{prefix}{name}", ranks, world // ranks, on_gpu)


def communicator_bytes(
    groups: tuple[JoinedGroup, ...], *, pair: int = PAIR_BYTES, larger: int = LARGER_BYTES
) -> int:
    """GPU memory of a rank's communicators once each has been used; alone a rank sends nothing."""
    ranks = [group.ranks for group in groups if group.on_gpu]
    return pair * ranks.count(2) + larger * sum(number > 2 for number in ranks)
