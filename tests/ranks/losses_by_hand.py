"""Losses by hand: one sequence at a time, from whole logits, by a model without parallelism."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from tests.data.plans import Sample
from tests.ranks.spine import VOCAB, make_samples
from torch.nn.functional import cross_entropy, logsigmoid

from longshore.data.source import Field
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder

TOP_K = 3
FIELDS = (
    Field("advantages", "target", "float64"),
    Field("old_logprobs", "target", "float64"),
    Field("ref_logprobs", "target", "float64"),
    Field("teacher_ids", "target", "int32", (TOP_K,)),
    Field("teacher_logprobs", "target", "float64", (TOP_K,)),
    Field("pair", "sequence", "int64"),
    Field("sign", "sequence", "int8"),
)


def samples_with_fields(plan) -> dict[int, Sample]:
    """Every sequence of 2 tokens or more has a loss token; neighbours are pairs."""
    random = np.random.default_rng(5)
    samples = {}
    for place, sample in make_samples(plan, seed=2).items():
        length = len(sample.tokens)
        mask = sample.loss_mask.copy()
        mask[-1] = True
        teacher = np.log(random.dirichlet(np.ones(TOP_K + 1), length)[:, :TOP_K])
        ids = np.stack([random.permutation(VOCAB)[:TOP_K] for _ in range(length)])
        fields = {
            "advantages": random.normal(size=length),
            "old_logprobs": -4 + random.normal(size=length),
            "ref_logprobs": -4 + random.normal(size=length),
            "teacher_ids": ids.astype(np.int32),
            "teacher_logprobs": teacher,
            "pair": np.int64(2**62 + place // 2),  # float64 would make them one number
            "sign": np.int8(1 - 2 * (place % 2)),
        }
        samples[place] = replace(sample, loss_mask=mask, fields=fields)
    return samples


class Alone:
    """A sequence run alone: its loss tokens' log-probabilities, logits and fields."""

    def __init__(self, model, sample: Sample) -> None:
        tokens = torch.from_numpy(sample.tokens).long()
        counts = torch.from_numpy(sample.loss_mask)[1:]
        self.logits = model(tokens).values[:-1][counts]
        self.labels = tokens[1:][counts]
        self.logp = self.logits.log_softmax(-1)
        self.own = self.logp.gather(1, self.labels[:, None])[:, 0]
        self.entropy = -(self.logp.exp() * self.logp).sum(-1)
        self.fields = {
            name: torch.from_numpy(np.asarray(value)[1:])[counts] if np.ndim(value) else int(value)
            for name, value in sample.fields.items()
        }


def smoothed(rows: list[Alone]) -> torch.Tensor:
    total = sum(
        cross_entropy(row.logits, row.labels, label_smoothing=0.1, reduction="sum")
        + 0.01 * row.logits.logsumexp(-1).square().sum()
        for row in rows
    )
    return total / sum(len(row.own) for row in rows)


def clipped(row: Alone, *, low: float, high: float, kl: float, bonus: float) -> torch.Tensor:
    ratio = (row.own - row.fields["old_logprobs"]).exp()
    advantage = row.fields["advantages"]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    d = row.fields["ref_logprobs"] - row.own
    return -gain + kl * (d.exp() - d - 1) - bonus * row.entropy


def clip_metrics(rows: list[Alone], *, low: float, high: float, kl: bool) -> dict[str, float]:
    """Token by token."""
    names = ("advantage", "ratio", "clipped", "old_kl", *(("kl",) if kl else ()), "entropy")
    columns = {name: [] for name in names}
    for row in rows:
        for token in range(len(row.own)):
            own, advantage = row.own[token].item(), row.fields["advantages"][token].item()
            old, ref = (row.fields[name][token].item() for name in ("old_logprobs", "ref_logprobs"))
            ratio = math.exp(own - old)
            past = ratio > 1 + high if advantage > 0 else ratio < 1 - low
            estimate = math.exp(ref - own) - (ref - own) - 1
            values = [advantage, ratio, float(past), ratio - 1 - (own - old)]
            values += [estimate] if kl else []
            for name, value in zip(names, [*values, row.entropy[token].item()], strict=True):
                columns[name].append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}


def pair_metrics(rows: list[Alone], *, beta: float) -> dict[str, float]:
    gains = [beta * (row.own - row.fields["ref_logprobs"]).sum().item() for row in rows]
    pairs = list(zip(gains[::2], gains[1::2], strict=True))
    sums = [
        sum(chosen for chosen, _ in pairs),
        sum(rejected for _, rejected in pairs),
        sum(chosen - rejected for chosen, rejected in pairs),
        sum(chosen > rejected for chosen, rejected in pairs),
    ]
    names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
    return {name: total / len(pairs) for name, total in zip(names, sums, strict=True)}


