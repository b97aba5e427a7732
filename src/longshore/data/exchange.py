"""Exchange: sequences travel from the lanes that own them to the lanes that compute them, and back.

In: a plan, who owns which sequence, and the whole sequences of this lane. Out: this lane's shards.
One uneven all-to-all carries everything; only real tokens travel, cut and labelled for the lane
that gets them. Both sides know the plan, so no message says how long another is.

A sequence of 7 tokens owned by lane 0 and split over lanes 0 and 1: lane 0 keeps positions 0 1 6
and sends positions 2 3 4 5 with the token after each: 4 rows of (token, next token, is the next a
target).
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.data.fields import Field
from longshore.data.pack import Piece, merge
from longshore.data.shard import Array, Cut, Shards, Tokenized, cut_shards, cut_tokens
from longshore.distributed.collectives import all_to_all
from longshore.plan.route import Routes, route
from longshore.plan.shapes import padded_lengths, spans
from longshore.plan.types import Plan


def exchange(
    plan: Plan,
    owners: Seq[int],
    samples: Mapping[int, Tokenized],
    group: ProcessGroup,
    *,
    depths: int = 0,
    fields: Seq[Field] = (),
) -> Shards:
    """This lane's shards of a step. All lanes of the group call it together.

    `group` orders its ranks by lane. `samples`: this lane's own sequences by their place in the
    plan. It is cut_parcels, deliver and open_parcels; only the second sends, so whoever has others
    waiting can agree with them on the first and the third.
    """
    parcels = cut_parcels(plan, owners, samples, group, depths=depths, fields=fields)
    return open_parcels(parcels, deliver(parcels, group))


@dataclass(frozen=True, slots=True, eq=False)
class Parcels:
    """What a lane sends to the others, so many bytes to each, and how it reads what they send."""

    sent: Tensor
    sizes: list[int]
    expected: "list[_Layout]"


def cut_parcels(
    plan: Plan,
    owners: Seq[int],
    samples: Mapping[int, Tokenized],
    group: ProcessGroup,
    *,
    depths: int = 0,
    fields: Seq[Field] = (),
) -> Parcels:
    """This lane's sequences, cut for the lanes that compute them; nothing is sent yet."""
    routes, lane = route(plan, owners), group.rank()
    sent = [
        _to_bytes(cut_shards(plan, samples, cuts, depths=depths, fields=fields))
        if cuts
        else np.empty(0, dtype=np.uint8)
        for cuts in _each(routes, lane, group, sending=True)
    ]
    expected = [
        _Layout(plan, cuts, depths, fields) for cuts in _each(routes, lane, group, sending=False)
    ]
    whole = torch.from_numpy(np.concatenate(sent))
    return Parcels(whole, [len(part) for part in sent], expected)


def deliver(parcels: Parcels, group: ProcessGroup) -> Array:
    """Sends them, and returns the bytes that came. All lanes of the group call it together."""
    received: Array = all_to_all(
        parcels.sent,
        group,
        sends=parcels.sizes,
        receives=[layout.size for layout in parcels.expected],
    ).numpy()
    return received


def open_parcels(parcels: Parcels, received: Array) -> Shards:
    """What came, as this lane's shards."""
    ends = np.cumsum([layout.size for layout in parcels.expected])
    parts = zip(parcels.expected, np.split(received, ends[:-1]), strict=True)
    return _joined([layout.read(part) for layout, part in parts])


def send_back(
    plan: Plan, owners: Seq[int], pieces: Seq[Piece], group: ProcessGroup, *, like: Tensor
) -> dict[int, Tensor]:
    """What a model said of each token, at the lane that owns the sequence, in the original order.

    `pieces` are those of all rounds of this lane (see data/pack.py); `like` has the dtype and,
    behind its first, the dimensions of their values. Returns this lane's own sequences by place.
    """
    routes, lane = route(plan, owners), group.rank()
    at_hand: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        at_hand.setdefault(piece.sequence, []).append(piece)
    back = [
        [piece.values for cut in cuts for piece in at_hand.get(cut.sequence, [])]
        for cuts in _each(routes, lane, group, sending=False)
    ]
    awaited = list(_each(routes, lane, group, sending=True))
    empty = like.new_empty((0, *like.shape[1:]))
    received = all_to_all(
        torch.cat([empty, *(values for part in back for values in part)]),
        group,
        sends=[sum(len(values) for values in part) for part in back],
        receives=[int(cut_tokens(plan, cuts).sum()) if cuts else 0 for cuts in awaited],
    )
    return merge(plan, _pieces(plan, [cut for cuts in awaited for cut in cuts], received))


