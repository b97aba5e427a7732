"""Streams: sequences go from the lanes that read them to the lanes that compute them, and back.

With prepared data nothing is sent: every rank reads what its lane needs (IndexedSteps).

In: a plan, which lane owns each sequence, and a lane's own uncut sequences: on its first rank or,
with `everywhere`, on all its ranks. Out: on every rank the shards that its stages read. Three kinds
of messages carry them; only real tokens are sent, cut and labelled for their receiver. All ranks
know the plan, so sizes are never sent, and a rank whose stages read no tokens takes no part:

    first rank of a lane  → first rank of each stage      the lane's own sequences, along PP
    first rank of a stage ↔ the same stage of all lanes   one uneven all-to-all
    first rank of a stage → its other ranks               the received shards, along TP

A sequence of 7 tokens owned by lane 0 and split over lanes 0 and 1: lane 0 keeps positions 0 1 6
and sends positions 2 3 4 5 with the token after each: 4 rows of (token, next token, is the next a
target). Only `exchange_shards` communicates, so that all ranks can agree before it that preparing
the messages (`make_shard_exchange`) worked, and after it that reading them (`read_shards`) did.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.data.pack import (
    Cut,
    Piece,
    Shards,
    cut_shards,
    cut_spans,
    cut_tokens,
    id_columns,
    mask_columns,
    merge,
    needed_fields,
)
from longshore.data.source import Array, Field, TokenizedSample
from longshore.distributed.collectives import all_to_all, broadcast
from longshore.distributed.topology import Groups
from longshore.plan.layout import NO_INPUTS, StageInputs
from longshore.plan.shapes import route
from longshore.plan.types import Plan


class ShardRoutes:
    """Which bytes go from a lane to each other lane; they follow from the plan.

    `inputs`, in its methods, is what the ranks of one stage read, and so send each other.
    """

    def __init__(
        self, plan: Plan, owners: Seq[int], lane: int, *, depths: int = 0, fields: Seq[Field] = ()
    ) -> None:
        self.plan, self.depths, self.fields = plan, depths, fields
        routes, lanes = route(plan, owners), range(plan.setting.lanes)
        self.outgoing = [routes.get((lane, other), ()) for other in lanes]
        self.incoming = [routes.get((other, lane), ()) for other in lanes]

    def sizes(self, inputs: StageInputs) -> list[int]:
        """How many bytes this lane sends to each lane."""
        return [self._layout(cuts, inputs).size for cuts in self.outgoing]

    def expected(self, inputs: StageInputs) -> "list[ByteLayout]":
        """What this lane receives from each lane."""
        return [self._layout(cuts, inputs) for cuts in self.incoming]

    def cut(self, samples: Mapping[int, TokenizedSample], inputs: StageInputs) -> Tensor:
        """The lane's own sequences, by index in the plan, cut for the lanes that get them."""
        parts = [np.empty(0, dtype=np.uint8)]
        for cuts in filter(None, self.outgoing):
            shards = cut_shards(
                self.plan, samples, cuts, depths=self.depths, fields=self.fields, inputs=inputs
            )
            fields = (*shards.token_fields.values(), *shards.sequence_fields.values())
            arrays = (shards.ids, shards.mask, *fields)
            parts += [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
        joined = np.concatenate(parts)
        assert len(joined) == sum(self.sizes(inputs))
        return torch.from_numpy(joined)

    def _layout(self, cuts: Seq[Cut], inputs: StageInputs) -> "ByteLayout":
        return ByteLayout(self.plan, cuts, self.depths, self.fields, inputs)


def read_shards(expected: "Seq[ByteLayout]", received: Tensor) -> Shards:
    """The received bytes as this lane's shards."""
    ends = np.cumsum([layout.size for layout in expected])
    parts = zip(expected, np.split(received.numpy(), ends[:-1]), strict=True)
    return _joined([layout.read(part) for layout, part in parts])


def send_back(
    plan: Plan, owners: Seq[int], pieces: Seq[Piece], group: ProcessGroup, *, like: Tensor
) -> dict[int, Tensor]:
    """Returns a model's outputs for each token to the lane that owns the sequence, in token order.

    `pieces` are those of all rounds of this lane (see data/pack.py); `like` has the dtype of their
    values and, after the first, their dimensions. Returns this lane's own sequences by their index
    in the plan.
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
        receives=[int(cut_tokens(plan, cuts).sum()) for cuts in awaited],
    )
    return merge(plan, _pieces(plan, [cut for cuts in awaited for cut in cuts], received))


class ByteLayout:
    """How the bytes of some cuts are read back into shards."""

    def __init__(
        self, plan: Plan, cuts: Seq[Cut], depths: int, fields: Seq[Field], inputs: StageInputs
    ) -> None:
        self.sequences = np.array([cut.sequence for cut in cuts], dtype=np.int64)
        self.tokens = cut_tokens(plan, cuts)
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
        by_name = list(zip(names, extra, strict=True))
        return Shards(
            sequences=self.sequences,
            tokens=self.tokens,
            ids=ids,
            mask=mask,
            token_fields=dict(by_name[: len(self.fields)]),
            sequence_fields=dict(by_name[len(self.fields) :]),
            depths=self.depths,
            inputs=self.inputs,
        )


def _joined(parts: Seq[Shards]) -> Shards:
    def join(name: str) -> Array:
        return np.concatenate([getattr(part, name) for part in parts])

    def join_fields(name: str) -> dict[str, Array]:
        by_part = [getattr(part, name) for part in parts]
        return {k: np.concatenate([fields[k] for fields in by_part]) for k in by_part[0]}

    return replace(
        parts[0],
        sequences=join("sequences"),
        tokens=join("tokens"),
        ids=join("ids"),
        mask=join("mask"),
        token_fields=join_fields("token_fields"),
        sequence_fields=join_fields("sequence_fields"),
    )


def _pieces(plan: Plan, cuts: Seq[Cut], values: Tensor) -> Iterator[Piece]:
    """Returned values, cut by cut, as pieces of consecutive tokens."""
    sequences, _, starts, stops = cut_spans(plan, cuts)
    at = 0
    for sequence, *bounds in zip(sequences.tolist(), starts.tolist(), stops.tolist(), strict=True):
        for start, stop in zip(*bounds, strict=True):
            if stop > start:
                yield Piece(sequence, start, values[at : at + stop - start])
                at += stop - start


@dataclass(frozen=True, slots=True, eq=False)
class ShardExchange:
    """What a rank sends and receives until it has its shards; all memory is allocated."""

    sent: Tensor
    """Bytes for all lanes, one lane after the other; still to come where `is_awaited`."""
    sends: list[int]
    """How many bytes go to each lane."""
    expected: list[ByteLayout]
    """How the bytes from each lane are read."""
    to_stages: dict[int, Tensor]
    """What the first rank of the lane sends to other pipeline ranks."""
    is_awaited: bool
    """Whether the first rank of the lane has what is to be sent to other lanes."""
    copy: Tensor | None
    """Where the received bytes go on a rank to which the first of its stage sends them."""
    is_shared: bool
    """Whether the received bytes are sent along TP."""


def make_shard_exchange(
    routes: ShardRoutes,
    samples: Mapping[int, TokenizedSample],
    groups: Groups,
    stages: Seq[StageInputs],
    *,
    everywhere: bool,
) -> ShardExchange:
    """A rank's part of the exchange, if its stages read anything.

    samples: what the lane drew, on the ranks that know it. stages: what each pipeline rank reads.
    """
    mine, tp_rank = groups.pp.rank(), groups.tp.rank()
    inputs = stages[mine]
    is_cut_here = everywhere or (mine == 0 and tp_rank == 0)
    is_awaited = not is_cut_here and tp_rank == 0
    sizes, expected = routes.sizes(inputs), routes.expected(inputs)
    sent = routes.cut(samples, inputs) if is_cut_here else _bytes(sum(sizes) if is_awaited else 0)
    to_stages = {
        other: routes.cut(samples, needed)
        for other, needed in enumerate(stages)
        if is_cut_here and not everywhere and other != mine and needed != NO_INPUTS
    }
    is_copy = not (is_cut_here or is_awaited)
    return ShardExchange(
        sent=sent,
        sends=sizes,
        expected=expected,
        to_stages=to_stages,
        is_awaited=is_awaited,
        copy=_bytes(sum(layout.size for layout in expected)) if is_copy else None,
        is_shared=not everywhere,
    )


def exchange_shards(exchange: ShardExchange, groups: Groups) -> Tensor:
    """The bytes of this rank's shards. All ranks that have a ShardExchange call it together."""
    for other, message in exchange.to_stages.items():
        if len(message):
            dist.send(message, group=groups.pp, group_dst=other)
    if exchange.is_awaited and len(exchange.sent):
        dist.recv(exchange.sent, group=groups.pp, group_src=0)
    received = exchange.copy
    if received is None:
        receives = [layout.size for layout in exchange.expected]
        received = all_to_all(exchange.sent, groups.lanes, sends=exchange.sends, receives=receives)
    return broadcast(received, groups.tp) if exchange.is_shared and len(received) else received


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8)
