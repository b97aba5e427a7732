"""Expert parallelism on gloo ranks: losses and gradients of each sequence alone, for any plan."""

import faulthandler
import random
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.ranks.exchanged import count
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek
from tests.ranks.piped import stage_batches, staged
from tests.ranks.spine import (
    MTP_WEIGHT,
    VOCAB,
    alone,
    dense,
    exact,
    make_samples,
    together,
    whole,
    worst,
)
from tests.ranks.test_moe import experts
from tests.ranks.test_random_plans import planned, scattered

from longshore.arch.attention import AttentionConfig
from longshore.arch.cuts import expert_cut
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.distributed.topology import CPGroups, make_topology
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import Experts
from longshore.model.init import init_decoder
from longshore.parallel.expert import exchanged, split_experts
from longshore.parallel.fsdp import local_part, shard
from longshore.parallel.pipeline import stages_of
from longshore.parallel.shards import cuts_by_name
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.layout import parse_layout
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

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


@pytest.mark.fuzz
@pytest.mark.parametrize(("lanes", "ep"), CASES, ids=str)
def test_the_gradients_of_each_sequence_alone(lanes: int, ep: int, is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("in `make fuzz`; a sample of all axes is in test_composed.py")
    assert run_ranks(lanes, run_cases, lanes, ep, timeout=120)[0] == []


def run_pipeline() -> tuple[tuple[float, str], int]:
    """The worst error of this rank's gradients, and how many groups all ranks created."""
    errors, config = [], deepseek()
    topology = make_topology(lanes=2, pp=2, ep=2, device="cpu")
    with CPGroups(topology, [1, 2]) as groups:
        for text, mode in (("Et|tmmL", "none"), ("Ett|m|m|L", "zero3")):
            layout = parse_layout(text, pp=2, layers=2, depths=2)
            plan = make_plan([5, 17, 1, 40], lanes=2, capacity=32, pp=2, vpp=layout.vpp)
            samples = make_samples(plan)
            model = staged(config, layout, topology, groups, exact(mode=mode))
            stepper = Stepper(model, None, topology, mode, make_loss(), 0.0, MTP_WEIGHT)
            batches = stage_batches(plan, samples, topology, layout)
            stepper.gradients(batches, max(1, batches[0].counts.main), plan=plan)
            want = alone(config, samples).gradients
            for part in stages_of(model).values():
                cuts, lanes = cuts_by_name(part), topology.groups.lanes
                for name, parameter in part.named_parameters():
                    mine = whole(parameter.grad, cuts.get(name), lanes)
                    error = (mine - want[name]).abs().max() / want[name].abs().max()
                    # The embedding is on several stages, and its gradients are not summed here.
                    errors.append((error.item() if name != "embed.weight" else 0.0, name))
    return max(errors), dist.distributed_c10d._world.group_count


def test_stages_with_and_without_experts() -> None:
    """Lanes 2 × PP 2 × EP 2, also interleaved. A rank without experts creates the same groups."""
    errors, groups = zip(*run_ranks(4, run_pipeline, timeout=120), strict=True)
    assert max(errors)[0] <= LIMIT, max(errors)
    assert len(set(groups)) == 1


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
    """100 of each."""
    if not is_fuzz:
        pytest.skip("minutes; in `make fuzz`")
    seeds = range(100)
    assert run_ranks(lanes, run_random, lanes, ep, seeds, timeout=60 + 5 * len(seeds))[0] == []


CHOICES = {
    "any": lambda tokens, draw: torch.rand(tokens, E, generator=draw).topk(3).indices,
    "rank 1 alone": lambda tokens, draw: torch.tensor([[2, 3, E]]).expand(tokens, 3),
    "nothing": lambda tokens, draw: torch.full((tokens, 3), E),
}
"""What tokens choose: (T, 3) of 8 experts, of which rank 1 of 4 has the second and third."""


def layer_of_experts(kinds: list[str], tp: int = 1) -> list[tuple[str, float]]:
    """This rank's tokens choose as kinds[rank]: the differences from all experts in one place."""
    topology = make_topology(lanes=4 // tp, tp=tp, ep=4, device="cpu")
    group, rank = topology.experts.ep, topology.ep_rank
    draw = torch.Generator().manual_seed(rank)
    tokens = 5 + 3 * rank
    torch.manual_seed(0)
    everyone = Experts(MoEConfig(experts=E, top_k=3, width=6), 10).double()
    (span,) = expert_cut(E, ep=4, ep_rank=rank).spans
    own = Experts(MoEConfig(experts=2, top_k=1, width=6), 10).double()
    for name, parameter in own.named_parameters():
        parameter.data.copy_(getattr(everyone, name).detach()[span.start : span.stop])
    ids = CHOICES[kinds[rank]](tokens, draw)
    x, weights, direction = (
        torch.randn(tokens, width, generator=draw, dtype=torch.float64) for width in (10, 3, 10)
    )
    results, calls = [], []
    for run in (everyone, partial(exchanged, own, experts=E, group=group)):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weights)]
        with count() as counted:
            y, counts = run(inputs[0], ids, inputs[1])
            calls.append(counted.calls("all_to_all"))
            y.backward(direction)
            calls.append(counted.calls())
        assert counts.dtype == torch.int32
        results.append((y, counts, *(tensor.grad for tensor in inputs)))
    assert calls == [0, 0, 4, 7], "counts, rows and choices there, rows back; no counts backward"
    pairs = dict(zip(("y", "counts", "dx", "dweights"), zip(*results, strict=True), strict=True))
    for name, parameter in everyone.named_parameters():
        dist.all_reduce(parameter.grad)
        pairs[name] = parameter.grad[span.start : span.stop], getattr(own, name).grad
    topology.close()
    return [(name, (a - b).abs().max().item()) for name, (a, b) in pairs.items()]


