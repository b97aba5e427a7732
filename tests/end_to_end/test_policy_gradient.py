"""A loop of reinforcement learning with our planner: the reward rises.

The task: after a token from 2 to 4, answer with tokens that repeat it, and end with 1. Answers end
early or late, so rollouts have different lengths.
"""

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from tests.data.plans import Sample, counts_of
from tests.ranks.harness import run_ranks
from tests.ranks.spine import dense, exact, lanes_of, sharded

from longshore.batch import whole_context
from longshore.data.pack import cut_shards, lane_cuts, pack_step
from longshore.data.source import Field
from longshore.model.decoder import Decoder
from longshore.plan import make_plan
from longshore.train.losses import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.step import Stepper

LR = 7e-3
VOCAB, END, ASKED, MOST = 5, 1, range(2, 5), 6
ROLLOUTS = 16
FIELDS = (Field("advantages", "sequence", "float64"), Field("old_logprobs", "target", "float64"))
CONFIG = replace(dense(2), vocab_size=VOCAB, layers=dense(2).layers[:1], init_std=0.2)


def reward(asked: int, answer: list[int]) -> float:
    """The share of right tokens before the end; half of it if there is no end."""
    words = [token for token in answer if token != END]
    right = sum(token == asked for token in words) / max(len(words), 1)
    return right if END in answer else right / 2


@torch.no_grad()
def rollouts(model: Decoder, draw: torch.Generator) -> list[tuple[list[int], list[float]]]:
    """Answers, token by token, all in one pack, and the log-probability of each token."""
    answers = [([asked], [0.0]) for asked in ASKED for _ in range(ROLLOUTS)]
    for _ in range(MOST):
        open_ones = [answer for answer in answers if answer[0][-1] != END]
        if not open_ones:
            break
        lengths = [len(tokens) for tokens, _ in open_ones]
        ids = torch.tensor([token for tokens, _ in open_ones for token in tokens])
        logits = model(ids, whole_context(lengths)).values[np.cumsum(lengths) - 1]
        logp = logits.log_softmax(-1)
        drawn = torch.multinomial(logp.exp(), 1, generator=draw)[:, 0].tolist()
        for (tokens, logprobs), row, token in zip(open_ones, logp, drawn, strict=True):
            tokens.append(token)
            logprobs.append(row[token].item())
    return answers


def sampled(model: Decoder, draw: torch.Generator) -> tuple[dict[int, Sample], float]:
    """Rollouts of every question with advantages of its group, and their mean reward."""
    answers = rollouts(model, draw)
    rewards = np.array([reward(tokens[0], tokens[1:]) for tokens, _ in answers])
    groups = rewards.reshape(-1, ROLLOUTS)
    gains = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-2)
    samples = {
        place: Sample(
            np.array(tokens, dtype=np.int32),
            np.arange(len(tokens)) > 0,
            {"advantages": gain, "old_logprobs": np.array(logprobs)},
        )
        for place, ((tokens, logprobs), gain) in enumerate(zip(answers, gains.flat, strict=True))
    }
    return samples, float(rewards.mean())


def rewards_of_training(steps: int) -> list[float]:
    policy = Decoder(CONFIG).double()
    draw, rewards = torch.Generator().manual_seed(0), []
    with lanes_of(2) as (topology, groups):
        model = sharded(CONFIG, topology, groups, exact(mode="zero2"))
        optimizer = make_optimizer(model, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
        loss = make_loss("grpo", "auto", {"clip_high": 0.3, "entropy_bonus": 0.01})
        stepper = Stepper(model, optimizer, topology, "zero2", loss, 1.0)
        for _ in range(steps):
            weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
            policy.load_state_dict(weights)
            samples, mean = sampled(policy, draw)
            rewards.append(mean)
            lengths = [len(sample.tokens) for sample in samples.values()]
            plan = make_plan(lengths, lanes=2, capacity=64)
            shards = cut_shards(plan, samples, lane_cuts(plan, topology.lane), fields=FIELDS)
            batches = pack_step(plan, topology.lane, shards, counts=counts_of(samples, 0))
            for _ in range(3):  # after the first time the ratios differ from 1
                stepper.step(batches, lr=LR)
    dist.barrier()
    return rewards


def test_the_reward_rises() -> None:
    rewards, others = run_ranks(2, rewards_of_training, 8)
    assert rewards == others, "all ranks sampled the same"
    assert rewards[0] < 0.25
    assert np.mean(rewards[-2:]) > 0.45