def _each(
    routes: Routes, lane: int, group: ProcessGroup, *, sending: bool
) -> Iterator[tuple[Cut, ...]]:
    """The transfers between this lane and each other, in the order of the lanes."""
    for other in range(group.size()):
        yield routes.between(lane, other) if sending else routes.between(other, lane)


def _to_bytes(shards: Shards) -> Array:
    arrays = [
        shards.ids,
        shards.mask,
        *shards.token_fields.values(),
        *shards.sequence_fields.values(),
    ]
    return np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])


class _Layout:
    """How the bytes of some cuts are read."""

    def __init__(self, plan: Plan, cuts: Seq[Cut], depths: int, fields: Seq[Field]) -> None:
        self.sequences = np.array([cut.sequence for cut in cuts], dtype=np.int64)
        self.tokens = cut_tokens(plan, cuts) if cuts else np.empty(0, dtype=np.int64)
        rows = int(self.tokens.sum())
        self.fields = [f for f in fields if f.per != "sequence"]
        self.sequence_fields = [f for f in fields if f.per == "sequence"]
        self.shapes: list[tuple[np.dtype[np.generic], tuple[int, ...]]] = [
            (np.dtype(np.int32), (rows, depths + 2)),
            (np.dtype(np.bool_), (rows, depths + 1)),
            *((np.dtype(f.dtype), (rows, *f.shape)) for f in self.fields),
            *((np.dtype(f.dtype), (len(cuts), *f.shape)) for f in self.sequence_fields),
        ]

    @property
    def size(self) -> int:
        return sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.shapes)

    def read(self, data: Array) -> Shards:
        arrays, at = [], 0
        for dtype, shape in self.shapes:
            size = dtype.itemsize * int(np.prod(shape))
            # A copy, because a view of another dtype would have to start at a multiple of its size.
            arrays.append(data[at : at + size].copy().view(dtype).reshape(shape))
            at += size
        ids, mask, *extra = arrays
        names = [f.name for f in (*self.fields, *self.sequence_fields)]
        by_name = dict(zip(names, extra, strict=True))
        return Shards(
            sequences=self.sequences,
            tokens=self.tokens,
            ids=ids,
            mask=mask,
            token_fields={f.name: by_name[f.name] for f in self.fields},
            sequence_fields={f.name: by_name[f.name] for f in self.sequence_fields},
        )


def _joined(parts: Seq[Shards]) -> Shards:
    def join(arrays: Iterator[Array]) -> Array:
        return np.concatenate(list(arrays))

    return Shards(
        sequences=join(part.sequences for part in parts),
        tokens=join(part.tokens for part in parts),
        ids=join(part.ids for part in parts),
        mask=join(part.mask for part in parts),
        token_fields={k: join(p.token_fields[k] for p in parts) for k in parts[0].token_fields},
        sequence_fields={
            k: join(p.sequence_fields[k] for p in parts) for k in parts[0].sequence_fields
        },
    )


def _pieces(plan: Plan, cuts: Seq[Cut], values: Tensor) -> Iterator[Piece]:
    """Values that came back, cut by cut, as pieces of consecutive tokens."""
    if not cuts:
        return
    table = np.array([(cut.sequence, cut.cp_rank, cut.cp_size) for cut in cuts], dtype=np.int64)
    place, rank, size = table.T
    lengths = np.array([plan.sequences[i].length for i in place.tolist()], dtype=np.int64)
    padded = padded_lengths(plan, lengths, size)
    starts, stops = spans(lengths, padded, cp_rank=rank, cp_size=size)
    at = 0
    for sequence, begins, ends in zip(place.tolist(), starts.tolist(), stops.tolist(), strict=True):
        for start, stop in zip(begins, ends, strict=True):
            if stop > start:
                yield Piece(sequence, start, values[at : at + stop - start])
                at += stop - start
