"""DeepSeek-V4 on lanes, stages and TP ranks: each sequence alone gives the same."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import error_of
from tests.ranks.spine import VOCAB, alone, exact, make_samples
from tests.ranks.test_exactness import check

from longshore.arch.decoder import DecoderConfig
from longshore.arch.presets import preset
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout

LENGTHS = [3, 40, 17, 5, 50, 1, 2]
CASES = (
    ({"lanes": 2}, "", "zero3", "blocks", "mixed"),
    ({"lanes": 2}, "", "zero2", "none", "padded"),
    ({"lanes": 1, "pp": 2}, "Et|t|tt|mL", "zero3", "blocks", "mixed"),
    ({"lanes": 1, "tp": 2}, "", "none", "none", "mixed"),
)
SHARED = [3, 90, 17, 1]
"""The second is longer than a lane's capacity."""
SHARED_CASES = (
    ({"lanes": 2, "pp": 2}, "Et|t|tt|mL", "zero3", "none", "mixed", SHARED),
    ({"lanes": 2, "tp": 2}, "", "none", "none", "mixed", SHARED),
)


def tiny() -> DecoderConfig:
    """Every kind of layer; entries of 4 and of 16 tokens."""
    return preset("tiny-deepseek-v4", width=16, vocab_size=VOCAB, init_std=0.3)


def run_exact(
    axes: dict[str, int],
    text: str,
    mode: str,
    recompute: str,
    policy: str,
    lengths: Sequence[int] = LENGTHS,
) -> str:
    """What is off by most; `composed` compares what the ranks issue, too."""
    config, layout = tiny(), None
    with ranks_of(**axes) as (topology, groups):
        if text:
            layout = parse_layout(text, pp=topology.pp, layers=len(config.layers), depths=1)
            layout = replace(layout, id_layers=config.hashed_layers)
        options = {"pp": topology.pp, "vpp": layout.vpp if layout else 1, "tp": topology.tp}
        plan = make_plan(lengths, lanes=topology.lanes, capacity=64, policy=policy, **options)
        samples = make_samples(plan)
        choices = exact(mode=mode, recompute=recompute)
        result = composed(config, plan, samples, topology, groups, choices, layout=layout)
        if topology.rank:
            return ""
        error, name = error_of(result, alone(config, samples))
        return "" if error <= 1e-9 else f"{axes} {mode} {policy}: {name} is off by {error}"


def run_all(cases: list) -> list[str]:
    """All in one run: processes cost more than the steps."""
    return [fault for case in cases if (fault := run_exact(*case))]


@pytest.mark.fuzz
def test_gradients_are_those_of_each_sequence_alone(is_fuzz: bool) -> None:
    cases = list(CASES if is_fuzz else CASES[:1])
    assert run_ranks(2, run_all, cases, timeout=200) == [[], []]


def test_stages_and_tp_ranks_whose_lanes_share_a_pack() -> None:
    assert run_ranks(4, run_all, list(SHARED_CASES), timeout=200) == [[]] * 4


@pytest.mark.fuzz
@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8])
def test_every_policy_mode_and_number_of_lanes(lanes: int, is_fuzz: bool) -> None:
    """Packs of one and of many sequences, with and without recomputation."""
    if not is_fuzz:
        pytest.skip("in `make fuzz`; a sample is above")
    cases = []
    policies = ("padded", "static", "balanced", "dynamic", "mixed", "mixed")
    modes = (("zero3", "blocks"), ("zero2", "none"), ("none", "none"), ("zero3", "none"))
    for policy, (mode, recompute) in zip(policies, cycle(modes), strict=False):
        for lengths in (LENGTHS, [129]):
            longest = -(-max(lengths) // lanes)
            plan = make_plan(
                lengths,
                lanes=lanes,
                capacity=max(64, 2 * longest),
                policy=policy,
                cp_sizes="any" if lanes == 3 else "pow2",
            )
            cases.append((tiny(), plan, exact(mode=mode, recompute=recompute)))
    static = make_plan([129, 3], lanes=lanes, capacity=136, policy="static", cp_size=lanes)
    cases.append((tiny(), static, exact(mode="zero2", recompute="blocks")))
    check(lanes, cases, timeout=900)
