"""Multi-token prediction from shards alone: the next tokens' ids and labels under CP 2.

In: a lane's shard of the token ids, as a trainer that shards its batches early has them. Out: for
each depth the ids and labels of its tokens, shifted by one more token within each sequence. Only
the first token of a chunk comes from the other lane, and those of a pack come in one exchange.

Try it: torchrun --nproc-per-node 2 examples/shift_under_cp.py

A sequence of 7 tokens on 2 lanes, each with two of its four chunks:

    lane 0: depth 1 ids [1, 2, 0, 0], labels [2, 3, -100, -100]
    lane 1: depth 1 ids [3, 4, 5, 6], labels [4, 5, 6, -100]
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from longshore import MicroBatch, PackContext, TokenizedSample, make_plan, pack_lane, shift


def shifted(ids: Tensor, pack: PackContext, *, fill: int) -> Tensor:
    """The rows of a pack, shifted within its sequences. All lanes that share the pack call it."""
    group = dist.group.WORLD if pack.group.cp_size > 1 else None
    rows, _ = shift(
        ids[pack.rows], real=pack.real.offsets, padded=pack.padded.offsets, group=group, fill=fill
    )
    return rows


def depths_of(batch: MicroBatch, depths: int, pad_id: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The ids and labels of each depth of multi-token prediction, from the batch's ids alone."""
    assert batch.token_ids is not None
    packs = batch.ctx.packs
    labels = torch.cat([shifted(batch.token_ids, pack, fill=-100) for pack in packs])
    result = []
    for _ in range(depths):
        # A depth's ids are the labels before it.
        ids = torch.where(labels == -100, pad_id, labels)
        labels = torch.cat([shifted(labels, pack, fill=-100) for pack in packs])
        result.append((ids, labels))
    return result


def batches_of(lane: int, lengths: list[int]) -> list[MicroBatch]:
    """Your data: here sequences that count from 0, split over two lanes where they are long."""
    rows = [np.arange(length, dtype=np.int32) for length in lengths]
    samples = [TokenizedSample(i, row, np.ones(len(row), bool)) for i, row in enumerate(rows)]
    plan = make_plan(lengths, lanes=2, capacity=max(4, max(lengths) * 2 // 3))
    return pack_lane(plan, lane, samples)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    lane = dist.get_rank()
    for batch in batches_of(lane, [7]):
        for depth, (ids, labels) in enumerate(depths_of(batch, 2), start=1):
            print(f"lane {lane}: depth {depth} ids {ids.tolist()}, labels {labels.tolist()}")
    dist.destroy_process_group()
