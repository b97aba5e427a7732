"""Expected peak memory against what an H200 measured, and against the upper bounds."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from longshore.advisor.peak_memory import WORKSPACE, expected_peak
from longshore.arch.costs import (
    logits_bytes,
    make_layout,
    model_bytes,
    parameter_count,
    token_bytes,
)
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.memory import RankSetting
from longshore.arch.part import Part, Saved, Sharing
from longshore.arch.presets import preset
from longshore.plan.types import Axes

GIB = 1 << 30
LARGEST_PACK = 27_762
"""Tokens of the fullest of the 3 rounds that bench/gpu.py ran, with a capacity of 32,768."""


def fewer_experts(decoder, experts):
    layers = [replace(layer, mlp=replace(layer.mlp, experts=experts)) for layer in decoder.layers]
    return replace(decoder, layers=tuple(layers))


MEASURED = {  # GiB, bench/RESULTS.md, "Speed on one GPU"
    "qwen3-0.6b": (preset("qwen3-0.6b"), 40.8),
    "qwen3-8b": (preset("qwen3-8b", layers=8), 74.9),
    "llama-3.2-1b": (preset("llama-3.2-1b"), 48.6),
    "qwen3-30b-a3b": (preset("qwen3-30b-a3b", layers=4), 63.8),
    "nemotron-h-8b": (preset("nemotron-h-8b", layers=8), 56.3),
    "qwen3-next": (fewer_experts(preset("qwen3-next-80b-a3b", layers=4), 32), 34.2),
    "deepseek-v3": (preset("deepseek-v3", layers=3, mtp=()), 84.8),
}


@pytest.mark.parametrize("name", MEASURED)
def test_within_a_tenth_of_what_an_h200_measured(name):
    decoder, measured = MEASURED[name]
    peak = expected_peak(decoder, RankSetting(), tokens=LARGEST_PACK, rounds=3)
    assert peak.total / GIB == pytest.approx(measured, rel=0.1)


def test_the_parts_of_qwen3_600m():
    decoder = preset("qwen3-0.6b")
    peak = expected_peak(decoder, RankSetting(), tokens=1000, rounds=2)
    count = parameter_count(decoder)
    assert (peak.parameters, peak.gradients) == (6 * count, 4 * count)
    assert (peak.optimizer, peak.other) == (8 * count, WORKSPACE)
    # 28 layers of norms' inputs and outputs, q k v before and after rotation, output, gate and up;
    # statistics of 16 heads; rotary tables and inputs; the last rows.
    layer = 2 * (4 * 1024 + 2 * 3072 + 1024 + 2048 + 2 * 3072) + 4 * 16
    assert peak.activations == 1000 * (28 * layer + 4 * 128 + 48 + 3 * 2048)
    assert peak.moment == "loss"


def test_one_round_has_no_summed_gradients():
    decoder = preset("qwen3-0.6b")
    one, two = (
        expected_peak(decoder, RankSetting(), tokens=30_000, rounds=rounds) for rounds in (1, 2)
    )
    assert two.total - one.total == 4 * parameter_count(decoder)


def test_a_large_model_with_few_tokens_peaks_while_gradients_are_reduced():
    peak = expected_peak(preset("qwen3-30b-a3b", layers=4), RankSetting(), tokens=256)
    assert peak.moment == "reduction of gradients"


def test_recomputation_keeps_only_the_inputs():
    decoder = preset("qwen3-8b", layers=8)
    plain, again = (
        expected_peak(decoder, RankSetting(recompute=recompute), tokens=65_536)
        for recompute in (False, True)
    )
    assert again.activations < plain.activations / 3
    assert again.total < plain.total


def test_sharding_divides_weights_and_moments():
    decoder = preset("qwen3-8b")
    count = parameter_count(decoder)

    def peak(shard):
        how = RankSetting(axes=Axes(lanes=8, shard=shard))
        return expected_peak(decoder, how, tokens=8192)

    none, zero2, zero3 = map(peak, ("none", "zero2", "zero3"))
    assert none.optimizer == 8 * count
    assert zero2.optimizer == zero3.optimizer == 8 * -(-count // 8)
    assert none.total > zero2.total > zero3.total


def test_a_part_that_is_not_known_counts_as_it_says():
    class Own(Part):
        def saved(self, width):
            return Saved(3 * width, 1)

        def parameters(self, width):
            return width

    memory = Own().kernel_memory(10)
    assert memory.saved == Saved(30, 1)
    assert memory.backward[0].rows == Saved(50, 1)


SMALL = ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe", "tiny-nemotron-h", "tiny-hybrid"]


SHARED = {"layers": 1, "recompute": False, "shard": "zero3", "lanes": 8}


@pytest.mark.property
@example(name="qwen3-0.6b", tokens=4096, **SHARED).via("one more makes the loss's chunks smaller")
@example(name="deepseek-v3", tokens=77_672, **SHARED).via("one more leaves a head for later")
@given(
    name=st.sampled_from(["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v3", *SMALL]),
    layers=st.integers(1, 12),
    tokens=st.integers(1, 300_000),
    recompute=st.booleans(),
    shard=st.sampled_from(["none", "zero2", "zero3"]),
    lanes=st.sampled_from([1, 2, 8]),
)
def test_more_tokens_need_more_and_kernels_save_no_more_than_the_bound(
    name, layers, tokens, recompute, shard, lanes
):
    decoder = preset(name, layers=layers)
    how = RankSetting(axes=Axes(lanes=lanes, shard=shard), recompute=recompute)
    peak = expected_peak(decoder, how, tokens=tokens)
    assert min(peak.parts().values()) >= 0
    assert expected_peak(decoder, how, tokens=tokens + 1).total >= peak.total
    bound = token_bytes(decoder, RankSetting(dtype="bfloat16", recompute=False))
    assert peak.activations <= tokens * (bound.saved + bound.working + 2 * decoder.width)
    model = model_bytes(decoder, RankSetting(axes=Axes(lanes=lanes, shard=shard), dtype="bfloat16"))
    assert peak.optimizer == model.optimizer
    assert peak.loss <= logits_bytes(decoder, tokens, dtype="bfloat16")


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_tensor_and_expert_parallelism_need_less(name):
    decoder = preset(name, layers=8)
    ep = 2 if isinstance(decoder.layers[0].mlp, MoEConfig) else 1
    split = Axes(lanes=4, tp=2, ep=ep, shard="none")
    whole, part = (
        expected_peak(decoder, RankSetting(axes=each), tokens=16_384)
        for each in (Axes(lanes=4, shard="none"), split)
    )
    assert part.parameters < whole.parameters * 0.6
    assert whole.activations / 2 < part.activations < whole.activations


def peaks_of_pipeline(decoder: DecoderConfig, pp: int):
    layout = make_layout(decoder, pp=pp, vpp=1)
    return [
        expected_peak(decoder, RankSetting(layout=layout, pp_rank=rank), tokens=8192)
        for rank in range(pp)
    ]


def test_the_first_rank_of_a_pipeline_saves_most_rounds():
    peaks = peaks_of_pipeline(preset("qwen3-8b"), 4)
    saved = [peak.activations for peak in peaks]
    assert saved[0] > saved[1] > saved[2] > saved[3]
    assert peaks[0].loss == 0


def test_a_shared_pack_gathers_keys_and_values():
    decoder = preset("qwen3-8b", layers=8)
    axes = Axes(lanes=8, shard="none")
    how = RankSetting(axes=axes, sharing=Sharing("gather", "auto"))
    shared = expected_peak(decoder, how, tokens=32_768, cp_size=8)
    assert shared.exchanged > 0
    assert shared.total > expected_peak(decoder, RankSetting(axes=axes), tokens=32_768).total
    few = expected_peak(decoder, how, tokens=32_768, cp_size=8, shared_tokens=4096)
    assert few.exchanged < shared.exchanged / 7
