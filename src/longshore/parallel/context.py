"""Context parallelism: what lanes that share a pack send each other.

In: a lane's rows of a shared pack and the process group of its lanes. Out: the rows it needs of the
others, and on the way back what it owes them. One class for all mixers; see model/interface.py for
what each method promises. Collectives are issued in the order of the calls, which is the same on
all lanes that share the pack.

With CP size 2 and one sequence of 8 tokens lane 0 holds rows 0 1 6 7 and lane 1 rows 2 3 4 5:

    visible       lane 0 gets 0 1 for its early chunk, 0 1 2 3 4 5 6 7 for its late one
    gather        0 1 2 3 4 5 6 7 on both
    to_heads      of heads a b, lane 0 sends its rows of b, gets lane 1's rows of a, and orders them
    rows_before   with a count of 1 lane 1 gets row 1 of lane 0, and lane 0 row 5 of lane 1
    sum_counts    counts [3 1 0] and [0 2 2] become [3 3 2] on both

T rows of the lane; N = size·T of the pack.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.batch import Boundaries, PackContext, SeqContext, Zigzag
from longshore.distributed.collectives import (
    all_to_all,
    begin_gather,
    begin_reduce_scatter,
    gather,
    sum_over,
)
from longshore.distributed.topology import CPGroups
from longshore.model.interface import Exchange, Exchanges, PendingRows, Rows
from longshore.ops.boundaries import table, to_device
from longshore.plan.cost import Ints
from longshore.settings import AttentionKind, ScanKind


@dataclass(frozen=True, eq=False, kw_only=True)
class CPExchanges(Exchanges):
    """The exchanges of packs of any CP size. row_ranks: those that share the lane's rows."""

    groups: CPGroups
    attention: AttentionKind
    scan: ScanKind
    row_ranks: ProcessGroup | None

    def shared(self, pack: PackContext) -> Exchange:
        return GroupExchange(pack, self.groups.group(pack.group.first_lane, pack.group.cp_size))

    def sum_counts(self, ctx: SeqContext, counts_SE: Tensor) -> None:
        if self.row_ranks is not None:
            sum_over(counts_SE, self.row_ranks)
        super().sum_counts(ctx, counts_SE)


