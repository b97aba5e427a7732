"""The SeqContext of a lane in a round, from the plan alone.

In: a plan, a round, a lane, the bucket sizes. Out: boundaries, positions and CP groups of the
lane's packs, padding included. It reads no data, so every rank of a lane computes it by itself.

Two lanes of capacity 8 with align 8: a sequence of 7 tokens at CP size 2 gives lane 0 positions
0 1 6 7; a second of 3 tokens at CP size 1 beside it fills rows 4 to 6, and one row of padding makes
8. The packs are rows 0…4 with padded boundaries (0, 8), and rows 4…8 with (0, 3, 4).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from longshore.batch import Boundaries, CPGroup, PackContext, SeqContext, TableMaker, Zigzag
from longshore.plan.cost import Ints
from longshore.plan.shapes import (
    chunk_pair,
    lane_packs,
    lane_tokens,
    natural_order,
    padded_lengths,
    ranges,
    shard_positions,
    visible_lengths,
)
from longshore.plan.types import Plan


def lane_context(
    plan: Plan,
    number: int,
    lane: int,
    *,
    buckets: Seq[int] = (),
    tables: Seq[TableMaker] = (),
    max_sequences: int = 0,
) -> SeqContext:
    """Boundaries, positions and CP groups of one lane in round `number`.

    tables: what makes the tables of each pack's boundaries that the model needs. max_sequences: of
    CUDA graphs; the boundaries of a whole pack with no more sequences are padded to so many.
    """
    tokens = lane_tokens(plan, number, lane, buckets=buckets)
    drafts = _drafts(plan, number, lane, tokens)
    places = tuple(place for draft in drafts for place in draft.sequences)
    lengths = np.concatenate([draft.lengths for draft in drafts])
    local_lengths = np.concatenate([draft.padded // draft.group.cp_size for draft in drafts])
    positions = np.concatenate([draft.positions() for draft in drafts])
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int64), local_lengths)
    is_real = positions < np.repeat(lengths, local_lengths)
    sequence[~is_real] = len(places)
    packs = _packs(drafts, max_sequences)
    for pack in packs:
        for make_tables in tables:
            make_tables(pack)
    return SeqContext(
        tokens=tokens,
        real_tokens=int(np.count_nonzero(is_real)),
        positions=torch.from_numpy(positions),
        sequence_index=torch.from_numpy(sequence),
        is_real=torch.from_numpy(is_real),
        lengths=torch.tensor([*lengths[: len(places)].tolist(), 1]),
        sequences=places,
        packs=packs,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Draft:
    """A pack before its tensors exist; a lane's own padding is one more sequence, of length 0."""

    group: CPGroup
    sequences: tuple[int, ...]
    lengths: Ints
    padded: Ints

    @property
    def tokens(self) -> int:
        return int(self.padded.sum()) // self.group.cp_size

    def positions(self) -> Ints:
        group = self.group
        return shard_positions(self.padded, cp_rank=group.cp_rank, cp_size=group.cp_size)


def _drafts(plan: Plan, number: int, lane: int, tokens: int) -> list[_Draft]:
    """The lane's packs; its padding goes into its pack of CP size 1, or into a new one."""
    drafts = []
    for pack in lane_packs(plan, number, lane):
        if not pack.sequences:
            raise ValueError(
                f"round {number}, lane {lane}: a pack of CP size {pack.cp_size} has no sequences; "
                "leave the pack out: lanes without packs get padding automatically"
            )
        lengths = np.array([plan.sequences[i].length for i in pack.sequences], dtype=np.int64)
        padded = padded_lengths(plan, lengths, pack.cp_size)
        group = CPGroup(pack.first_lane, pack.cp_size, lane - pack.first_lane)
        draft = _Draft(group, pack.sequences, lengths, padded)
        if draft.tokens != pack.tokens_per_lane:
            raise ValueError(
                f"round {number}, lane {lane}: tokens_per_lane of a pack of CP size {pack.cp_size} "
                f"is {pack.tokens_per_lane}, but its sequences have {draft.tokens} tokens per lane"
            )
        drafts.append(draft)
    padding = tokens - sum(draft.tokens for draft in drafts)
    if padding:
        none: Ints = np.zeros(0, dtype=np.int64)
        alone = _Draft(CPGroup(lane, 1, 0), (), none, none)
        last = drafts.pop() if drafts and drafts[-1].group.cp_size == 1 else alone
        lengths, padded = np.append(last.lengths, 0), np.append(last.padded, padding)
        drafts.append(_Draft(last.group, last.sequences, lengths, padded))
    return drafts


def _packs(drafts: Seq[_Draft], max_sequences: int) -> tuple[PackContext, ...]:
    (first_draft, *others) = drafts
    alone = not others and first_draft.group.cp_size == 1
    fits = alone and len(first_draft.padded) <= max_sequences
    starts = accumulate((draft.tokens for draft in drafts), initial=0)
    firsts = accumulate((len(draft.sequences) for draft in drafts), initial=0)
    return tuple(
        PackContext(
            group=draft.group,
            start=start,
            stop=start + draft.tokens,
            first_sequence=first,
            lengths=tuple(draft.lengths.tolist()),
            real=_boundaries(draft.lengths),
            padded=_boundaries(draft.padded, max_sequences if fits else 0),
            zigzag=_zigzag(draft.padded, draft.group) if draft.group.cp_size > 1 else None,
        )
        for draft, start, first in zip(drafts, starts, firsts, strict=False)
    )


def _zigzag(padded: Ints, group: CPGroup) -> Zigzag:
    to_natural, to_shards = natural_order(padded, group.cp_size)
    chunk, _, _ = chunk_pair(padded, group.cp_rank, group.cp_size)
    visible = visible_lengths(padded, cp_rank=group.cp_rank, cp_size=group.cp_size)
    first = np.repeat(np.cumsum(padded) - padded, 2)
    return Zigzag(
        local=_boundaries(padded // group.cp_size),
        chunks=_boundaries(np.repeat(chunk, 2)),
        to_natural=torch.from_numpy(to_natural),
        to_shards=torch.from_numpy(to_shards),
        visible=_boundaries(visible),
        visible_rows=torch.from_numpy(to_natural[ranges(first, visible)]),
    )


def _boundaries(lengths: Ints, sequences: int = 0) -> Boundaries:
    """sequences: so many in all, the last of them empty, with tables of a fixed size; 0: as is."""
    offsets = np.zeros(max(len(lengths), sequences) + 1, dtype=np.int32)
    offsets[1:] = lengths.sum()
    np.cumsum(lengths, out=offsets[1 : len(lengths) + 1])
    return Boundaries(
        tuple(offsets.tolist()),
        torch.from_numpy(offsets),
        int(lengths.max()),
        fixed=sequences > 0,
    )
