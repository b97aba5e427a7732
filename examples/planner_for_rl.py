"""The planner alone, for an RL controller that owns all rollouts (as in verl or NeMo-RL).

In: rollouts of very different lengths, with an advantage each. Out: the log-probability of each
token and its loss −advantage · log-probability, one row for each rollout, from workers that got
packed micro-batches. The controller plans, packs for every worker, and unpacks; it
needs no process group, and `mixed` plans with any CP size work.

    rollouts of 90, 6 and 7 tokens on 2 lanes of capacity 64: the first is split over both lanes,
    and its log-probabilities come back as one row of 90

The workers here are functions of this process with a bigram table in place of a model. A real
worker gets `batch.to_tensors()` and `batch.skeleton()` (picklable), runs its own model with
`batch.ctx`, and returns values for each of its tokens. The value at a token is about the next one,
its target: fields such as advantages are declared per target, and are shifted with the labels.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longshore import Field, MicroBatch, Plan, TokenizedSample, make_plan, merge, pack_lane, unpack

ADVANTAGE = Field("advantage", "target", "float32")
Worker = Callable[[MicroBatch], Tensor]


def as_samples(
    rollouts: Sequence[NDArray[np.int32]], prompts: Sequence[int], advantages: Sequence[float]
) -> list[TokenizedSample]:
    """Rollouts whose first tokens are the prompt, which has no loss."""
    samples = []
    rows = zip(rollouts, prompts, advantages, strict=True)
    for place, (tokens, prompt, advantage) in enumerate(rows):
        is_response = np.arange(len(tokens)) >= prompt
        fields = {"advantage": np.where(is_response, advantage, 0.0).astype(np.float32)}
        samples.append(TokenizedSample(place, tokens, is_response, fields))
    return samples


def run_workers(
    samples: Sequence[TokenizedSample], worker: Worker, *, lanes: int, capacity: int
) -> tuple[Plan, Tensor]:
    """(rows, longest, 2): log-probability and loss of each token, 0 at padding."""
    plan = make_plan([sample.length for sample in samples], lanes=lanes, capacity=capacity)
    pieces = []
    for lane in range(lanes):  # on a cluster: one call for each worker
        for batch in pack_lane(plan, lane, samples, fields=[ADVANTAGE]):
            pieces += unpack(batch.ctx, worker(batch))
    longest = max(sample.length for sample in samples)
    rows = torch.zeros(len(samples), longest, 2, dtype=torch.float64)
    for place, values in merge(plan, pieces).items():
        rows[place, 1 : len(values)] = values[:-1]  # the value at a token is that of the next one
    return plan, rows


def bigram_worker(logits: Tensor) -> Worker:
    """A stand-in for a model: the next token depends on this one alone."""
    table = logits.log_softmax(dim=-1)

    def run(batch: MicroBatch) -> Tensor:
        assert batch.token_ids is not None
        assert batch.targets is not None
        labels = batch.targets.labels
        log_probs = table[batch.token_ids, labels.clamp(min=0)].where(labels >= 0, 0.0)
        return torch.stack([log_probs, -batch.token_fields["advantage"] * log_probs], dim=-1)

    return run


def main() -> None:
    random = np.random.default_rng(0)
    lengths = random.lognormal(4.0, 1.3, 24).clip(8, 2000).astype(int)
    rollouts = [random.integers(0, 64, length).astype(np.int32) for length in lengths]
    samples = as_samples(rollouts, [4] * len(rollouts), random.normal(size=len(rollouts)).tolist())
    worker = bigram_worker(torch.randn(64, 64, dtype=torch.float64))
    plan, rows = run_workers(samples, worker, lanes=4, capacity=128)
    print(f"{len(samples)} rollouts of {lengths.min()} to {lengths.max()} tokens")
    print(f"{plan.stats.rounds} rounds on 4 lanes, CP sizes {dict(plan.stats.cp_histogram)}")
    log_probs, losses = rows.unbind(dim=-1)
    print(f"log-probabilities: {tuple(log_probs.shape)}, their sum {log_probs.sum():.1f}")
    print(f"the summed loss: {losses.sum():.1f}")


if __name__ == "__main__":
    main()
