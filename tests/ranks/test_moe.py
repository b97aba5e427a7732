"""Experts on gloo ranks: any plan gives the losses, counts and gradients of each sequence alone."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from tests.data.plans import Sample
from tests.ranks.exchanged import count
from tests.ranks.harness import run_ranks
from tests.ranks.spine import VOCAB, Outcome, batches_of, exact, lanes_of, make_samples, worst

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.batch import whole_context
from longshore.data.pack import merge, unpack
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder, initial_block
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import begin_round
from longshore.parallel.shards import fill
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.train.losses import make_loss
from longshore.train.optimizer import RoutingCounts, update_bias

LIMIT = 1e-9
STEP = 0.01


def experts(aux_weight: float = 0.5) -> DecoderConfig:
    """Group-limited with a bias and a shared expert; then softmax with a gated shared expert."""
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=4)
    deepseek = MoEConfig(
        experts=8,
        top_k=3,
        width=8,
        score="sigmoid",
        groups=4,
        top_groups=2,
        scale=1.5,
        shared_width=6,
        bias_update=STEP,
        aux_weight=aux_weight,
    )
    qwen = MoEConfig(
        experts=5, top_k=2, width=12, shared_width=7, shared_gate=True, aux_weight=aux_weight
    )
    return DecoderConfig(
        vocab_size=VOCAB,
        width=16,
        layers=(LayerConfig(attention, deepseek), LayerConfig(attention, qwen)),
        init_std=0.3,
    )


@dataclass(frozen=True)
class Routing:
    """outcome: loss and gradients hold the balance loss. counts: of each layer, of all tokens.

    bias: of layer 0 after the step.
    """

    outcome: Outcome
    counts: list[list[int]]
    bias: torch.Tensor


def set_bias(model: Decoder) -> None:
    bias = model.layers["0"].mlp.router.bias
    bias.copy_(torch.linspace(-0.2, 0.3, len(bias)).flip(0))


def alone(config: DecoderConfig, samples: dict[int, Sample]) -> Routing:
    """Every sequence by itself, the balance loss as it is defined: α·Σ n·Σ f·P / Σ n."""
    model = Decoder(config).double()
    init_decoder(model, seed=3)
    set_bias(model)
    found, total = {}, 0.0
    every = sum(len(sample.tokens) for sample in samples.values())
    main = max(1, sum(int(sample.loss_mask[1:].sum()) for sample in samples.values()))
    sums = [torch.zeros(layer.mlp.experts, dtype=torch.int64) for layer in config.layers]
    for place, sample in samples.items():
        tokens = torch.from_numpy(sample.tokens).long()
        labels = torch.cat([tokens[1:], torch.tensor([-100])])
        counted = torch.from_numpy(np.append(sample.loss_mask[1:], False))
        out = model(tokens, whole_context([len(tokens)]), labels)
        auxiliary = sum(routed.auxiliary for routed in out.routed)
        loss = out.values[counted].sum() / main + auxiliary / every
        loss.backward()
        found[place], total = out.values.detach(), total + loss.item()
        for layer, routed in zip(sums, out.routed, strict=True):
            layer += routed.counts
    gradients = {name: p.grad for name, p in model.named_parameters()}
    bias = model.layers["0"].mlp.router.bias + STEP * (sums[0].double().mean() - sums[0]).sign()
    return Routing(Outcome(found, total, gradients), [c.tolist() for c in sums], bias)


def sharded(config, topology, groups, choices: Choices) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config).double()
    parallelize(model, topology, groups, choices=choices)
    fill(model, topology.device, partial(initial_block, config, seed=3))
    set_bias(model)
    return model


def together(config, plan, samples, topology, groups, choices: Choices) -> Routing:
    """The plan on all lanes, round by round; every rank gets the whole outcome."""
    model = sharded(config, topology, groups, choices)
    loss, counts, total, pieces = make_loss(), RoutingCounts(), 0.0, []
    for batch in batches_of(plan, samples, topology.lane):
        begin_round(model, mode=choices.mode, is_last=batch.is_last)
        out = model(batch.token_ids, batch.ctx, batch.targets.labels)
        auxiliary = sum(routed.auxiliary for routed in out.routed)
        main = loss.summed(out.values, batch)[0] / max(1, batch.counts.main)
        both = main + auxiliary / batch.counts.tokens
        both.backward()
        counts.add(out.routed)
        total += both.item()
        pieces += unpack(batch.ctx, out.values.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    own = [layer.tolist() for layer in counts.layers]
    update_bias(model, counts.over_lanes(topology))
    assert [layer.tolist() for layer in counts.layers] == own
    everything = [None] * topology.lanes
    torch.distributed.all_gather_object(everything, (pieces, total, own))
    nll = merge(plan, [piece for part, _, _ in everything for piece in part])
    layers = zip(*(counts for _, _, counts in everything), strict=True)
    sums = [np.sum(layer, axis=0).tolist() for layer in layers]
    outcome = Outcome(nll, sum(part for _, part, _ in everything), gradients)
    return Routing(outcome, sums, model.layers["0"].mlp.router.bias)


def compare(lanes: int, cases: list) -> list[str]:
    """On rank 0, the cases that differ from the model alone."""
    faults = []
    with lanes_of(lanes) as (topology, groups):
        for config, plan, choices in cases:
            samples = make_samples(plan)
            got = together(config, plan, samples, topology, groups, choices)
            if topology.lane != 0:
                continue
            want = alone(config, samples)
            error, name = worst(got.outcome, want.outcome)
            if not error <= LIMIT:
                faults.append(f"{name} is off by {error:.1e}: {choices}, {plan.rounds}")
            if got.counts != want.counts:
                faults.append(f"counts are {got.counts}, alone {want.counts}")
            if not torch.equal(got.bias, want.bias):
                faults.append(f"the bias is {got.bias}, alone {want.bias}")
    return faults


def check(lanes: int, cases: list) -> None:
    assert run_ranks(lanes, compare, lanes, cases, timeout=120)[0] == []


LENGTHS = [1, 2, 7, 33, 90, 5, 9, 3]


def cases_of(lanes: int) -> list:
    cases = []
    for policy, mode, recompute in [
        ("mixed", "zero3", "none"),
        ("static", "zero2", "blocks"),
        ("dynamic", "none", "none"),
        ("balanced", "zero3", "blocks"),
    ]:
        capacity = 100 // lanes + 10
        plan = make_plan(LENGTHS, lanes=lanes, capacity=capacity, policy=policy)
        cases.append((experts(), plan, exact(mode=mode, attention="gather", recompute=recompute)))
    assert max(pack.cp_size for _, plan, _ in cases for _, pack in plan.packs()) == lanes
    return cases


@pytest.mark.parametrize("lanes", [1, 2])
def test_any_plan_is_each_sequence_alone(lanes: int) -> None:
    check(lanes, cases_of(lanes))


def several_packs() -> Plan:
    """Lane 0 holds shards at CP sizes 4 and 2 and two sequences of its own; lane 3 less."""
    packs = (
        Pack(0, 4, (0, 1), 26),
        Pack(0, 2, (2,), 6),
        Pack(2, 2, (3,), 2),
        Pack(0, 1, (4, 5), 4),
        Pack(1, 1, (6,), 9),
    )
    late = Round((Pack(2, 2, (7,), 4),))
    plan = make_plan([81, 9, 11, 3, 1, 3, 9, 6], lanes=4, capacity=64)
    return Plan(plan.setting, plan.sequences, (Round(packs), late), plan.stats, "by hand")


def test_four_lanes_several_packs_and_lanes_without_work() -> None:
    """Some lanes have no token in the second round."""
    ways = [exact(mode="zero3", attention="gather", recompute=how) for how in ("none", "blocks")]
    check(4, [*cases_of(4)[:2], *((experts(), several_packs(), way) for way in ways)])


def exchanged(aux_weight: float, cp_size: int, recompute: str, lanes) -> tuple:
    """How many sequences are shared, and the sums forward and backward."""
    plan = make_plan([50, 3, 20], lanes=4, capacity=128, policy="static", cp_size=cp_size)
    topology, groups = lanes
    choices = exact(mode="none", attention="gather", recompute=recompute)
    model = sharded(experts(aux_weight), topology, groups, choices)
    (batch,) = batches_of(plan, make_samples(plan), topology.lane)
    with count() as forward:
        out = model(batch.token_ids, batch.ctx, batch.targets.labels)
    begin_round(model, mode="none", is_last=False)  # FSDP sums no gradients
    with count() as backward:
        (out.values.sum() + sum(routed.auxiliary for routed in out.routed)).backward()
    shared = sum(len(pack.lengths) for pack in batch.ctx.packs if pack.group.cp_size > 1)
    logs = ([size for kind, size in c.log if kind == "all_reduce"] for c in (forward, backward))
    return shared, *logs


def all_exchanged() -> list[tuple]:
    with lanes_of(4) as lanes:
        return [
            exchanged(0.5, 4, "none", lanes),
            exchanged(0.5, 4, "blocks", lanes),
            exchanged(0.5, 1, "none", lanes),
            exchanged(0.0, 4, "blocks", lanes),
        ]


def test_one_small_sum_of_counts_for_each_shared_pack_and_nothing_else() -> None:
    for plain, recomputed, own, without in run_ranks(4, all_exchanged, timeout=120):
        sums = [3 * 3 * 8 * experts for experts in (8, 5)]
        assert plain == (3, sums, [])
        assert recomputed == (3, sums, sums[::-1])
        assert own == (0, [], [])
        assert without == (3, [], [])


def test_three_lanes() -> None:
    plan = make_plan(LENGTHS, lanes=3, capacity=64, policy="static", cp_size=3, cp_sizes="any")
    assert {pack.cp_size for _, pack in plan.packs()} == {3}
    check(3, [(experts(), plan, exact(mode="zero3", attention="gather"))])
