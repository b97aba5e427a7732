"""The checker: random plans, layouts and orders run to the end, and broken queues do not."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.plan.samples import CHARGED, FREE, examples

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig, has_experts
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.distributed.topology import Axes
from longshore.model.interface import PackStep
from longshore.parallel.pipeline import pack_collectives
from longshore.parallel.pipeline.checker import DeadlockError, MismatchError, run_traces
from longshore.parallel.pipeline.trace import (
    UNKNOWN,
    Operation,
    TracedModel,
    Tracer,
    groups_of,
)
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.layout import Layout, parse_layout
from longshore.plan.order import Action, make_order
from longshore.plan.pipeline_queue import Queue, message_of, rank_queues
from longshore.plan.shapes import make_buckets, padded_length
from longshore.plan.simulate import pipeline_walk

MIXERS = (
    AttentionConfig(heads=8, kv_heads=4, head_dim=2),
    MLAConfig(heads=4, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=3),
    Mamba2Config(heads=8, head_dim=2, state_dim=3, groups=4, norm_groups=1, bias=True),
    DeltaNetConfig(key_heads=4, value_heads=4, key_dim=2, value_dim=3),
)
MLPS = (
    MLPConfig(width=8),
    MoEConfig(experts=8, top_k=1, width=4, aux_weight=0.1),
    MoEConfig(experts=8, top_k=2, width=4),
)
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
    tp = draw(st.sampled_from([1, 1, 2, 2, 4]))
    most = MOST_RANKS // (pp * tp)
    lanes = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16, 32) if n <= most]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if lanes * tp % n == 0]))
    return Axes(lanes=lanes, tp=tp, pp=pp, ep=ep)


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
    axes = axes if has_experts(config) else replace(axes, ep=1)
    heads = draw(st.booleans()) and axes.lanes % 3 != 0
    largest = min(axes.lanes, 4 // axes.tp if heads else 4)
    widest = CAPACITY * largest // 2
    lengths = st.integers(1, 16) | st.integers(1, widest)
    align = draw(st.sampled_from([axes.tp, 4]))
    plan = make_plan(
        draw(st.lists(lengths, min_size=1, max_size=12)),
        lanes=axes.lanes,
        capacity=CAPACITY,
        policy=draw(st.sampled_from(["mixed", "mixed", "dynamic", "balanced", "padded"])),
        profile=draw(st.sampled_from([FREE, CHARGED])),
        cp_sizes="pow2" if heads else draw(st.sampled_from(["pow2", "any"])),
        heads=4 // axes.tp if heads else None,
        align=align,
        tp=axes.tp,
        ep=axes.ep,
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
    axes = axes if has_experts(config) else replace(axes, ep=1)
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
    plan = make_plan(lengths, lanes=axes.lanes, capacity=2048, policy="balanced", tp=axes.tp)
    setting = replace(plan.setting, pp=axes.pp, vpp=vpp, cp_sizes=tuple(range(1, axes.lanes + 1)))
    plan = Plan(setting, plan.sequences, tuple(rounds), plan.stats, "by hand")
    return Pipeline(plan, layout, draw(models(config, heads=False)), axes)


SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


@pytest.mark.property
@settings(max_examples=examples(40), suppress_health_check=SLOW)
@given(planned())
def test_every_plan_layout_and_order_runs_to_the_end(pipeline: Pipeline) -> None:
    run_traces(pipeline.traces())


@pytest.mark.property
@settings(max_examples=examples(40), suppress_health_check=SLOW)
@given(by_hand())
def test_packs_need_not_be_nested(pipeline: Pipeline) -> None:
    run_traces(pipeline.traces())


def fixed(
    *, pp: int, vpp: int = 1, lanes: int = 2, tp: int = 1, ep: int = 1, sharing: bool = True
) -> Pipeline:
    """Attention in every stage; with `sharing` each round has a pack of all lanes and of two."""
    lengths = [40, 30, 16, 12] * pp if sharing else [8] * 8 * lanes
    plan = make_plan(lengths, lanes=lanes, capacity=24, pp=pp, vpp=vpp, tp=tp, profile=CHARGED)
    stages = pp * vpp
    text = "|".join(["Et", *["t"] * (stages - 2), "tL"]) if stages > 1 else "EttL"
    layers = max(stages, 2)
    layer = LayerConfig(MIXERS[0], MLPS[0] if ep == 1 else MLPS[1])
    config = DecoderConfig(vocab_size=16, width=4, layers=(layer,) * layers)
    model = TracedModel(config=config, mode="none", item=4, kept=4, attention="gather")
    layout = parse_layout(text, pp=pp, layers=layers)
    return Pipeline(plan, layout, model, Axes(lanes=lanes, tp=tp, pp=pp, ep=ep))


BROKEN = (DeadlockError, MismatchError)


def one_at_a_time(pipeline: Pipeline) -> list[Queue]:
    """Receives just before they are needed, sends right after their action, each by itself."""
    layout, stages = pipeline.layout, len(pipeline.layout.stages)
    order = make_order(len(pipeline.plan.rounds), pp=layout.pp, vpp=layout.vpp)
    messages = [
        message
        for actions in order
        for action in actions
        if (message := message_of(action, pp=layout.pp, stages=stages)) is not None
    ]
    needed = {message.needed_by: message for message in messages}
    sent = {message.action: message for message in messages}
    return [
        tuple(
            entry
            for action in actions
            for entry in ((needed.get(action),), action, (sent.get(action),))
            if entry != (None,)
        )
        for actions in order
    ]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_messages_one_at_a_time_deadlock(pp: int, vpp: int) -> None:
    pipeline = fixed(pp=pp, vpp=vpp, sharing=False)
    assert len(pipeline.plan.rounds) >= 2
    run_traces(pipeline.traces())
    with pytest.raises(DeadlockError, match=r"ranks wait forever\nrank 0 at its operation \d+: "):
        run_traces(pipeline.traces(one_at_a_time(pipeline)))


@pytest.mark.parametrize("vpp", [1, 2])
def test_a_swapped_order_on_one_rank_is_noticed(vpp: int) -> None:
    """Of two entries with messages between the same two ranks, in one direction."""
    pipeline = fixed(pp=2, vpp=vpp)
    queues, swapped = list(pipeline.queues()), 0
    for rank, queue in enumerate(queues):
        by_pair = defaultdict(list)
        for place, entry in enumerate(queue):
            if not isinstance(entry, Action):
                for message in entry:
                    by_pair[message.source, message.target].append(place)
        for one, other in (pair for places in by_pair.values() for pair in pairwise(places)):
            if one == other:
                continue
            changed = list(queue)
            changed[one], changed[other] = changed[other], changed[one]
            broken = [*queues[:rank], tuple(changed), *queues[rank + 1 :]]
            with pytest.raises(BROKEN):
                run_traces(pipeline.traces(broken))
            swapped += 1
    assert swapped > 4


def swap(operations: list[Operation], one: int, other: int) -> list[Operation]:
    changed = list(operations)
    changed[one], changed[other] = changed[other], changed[one]
    return changed


def shared_by_four_and_two() -> Pipeline:
    """Lanes 0 and 1 share a pack with 2 and 3, and one of their own."""
    packs = (Pack(0, 4, (0,), 4), Pack(0, 2, (1,), 4), Pack(2, 2, (2,), 4))
    plan = make_plan([15, 7, 8], lanes=4, capacity=64)
    plan = Plan(plan.setting, plan.sequences, (Round(packs),), plan.stats, "by hand")
    pipeline = fixed(pp=1, lanes=4)
    return replace(pipeline, plan=plan)


def test_the_order_of_packs_on_one_lane_matters() -> None:
    pipeline = shared_by_four_and_two()
    traces = pipeline.traces()
    run_traces(traces)
    assert [operation.group for operation in traces[0][:2]] == [(0, 1, 2, 3), (0, 1)]
    with pytest.raises(DeadlockError) as error:
        run_traces([swap(traces[0], 0, 1), *traces[1:]])
    lines = str(error.value).splitlines()
    assert lines[0] == "4 of 4 ranks wait forever"
    assert lines[1].startswith("rank 0 at its operation 0: gather (0, 1), ")
    assert lines[2].startswith("rank 1 at its operation 0: gather (0, 1, 2, 3), ")


@pytest.mark.property
@settings(max_examples=examples(15, fuzz=500), suppress_health_check=SLOW)
@given(st.data())
def test_any_two_operations_of_one_group_swapped_are_noticed(data: st.DataObject) -> None:
    """Also where kind and bytes are equal: a forward's gather is not a backward's."""
    traces = mixed_traces(data.draw(st.sampled_from([1, 2])))
    rank = data.draw(st.integers(0, len(traces) - 1))
    mine = traces[rank]
    one = data.draw(st.integers(0, len(mine) - 1))
    same = [n for n, operation in enumerate(mine) if operation.group == mine[one].group]
    other = data.draw(st.sampled_from(same))
    assume(other != one)
    changed = swap(mine, one, other)
    # The places keep their batches.
    for place in (one, other):
        changed[place] = changed[place]._replace(batch=mine[place].batch)
    with pytest.raises(BROKEN):
        run_traces([*traces[:rank], changed, *traces[rank + 1 :]])


@lru_cache
def mixed_traces(vpp: int) -> list[list[Operation]]:
    return fixed(pp=2, vpp=vpp, lanes=4).traces()


@lru_cache
def grid_traces(ep: int) -> tuple[Axes, list[list[Operation]]]:
    """4 lanes × tp 2, with packs of all lanes and of two; ep 4 is that of two lanes."""
    pipeline = fixed(pp=1, lanes=4, tp=2, ep=ep)
    pipeline = replace(
        pipeline, plan=replace(shared_by_four_and_two().plan, setting=pipeline.plan.setting)
    )
    traces = pipeline.traces()
    run_traces(traces)
    return pipeline.axes, traces


@pytest.mark.property
@settings(max_examples=examples(30, fuzz=1000), suppress_health_check=SLOW)
@given(st.data(), st.sampled_from([("tp", 1), ("tp", 4), ("ep", 4), ("ep", 8)]))
def test_a_tp_or_ep_collective_swapped_with_one_of_a_pack_is_noticed(
    data: st.DataObject, case: tuple[str, int]
) -> None:
    """Wherever two operations change places that another rank issues, too.

    Neighbours whose groups share only this rank may change places: that is a legal order, which
    only the comparison with the trace notices.
    """
    over, ep = case
    axes, traces = grid_traces(ep)
    rank = data.draw(st.integers(0, len(traces) - 1))
    groups, mine = groups_of(axes, rank), traces[rank]
    packs = [n for n, o in enumerate(mine) if "fsdp" not in o.kind and is_of_pack(o, groups)]
    rows = [n for n, o in enumerate(mine) if o.group == groups[over]]
    one, other = sorted((data.draw(st.sampled_from(packs)), data.draw(st.sampled_from(rows))))
    changed = [*traces[:rank], swap(mine, one, other), *traces[rank + 1 :]]
    first, *between, last = (set(operation.group) for operation in mine[one : other + 1])
    if any(len(first & group) > 1 or len(last & group) > 1 for group in between) or (
        len(first & last) > 1
    ):
        with pytest.raises(BROKEN):
            run_traces(changed)
    elif not between:
        run_traces(changed)


def is_of_pack(operation: Operation, groups: dict) -> bool:
    return set(operation.group) <= set(groups["lanes"]) and len(operation.group) > 1


def one_gather_ahead(cp_sizes: list[int]) -> list[PackStep]:
    """What model/interface.py warns of: in backward, too, the next gather only before it is due."""
    shared = [place for place, size in enumerate(cp_sizes) if size > 1]
    steps = [PackStep("gather", place) for place in shared[:1]]
    for number, place in enumerate(shared):
        steps += [PackStep("gather", ahead) for ahead in shared[number + 1 : number + 2]]
        steps += [PackStep("attend", place), PackStep("reduce", place)]
    return steps


def test_an_order_that_depends_on_the_lane_deadlocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lane 1 has packs of sizes 4, 3 and 2, lane 0 none of size 3."""
    packs = (Pack(0, 4, (0,), 4), Pack(1, 3, (1,), 4), Pack(0, 2, (2,), 4))
    plan = make_plan([15, 12, 8], lanes=4, capacity=64, cp_sizes="any")
    plan = Plan(plan.setting, plan.sequences, (Round(packs),), plan.stats, "by hand")
    pipeline = replace(fixed(pp=1, lanes=4), plan=plan)
    run_traces(pipeline.traces())
    monkeypatch.setattr(pack_collectives, "backward_steps", one_gather_ahead)
    with pytest.raises(DeadlockError, match=r"(?s)rank 0 .*: gather \(0, 1\).*rank 1 .*: reduce_"):
        run_traces(pipeline.traces())


