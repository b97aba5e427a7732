"""Which positions of a padded sequence each lane of a CP group holds, for many sequences at once.

In: real and padded lengths, cp_rank, cp_size, as integers or arrays of them. Out: arrays.

A sequence padded to P tokens is cut into 2·k chunks of P/(2·k) at CP size k, and lane r holds
chunks r and 2·k−1−r. At CP size 2 a sequence of 7 tokens is padded to 8: lane 0 holds positions
0 1 6 7, where 7 is padding, so its spans of real tokens are 0…2 and 6…7; lane 1 holds 2 3 4 5.
Gathered in the order of the lanes, [0 1 6 7 2 3 4 5] becomes natural by taking its places
[0 1 4 5 6 7 2 3].
"""

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import Ints
from longshore.plan.types import Plan

Ints32 = NDArray[np.int32]


def padded_lengths(plan: Plan, lengths: Ints, cp_size: int | Ints) -> Ints:
    """Tokens of a plan's sequences with their padding; policy `padded` makes all as the longest."""
    if plan.setting.policy == "padded":
        longest = max(sequence.length for sequence in plan.sequences)
        lengths = np.full_like(lengths, longest)
    step = np.where(np.equal(cp_size, 1), 1, 2 * np.asarray(cp_size))
    padded: Ints = -(-lengths // step) * step
    return padded


def chunk_pair(padded: Ints, cp_rank: int | Ints, cp_size: int | Ints) -> tuple[Ints, Ints, Ints]:
    """The chunk length, and the positions at which a lane's early and late chunk start.

    One lane alone holds chunks 0 and 1 of two, which join; the second is the shorter if P is odd.
    """
    chunk = -(-padded // (2 * cp_size))
    return chunk, cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk


def spans(
    lengths: Ints, padded: Ints, *, cp_rank: int | Ints, cp_size: int | Ints
) -> tuple[Ints, Ints]:
    """Starts and stops, both (sequences, 2), of the real tokens in a lane's two chunks."""
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    starts = np.stack([early, late], axis=-1)
    stops = starts + chunk[..., None]
    end = lengths[..., None]
    return np.minimum(starts, end), np.minimum(stops, end)


def shard_positions(padded: Ints, *, cp_rank: int, cp_size: int) -> Ints:
    """The position, in its sequence, of each token a lane holds of a pack, padding included."""
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    pieces = np.stack([chunk, padded // cp_size - chunk], axis=-1).ravel()
    return ranges(np.stack([early, late], axis=-1).ravel(), pieces)


def natural_order(padded: Ints, cp_size: int) -> tuple[Ints32, Ints32]:
    """(to_natural, to_shards) for a pack whose shards were gathered in the order of the lanes.

    natural = gathered[to_natural] and gathered = natural[to_shards].
    """
    chunk = padded // (2 * cp_size)
    first = np.cumsum(padded) - padded
    chunks = np.arange(2 * cp_size, dtype=np.int64)
    rank = np.minimum(chunks, chunks[::-1])
    held = first // cp_size + chunk * (chunks[:, None] >= cp_size)
    gathered = held + rank[:, None] * (padded.sum() // cp_size)
    to_natural = _ranges32(gathered.T.ravel(), np.repeat(chunk, 2 * cp_size))
    pair = np.stack([chunks[:cp_size], chunks[: cp_size - 1 : -1]], axis=-1)
    natural = first[:, None] + chunk[:, None] * pair[:, None]
    to_shards = _ranges32(natural.ravel(), np.tile(np.repeat(chunk, 2), cp_size))
    return to_natural, to_shards


def seen_lengths(padded: Ints, *, cp_rank: int, cp_size: int) -> Ints:
    """For a lane's early and late chunk of each sequence, by turns: the tokens up to its end."""
    chunk, early, late = chunk_pair(padded, cp_rank, cp_size)
    seen: Ints = (np.stack([early, late], axis=-1) + chunk[:, None]).ravel()
    return seen


def ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, … of each range, joined: starts (5, 0) and counts (2, 3) give 5 6 0 1 2."""
    joined: Ints = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    joined += np.arange(len(joined), dtype=np.int64)
    return joined


def _ranges32(starts: Ints, counts: Ints) -> Ints32:
    """The same as int32, in less than half the time: these are as long as a whole pack."""
    shift: Ints32 = (starts - (np.cumsum(counts) - counts)).astype(np.int32)
    joined: Ints32 = np.repeat(shift, counts)
    joined += np.arange(len(joined), dtype=np.int32)
    return joined