def teacher_metrics(rows: list[Alone]) -> dict[str, float]:
    kl, agrees, count = 0.0, 0, 0
    for row in rows:
        q = (row.logits / 2).log_softmax(-1)
        for token in range(len(row.own)):
            ids = row.fields["teacher_ids"][token].tolist()
            logps = row.fields["teacher_logprobs"][token].tolist()
            pairs = zip(ids, logps, strict=True)
            kl += sum(math.exp(p) * (p - q[token, word].item()) for word, p in pairs)
            agrees += ids[logps.index(max(logps))] == int(row.logits[token].argmax())
            count += 1
    return {"kl": kl / count, "agreement": agrees / count}


def own_metrics(rows: list[Alone]) -> dict[str, float]:
    nll = [-value for row in rows for value in row.own.tolist()]
    likely = [value for value in nll if value < 4]
    entropy = torch.cat([row.entropy for row in rows]).mean().item()
    return {"nll_where_likely": sum(likely) / len(likely), "entropy": entropy}


def grpo(rows: list[Alone]) -> torch.Tensor:
    means = [clipped(row, low=0.2, high=0.3, kl=0.05, bonus=0.02).mean() for row in rows]
    return torch.stack(means).mean()


def grpo_of_trl(rows: list[Alone]) -> torch.Tensor:
    """Its entropy is a mean over tokens."""
    means = [clipped(row, low=0.2, high=0.2, kl=0.0, bonus=0.0).mean() for row in rows]
    return torch.stack(means).mean() - 0.3 * torch.cat([row.entropy for row in rows]).mean()


def ppo(rows: list[Alone]) -> torch.Tensor:
    return torch.cat([clipped(row, low=0.2, high=0.2, kl=0.0, bonus=0.0) for row in rows]).mean()


def dpo(rows: list[Alone]) -> torch.Tensor:
    gains = [(row.own - row.fields["ref_logprobs"]).sum() for row in rows]
    margins = torch.stack(gains[::2]) - torch.stack(gains[1::2])
    return (-0.9 * logsigmoid(0.3 * margins) - 0.1 * logsigmoid(-0.3 * margins)).mean()


def distill(rows: list[Alone]) -> torch.Tensor:
    values = []
    for row in rows:
        q = (row.logits / 2).log_softmax(-1).gather(1, row.fields["teacher_ids"].long())
        p = row.fields["teacher_logprobs"]
        values.append((p.exp() * (p - q)).sum(-1) - 0.2 * row.own)
    return torch.cat(values).mean()


def own(rows: list[Alone]) -> torch.Tensor:
    return torch.cat([-row.own * row.entropy for row in rows]).mean()


def nll(rows: list[Alone]) -> torch.Tensor:
    return -torch.cat([row.own for row in rows]).mean()


BY_HAND = {
    "cross_entropy": (smoothed, {"label_smoothing": 0.1, "z_loss": 0.01}),
    "grpo": (grpo, {"clip_high": 0.3, "kl": 0.05, "entropy_bonus": 0.02}),
    "ppo": (ppo, {}),
    "dpo": (dpo, {"beta": 0.3, "label_smoothing": 0.1}),
    "distill": (distill, {"temperature": 2.0, "nll_weight": 0.2}),
    "tests.train.losses:entropy_weighted": (own, {}),
    "tests.train.losses:entropy_by_logits": (own, {}),
    "tests.train.losses:with_metrics": (nll, {}),
    "grpo as in TRL": (grpo_of_trl, {"entropy_bonus": 0.3, "entropy_average": "tokens"}),
}
METRICS = {
    "grpo": partial(clip_metrics, low=0.2, high=0.3, kl=True),
    "ppo": partial(clip_metrics, low=0.2, high=0.2, kl=False),
    "dpo": partial(pair_metrics, beta=0.3),
    "distill": teacher_metrics,
    "tests.train.losses:with_metrics": own_metrics,
}


def alone(
    config, samples: dict[int, Sample], name: str
) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    """The loss, all gradients, and what the loss logs."""
    model = Decoder(config).double()
    init_decoder(model, seed=3)
    rows = [Alone(model, sample) for sample in samples.values()]
    loss = BY_HAND[name][0](rows)
    loss.backward()
    metrics = METRICS[name](rows) if name in METRICS else {}
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}, metrics
