"""A decoder with depths of multi-token prediction and experts, each sequence alone, by hand.

As the formula says it: depth d of a sequence of n tokens is a run of n − d positions, and nothing
else is there: no padding, no mask, no shifted ids. The balance loss is added up expert by expert.
"""

from dataclasses import dataclass

import torch
from tests.data.plans import Sample
from tests.ranks.spine import MTP_WEIGHT

from longshore.arch.decoder import DecoderConfig
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import MoE
from longshore.model.init import init_decoder
from longshore.model.norm_rope import rope_tables


@dataclass(frozen=True)
class ByHand:
    """counts: tokens of each expert, by layer of experts. balance: without its weight in others."""

    loss: float
    balance: float
    gradients: dict[str, torch.Tensor]
    counts: list[list[int]]


def nll_of(model: Decoder, hidden: torch.Tensor, labels: list[int], counted: list[bool]):
    """The sum over labels that count; position i predicts labels[i]."""
    total = torch.zeros((), dtype=torch.float64)
    logits = hidden @ model.head.weight.T
    for row, (label, counts) in enumerate(zip(labels, counted, strict=True)):
        if counts:
            total = total + logits[row].logsumexp(0) - logits[row, label]
    return total


def balance_of(config, scores: torch.Tensor, ids: torch.Tensor, counts: list[int]):
    """n · Σ_i f_i · P_i of a run of n positions; adds what each expert got to `counts`."""
    n, total = len(scores), torch.zeros((), dtype=torch.float64)
    for expert in range(config.experts):
        chose = sum(expert in row for row in ids.tolist())
        counts[expert] += chose
        f = config.experts / config.top_k * chose / n
        total = total + f * sum(row[expert] / row.sum() for row in scores)
    return config.aux_weight * total


def by_hand(config: DecoderConfig, samples: dict[int, Sample]) -> ByHand:
    model = Decoder(config).double()
    init_decoder(model, seed=3)
    experts = [module for module in model.modules() if isinstance(module, MoE)]
    chosen = {}
    for number, layer in enumerate(experts):
        layer.router.register_forward_hook(
            lambda _, args, out, number=number: chosen.update({number: out})
        )
    counts = [[0] * layer.config.experts for layer in experts]
    runs = range(len(config.mtp) + 1)
    texts = [sample.tokens.tolist() for sample in samples.values()]
    masks = [sample.loss_mask.tolist() for sample in samples.values()]
    labels = [max(1, sum(sum(mask[d + 1 :]) for mask in masks)) for d in runs]
    positions = [sum(max(0, len(text) - d) for text in texts) for d in runs]
    loss, balance = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for text, mask in zip(texts, masks, strict=True):
        for d in runs:
            n = len(text) - d
            if n < 1:
                break
            ctx, embedded = whole_context([n]), model.embed(torch.tensor(text[d:]))
            tables = rope_tables(model.ropes, ctx, torch.float64)
            chosen.clear()
            if d == 0:
                hidden = embedded
                for block in model.layers.values():
                    hidden = block(hidden, ctx, tables).values
                hidden = model.norm(hidden)
            else:
                part = model.mtp[str(d - 1)]
                both = [part.embed_norm(embedded), part.hidden_norm(hidden[:n])]
                hidden = part.block(part.proj(torch.cat(both, -1)), ctx, tables).values
                hidden = part.norm(hidden)
            weight = MTP_WEIGHT / len(config.mtp) if d else 1.0
            nll = nll_of(model, hidden[:-1], text[d + 1 :], mask[d + 1 :])
            loss = loss + weight * nll / labels[d]
            for number, (ids, _, scores) in chosen.items():
                layer = experts[number].config
                part_of = balance_of(layer, scores, ids, counts[number])
                balance = balance + part_of / positions[d]
    (loss + balance).backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return ByHand((loss + balance).item(), balance.item(), gradients, counts)
