"""The ids and labels of each depth are those that the data path makes from whole sequences."""

import numpy as np
import pytest
import torch
from examples import shift_under_cp as example
from tests.ranks.harness import run_ranks

from longshore import TokenizedSample, make_plan, pack_lane

LENGTHS = [[7], [40, 3, 1, 26, 2]]


def on_rank(lengths):
    lane = torch.distributed.get_rank()
    batches = example.batches_of(lane, lengths)
    return [(b.ctx.packs[0].group.cp_size, example.depths_of(b, 3)) for b in batches]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_depths_from_shards_are_those_of_whole_sequences(lengths):
    rows = [np.arange(length, dtype=np.int32) for length in lengths]
    samples = [TokenizedSample(i, row, np.ones(len(row), bool)) for i, row in enumerate(rows)]
    plan = make_plan(lengths, lanes=2, capacity=max(4, max(lengths) * 2 // 3))
    for lane, rounds in enumerate(run_ranks(2, on_rank, lengths)):
        assert any(cp_size == 2 for cp_size, _ in rounds)
        whole = pack_lane(plan, lane, samples, depths=3)
        for batch, (_, depths) in zip(whole, rounds, strict=True):
            for depth, (ids, labels) in zip(batch.mtp, depths, strict=True):
                assert torch.equal(ids, depth.token_ids)
                assert torch.equal(labels, depth.targets.labels)


def test_the_worked_example():
    first, second = (rounds[0][1][0] for rounds in run_ranks(2, on_rank, [7]))
    assert [x.tolist() for x in first] == [[1, 2, 0, 0], [2, 3, -100, -100]]
    assert [x.tolist() for x in second] == [[3, 4, 5, 6], [4, 5, 6, -100]]
