"""Tensor and expert parallelism with lanes and pipelines: each sequence's own gradients."""

import random
from dataclasses import replace

import pytest
from tests.parallel.my_mixer import MeanConfig
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.piped import deep, error_of
from tests.ranks.spine import alone, dense, exact, make_samples
from tests.ranks.test_pipeline import random_layout

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.scan import Mamba2Config
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout


def few_groups():
    """Fewer KV heads, groups and normed groups than 4 TP ranks, biases, a mixer of a user's own."""
    attention = AttentionConfig(
        heads=8, kv_heads=2, head_dim=4, qk_norm=True, bias=True, output_bias=True
    )
    mamba = Mamba2Config(heads=8, head_dim=4, state_dim=6, groups=2, norm_groups=1, bias=True)
    one = Mamba2Config(heads=4, head_dim=4, state_dim=6, groups=1)
    mlp = MLPConfig(width=24, activation="relu2")
    layers = (
        LayerConfig(attention, mlp),
        LayerConfig(mamba, None),
        LayerConfig(MeanConfig(), None),
        LayerConfig(one, mlp),
    )
    return replace(dense(), layers=layers, pad_token_id=5)


CONFIGS = {
    "tied": lambda: deep(3, tied=True),
    "few": few_groups,
    "hybrid": lambda: hybrid(experts=8),
    "deepseek": deepseek,
}

# (lanes, tp, pp, ep): (config, layout or "", policy, mode, recompute)
CASES = {
    (1, 2, 1, 1): [
        ("tied", "", "balanced", "none", "none"),
        ("few", "", "balanced", "zero3", "none"),
        ("hybrid", "", "balanced", "zero2", "none"),
        ("deepseek", "", "balanced", "zero3", "blocks"),
    ],
    (1, 4, 1, 1): [("few", "", "balanced", "none", "none")],
    (4, 2, 1, 1): [
        ("tied", "", "mixed", "zero3", "none"),
        ("deepseek", "", "dynamic", "none", "none"),
        ("few", "", "mixed", "zero2", "blocks"),
        ("hybrid", "", "mixed", "zero3", "none"),
    ],
    (2, 2, 2, 1): [
        ("tied", "Ett|tL", "mixed", "zero3", "none"),
        ("hybrid", "Et|ttmL", "mixed", "zero2", "none"),
        ("deepseek", "Et|tm|m|L", "dynamic", "zero3", "none"),
    ],
    (2, 1, 1, 2): [
        ("hybrid", "", "mixed", "zero3", "none"),
        ("deepseek", "", "dynamic", "none", "none"),
    ],
    (4, 1, 1, 4): [
        ("hybrid", "", "mixed", "zero2", "none"),
        ("deepseek", "", "mixed", "zero3", "blocks"),
    ],
    (4, 1, 1, 2): [
        ("hybrid", "", "mixed", "none", "none"),
        ("deepseek", "", "mixed", "zero3", "none"),
    ],
    (2, 2, 1, 4): [
        ("hybrid", "", "mixed", "zero3", "none"),
        ("deepseek", "", "dynamic", "none", "none"),
        ("deepseek", "", "mixed", "zero2", "blocks"),
    ],
    (2, 1, 2, 2): [
        ("hybrid", "Et|tt|m|L", "mixed", "zero3", "none"),
        ("deepseek", "Et|tm|m|L", "dynamic", "zero2", "none"),
    ],
    (2, 2, 2, 2): [("deepseek", "Et|tmmL", "mixed", "zero3", "none")],
}


SAMPLE = {
    (1, 4, 1, 1): 1,
    (4, 2, 1, 1): 3,
    (2, 2, 1, 4): 2,
    (2, 2, 2, 1): 1,
    (2, 1, 2, 2): 1,
}
"""How many cases of which axes are run in each test run; all of them in `make fuzz`."""


def run_cases(lanes: int, tp: int, pp: int, ep: int, count: int) -> list[str]:
    faults = []
    cases = CASES[lanes, tp, pp, ep][:count]
    with ranks_of(lanes=lanes, tp=tp, pp=pp, ep=ep) as (topology, groups):
        for number, (name, text, policy, mode, recompute) in enumerate(cases):
            config, draw = CONFIGS[name](), random.Random(number)
            depths = len(config.mtp)
            layout = text and parse_layout(text, pp=pp, layers=len(config.layers), depths=depths)
            lengths = [draw.choice((1, 2, 5, 17, 40)) for _ in range(9)] + [60 if lanes < 2 else 90]
            vpp = layout.vpp if layout else 1
            plan = make_plan(
                lengths, lanes=lanes, capacity=64, policy=policy, pp=pp, vpp=vpp, align=tp
            )
            samples = make_samples(plan, number)
            choices = exact(mode=mode, recompute=recompute)
            result = composed(
                config, plan, samples, topology, groups, choices, layout=layout or None
            )
            if topology.rank == 0:
                error, worst = error_of(result, alone(config, samples))
                if not error <= 1e-9:
                    faults.append(f"{name} {text} {policy} {mode}: {worst} is off by {error}")
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize("axes", CASES, ids=str)
def test_the_gradients_of_each_sequence_alone(
    axes: tuple[int, int, int, int], is_fuzz: bool
) -> None:
    if not is_fuzz and axes not in SAMPLE:
        pytest.skip("in `make fuzz`")
    lanes, tp, pp, _ = axes
    count = len(CASES[axes]) if is_fuzz else SAMPLE[axes]
    for faults in run_ranks(lanes * tp * pp, run_cases, *axes, count, timeout=200):
        assert faults == []


def run_random(lanes: int, tp: int, pp: int, ep: int, seeds: range) -> list[str]:
    """Random models, plans, layouts and ways to shard."""
    faults = []
    with ranks_of(lanes=lanes, tp=tp, pp=pp, ep=ep) as (topology, groups):
        for seed in seeds:
            draw = random.Random(seed)
            name = draw.choice(("hybrid", "deepseek") if ep > 1 else tuple(CONFIGS))
            config, layout = CONFIGS[name](), None
            if pp > 1:
                most = (len(config.layers) + len(config.mtp) + 1) // pp
                layout = random_layout(draw, config, pp=pp, vpp=draw.randint(1, most))
            longest = 60 if lanes == 1 else 60 * lanes
            lengths = [
                draw.choice((1, 2, draw.randint(3, 40), draw.randint(3, longest)))
                for _ in range(draw.randint(1, 12))
            ]
            plan = make_plan(
                lengths,
                lanes=lanes,
                capacity=64,
                policy=draw.choice(("balanced", "dynamic", "mixed")),
                align=tp * draw.choice((1, 4)),
                pp=pp,
                vpp=layout.vpp if layout else 1,
                ep=ep,
                tp=tp,
            )
            samples = make_samples(plan, seed)
            choices = exact(
                mode=draw.choice(("zero3", "zero2", "none")),
                recompute=draw.choice(("none", "blocks")),
                attention=draw.choice(("auto", "gather")),
                scan=draw.choice(("auto", "states")),
            )
            result = composed(config, plan, samples, topology, groups, choices, layout=layout)
            if topology.rank == 0:
                error, worst = error_of(result, alone(config, samples))
                if not error <= 1e-9:
                    faults.append(f"seed {seed}, {name} {layout}: {worst} is off by {error}")
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize("axes", CASES, ids=str)
def test_random_plans(axes: tuple[int, int, int, int], is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("minutes; in `make fuzz`")
    lanes, tp, pp, _ = axes
    for faults in run_ranks(lanes * tp * pp, run_random, *axes, range(12), timeout=600):
        assert faults == []
