"""Models of transformers on 4 ranks, mixed CP and FSDP2: transformers' own gradients."""

import pytest
from tests.ranks.foreign import MODELS, alone, in_float64, make_hf, together
from tests.ranks.harness import run_ranks
from tests.ranks.spine import exact, lanes_of, make_samples, worst
from tests.ranks.test_exactness import several_packs

CASES = {
    "llama": {"mode": "zero2", "recompute": "blocks"},
    "qwen3": {"mode": "zero3"},
    "qwen3_moe": {"mode": "zero3", "recompute": "blocks"},
    "gemma3": {"mode": "zero2", "attention": "heads"},
    "gemma2": {"mode": "none"},
    "gpt_oss": {"mode": "zero3", "attention": "gather"},
}


def run_cases(cases) -> list[str]:
    """The plan has CP sizes 4, 2 and 1, lanes with several of them, and lanes without work."""
    faults, plan = [], several_packs()
    with lanes_of(4) as (topology, groups):
        for name, choices in cases:
            in_float64(name)
            hf, samples = make_hf(name), make_samples(plan)
            result = together(name, hf, plan, samples, topology, groups, exact(**choices))
            if topology.rank == 0:
                error, tensor = worst(result, alone(hf, samples))
                if not error <= 1e-9:
                    faults.append(f"{name} {choices}: {tensor} is off by {error}")
    return faults


def test_the_gradients_of_transformers_one_sequence_at_a_time():
    assert list(CASES) == list(MODELS)
    for faults in run_ranks(4, run_cases, list(CASES.items()), timeout=200):
        assert faults == []


@pytest.mark.fuzz
@pytest.mark.parametrize("attention", ["heads", "gather"])
@pytest.mark.parametrize("mode", ["zero3", "zero2", "none"])
def test_all_ways(mode, attention, is_fuzz):
    if not is_fuzz:
        pytest.skip("in `make fuzz`")
    choices = {"mode": mode, "attention": attention, "recompute": "blocks"}
    for faults in run_ranks(4, run_cases, [(name, choices) for name in CASES], timeout=200):
        assert faults == []
