"""What a run decides about graphs, from its own plans."""

from dataclasses import replace

import numpy as np
import pytest

from longshore.arch.presets import preset
from longshore.config.load import load_config
from longshore.config.schema import GraphConfig
from longshore.data.source import Batches, BatchSize
from longshore.plan import make_plan
from longshore.plan.graph_use import GraphSetting, MicroBatchSizes
from longshore.run import auto
from longshore.run import auto as graph_cap
from longshore.run.auto import GIB, graph_bytes, resolve, sampled_plans

LENGTHS = np.array([60, 30, 20, 10] * 64)


def resolved(
    *, lengths=LENGTHS, device="cuda", plan=(), train=(), lanes=1, model="tiny-llama", **graph
):
    config = load_config(None, ["train.device=auto"])
    config = replace(
        config,
        data=replace(config.data, batch=8),
        plan=replace(config.plan, **{"capacity": 64, **dict(plan)}),
        train=replace(config.train, **dict(train)),
        graph=GraphConfig(**{"layers": ("all",), **graph}),
    )
    return resolve(
        config,
        preset(model),
        lanes=lanes,
        dtype="bfloat16",
        device=device,
        memory=80 * GIB,
        longest=int(lengths.max()),
        lengths=lengths,
    )


def test_scans_without_their_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(auto, "is_installed", lambda package: False)
    with pytest.raises(ValueError, match=r"graph\.layers has mamba, .*kernels of triton"):
        resolved(model="tiny-nemotron-h")
    assert resolved(model="tiny-nemotron-h", layers=("attention", "mlp")).graph is not None


def test_without_graphs_nothing_changes():
    off = resolved(layers=())
    assert (off.graph, off.config.plan.buckets) == (None, 0)
    assert not [note for note in off.notes if "graph" in note or "buckets" in note]


@pytest.mark.slow
def test_the_cap_comes_from_the_runs_own_plans():
    run = resolved()
    assert run.config.plan.buckets == 8
    again = resolved()
    assert run.graph == again.graph
    buckets = tuple(range(8, 65, 8))
    batches = Batches(LENGTHS, BatchSize("sequences", 8), seed=run.config.data.seed)
    plans = [
        make_plan(LENGTHS[indices].tolist(), lanes=1, capacity=64, buckets=buckets)
        for indices in (batches._order[at : at + 8] for at in range(0, batches.steps(0) * 8, 8))
    ]
    sizes = MicroBatchSizes.of(plans)
    assert run.graph is not None
    assert run.graph.halves
    assert sizes.covered(run.graph.max_sequences) >= 0.95
    note = next(note for note in run.notes if note.startswith("graph.max_sequences"))
    cap = run.graph.max_sequences
    assert note.startswith(f"graph.max_sequences: {cap} serves {sizes.covered(cap):.0%} of ")
    assert f"of {len(sizes.alone)} sampled micro-batches" in note


def test_a_cap_by_hand_needs_no_sample(monkeypatch):
    monkeypatch.setattr(graph_cap, "sampled_plans", None)
    assert resolved(max_sequences=7).graph == GraphSetting(7, halves=True)


def test_recomputation_leaves_no_halves():
    run = resolved(max_sequences=7, train={"recompute": "blocks"})
    assert run.graph == GraphSetting(7, halves=False)


def test_data_whose_packs_are_all_shared():
    run = resolved(lengths=np.array([128] * 8), lanes=2, train={"recompute": "blocks"})
    assert run.graph == GraphSetting(1, halves=False)
    assert any("none of 16 sampled micro-batches has one unshared pack, so" in n for n in run.notes)


def test_buckets_of_the_recipe_and_few_totals_stay():
    assert resolved(plan={"buckets": 2}, max_sequences=2).config.plan.buckets == 2
    assert resolved(plan={"align": 16}, max_sequences=2).config.plan.buckets == 0


def test_a_cpu_is_refused_where_the_device_is_auto():
    with pytest.raises(ValueError, match=r"^graph\.layers needs a GPU, and this run is on a CPU"):
        resolved(device="cpu")


def test_graphs_leave_compile_out(monkeypatch):
    from longshore.run import auto

    monkeypatch.setattr(auto, "is_installed", lambda package: True)
    run = resolved(max_sequences=2, train={"kernels": "plain"})
    assert not run.compile
    assert "train.compile: false, because graph.layers is set" in run.notes


def test_memory_of_graphs():
    assert graph_bytes(GraphConfig(), 80 * GIB) == 0
    assert graph_bytes(GraphConfig(layers=("mlp",)), 80 * GIB) == 8 * GIB
    assert graph_bytes(GraphConfig(layers=("mlp",), memory_gib=1.5), 80 * GIB) == 3 * GIB // 2
    with_graphs = resolved(plan={"capacity": "auto"}, max_sequences=2)
    without = resolved(plan={"capacity": "auto"}, layers=())
    assert with_graphs.capacity < without.capacity


def test_a_sample_is_spread_and_bounded(monkeypatch):
    monkeypatch.setattr(graph_cap, "SAMPLE_STEPS", 4)
    batches = Batches(np.arange(1, 65), BatchSize("sequences", 4), seed=0, shuffle=False)
    firsts = []

    def planner(lengths):
        firsts.append(lengths[0])
        return make_plan(lengths, lanes=1, capacity=512)

    assert len(list(sampled_plans(batches, planner))) == 4
    assert firsts == [1, 33, 17, 49]
    monkeypatch.setattr(graph_cap, "SAMPLE_SEQUENCES", 8)
    assert len(list(sampled_plans(batches, planner))) == 2
