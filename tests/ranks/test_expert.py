"""Expert parallelism on gloo ranks: losses and gradients of each sequence alone, for any plan."""

import faulthandler
import random
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek
from tests.ranks.spine import VOCAB, alone, exact, make_samples, together, worst
from tests.ranks.test_random_plans import planned, scattered

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.expert_cuts import expert_cut
from longshore.arch.feed_forward import MoEConfig
from longshore.distributed.cp_groups import CPGroups
from longshore.distributed.topology import make_topology
from longshore.model.feed_forward import Experts
from longshore.parallel.expert import exchanged
from longshore.plan import Pack, Plan, Round, make_plan

LIMIT = 1e-9
WATCHDOG_S = 60
E = 8
"""Experts of a layer."""


def qwen_moe() -> DecoderConfig:
    """Softmax without shared experts, then with a gated one."""
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=4, qk_norm=True)
    plain = MoEConfig(experts=E, top_k=3, width=8, aux_weight=0.5)
    gated = MoEConfig(experts=4, top_k=2, width=6, shared_width=7, shared_gate=True)
    layers = (LayerConfig(attention, plain), LayerConfig(attention, gated))
    return DecoderConfig(vocab_size=VOCAB, width=16, layers=layers, init_std=0.3)


CONFIGS = {"qwen_moe": qwen_moe, "deepseek": deepseek}


@contextmanager
def ep_ranks(lanes: int, ep: int):
    topology = make_topology(lanes=lanes, ep=ep, device="cpu")
    with CPGroups(topology, range(1, lanes + 1)) as groups:
        yield topology, groups


def several_packs() -> Plan:
    """Lane 0 holds shards at CP sizes 4 and 2 and sequences of its own; lanes 0, 1, then all but
    lane 3, have no token in later rounds."""
    packs = (Pack(0, 4, (0, 1), 26), Pack(0, 2, (2,), 6), Pack(2, 2, (3,), 2), Pack(0, 1, (4,), 1))
    late = Round((Pack(2, 2, (5,), 4),)), Round((Pack(3, 1, (6,), 1),))
    plan = make_plan([81, 9, 11, 3, 1, 6, 1], lanes=4, capacity=64)
    return Plan(plan.setting, plan.sequences, (Round(packs), *late), plan.stats, "by hand")


# (config, plan's policy, mode, recompute)
CASES = {
    (2, 2): [
        ("qwen_moe", "mixed", "zero3", "none"),
        ("deepseek", "mixed", "zero2", "blocks"),
    ],
    (4, 4): [
        ("deepseek", "by hand", "zero3", "none"),
        ("qwen_moe", "mixed", "none", "none"),
    ],
    (4, 2): [
        ("qwen_moe", "by hand", "zero3", "blocks"),
        ("deepseek", "mixed", "none", "none"),
        ("deepseek", "dynamic", "zero2", "none"),
    ],
}
LENGTHS = [1, 2, 7, 33, 90, 5, 9, 3]


def fault_of(config, plan, choices, lanes, seed: int = 0) -> list[str]:
    """On rank 0, whether the plan differs from each sequence alone."""
    topology, groups = lanes
    samples = make_samples(plan, seed)
    result = together(config, plan, samples, topology, groups, choices)
    if topology.rank:
        return []
    error, name = worst(result, alone(config, samples))
    return [] if error <= LIMIT else [f"{name} is off by {error:.1e}: {choices}, {plan.rounds}"]


def run_cases(lanes: int, ep: int) -> list[str]:
    faults = []
    with ep_ranks(lanes, ep) as ranks:
        for name, policy, mode, recompute in CASES[lanes, ep]:
            capacity = 100 // lanes + 10
            by_hand = policy == "by hand"
            plan = (
                several_packs()
                if by_hand
                else make_plan(LENGTHS, lanes=lanes, capacity=capacity, policy=policy)
            )
            choices = exact(mode=mode, recompute=recompute)
            faults += fault_of(CONFIGS[name](), plan, choices, ranks)
    return faults


@pytest.mark.parametrize(("lanes", "ep"), CASES, ids=str)
def test_the_gradients_of_each_sequence_alone(lanes: int, ep: int) -> None:
    assert run_ranks(lanes, run_cases, lanes, ep, timeout=120)[0] == []


