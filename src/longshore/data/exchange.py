"""Exchange: sequences go from the lanes that own them to the lanes that compute them, and back.

In: a plan, which lane owns each sequence, and this lane's own uncut sequences. Out: this lane's
shards. One uneven all-to-all carries everything; only real tokens are sent, cut and labelled for
the lane that receives them, and only what the rank's stages read. Both sides know the plan, so
message sizes are never sent. `ParcelRoutes.cut`, `deliver` and `open_parcels` follow each other,
and only `deliver` communicates, so that all ranks can agree that the other two worked.

A sequence of 7 tokens owned by lane 0 and split over lanes 0 and 1: lane 0 keeps positions 0 1 6
and sends positions 2 3 4 5 with the token after each: 4 rows of (token, next token, is the next a
target).

Lane broadcast: every rank of a lane gets the shards that its stages read.

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

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.data.fields import Field
from longshore.data.pack import Piece, merge
from longshore.data.shard import (
    Array,
    Cut,
    CutSpans,
    Shards,
    Tokenized,
    cut_shards,
    cut_tokens,
    id_columns,
    mask_columns,
    needed_fields,
)
from longshore.distributed.collectives import all_to_all, broadcast
from longshore.distributed.topology import Groups
from longshore.plan.layout import StageInputs
from longshore.plan.shapes import route
from longshore.plan.types import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Parcels:
    """What a rank sends to the other lanes, and how much it receives from them."""

    sent: Tensor
    """Bytes for all lanes, one lane after the other."""
    sends: list[int]
    """How many of them go to each lane."""
    receives: list[int]
    """How many bytes come from each lane."""


class ParcelRoutes:
    """Which bytes go from a lane to each other lane; they follow from the plan.

    `inputs`, in its methods, is what the rank reads that takes part: the ranks of one stage send
    each other what this stage needs, and no more.
    """

    def __init__(
        self, plan: Plan, owners: Seq[int], lane: int, *, depths: int = 0, fields: Seq[Field] = ()
    ) -> None:
        self.plan, self.depths, self.fields = plan, depths, fields
        routes, lanes = route(plan, owners), range(plan.setting.lanes)
        self.outgoing = [routes.get((lane, other), ()) for other in lanes]
        self.incoming = [routes.get((other, lane), ()) for other in lanes]

    def sizes(self, inputs: StageInputs) -> list[int]:
        """How many bytes this lane sends to each."""
        return [self._layout(cuts, inputs).size for cuts in self.outgoing]

    def expected(self, inputs: StageInputs) -> "list[ByteLayout]":
        """What this lane receives from each."""
        return [self._layout(cuts, inputs) for cuts in self.incoming]

    def cut(self, samples: Mapping[int, Tokenized], inputs: StageInputs) -> Tensor:
        """The lane's own sequences, by their place in the plan, cut for the lanes that get them."""
        parts = [
            _to_bytes(
                cut_shards(
                    self.plan, samples, cuts, depths=self.depths, fields=self.fields, inputs=inputs
                )
            )
            for cuts in self.outgoing
            if cuts
        ]
        joined = np.concatenate([np.empty(0, dtype=np.uint8), *parts])
        assert len(joined) == sum(self.sizes(inputs))
        return torch.from_numpy(joined)

    def _layout(self, cuts: Seq[Cut], inputs: StageInputs) -> "ByteLayout":
        return ByteLayout(self.plan, cuts, self.depths, self.fields, inputs)


def deliver(parcels: Parcels, group: ProcessGroup) -> Tensor:
    """Sends them and returns the received bytes. All lanes of the group call it together.

    `group` orders its ranks by lane.
    """
    return all_to_all(parcels.sent, group, sends=parcels.sends, receives=parcels.receives)


def open_parcels(expected: "Seq[ByteLayout]", received: Tensor) -> Shards:
    """The received bytes as this lane's shards."""
    ends = np.cumsum([layout.size for layout in expected])
    parts = zip(expected, np.split(received.numpy(), ends[:-1]), strict=True)
    return _joined([layout.read(part) for layout, part in parts])


def send_back(
    plan: Plan, owners: Seq[int], pieces: Seq[Piece], group: ProcessGroup, *, like: Tensor
) -> dict[int, Tensor]:
    """Returns a model's outputs for each token to the lane that owns the sequence, in token order.

    `pieces` are those of all rounds of this lane (see data/pack.py); `like` has the dtype of their
    values and, after the first, their dimensions. Returns this lane's own sequences by place.
    """
    routes, lane, lanes = route(plan, owners), group.rank(), range(group.size())
    by_sequence: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        by_sequence.setdefault(piece.sequence, []).append(piece)
    returned = [
        [piece.values for cut in cuts for piece in by_sequence.get(cut.sequence, [])]
        for cuts in (routes.get((other, lane), ()) for other in lanes)
    ]
    awaited = [routes.get((lane, other), ()) for other in lanes]
    empty = like.new_empty((0, *like.shape[1:]))
    received = all_to_all(
        torch.cat([empty, *(values for part in returned for values in part)]),
        group,
        sends=[sum(len(values) for values in part) for part in returned],
        receives=[int(cut_tokens(plan, cuts).sum()) if cuts else 0 for cuts in awaited],
    )
    return merge(plan, _pieces(plan, [cut for cuts in awaited for cut in cuts], received))


def _to_bytes(shards: Shards) -> Array:
    arrays = [
        shards.ids,
        shards.mask,
        *shards.token_fields.values(),
        *shards.sequence_fields.values(),
    ]
    return np.concatenate([np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays])


class ByteLayout:
    """How the bytes of some cuts are read back into shards."""

    def __init__(
        self,
        plan: Plan,
        cuts: Seq[Cut],
        depths: int,
        fields: Seq[Field],
        inputs: StageInputs,
    ) -> None:
        self.sequences = np.array([cut.sequence for cut in cuts], dtype=np.int64)
        self.tokens = cut_tokens(plan, cuts) if cuts else np.empty(0, dtype=np.int64)
        self.depths, self.inputs = depths, inputs
        rows, needed = int(self.tokens.sum()), needed_fields(fields, inputs)
        self.fields = [f for f in needed if f.per != "sequence"]
        self.sequence_fields = [f for f in needed if f.per == "sequence"]
        self.shapes: list[tuple[np.dtype[np.generic], tuple[int, ...]]] = [
            (np.dtype(np.int32), (rows, len(id_columns(inputs, depths)))),
            (np.dtype(np.bool_), (rows, len(mask_columns(inputs, depths)))),
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
            # A copy: a view of another dtype would have to start at a multiple of its item size.
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
            depths=self.depths,
            inputs=self.inputs,
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
        depths=parts[0].depths,
        inputs=parts[0].inputs,
    )


def _pieces(plan: Plan, cuts: Seq[Cut], values: Tensor) -> Iterator[Piece]:
    """Returned values, cut by cut, as pieces of consecutive tokens."""
    if not cuts:
        return
    spans = CutSpans.of(plan, cuts)
    at = 0
    for cut, starts, stops in zip(cuts, spans.starts.tolist(), spans.stops.tolist(), strict=True):
        for start, stop in zip(starts, stops, strict=True):
            if stop > start:
                yield Piece(cut.sequence, start, values[at : at + stop - start])
                at += stop - start


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
