"""The checker: random plans, layouts and orders run to the end, and broken queues do not."""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.plan.samples import CHARGED, FREE, examples

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.distributed.topology import Axes
from longshore.parallel.pipeline.checker import run_traces
from longshore.parallel.pipeline.trace import Operation, TracedModel, Tracer
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.layout import Layout, parse_layout
from longshore.plan.pipeline_queue import Queue, rank_queues
from longshore.plan.shapes import make_buckets, padded_length
from longshore.plan.simulate import pipeline_walk

MIXERS = (
    AttentionConfig(heads=8, kv_heads=4, head_dim=2),
    MLAConfig(heads=4, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=3),
    Mamba2Config(heads=8, head_dim=2, state_dim=3, groups=4),
    DeltaNetConfig(key_heads=4, value_heads=4, key_dim=2, value_dim=3),
)
MLPS = (MLPConfig(width=8), MoEConfig(experts=4, top_k=1, width=4, aux_weight=0.1))
LAYERS = tuple(LayerConfig(mixer, mlp) for mixer in MIXERS for mlp in (*MLPS, None))
MOST_RANKS = 64
CAPACITY = 48


@dataclass(frozen=True)
class Pipeline:
    plan: Plan
    layout: Layout
    model: TracedModel
    axes: Axes
    buckets: tuple[int, ...] = ()

    def tracer(self, queues: list[Queue] | None = None) -> Tracer:
        return Tracer(
            self.plan,
            self.layout,
            model=self.model,
            axes=self.axes,
            queues=queues,
            buckets=self.buckets,
        )

    def traces(self, queues: list[Queue] | None = None) -> list[list[Operation]]:
        tracer = self.tracer(queues)
        return [tracer.of(rank) for rank in range(self.axes.world_size)]

    def queues(self) -> tuple[Queue, ...]:
        walk = pipeline_walk(self.plan)
        return rank_queues(walk, pp=self.layout.pp, stages=len(self.layout.stages))


@st.composite
def axes_of(draw: st.DrawFn) -> Axes:
    pp = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 8]))
    tp = draw(st.sampled_from([1, 1, 1, 2]))
    most = MOST_RANKS // (pp * tp)
    lanes = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16, 32) if n <= most]))
    return Axes(lanes=lanes, tp=tp, pp=pp)


@st.composite
def layouts(draw: st.DrawFn, pp: int, vpp: int) -> tuple[Layout, DecoderConfig]:
    """A random model in random pieces; embedding, head and depths may be stages of their own."""
    stages = pp * vpp
    depths = draw(st.integers(0, 2))
    layers = draw(st.integers(max(1, stages - 2 - depths), max(3, stages + 2)))
    letters = f"E{'t' * layers}{'m' * depths}L"
    borders = st.lists(
        st.integers(1, len(letters) - 1), min_size=stages - 1, max_size=stages - 1, unique=True
    )
    cuts = [0, *sorted(draw(borders)), len(letters)]
    text = "|".join(letters[start:stop] for start, stop in pairwise(cuts))
    kinds = st.sampled_from(LAYERS)
    drawn = draw(st.lists(kinds, min_size=1, max_size=3))
    config = DecoderConfig(
        vocab_size=16,
        width=4,
        layers=tuple(drawn[number % len(drawn)] for number in range(layers)),
        mtp=tuple(draw(kinds) for _ in range(depths)),
        tied=draw(st.booleans()),
        float32_residual=draw(st.booleans()),
    )
    return parse_layout(text, pp=pp, layers=layers, depths=depths), config


@st.composite
def models(draw: st.DrawFn, config: DecoderConfig, *, heads: bool) -> TracedModel:
    """heads: whether all CP sizes divide the heads."""
    return TracedModel(
        config=config,
        mode=draw(st.sampled_from(["zero3", "zero2", "none"])),
        item=draw(st.sampled_from([2, 4])),
        kept=4,
        attention="heads" if heads else draw(st.sampled_from(["auto", "gather"])),
        scan="heads" if heads else draw(st.sampled_from(["auto", "states"])),
        recompute=draw(st.sampled_from(["none", "blocks"])),
    )


@st.composite
def planned(draw: st.DrawFn) -> Pipeline:
    """A plan of make_plan on random lengths."""
    axes = draw(axes_of())
    vpp = draw(st.sampled_from([1, 1, 2, 3])) if axes.pp > 1 else 1
    layout, config = draw(layouts(axes.pp, vpp))
    heads = draw(st.booleans()) and axes.lanes % 3 != 0
    widest = CAPACITY * min(axes.lanes, 4) // 2
    lengths = st.integers(1, 16) | st.integers(1, widest)
    align = draw(st.sampled_from([1, 4]))
    plan = make_plan(
        draw(st.lists(lengths, min_size=1, max_size=16)),
        lanes=axes.lanes,
        capacity=CAPACITY,
        policy=draw(st.sampled_from(["mixed", "mixed", "dynamic", "balanced", "padded"])),
        profile=draw(st.sampled_from([FREE, CHARGED])),
        cp_sizes="pow2" if heads else draw(st.sampled_from(["pow2", "any"])),
        heads=4 if heads else None,
        align=align,
        pp=axes.pp,
        vpp=vpp,
    )
    buckets = make_buckets(CAPACITY, align=align, count=3) if draw(st.booleans()) else ()
    return Pipeline(plan, layout, draw(models(config, heads=heads)), axes, buckets)


@st.composite
def by_hand(draw: st.DrawFn) -> Pipeline:
    """Any packs on any neighbouring lanes, in any number of rounds, some of them empty."""
    axes = draw(axes_of())
    assume(axes.lanes > 1)
    vpp = draw(st.sampled_from([1, 2])) if axes.pp > 1 else 1
    layout, config = draw(layouts(axes.pp, vpp))
    rounds, lengths = [], []
    for _ in range(draw(st.integers(1, 3)) * (axes.pp if vpp > 1 else 1)):
        packs = {}
        for _ in range(draw(st.integers(0, 4))):
            size = draw(st.integers(1, axes.lanes))
            first = draw(st.integers(0, axes.lanes - size))
            length = draw(st.integers(1, 2 * size))
            packs[size, first] = Pack(
                first, size, (len(lengths),), padded_length(length, size) // size
            )
            lengths.append(length)
        order = sorted(packs, key=lambda key: (-key[0], key[1]))
        rounds.append(Round(tuple(packs[key] for key in order)))
    assume(lengths)
    plan = make_plan(lengths, lanes=axes.lanes, capacity=2048, pp=1, policy="balanced")
    setting = replace(plan.setting, pp=axes.pp, vpp=vpp, cp_sizes=tuple(range(1, axes.lanes + 1)))
    plan = Plan(setting, plan.sequences, tuple(rounds), plan.stats, "by hand")
    return Pipeline(plan, layout, draw(models(config, heads=False)), axes)


SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@pytest.mark.property
@settings(max_examples=examples(80), suppress_health_check=SLOW)
@given(planned())
def test_every_plan_layout_and_order_runs_to_the_end(pipeline: Pipeline) -> None:
    run_traces(pipeline.traces())


@pytest.mark.property
@settings(max_examples=examples(40), suppress_health_check=SLOW)
@given(by_hand())
def test_packs_need_not_be_nested(pipeline: Pipeline) -> None:
    run_traces(pipeline.traces())
