from dataclasses import replace

import pytest

from longshore.arch.presets import preset
from longshore.config.schema import ModelConfig, ParallelConfig, PlanConfig, RunConfig, TrainConfig
from longshore.run import auto
from longshore.run.auto import possible_cp_sizes, resolve

GIB = 1 << 30


def config(parallel=None, **plan):
    return RunConfig(
        model=ModelConfig(preset="qwen3-8b"),
        plan=PlanConfig(**plan),
        parallel=parallel or ParallelConfig(),
    )


def sizes(**plan):
    return possible_cp_sizes(config(**plan), preset("qwen3-8b"), lanes=8)


def test_cp_sizes_of_a_run():
    assert sizes() == (1, 2, 4, 8)
    assert sizes(max_cp=2) == (1, 2)
    assert sizes(policy="static", cp_size=8) == (8,)
    assert sizes(policy="static") == (1, 2, 4, 8)
    by_heads = ParallelConfig(attention="heads")
    assert possible_cp_sizes(config(by_heads), preset("qwen3-8b"), lanes=16) == (1, 2, 4, 8)


def test_capacity_falls_with_what_a_shared_pack_gathers():
    """Though no sequence is long: under static every pack is shared by 8."""

    def capacity(**plan):
        gather = replace(ParallelConfig(), attention="gather")
        return resolve(
            config(gather, **plan),
            preset("qwen3-8b"),
            lanes=8,
            dtype="bfloat16",
            device="cuda",
            memory=139 * GIB,
            longest=8192,
        )

    alone = capacity(policy="static", cp_size=1)
    shared = capacity(policy="static", cp_size=8)
    assert shared.capacity < alone.capacity
    assert any(f"{8 * shared.capacity:,} tokens of a full pack" in note for note in shared.notes)
    assert not any("full pack" in note for note in alone.notes)


def test_ranks_of_a_lane_share_the_model():
    """A quarter of the memory holds the whole model on every lane only if 8 ranks split it."""

    def resolved(**parallel):
        return resolve(
            config(ParallelConfig(**parallel)),
            preset("qwen3-8b"),
            lanes=2,
            dtype="bfloat16",
            device="cuda",
            memory=139 * GIB,
            longest=8192,
        )

    alone, split = resolved(), resolved(tp=8)
    assert (alone.shard, split.shard) == ("zero3", "none")
    assert split.capacity > alone.capacity
    assert "none, every rank has its part of the whole model" in split.notes[0]
    assert any("over 2 lanes, tp 8, ep 1" in note for note in split.notes)


@pytest.mark.parametrize(
    ("given", "kernels", "device", "installed", "compiles"),
    [
        ("auto", "auto", "cpu", True, False),
        ("auto", "plain", "cpu", True, False),
        ("auto", "auto", "cuda", True, False),
        ("auto", "plain", "cuda", True, True),
        ("auto", "auto", "cuda", False, False),
        ("auto", "plain", "cuda", False, False),
        (True, "auto", "cpu", False, True),
        (False, "plain", "cuda", True, False),
    ],
)
def test_what_is_compiled(monkeypatch, given, kernels, device, installed, compiles):
    monkeypatch.setattr(auto, "is_installed", lambda package: installed and package == "triton")
    resolved = resolve(
        replace(config(capacity=8192), train=TrainConfig(compile=given, kernels=kernels)),
        preset("qwen3-8b"),
        lanes=8,
        dtype="bfloat16",
        device=device,
        memory=139 * GIB,
        longest=8192,
    )
    assert resolved.compile is compiles
    notes = [note for note in resolved.notes if note.startswith("train.compile")]
    expected = ["train.compile: true, because train.kernels is plain"]
    assert notes == (expected if compiles and given == "auto" else [])


def test_models_of_transformers_are_compiled_on_gpus(monkeypatch):
    monkeypatch.setattr(auto, "is_installed", lambda package: True)
    run = config(capacity=8192)
    run = replace(run, model=replace(run.model, from_hf="somewhere", code="transformers"))
    for device, compiles in (("cuda", True), ("cpu", False)):
        assert auto._compile(run, device)[0] is compiles
