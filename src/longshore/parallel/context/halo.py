"""Which rows travel so that each chunk of a lane has the rows before it. Numbers alone.

In: the padded lengths of a shared pack's sequences, how many rows before a chunk are wanted, a
lane's place. Out: what the lane sends to each other lane, and where what it receives belongs.

With one sequence of 8 tokens at CP size 2 and a halo of 1, lane 0 (tokens 0 1 6 7) sends token 1 to
lane 1 and gets token 5 for its late chunk. Where chunks are shorter than the halo, rows come from
several lanes.
"""

from dataclasses import dataclass

import numpy as np

from longshore.plan.cost import Ints


@dataclass(frozen=True, slots=True, eq=False)
class HaloRoute:
    """What a lane sends and receives, ordered by lane."""

    sent: Ints
    """Rows of the lane's shard, for the first lane first."""
    received: Ints
    """Where each row that comes belongs among the lane's 2·S·halo rows."""
    sends: tuple[int, ...]
    """How many rows go to each lane."""
    receives: tuple[int, ...]
    """How many rows come from each lane."""


def halo_route(padded: Ints, halo: int, *, cp_rank: int, cp_size: int) -> HaloRoute:
    """padded: lengths of the pack's sequences, each a multiple of 2·cp_size."""
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
