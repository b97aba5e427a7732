"""Lane broadcast: every rank of a lane gets the shards that its stages read.

In: the plan, and the sequences that a lane drew: on its first rank or, with `everywhere`, on all.
Out: on every rank the bytes of its shards. Three kinds of messages carry them, and all sizes follow
from the plan:

    first rank of a lane  → first rank of each stage      the lane's own sequences, along PP
    first rank of a stage ↔ the same stage of all lanes   the exchange of sequences
    first rank of a stage → its other ranks               the received shards, along TP

What a stage does not read is never sent to it, and a rank without tokens takes no part. With 4096
tokens, pp 4 and no depth, the first rank of the last stage receives 4096 labels and mask values,
those of the two middle stages nothing.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.data.exchange import ByteLayout, ParcelRoutes, Parcels, deliver
from longshore.data.shard import Tokenized
from longshore.distributed.collectives import broadcast
from longshore.distributed.topology import Groups
from longshore.plan.layout import StageInputs


@dataclass(frozen=True, slots=True, eq=False)
class LaneParcels:
    """What a rank sends and receives until it has its shards; all memory is allocated."""

    parcels: Parcels
    """For the exchange with other lanes; its bytes are still to come where `is_awaited`."""
    expected: list[ByteLayout]
    """How the received bytes are read."""
    to_stages: dict[int, Tensor]
    """What the first rank of the lane sends to other pipeline ranks."""
    is_awaited: bool
    """Whether the first rank of the lane has what is to be sent to other lanes."""
    copy: Tensor | None
    """Where the received bytes go on a rank to which the first of its stage sends them."""
    is_shared: bool
    """Whether the received bytes are sent along TP."""


def make_lane_parcels(
    routes: ParcelRoutes,
    samples: Mapping[int, Tokenized],
    groups: Groups,
    stages: Seq[StageInputs],
    *,
    everywhere: bool,
) -> LaneParcels:
    """A rank's part, if its stages read anything. `samples`: what the lane drew, where known.

    stages: what each pipeline rank reads.
    """
    mine, tp_rank = groups.pp.rank(), groups.tp.rank()
    inputs = stages[mine]
    is_cut_here = everywhere or (mine == 0 and tp_rank == 0)
    is_awaited = not is_cut_here and tp_rank == 0
    sizes, expected = routes.sizes(inputs), routes.expected(inputs)
    sent = routes.cut(samples, inputs) if is_cut_here else _bytes(sum(sizes) if is_awaited else 0)
    parcels = Parcels(sent, sizes, [layout.size for layout in expected])
    to_stages = {
        other: routes.cut(samples, needed)
        for other, needed in enumerate(stages)
        if is_cut_here and not everywhere and other != mine and needed.any
    }
    is_copy = not (is_cut_here or is_awaited)
    return LaneParcels(
        parcels=parcels,
        expected=expected,
        to_stages=to_stages,
        is_awaited=is_awaited,
        copy=_bytes(sum(parcels.receives)) if is_copy else None,
        is_shared=not everywhere,
    )


def deliver_in_lane(mail: LaneParcels, groups: Groups) -> Tensor:
    """The bytes of this rank's shards. All ranks that have LaneParcels call it together."""
    for other, message in mail.to_stages.items():
        if len(message):
            dist.send(message, group=groups.pp, group_dst=other)
    if mail.is_awaited and len(mail.parcels.sent):
        dist.recv(mail.parcels.sent, group=groups.pp, group_src=0)
    received = mail.copy if mail.copy is not None else deliver(mail.parcels, groups.lanes)
    return broadcast(received, groups.tp) if mail.is_shared and len(received) else received


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)