def run_random(lanes: int, ep: int, seeds: range) -> list[str]:
    faults = []
    with ep_ranks(lanes, ep) as ranks:
        for seed in seeds:
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
            draw = random.Random(seed)
            plan = draw.choice((planned, scattered))(draw, lanes, "round")
            choices = exact(
                mode=draw.choice(("zero3", "zero2", "none")),
                recompute=draw.choice(("none", "blocks")),
                attention="gather",
            )
            config = CONFIGS[draw.choice(list(CONFIGS))]()
            faults += [f"seed {seed}: {f}" for f in fault_of(config, plan, choices, ranks, seed)]
    faulthandler.cancel_dump_traceback_later()
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize(("lanes", "ep"), [(4, 2), (6, 2)])
def test_random_plans(lanes: int, ep: int, is_fuzz: bool) -> None:
    """2 of them; 200 in `make fuzz`."""
    if lanes == 6 and not is_fuzz:
        pytest.skip("in `make fuzz`")
    seeds = range(100 if is_fuzz else 2)
    assert run_ranks(lanes, run_random, lanes, ep, seeds, timeout=60 + 5 * len(seeds))[0] == []


CHOICES = {
    "any": lambda tokens, draw: torch.rand(tokens, E, generator=draw).topk(3).indices,
    "rank 1 alone": lambda tokens, draw: torch.tensor([[2, 3, E]]).expand(tokens, 3),
    "nothing": lambda tokens, draw: torch.full((tokens, 3), E),
}
"""What tokens choose: (T, 3) of 8 experts, of which rank 1 of 4 has the second and third."""


def layer_of_experts(kinds: list[str]) -> list[tuple[str, float]]:
    """This rank's tokens choose as kinds[rank]: the differences from all experts in one place."""
    topology = make_topology(lanes=4, ep=4, device="cpu")
    draw = torch.Generator().manual_seed(topology.rank)
    tokens = 5 + 3 * topology.rank
    torch.manual_seed(0)
    whole = Experts(MoEConfig(experts=E, top_k=3, width=6), 10).double()
    (span,) = expert_cut(E, ep=4, ep_rank=topology.rank).spans
    own = Experts(MoEConfig(experts=2, top_k=1, width=6), 10).double()
    for name, parameter in own.named_parameters():
        parameter.data.copy_(getattr(whole, name).detach()[span.start : span.stop])

    ids = CHOICES[kinds[topology.rank]](tokens, draw)
    x, weights, direction = (
        torch.randn(tokens, width, generator=draw, dtype=torch.float64) for width in (10, 3, 10)
    )
    inputs, pairs = (x, weights), {}
    results = []
    for run in (whole, lambda *a: exchanged(own, *a, experts=E, group=topology.experts.ep)):
        x, weights = (tensor.clone().requires_grad_() for tensor in inputs)
        y, counts = run(x, ids, weights)
        y.backward(direction)
        results.append((y, counts, x.grad, weights.grad))
    (y, counts, dx, dw), (y_ep, counts_ep, dx_ep, dw_ep) = results
    assert counts.dtype == counts_ep.dtype == torch.int32
    pairs = {"y": (y_ep, y), "counts": (counts_ep, counts), "dx": (dx_ep, dx), "dw": (dw_ep, dw)}
    for name, parameter in whole.named_parameters():
        dist.all_reduce(parameter.grad)
        pairs[name] = getattr(own, name).grad, parameter.grad[span.start : span.stop]
    topology.close()
    return [(name, (a - b).abs().max().item()) for name, (a, b) in pairs.items()]


def run_layers() -> list:
    return [
        layer_of_experts(kinds)
        for kinds in (
            ["any"] * 4,
            ["rank 1 alone", "nothing", "rank 1 alone", "any"],
            ["rank 1 alone"] * 4,
            ["nothing"] * 4,
        )
    ]


def test_a_layer_is_that_of_all_experts_in_one_place() -> None:
    """Also where a rank sends or receives nothing, or all ranks do; counts are of own tokens."""
    for cases in run_ranks(4, run_layers):
        for case in cases:
            assert all(difference <= 1e-12 for _, difference in case), case