def run_layers() -> list:
    uneven = ["rank 1 alone", "nothing", "rank 1 alone", "any"]
    return [
        layer_of_experts(["any"] * 4),
        layer_of_experts(uneven),
        layer_of_experts(uneven, tp=2),
        layer_of_experts(["rank 1 alone"] * 4),
        layer_of_experts(["nothing"] * 4),
    ]


def test_a_layer_is_that_of_all_experts_in_one_place() -> None:
    """Also where a rank sends or receives nothing, or all ranks do; counts are of own tokens."""
    for cases in run_ranks(4, run_layers):
        for case in cases:
            assert all(difference <= 1e-12 for _, difference in case), case


def held_parts() -> dict:
    """For each size of EP and mode: the rows of an expert's weight that this rank has."""
    parts = {}
    for sizes, mode in (({"ep": 2}, "zero3"), ({"ep": 2}, "none"), ({"ep": 1}, "zero2")):
        topology = make_topology(lanes=2, tp=2, device="cpu", **sizes)
        model = Decoder(deepseek()).double()
        init_decoder(model, seed=3)
        gate_up = model.layers["1"].mlp.experts.gate_up.detach().clone()
        split_experts(model, topology)
        shard(model, [*model.layers.values()], topology, mode=mode, dtype=torch.float64)
        local = local_part(model.layers["1"].mlp.experts.gate_up)
        same = [row for row in range(E) if any(torch.equal(gate_up[row], own) for own in local)]
        parts[sizes["ep"], mode] = same
        assert len(same) == len(local)
        other = model.layers["0"].mlp.up_proj.weight
        assert other.device_mesh.size() == 2, "the others are split over the lanes"
    return parts


def test_experts_are_split_over_the_ranks_that_have_the_same() -> None:
    """With lanes 2 × TP 2 and ep 2, ranks 0 and 2 have experts 0 … 3, and split them in zero3."""
    ranks = run_ranks(4, held_parts)
    assert [parts[2, "zero3"] for parts in ranks] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    assert [parts[2, "none"] for parts in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert [parts[1, "zero2"] for parts in ranks] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def refuse_sizes() -> None:
    topology = make_topology(lanes=2, ep=2, device="cpu")
    for config, message in ((dense(), "has no experts"), (experts(), "does not divide the 5 exp")):
        with pytest.raises(ValueError, match=message):
            split_experts(Decoder(config), topology)


def test_a_model_that_cannot_be_divided_is_refused() -> None:
    run_ranks(2, refuse_sizes)