class GroupExchange(Exchange):
    """One pack that the lanes of `group` share."""

    def __init__(self, pack: PackContext, group: ProcessGroup) -> None:
        super().__init__(pack)
        self.group = group
        self.size = group.size()
        self.rank = group.rank()

    @property
    def zigzag(self) -> Zigzag:
        assert self.pack.zigzag is not None
        return self.pack.zigzag

    @property
    def bounds(self) -> Boundaries:
        return self.zigzag.chunks

    @property
    def visible_bounds(self) -> Boundaries:
        return self.zigzag.visible

    def begin_visible(self, rows: Rows) -> PendingRows:
        shapes, visible_rows = _shapes(rows), self.zigzag.visible_rows
        with torch.no_grad():
            begun = begin_gather(_join(rows), self.group)
        return lambda: _split(begun.wait().index_select(0, visible_rows), shapes)

    def begin_return_visible(self, grads: Rows) -> PendingRows:
        # Taken now: what waits must not keep the gradients themselves in memory.
        shapes = _shapes(grads)
        with torch.no_grad():
            joined = _join(grads)
            by_lane = joined.new_zeros(len(self.zigzag.to_natural), joined.shape[1])
            # At most two chunks of a lane see a row, so the order of the additions cannot show.
            by_lane.index_add_(0, self.zigzag.visible_rows, joined)
            begun = begin_reduce_scatter(by_lane, self.group)
        return lambda: _split(begun.wait(), shapes)

    def gather(self, rows: Tensor) -> Tensor:
        return gather(rows, self.group).index_select(0, self.zigzag.to_natural)

    def shard(self, rows: Tensor) -> Tensor:
        mine = self.zigzag.to_shards.view(self.size, -1)[self.rank]
        return rows.index_select(0, mine)

    def to_heads(self, parts: Rows) -> Rows:
        shares = [part.unflatten(1, (self.size, -1)) for part in parts]
        joined = torch.cat([share.flatten(2) for share in shares], dim=2)
        received = self._all_to_all(joined.transpose(0, 1).flatten(0, 1), rows=len(joined))
        natural = received.index_select(0, self.zigzag.to_natural)
        return _split(natural, _shapes(tuple(share[:, 0] for share in shares)))

    def from_heads(self, rows: Tensor) -> Tensor:
        by_lane = rows.index_select(0, self.zigzag.to_shards).flatten(1)
        received = self._all_to_all(by_lane, rows=len(rows) // self.size)
        heads: Tensor = received.unflatten(0, (self.size, -1)).unflatten(2, rows.shape[1:])
        return heads.transpose(0, 1).flatten(1, 2)

    def _all_to_all(self, by_lane: Tensor, *, rows: int) -> Tensor:
        """rows: for and from each lane."""
        even = [rows] * self.size
        return all_to_all(by_lane, self.group, sends=even, receives=even)

    def rows_before(self, rows: Tensor, count: int) -> Tensor | None:
        if count == 0:
            return None
        chunks = 2 * len(self.pack.padded)
        taken, placed, sends, receives = self._halo(count, rows.device)
        sent = rows.index_select(0, taken)
        received = all_to_all(sent, self.group, sends=sends, receives=receives)
        halos = rows.new_zeros(chunks * count, rows.shape[1])
        halos = halos.index_copy(0, placed, received)
        return halos.view(chunks, count, rows.shape[1])

    def _halo(
        self, count: int, device: torch.device
    ) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
        """A halo_route, computed and copied to the device once for a pack, not in every layer."""

        def make() -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
            offsets: Ints = np.asarray(self.pack.padded.offsets, dtype=np.int64)
            sent, received, sends, receives = halo_route(
                offsets[1:] - offsets[:-1], count, cp_rank=self.rank, cp_size=self.size
            )
            return to_device(sent, device), to_device(received, device), sends, receives

        return table(self.pack.padded, f"halo of {count}, {self.rank} of {self.size}", make)

    def gather_uneven(self, rows: Tensor, *, most: int, order: Tensor) -> Tensor:
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        return gather(padded, self.group).index_select(0, order)

    def gather_chunks(self, values: Tensor) -> Tensor:
        by_lane = gather(values, self.group).unflatten(0, (self.size, -1, 2))
        return torch.cat([by_lane[:, :, 0], by_lane[:, :, 1].flip(0)])

    def sum_counts(self, counts: Tensor) -> None:
        if len(counts):
            sum_over(counts, self.group)


def _join(rows: Rows) -> Tensor:
    """All that belongs to a token in one row, so that one exchange carries it."""
    return torch.cat([part.flatten(1) for part in rows], dim=1)


def _shapes(rows: Rows) -> tuple[torch.Size, ...]:
    """The shape of one row of each part."""
    return tuple(part.shape[1:] for part in rows)


def _split(joined: Tensor, shapes: tuple[torch.Size, ...]) -> Rows:
    """The reverse of _join, for rows of these shapes."""
    parts = joined.split([shape.numel() for shape in shapes], dim=1)
    return tuple(part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True))


def halo_route(
    padded: Ints, halo: int, *, cp_rank: int, cp_size: int
) -> tuple[Ints, Ints, tuple[int, ...], tuple[int, ...]]:
    """What rows_before sends and receives, in numbers alone: sent, received, sends, receives.

    sent: rows of the lane's shard, for the first lane first. received: where each row that comes
    belongs among the lane's 2·S·halo rows. sends, receives: how many rows go to each lane and come
    from it; where chunks are shorter than the halo, rows come from several lanes. padded: lengths
    of the pack's sequences, each a multiple of 2·cp_size.
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
    return (
        row[lent][np.argsort(reader[lent], kind="stable")],
        place[taken][np.argsort(source[taken], kind="stable")],
        tuple(np.bincount(reader[lent], minlength=cp_size).tolist()),
        tuple(np.bincount(source[taken], minlength=cp_size).tolist()),
    )
