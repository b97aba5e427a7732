"""Log-probabilities come back to the rows they belong to, whatever the plan."""

import numpy as np
import pytest
import torch
from examples import planner_for_rl as example
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore import pack_lane

PROMPT = 2
LENGTHS = st.lists(st.integers(2, 150), min_size=1, max_size=6)


def rollouts(lengths):
    random = np.random.default_rng(sum(lengths))
    rows = [random.integers(0, 16, length).astype(np.int32) for length in lengths]
    return example.as_samples(rows, [PROMPT] * len(rows), [float(i) for i in range(len(rows))])


def plain(samples, logits):
    """Row by row, without a plan. The advantage of row i is i, from the first token it wrote on."""
    table = logits.log_softmax(dim=-1)
    rows = torch.zeros(len(samples), max(len(s.tokens) for s in samples), 2, dtype=torch.float64)
    for number, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        ids = torch.from_numpy(sample.tokens).long()
        row[1 : len(ids), 0] = table[ids[:-1], ids[1:]]
        row[PROMPT:, 1] = -number * row[PROMPT:, 0]
    return rows


@pytest.mark.property
@settings(max_examples=settings.default.max_examples // 5)
@given(lengths=LENGTHS, lanes=st.sampled_from([1, 2, 3, 4]))
def test_rows_are_those_of_each_rollout_alone(lengths, lanes):
    logits = torch.linspace(-2, 3, 256, dtype=torch.float64).view(16, 16)
    samples = rollouts(lengths)
    worker = example.bigram_worker(logits)
    _, rows = example.run_workers(samples, worker, lanes=lanes, capacity=160)
    assert torch.equal(rows, plain(samples, logits))


def test_split_rollouts_come_back_whole_and_keep_their_advantages():
    samples = rollouts([300, 6, 7, 40])
    worker = example.bigram_worker(torch.zeros(16, 16, dtype=torch.float64))
    plan, rows = example.run_workers(samples, worker, lanes=4, capacity=96)
    assert max(size for size, _ in plan.stats.cp_histogram) == 4
    assert (rows[0, 1:300, 0] == rows[0, 1, 0]).all()
    assert rows[1, 6:].eq(0).all()
    batch = pack_lane(plan, 0, samples, fields=[example.ADVANTAGE])[0]
    predicts_answer = batch.targets.loss_mask
    owners = torch.tensor(batch.ctx.sequences)[batch.ctx.sequence_index[predicts_answer]]
    assert torch.equal(batch.token_fields["advantage"][predicts_answer], owners.float())
    assert batch.token_fields["advantage"][~predicts_answer].eq(0).all()


def test_too_few_samples_are_refused():
    samples = rollouts([5, 6])
    plan, _ = example.run_workers(
        samples, example.bigram_worker(torch.zeros(16, 16)), lanes=1, capacity=16
    )
    with pytest.raises(ValueError, match="1 samples were given for a plan of 2 sequences"):
        pack_lane(plan, 0, samples[:1])


def test_it_runs(capsys):
    example.main()
    assert "log-probabilities: (24, " in capsys.readouterr().out