def test_bytes_that_differ_are_named() -> None:
    traces = fixed(pp=2, lanes=1, sharing=False).traces()
    run_traces(traces)
    short = [traces[0][0]._replace(bytes=7), *traces[0][1:]]
    with pytest.raises(MismatchError, match=r"ranks \d and \d meet .* 7 bytes"):
        run_traces([short, traces[1]])


def test_lanes_that_do_not_add_up_are_named() -> None:
    traces = shared_by_four_and_two().traces()
    short = [traces[3][0]._replace(bytes=7), *traces[3][1:]]
    with pytest.raises(MismatchError, match=r"receive [\d,]+ bytes together, not [\d,]+"):
        run_traces([*traces[:3], short])


def test_a_missing_operation_is_a_deadlock() -> None:
    traces = shared_by_four_and_two().traces()
    with pytest.raises(DeadlockError, match=r"^3 of 4 ranks wait forever"):
        run_traces([*traces[:3], traces[3][:-1]])


def test_unknown_bytes_are_not_compared_but_their_place_is() -> None:
    _, traces = grid_traces(8)
    assert sum(operation.total == UNKNOWN for operation in traces[0]) > 4
    place = next(n for n, o in enumerate(traces[5]) if o.total == UNKNOWN)
    assert "unknown bytes" in str(traces[5][place])
    moved = traces[5][place]._replace(what="elsewhere")
    with pytest.raises(MismatchError, match=r"ranks \d and \d meet .* unknown bytes: elsewhere"):
        run_traces([*traces[:5], [*traces[5][:place], moved, *traces[5][place + 1 :]], *traces[6:]])
