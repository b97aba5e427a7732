"""The search of `longshore advise`: what is legal, fits and is fastest, and a valid recipe."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.advisor.advise import (
    TIE,
    _choice,
    _with_smallest_groups,
    advise,
    answer,
    sample_steps,
)
from longshore.advisor.advise_page import MEMORY_NAMES, advise_summary
from longshore.advisor.candidate_time import StepSize, StepTimer
from longshore.advisor.candidates import (
    CONTEXT_BYTES,
    AdviceTask,
    Candidate,
    LaneLoad,
    MemoryCheck,
    all_candidates,
    capacities,
    cp_limits,
    legal_axes,
    memory_of,
)
from longshore.advisor.machine import load_machine
from longshore.advisor.peak_memory import LARGER_BYTES, PAIR_BYTES
from longshore.advisor.step_time import step_seconds
from longshore.arch.costs import parameter_count, step_flops
from longshore.arch.decoder import LoRAConfig
from longshore.arch.memory import ALONE
from longshore.arch.presets import preset
from longshore.config.check import check_config, decoder_config
from longshore.config.load import load_config
from longshore.config.schema import ModelConfig
from longshore.plan.types import Axes

GIB = 1 << 30
H200 = load_machine("h200")
LENGTHS = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 300), 4, 6000).astype(np.int64)


def task_of(name="tiny-qwen3", *, gpus=8, gib=20.0, lengths=LENGTHS, batch=64, layers=0):
    model = ModelConfig(preset=name, layers=layers)
    return AdviceTask(
        model=model,
        decoder=decoder_config(model),
        gpus=gpus,
        memory=int(gib * GIB),
        machine=H200,
        machine_name="h200",
        lengths=np.asarray(lengths, dtype=np.int64),
        batch=batch,
    )


@pytest.fixture(scope="module")
def large():
    """Qwen3-8B on 8 H200s, with sequences that one lane does not hold."""
    lengths = np.clip(np.random.default_rng(1).lognormal(6.9, 1.5, 500), 16, 131_072)
    lengths[7] = 131_072
    return advise(task_of("qwen3-8b", gib=139.8, lengths=lengths, batch=96))


def test_the_best_fits_and_no_other_is_much_faster(large):
    best = large.best
    assert best.at_capacity <= large.task.usable
    assert best.memory.total <= best.at_capacity
    assert all(best.seconds <= other.seconds * (1 + TIE) for other in large.others)
    assert [o.seconds for o in large.others] == sorted(o.seconds for o in large.others)


def test_every_candidate_holds_the_longest_sequence(large):
    for choice in (large.best, *large.others):
        candidate = choice.candidate
        assert candidate.capacity * candidate.max_cp >= large.task.longest
        for step in choice.steps:
            assert LaneLoad.of([step.plan]).tokens <= candidate.capacity


def test_a_smaller_machine_changes_the_answer(large):
    small = advise(replace(large.task, memory=int(79 * GIB)))
    assert small.best.at_capacity <= 0.9 * 79 * GIB
    assert small.best.candidate != large.best.candidate
    assert small.best.tokens_per_second < large.best.tokens_per_second


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe", "qwen3-8b"])
def test_the_recipe_is_one_that_a_run_accepts(name, large, tmp_path):
    advice = large if name == "qwen3-8b" else advise(task_of(name))
    data = answer(advice, total_tokens=10**9)
    path = tmp_path / "advised.toml"
    path.write_text(data["recipe"])
    mock = "data.mock={mode='distribution', type='uniform', min_seq_len=1, max_seq_len=500}"
    config = load_config(str(path), [mock, "data.count=64", "data.batch=8"])
    check_config(config, advice.task.gpus)
    candidate = advice.best.candidate
    assert config.plan.capacity == candidate.capacity
    assert (config.parallel.tp, config.parallel.pp) == (candidate.axes.tp, candidate.axes.pp)
    assert bool(config.graph.layers) == candidate.graph
    tables = tomllib.loads(data["recipe"])
    for key, value, text in data["reasons"]:
        section, name = key.split(".")
        assert tables[section][name] == tomllib.loads(f"v = {value}")["v"]
        assert text


def test_the_answer_is_json_and_always_the_same():
    texts = [json.dumps(answer(advise(task_of()), total_tokens=10**9)) for _ in range(2)]
    assert texts[0] == texts[1]


def test_what_the_text_shows(large):
    data = answer(large, total_tokens=15 * 10**9)
    best = data["candidates"][0]
    assert best["days"] == pytest.approx(15e9 / best["tokens_per_s"] / 86_400)
    rate = sum(step.flops for step in large.best.steps) / 8
    rate /= sum(step.seconds for step in large.best.steps)
    assert best["mfu"] == pytest.approx(rate / 989.5e12), "of the vendor's peak, as runs have it"
    assert best["of_product"] == pytest.approx(rate * H200.products.flop)
    assert 0 < best["mfu"] < best["of_product"] < 1
    assert set(best["memory"]) == set(MEMORY_NAMES)
    assert sum(best["memory"].values()) == pytest.approx(best["memory_gib"])
    text = "\n".join(advise_summary(data))
    assert f"{best['tokens_per_s']:,.0f} tokens/s, {best['mfu']:.0%} MFU (" in text
    assert f"{best['of_product']:.0%} of the fastest product)" in text
    assert "plan.capacity = " in text
    assert "[parallel]\n" in text


def test_low_rank_factors(large, tmp_path):
    """One GPU trains factors of Qwen3-8B, where it could not train all."""
    model = ModelConfig(preset="qwen3-8b", lora={"rank": 16, "targets": ["q_proj", "v_proj"]})
    task = replace(large.task, model=model, decoder=decoder_config(model), gpus=1)
    task = replace(task, lengths=task.lengths.clip(max=8000))
    with pytest.raises(ValueError, match="nothing fits"):
        advise(replace(task, decoder=task.decoder.merged()))
    advice = advise(task)
    best, parts = advice.best, advice.best.memory.peak
    count = parameter_count(task.decoder)
    assert 2 * count <= parts.parameters < 2.1 * count, "the base in bfloat16, once"
    assert parts.optimizer + parts.gradients < 2 * GIB, "of factors alone"
    assert not best.candidate.graph, "a run refuses graphs beside factors"
    data = answer(advice, total_tokens=10**9)
    assert 0.4 < data["candidates"][0]["mfu"] < 0.75
    path = tmp_path / "advised.toml"
    path.write_text(data["recipe"])
    mock = "data.mock={mode='distribution', type='uniform', min_seq_len=1, max_seq_len=500}"
    config = load_config(str(path), [mock, "data.count=200"])
    check_config(config, 1)
    assert config.model == model
    assert "LoRA: " in "\n".join(advise_summary(data))


def test_freezing_saves_the_gradients_of_weights():
    """Products have one gradient instead of two, and factors some of their own."""
    full = preset("qwen3-8b", layers=8)
    lora = replace(full, lora=LoRAConfig(16, 32.0))
    rounds = [[16384]] * 64
    seconds = [step_seconds(H200, each, rounds, tokens=[16384] * 64) for each in (full, lora)]
    flops = [step_flops(each, [16384]) for each in (full, lora)]
    assert flops[1] / flops[0] == pytest.approx(0.73, abs=0.02)
    assert flops[1] / flops[0] < seconds[1] / seconds[0] < 0.85


def test_graphs_where_the_host_is_slower():
    tiny = advise(task_of(gpus=1, gib=40))
    device, host = tiny.best.launch
    assert host > device
    assert tiny.best.candidate.graph
    assert tiny.best.max_sequences >= 1
    assert tiny.best.memory.graphs == 4 * GIB
    assert "graph.layers" in dict.fromkeys(
        key for key, *_ in answer(tiny, total_tokens=1)["reasons"]
    )


def test_no_graphs_where_the_gpu_is_slower(large):
    device, host = large.best.launch
    assert host < device
    assert not any(candidate.graph for candidate, _ in large.estimates)


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"nothing fits into 36\.0 GiB of each of 1 GPUs") as error:
        advise(task_of("qwen3-8b", gpus=1, gib=40))
    assert "GiB are missing" in str(error.value)
    assert "use more or larger GPUs" in str(error.value)


def test_a_sequence_that_no_lanes_hold():
    huge = task_of("tiny-qwen3", gpus=1, gib=40, lengths=[5_000_000, 10], batch=2)
    with pytest.raises(ValueError, match="holds its longest sequence of 5,000,000 tokens"):
        advise(huge)


def test_axes_are_legal():
    dense = legal_axes(task_of("tiny-qwen3", gpus=16))
    assert {axes.ep for axes in dense} == {1}
    assert {axes.tp for axes in dense} == {1, 2, 4, 8}
    assert {axes.pp for axes in dense} == {1, 2}, "it has two layers"
    assert all(axes.lanes * axes.tp * axes.pp == 16 for axes in dense)
    experts = legal_axes(task_of("tiny-qwen3-moe", gpus=8))
    assert {axes.ep for axes in experts} == {1, 2, 4, 8}
    assert {axes.tp for axes in legal_axes(task_of(gpus=6))} == {1, 2}


def way(**axes):
    return Candidate(axes=Axes(**{"shard": "none", **axes}), capacity=1024, max_cp=1)


def test_lanes_wait_only_where_they_must():
    assert way(lanes=8, shard="zero2").sync == "step"
    assert way(lanes=8, shard="zero3").sync == "round"
    assert way(lanes=4, pp=2).sync == way(lanes=8, ep=2).sync == way(lanes=1).sync == "round"


def test_simpler_is_less_complex():
    rising = [way(lanes=8), way(lanes=8, shard="zero3"), way(lanes=4, tp=2)]
    rising += [way(lanes=2, tp=4), way(lanes=2, tp=2, pp=2)]
    sizes = [each.complexity for each in rising]
    assert sizes == sorted(sizes)


def test_capacities_and_cp_limits():
    task = task_of(gpus=8, lengths=[40_000, 100, 100], batch=3)
    axes = Axes(lanes=8, shard="none")
    assert capacities(task, axes)[0] == 8192, "8 lanes of 4,096 do not hold 40,000"
    assert cp_limits(task, axes, 8192) == [8]
    assert cp_limits(task, axes, 16_384) == [4, 8]
    assert cp_limits(task, axes, 65_536) == [1, 8]
    assert cp_limits(task, axes, 4096) == []


def test_memory_counts_communicators_and_cuda():
    task = task_of(gpus=4)
    alone = memory_of(task_of(gpus=1), Candidate(axes=ALONE, capacity=1024, max_cp=1))
    assert (alone.communicators, alone.context, alone.graphs) == (0, CONTEXT_BYTES, 0)
    lanes = Candidate(axes=Axes(lanes=4, shard="zero3"), capacity=1024, max_cp=2)
    assert memory_of(task, lanes).communicators == LARGER_BYTES + PAIR_BYTES
    graphed = memory_of(task, replace(lanes, graph=True))
    assert graphed.graphs == task.memory // 10
    assert graphed.total == sum(graphed.parts().values())


def test_what_needs_more_than_one_that_does_not_fit_is_skipped(monkeypatch):
    task = task_of("qwen3-8b", gpus=1, gib=139.8)
    check, calls = MemoryCheck(task), []

    def counted(*given):
        calls.append(given)
        return memory_of(*given)

    monkeypatch.setattr("longshore.advisor.candidates.memory_of", counted)
    small = Candidate(axes=ALONE, capacity=8192, max_cp=1)
    assert not check.fits(small)
    assert not check.fits(replace(small, capacity=16_384))
    assert len(calls) == 1


def test_exchange_of_tensor_and_expert_parallelism():
    timer = StepTimer(task_of("qwen3-30b-a3b", gpus=8))
    inside, layers, row = H200.byte_gathered(across=False), 48, 2048 * 2
    split = timer.exchange(Axes(lanes=4, tp=2, shard="none"))
    assert split == pytest.approx(8 * row * layers / 2 * inside)
    shared = timer.exchange(Axes(lanes=8, ep=4, shard="none"))
    assert shared == pytest.approx(4 * row * layers * 4 * 3 / 4 * inside)
    assert timer.exchange(Axes(lanes=8, shard="none")) == 0


def test_weights_of_shared_experts_travel_less():
    timer = StepTimer(task_of("qwen3-30b-a3b", gpus=8))
    travel = [timer._travel(Axes(lanes=8, ep=ep, shard="zero3")) for ep in (1, 2, 8)]
    assert travel[0] > travel[1] > travel[2] > 0
    count = parameter_count(timer.task.decoder)
    gathered = count * 7 / 8 * (2 * 2 + 4) * H200.byte_gathered(across=False)
    assert travel[0] == pytest.approx(gathered)


def test_one_lane_takes_what_the_predictor_says():
    task = task_of("qwen3-0.6b", gpus=1, gib=139.8, lengths=[900, 800, 700, 600, 500], batch=5)
    timer = StepTimer(task)
    candidate = Candidate(axes=ALONE, capacity=4096, max_cp=1)
    step = timer.planned(candidate, task.lengths.tolist())
    expected = step_seconds(
        H200,
        task.decoder,
        [[900, 800, 700, 600, 500]],
        tokens=[3500],
    )
    assert (step.tokens, len(step.plan.rounds)) == (3500, 1)
    assert step.seconds == pytest.approx(expected)


def test_a_part_of_a_large_step_is_scaled_up():
    task = task_of("qwen3-0.6b", gpus=2, gib=139.8, lengths=[512] * 64, batch=64)
    timer = StepTimer(task)
    candidate = Candidate(axes=Axes(lanes=2, shard="none"), capacity=4096, max_cp=1)
    half, whole = (
        timer.planned(candidate, [512] * count, of=64 * 512).seconds for count in (32, 64)
    )
    assert half == pytest.approx(whole, rel=0.05)


def test_the_load_of_plans():
    task = task_of("qwen3-0.6b", gpus=2, gib=139.8, lengths=[6000, 512, 300], batch=3)
    candidate = Candidate(axes=Axes(lanes=2, shard="none"), capacity=4096, max_cp=2)
    plan = StepTimer(task).planned(candidate, [6000, 512, 300]).plan
    load = LaneLoad.of([plan, plan])
    shared = max(pack.tokens_per_lane for _, pack in plan.packs() if pack.cp_size == 2)
    assert (load.rounds, load.cp_size, load.shared_tokens) == (len(plan.rounds), 2, shared)
    assert 3000 <= shared <= load.tokens <= 4096
    assert memory_of(task, candidate, [plan]).total < memory_of(task, candidate).total


def test_groups_are_no_larger_than_they_need_to_be():
    task = task_of("qwen3-0.6b", gpus=8, gib=139.8, lengths=[500] * 256, batch=256)
    timer, samples = StepTimer(task), list(sample_steps(task, 1))
    wide = Candidate(axes=Axes(lanes=8, shard="none"), capacity=16_384, max_cp=8)
    best = _choice(timer, wide, 1.0, samples)
    assert _with_smallest_groups(timer, best, samples).candidate == replace(wide, max_cp=1)


def test_sampled_steps_are_those_of_training():
    task = task_of(lengths=[1, 2, 3, 4, 5], batch=2)
    steps = list(sample_steps(task, 9))
    assert sorted(n for lengths, _ in steps for n in lengths) == [1, 2, 3, 4, 5]
    assert [tokens for _, tokens in steps] == [sum(lengths) for lengths, _ in steps]


@pytest.mark.property
@settings(max_examples=25, deadline=None)
@given(
    gpus=st.sampled_from([1, 2, 4, 6, 8]),
    longest=st.integers(1, 200_000),
    name=st.sampled_from(["tiny-qwen3", "tiny-qwen3-moe"]),
)
def test_candidates_hold_every_sequence_and_have_a_finite_estimate(gpus, longest, name):
    task = task_of(name, gpus=gpus, lengths=[longest, 10, 10], batch=3)
    timer, size = StepTimer(task), StepSize.of([longest, 10, 10])
    for candidate in list(all_candidates(task))[::7]:
        axes = candidate.axes
        assert axes.lanes * axes.tp * axes.pp == gpus
        assert candidate.max_cp <= axes.lanes
        assert candidate.capacity * candidate.max_cp >= longest
        assert 0 < timer.estimate(candidate, size) < 1e6
