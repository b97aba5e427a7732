"""A scan over lanes that keep their tokens and pass states: no limit from the number of heads.

In: a lane's scan inputs and a pack that lanes share. Out: the lane's part of what the scan makes.
Of each sequence a lane holds two chunks, each a run of its own:

1. the convolution of a chunk reads the kernel − 1 tokens before it, brought by one exchange from
   the lanes that hold them (several, where chunks are shorter than that);
2. every chunk is scanned from a state of 0, which gives its final state and its transition, and one
   gather brings those of all chunks and sequences to all lanes;
3. a lane composes the states that enter its own chunks, and adds what they contribute: the products
   within chunks are not made again.

With transition ½ and final states 4, 6, 8 of chunks 0, 1, 2, chunk 3 begins with 8 + ½·(6 + ½·4) =
12. A lane brings home 2·(c − 1) states of each sequence at CP size c, however long it is; so many
short sequences in one such pack are dear.

S sequences; C channels; X numbers of a transition and a state.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.batch import PackContext
from longshore.distributed.collectives import all_to_all, gather
from longshore.model.scan import Scan, ScanInputs
from longshore.ops.boundaries import to_device
from longshore.plan.cost import Ints


def by_states(inputs: ScanInputs, scan: Scan, pack: PackContext, group: ProcessGroup) -> Tensor:
    """The lane's tokens with all heads, chunk by chunk, from the states that enter them."""
    assert pack.zigzag is not None
    before = fetch_halos(inputs.mixed, inputs.taps.shape[1] - 1, pack=pack, group=group)
    prepared = inputs.prepare(scan, pack.zigzag.chunks, before=before)
    transition, final = prepared.ends()
    return prepared.run(entering_states(transition, final, scan=scan, group=group))[0]


def entering_states(
    transition: Tensor, final: Tensor, *, scan: Scan, group: ProcessGroup
) -> Tensor:
    """(2·S, …): the state that enters each chunk of this lane, early and late by turns."""
    rank, size = group.rank(), group.size()
    rows = torch.cat([transition.flatten(1), final.flatten(1)], dim=1)
    by_lane = gather(rows, group).unflatten(0, (size, -1, 2))
    in_order = torch.cat([by_lane[:, :, 0], by_lane[:, :, 1].flip(0)])
    widths = [transition[0].numel(), final[0].numel()]
    transitions, finals = in_order.split(widths, dim=2)
    state = final.new_zeros(len(final) // 2, *final.shape[1:])
    early = state
    steps = zip(transitions.unbind(), finals.unbind(), strict=True)
    for chunk, (change, added) in enumerate(steps):
        if chunk == rank:
            early = state
        if chunk == 2 * size - 1 - rank:
            break
        kept = scan.compose(change.unflatten(1, transition.shape[1:]), state)
        state = kept + added.unflatten(1, final.shape[1:])
    return torch.stack([early, state], dim=1).flatten(0, 1)


def fetch_halos(
    rows_TC: Tensor, halo: int, *, pack: PackContext, group: ProcessGroup
) -> Tensor | None:
    """(2·S, halo, C): the rows before each chunk of this lane, 0 before a sequence begins."""
    if halo == 0:
        return None
    offsets: Ints = np.asarray(pack.padded.offsets, dtype=np.int64)
    padded = offsets[1:] - offsets[:-1]
    route = halo_route(padded, halo, cp_rank=group.rank(), cp_size=group.size())
    sent = rows_TC.index_select(0, to_device(route.sent, rows_TC.device))
    got = all_to_all(sent, group, sends=route.sends, receives=route.receives)
    halos = rows_TC.new_zeros(2 * len(padded) * halo, rows_TC.shape[1])
    halos = halos.index_copy(0, to_device(route.received, rows_TC.device), got)
    return halos.view(2 * len(padded), halo, rows_TC.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class HaloRoute:
    """sent: rows of the lane's shard, sends[r] of them for lane r, by rising r. received: places
    among its 2·S·halo rows of what comes, receives[r] of it from lane r.
    """

    sent: Ints
    received: Ints
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def halo_route(padded: Ints, halo: int, *, cp_rank: int, cp_size: int) -> HaloRoute:
    """What travels, from the padded lengths of the pack's sequences; numbers alone.

    With one sequence of 8 tokens at CP size 2 and a halo of 1, lane 0 (tokens 0 1 6 7) sends token
    1 to lane 1 and gets token 5 for its late chunk.
    """
    chunks = np.arange(2 * cp_size, dtype=np.int64)
    owner, is_late = np.minimum(chunks, chunks[::-1]), chunks >= cp_size
    # Over (sequence, chunk that reads, place in its halo), on all lanes in this order.
    length = (padded // (2 * cp_size))[:, None, None]
    position = chunks[:, None] * length - halo + np.arange(halo)
    number = np.arange(len(padded))[:, None, None]
    place = (number * 2 + is_late[:, None]) * halo + np.arange(halo)
    first = (np.cumsum(padded) - padded)[:, None, None] // cp_size
    real = position >= 0
    held_by = np.maximum(position, 0) // length
    row = first + is_late[held_by] * length + position % length
    reader = np.broadcast_to(owner[:, None], position.shape)
    reader, source, row, place = reader[real], owner[held_by[real]], row[real], place[real]
    lent, taken = source == cp_rank, reader == cp_rank
    return HaloRoute(
        sent=row[lent][np.argsort(reader[lent], kind="stable")],
        received=place[taken][np.argsort(source[taken], kind="stable")],
        sends=tuple(np.bincount(reader[lent], minlength=cp_size).tolist()),
        receives=tuple(np.bincount(source[taken], minlength=cp_size).tolist()),
    )
