"""The whole path on gloo ranks, and the same alone: one process, one sequence at a time."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from tests.data.plans import Sample, counts_of

from longshore.arch.attention import AttentionConfig
from longshore.arch.cuts import TensorCut
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.rope import DynamicScaling, RopeConfig
from longshore.batch import Depth, Targets, whole_context
from longshore.data.pack import cut_shards, lane_cuts, merge, pack_step, unpack
from longshore.distributed.topology import CPGroups, make_topology
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder, initial_block
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.shards import boxes_of, cuts_by_name, fill
from longshore.plan import Plan
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

VOCAB = 61
PAD = 1
MTP_WEIGHT = 0.7


def dense(kv_heads: int = 8, *, tied: bool = False) -> DecoderConfig:
    """Full attention with rotary scaling by length, then a window, with norms on q and k."""
    rope = RopeConfig(scaling=DynamicScaling(factor=2.0, original_length=16))
    full = AttentionConfig(heads=8, kv_heads=kv_heads, head_dim=4, rope=rope)
    near = AttentionConfig(
        heads=8, kv_heads=kv_heads, head_dim=4, qk_norm=True, bias=True, window=7
    )
    return DecoderConfig(
        vocab_size=VOCAB,
        width=24,
        layers=(LayerConfig(full, MLPConfig(width=40)), LayerConfig(near, MLPConfig(width=16))),
        init_std=0.3,
        tied=tied,
    )


def make_samples(plan: Plan, seed: int = 0) -> dict[int, Sample]:
    random = np.random.default_rng(seed)
    return {
        place: Sample(
            random.integers(0, VOCAB, sequence.length, dtype=np.int32),
            random.random(sequence.length) < 0.7,
        )
        for place, sequence in enumerate(plan.sequences)
    }


@dataclass(frozen=True)
class Outcome:
    """nll of each sequence, 0 where it does not count; the loss with all its terms; gradients."""

    nll: dict[int, torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


def shifted(sample: Sample, depth: int) -> Depth:
    """Ids `depth` places on, the labels after them and where these count, by hand."""
    ids = [*sample.tokens.tolist()[depth:], *[PAD] * depth][: len(sample.tokens)]
    labels = [*sample.tokens.tolist()[depth + 1 :], *[-100] * (depth + 1)][: len(sample.tokens)]
    mask = [*sample.loss_mask.tolist()[depth + 1 :], *[False] * (depth + 1)][: len(sample.tokens)]
    return Depth(torch.tensor(ids), Targets(torch.tensor(labels), torch.tensor(mask)))


def alone(config: DecoderConfig, samples: dict[int, Sample]) -> Outcome:
    """Every sequence by itself, through a model that nothing was done to."""
    model = Decoder(config).double()
    init_decoder(model, seed=3)
    depths = range(1, len(config.mtp) + 1)
    seen = [sum(len(s.tokens[depth:]) for s in samples.values()) for depth in (0, *depths)]
    counts = [
        max(1, sum(int(sample.loss_mask[depth + 1 :].sum()) for sample in samples.values()))
        for depth in (0, *depths)
    ]
    found, total = {}, 0.0
    for place, sample in samples.items():
        main, *mtp = (shifted(sample, depth) for depth in (0, *depths))
        ctx = whole_context([len(sample.tokens)])
        out = model(main.token_ids, ctx, main.targets.labels, mtp)
        sums = [
            nll[depth.targets.loss_mask].sum() / count
            for nll, depth, count in zip((out.values, *out.mtp), (main, *mtp), counts, strict=True)
        ]
        loss = sums[0] + sum(MTP_WEIGHT / len(mtp) * part for part in sums[1:])
        loss = loss + sum(r.auxiliary / max(1, seen[r.depth]) for r in out.routed)
        loss = loss + sum(m.total / max(1, seen[m.depth]) for m in out.mixer_losses)
        loss.backward()
        # A step gives the others no label.
        counted = out.values.where(main.targets.loss_mask, 0)
        found[place], total = counted.detach(), total + loss.item()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Outcome(found, total, {name: p.grad for name, p in trained.items()})


@contextmanager
def lanes_of(lanes: int):
    topology = make_topology(lanes=lanes, device="cpu")
    sizes = [size for size in range(1, lanes + 1) if lanes <= 8]
    with CPGroups(topology, sizes) as groups:
        yield topology, groups


def sharded(config, topology, groups, choices: Choices) -> Decoder:
    """A model made on `meta` and given its rows, as the trainer does it."""
    with torch.device("meta"):
        model = Decoder(config).double()
    parallelize(model, topology, groups, choices=choices)
    fill(model, topology.device, partial(initial_block, config, seed=3))
    return model


def batches_of(
    plan: Plan, samples: dict[int, Sample], lane: int, depths: int = 0, max_sequences: int = 0
):
    counts = counts_of(samples, depths)
    shards = cut_shards(plan, samples, lane_cuts(plan, lane), depths=depths)
    return pack_step(plan, lane, shards, counts=counts, pad_id=PAD, max_sequences=max_sequences)


def together(config, plan, samples, topology, groups, choices: Choices) -> Outcome:
    """The plan on all lanes; every rank gets the whole outcome."""
    model = sharded(config, topology, groups, choices)
    seen = {}
    model.register_forward_hook(
        lambda module, args, out: seen.update({id(args[1]): (args[1], out.values)})
    )
    stepper = Stepper(model, None, topology, choices.mode, make_loss(), 0.0, MTP_WEIGHT)
    batches = batches_of(plan, samples, topology.lane, len(config.mtp))
    losses, _, _ = stepper.gradients(batches, max(1, batches[0].counts.main))
    loss = stepper.weighted(losses)
    cuts = cuts_by_name(model)
    gradients = {name: whole(p.grad, cuts.get(name)) for name, p in model.named_parameters()}
    pieces = [piece for ctx, out in seen.values() for piece in unpack(ctx, out.detach())]
    everything = [None] * topology.lanes
    torch.distributed.all_gather_object(everything, (pieces, loss.item()))
    nll = merge(plan, [piece for part, _ in everything for piece in part])
    return Outcome(nll, sum(part for _, part in everything), gradients)


def whole(gradient, cut: TensorCut | None, group=None) -> torch.Tensor:
    """All of a gradient; what several ranks of the group (default: all) have is averaged."""
    if cut is None:
        return gradient.full_tensor()
    shape, boxes = boxes_of(gradient, cut)
    both = torch.zeros(2, *shape, dtype=gradient.dtype)
    for box in boxes:
        both[0][box.index] += box.local
        both[1][box.index] += 1
    torch.distributed.all_reduce(both, group=group)
    return both[0] / both[1]


def worst(got: Outcome, want: Outcome) -> tuple[float, str]:
    """The largest max|a − b| / max|b| of all tensors, and its name."""
    errors = {"loss": abs(got.loss - want.loss) / max(abs(want.loss), 1e-300)}
    assert got.nll.keys() == want.nll.keys()
    pairs = {f"nll {place}": (got.nll[place], value) for place, value in want.nll.items()}
    pairs |= {name: (got.gradients[name], value) for name, value in want.gradients.items()}
    for name, (a, b) in pairs.items():
        assert a.shape == b.shape, name
        size = b.abs().max().item()
        difference = (a - b).abs().max().item()
        errors[name] = difference / size if size else difference
        assert difference == difference, f"{name} is NaN"
    name = max(errors, key=errors.get)
    return errors[name], name


exact = partial(Choices, dtype=torch.float64)
