"""Log-probabilities come back to the rows they belong to, whatever the plan."""

import numpy as np
import pytest
import torch
from examples import planner_for_rl as example
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore import pack_lane

LENGTHS = st.lists(st.integers(2, 150), min_size=1, max_size=6)


def rollouts(lengths):
    random = np.random.default_rng(sum(lengths))
    rows = [random.integers(0, 16, length).astype(np.int32) for length in lengths]
    return example.as_samples(rows, [1] * len(rows), [float(i) for i in range(len(rows))])


def plain(samples, logits):
    """Row by row, without a plan."""
    table = logits.log_softmax(dim=-1)
    rows = torch.zeros(len(samples), max(len(s.tokens) for s in samples), dtype=torch.float64)
    for row, sample in zip(rows, samples, strict=True):
        ids = torch.from_numpy(sample.tokens).long()
        row[1 : len(ids)] = table[ids[:-1], ids[1:]]
    return rows


@pytest.mark.property
@settings(max_examples=settings.default.max_examples // 5)
@given(lengths=LENGTHS, lanes=st.sampled_from([1, 2, 3, 4]))
def test_rows_are_those_of_each_rollout_alone(lengths, lanes):
    logits = torch.linspace(-2, 3, 256, dtype=torch.float64).view(16, 16)
    samples = rollouts(lengths)
    _, rows = example.log_probabilities(
        samples, example.bigram_worker(logits), lanes=lanes, capacity=160
    )
    assert torch.equal(rows, plain(samples, logits))


def test_split_rollouts_come_back_whole_and_keep_their_advantages():
    samples = rollouts([300, 6, 7, 40])
    worker = example.bigram_worker(torch.zeros(16, 16, dtype=torch.float64))
    plan, rows = example.log_probabilities(samples, worker, lanes=4, capacity=96)
    assert max(size for size, _ in plan.stats.cp_histogram) == 4
    assert (rows[0, 1:300] == rows[0, 1]).all()
    assert rows[1, 6:].eq(0).all()
    batch = pack_lane(plan, 0, samples, fields=[example.ADVANTAGE])[0]
    real = batch.ctx.is_real & (batch.ctx.positions > 0)
    owners = torch.tensor(batch.ctx.sequences)[batch.ctx.sequence_index[real]]
    assert torch.equal(batch.token_fields["advantage"][real], owners.float())


def test_too_few_samples_are_refused():
    samples = rollouts([5, 6])
    plan, _ = example.log_probabilities(
        samples, example.bigram_worker(torch.zeros(16, 16)), lanes=1, capacity=16
    )
    with pytest.raises(ValueError, match="1 samples were given for a plan of 2 sequences"):
        pack_lane(plan, 0, samples[:1])


def test_it_runs(capsys):
    example.main()
    assert "log-probabilities: (24, " in capsys.readouterr().out
