"""The trace against what models issue on gloo ranks, and small traces by hand."""

from dataclasses import replace
from functools import partial

import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.issued import check_composed, check_in_flight, check_steps
from tests.ranks.spine import dense, exact
from tests.ranks.test_composed import few_groups
from tests.ranks.test_exactness import several_packs

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.distributed.collectives import Call
from longshore.distributed.topology import Axes
from longshore.parallel.pipeline.pack_collectives import halo_rows
from longshore.parallel.pipeline.trace import (
    UNKNOWN,
    Operation,
    TracedModel,
    check_issued,
    groups_of,
    trace,
)
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.layout import one_stage, parse_layout
from longshore.plan.order import Action

FORWARD, BACKWARD = partial(Action, "forward", 0), partial(Action, "backward", 0)


def odd_packs() -> Plan:
    """CP sizes 4, 3, 2 and 1; sequences so short that halos come from several lanes."""
    first = Round((Pack(0, 4, (0, 1), 12), Pack(0, 3, (2,), 4), Pack(2, 1, (3,), 5)))
    second = Round((Pack(0, 3, (4, 5), 8), Pack(0, 2, (6,), 4)))
    third = Round((Pack(3, 1, (7,), 6),))
    lengths = [33, 3, 9, 5, 2, 13, 7, 6]
    plan = make_plan(lengths, lanes=4, capacity=64, cp_sizes="any")
    return Plan(plan.setting, plan.sequences, (first, second, third), plan.stats, "by hand")


@pytest.mark.fuzz
def test_a_step_issues_what_its_trace_says(is_fuzz: bool) -> None:
    plain = partial(exact, mode="none")
    blocks = partial(plain, recompute="blocks")
    cases = [
        (deepseek(), several_packs(), blocks()),
        (hybrid(), several_packs(), plain(attention="heads", scan="heads")),
        (hybrid(), odd_packs(), plain(attention="gather", scan="states")),
    ]
    if is_fuzz:
        cases += [
            (dense(4), several_packs(), blocks(attention="heads")),
            (dense(4), several_packs(), plain(attention="gather")),
            (dense(4), odd_packs(), plain()),
            (deepseek(), odd_packs(), exact(mode="zero2")),
            (hybrid(), several_packs(), exact(mode="zero3", recompute="blocks", scan="states")),
            (hybrid(), odd_packs(), blocks()),
        ]
    assert min(run_ranks(4, check_steps, cases)) > 100


@pytest.mark.fuzz
def test_rounds_in_flight_issue_what_the_trace_says_with_fsdp(is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("a minute; in `make fuzz`")
    order = [FORWARD(0), FORWARD(1), BACKWARD(0), FORWARD(2), BACKWARD(1), BACKWARD(2)]
    cases = [
        (config(), odd_packs(), exact(mode=mode, recompute=recompute))
        for config in (hybrid, deepseek)
        for mode in ("zero3", "zero2", "none")
        for recompute in ("none", "blocks")
    ]
    assert min(run_ranks(4, check_in_flight, cases, order, timeout=400.0)) > 500


@pytest.mark.long
@pytest.mark.fuzz
def test_axes_issue_what_the_trace_says_with_fsdp(is_fuzz: bool) -> None:
    """Stages with ends of their own and without, depths on a stage of their own; biases of one TP
    rank, 61 words on 2 ranks, split norms, a mixer that is not split; experts over TP ranks."""
    zero3, zero2, none = (partial(exact, mode=mode) for mode in ("zero3", "zero2", "none"))
    blocks = zero3(recompute="blocks")
    pipelines = [(hybrid(), "Et|tt|m|L", blocks)]
    tensors = [(few_groups(), "", blocks)]
    experts = [(hybrid(experts=8), "", blocks)]
    replicas = [(deepseek(), "", zero2())]
    if is_fuzz:
        pipelines += [
            (hybrid(), "Et|ttmL", zero3()),
            (hybrid(), "E|t|tt|mL", zero2()),
            (deepseek(), "Et|tm|m|L", blocks),
            (deepseek(), "Et|tmmL", none()),
        ]
        every = [
            mode(recompute=recompute)
            for mode in (zero3, zero2, none)
            for recompute in ("none", "blocks")
        ]
        tensors = [
            (config, "", choices)
            for config in (few_groups(), hybrid(), deepseek())
            for choices in every
        ]
        tensors += [(dense(4), "", zero3()), (dense(4, tied=True), "", blocks)]
        experts = [(hybrid(experts=8), "", choices) for choices in every]
        replicas = [
            (config, "", choices) for config in (deepseek(), plain_moe()) for choices in every
        ]
    checks = [
        ({"lanes": 2, "pp": 2}, pipelines),
        ({"lanes": 2, "tp": 2}, tensors),
        ({"lanes": 2, "tp": 2, "ep": 4}, experts),
        ({"lanes": 4, "ep": 2} if is_fuzz else {"lanes": 2, "tp": 2, "ep": 2}, replicas),
    ]
    assert min(run_ranks(4, check_composed, checks, timeout=900.0 if is_fuzz else 120.0)) > 400


@pytest.mark.fuzz
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_all_axes_at_once_issue_what_the_trace_says(is_fuzz: bool, ep: int) -> None:
    if not is_fuzz:
        pytest.skip("8 ranks; in `make fuzz`")
    cases = [
        (hybrid(experts=8), "Et|tt|m|L", exact(mode="zero3", recompute="blocks")),
        (deepseek(), "Et|tmmL", exact(mode="zero2")),
        (deepseek(), "Et|tm|m|L", exact(mode="none", recompute="blocks")),
    ]
    if ep == 1:
        cases.append((few_groups(), "Ett|ttL", exact(mode="zero3")))
    checks = [({"lanes": 2, "tp": 2, "pp": 2, "ep": ep}, cases)]
    assert min(run_ranks(8, check_composed, checks, timeout=400.0)) > 200


def plain_moe() -> DecoderConfig:
    """Nothing after the experts that saves a tensor: no shared expert, no balance loss."""
    experts = MoEConfig(experts=4, top_k=2, width=8)
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=4)
    layers = (LayerConfig(attention, experts), LayerConfig(None, experts))
    return replace(dense(4), layers=layers, mtp=layers[:1])


def small() -> tuple[Plan, TracedModel]:
    """One sequence of 10 tokens at CP size 2 on 2 lanes of two pipeline ranks; 2 layers."""
    plan = make_plan([10], lanes=2, capacity=8, pp=2)
    assert plan.rounds == (Round((Pack(0, 2, (0,), 6),)),)
    attention = AttentionConfig(heads=2, kv_heads=2, head_dim=4)
    layer = LayerConfig(attention, MLPConfig(width=8))
    config = DecoderConfig(vocab_size=16, width=4, layers=(layer, layer))
    model = TracedModel(config=config, mode="none", item=8, kept=8, attention="gather")
    return plan, model


def text(operations: list[Operation]) -> list[str]:
    return [f"{o.kind} {o.group} {o.bytes}" for o in operations if "fsdp" not in o.kind]


def test_a_pipeline_by_hand() -> None:
    plan, model = small()
    layout = parse_layout("Et|tL", pp=2, layers=2)
    axes = Axes(lanes=2, pp=2)
    first, last = (trace(plan, layout, rank, model=model, axes=axes) for rank in (1, 3))
    kv, rows = 6 * 2 * 2 * 4 * 8, 6 * 4 * 8
    gather, reduce = f"gather (0, 1) {kv}", f"reduce_scatter (0, 1) {kv}"
    assert text(first) == [gather, f"send (1, 3) {rows}", f"receive (3, 1) {rows}", gather, reduce]
    gather, reduce = f"gather (2, 3) {kv}", f"reduce_scatter (2, 3) {kv}"
    assert text(last) == [f"receive (1, 3) {rows}", gather, gather, reduce, f"send (3, 1) {rows}"]
    again = trace(plan, layout, 1, model=replace(model, recompute="blocks"), axes=axes)
    assert len(text(again)) == len(text(first)) + 1


def test_tp_ranks_by_hand() -> None:
    """Rank 1 of 2 lanes × tp 2: 3 of the lane's 6 rows, 1 of 2 heads, shared with rank 3."""
    plan, model = small()
    plan = make_plan([10], lanes=2, capacity=8, tp=2)
    layout = one_stage(layers=2)
    operations = trace(plan, layout, 1, model=model, axes=Axes(lanes=2, tp=2))
    rows, kv, ends = 3 * 4 * 8, 6 * 2 * 4 * 8, 2 * 6 * 8
    gather, reduce = f"gather (0, 1) {rows}", f"reduce_scatter (0, 1) {rows}"
    mixer = [gather, f"gather (1, 3) {kv}", reduce]
    head = [gather, f"gather (0, 1) {ends}"]
    back = [gather, f"gather (1, 3) {kv}", f"reduce_scatter (1, 3) {kv}", reduce]
    layer, layer_back = [*mixer, gather, reduce], [gather, reduce, *back]
    assert text(operations) == [reduce, *layer * 2, *head, reduce, *layer_back * 2, gather]


def test_parameters_of_tp_ranks_by_hand() -> None:
    """The first rank has the output bias of 4; of 15 words the first has 7, the other 8."""
    plan, model = small()
    plan = make_plan([10], lanes=2, capacity=8, tp=2)
    attention = AttentionConfig(heads=2, kv_heads=2, head_dim=4, output_bias=True)
    layer = LayerConfig(attention, None)
    config = replace(model.config, layers=(layer,), vocab_size=15)
    layout, axes = one_stage(layers=1), Axes(lanes=2, tp=2)
    for rank, bias, words in ((0, 4, 7), (1, 0, 8)):
        changed = replace(model, config=config)
        operations = trace(plan, layout, rank, model=changed, axes=axes)
        sums = [(o.group, o.bytes) for o in operations if o.kind == "fsdp all_reduce"]
        group = (rank, rank + 2)
        block, ends = 4 + 4 * 4 * 4 + bias, 4 + 2 * words * 4
        assert sums == [(group, block * 8), (group, ends * 8)]


@pytest.mark.parametrize("axes", [Axes(lanes=3, tp=2, pp=2, ep=3), Axes(lanes=4, tp=2, ep=8)])
def test_groups_are_those_of_the_topology(axes: Axes) -> None:
    for over in ("lanes", "tp", "ep", "expert_replicas"):
        for block in axes.blocks(over):
            assert {groups_of(axes, rank)[over] for rank in block} == {tuple(block)}


def test_rows_of_experts_are_compared_without_their_bytes() -> None:
    plan, model = small()
    plan = make_plan([10], lanes=2, capacity=8, ep=2)
    layers = (LayerConfig(None, MoEConfig(experts=4, top_k=2, width=8)),)
    model = replace(model, config=replace(model.config, layers=layers))
    expected = trace(plan, one_stage(layers=1), 0, model=model, axes=Axes(lanes=2, ep=2))
    assert [o.bytes for o in expected if "fsdp" not in o.kind] == [16, *[UNKNOWN] * 6]
    issued = [Call(o.kind, abs(o.bytes), o.group) for o in expected if "fsdp" not in o.kind]
    check_issued(expected, issued)
    with pytest.raises(
        ValueError, match=r"operation 3 of 7 .* gather .*; the trace has all_to_all"
    ):
        check_issued(expected, [*issued[:3], replace(issued[3], name="gather"), *issued[4:]])
    with pytest.raises(ValueError, match=r"operation 6 of 7 .* the trace has .* unknown bytes: "):
        check_issued(expected, issued[:-1])


def test_a_depth_sends_one_more_stream_and_float32_is_wider() -> None:
    plan, model = small()
    config = replace(model.config, mtp=model.config.layers[:1], float32_residual=True)
    model = replace(model, config=config, item=2)
    layout = parse_layout("Et|tmL", pp=2, layers=2, depths=1)
    axes = Axes(lanes=2, pp=2)
    sent = [o for o in trace(plan, layout, 0, model=model, axes=axes) if o.kind == "send"]
    assert [o.bytes for o in sent] == [6 * 4 * 4]
    layout = parse_layout("Ettm|L", pp=2, layers=2, depths=1)
    sent = [o for o in trace(plan, layout, 0, model=model, axes=axes) if o.kind == "send"]
    assert [o.bytes for o in sent] == [2 * 6 * 4 * 2]


def test_rows_before_chunks_by_hand() -> None:
    # Chunks of 4 rows on lanes 0 1 1 0: chunk 1 reads from lane 0, chunk 3 from lane 1.
    assert halo_rows(16, 3, 2) == (3, 3)
    # Chunks of 1 row on lanes 0 1 2 2 1 0, 3 rows before each: those of other lanes.
    assert halo_rows(6, 3, 3) == (3, 3, 4)


def test_a_difference_is_named() -> None:
    plan, model = small()
    layout = parse_layout("Et|tL", pp=2, layers=2)
    expected = trace(plan, layout, 0, model=model, axes=Axes(lanes=2, pp=2))
    issued = [Call(o.kind, o.bytes, o.group) for o in expected if "fsdp" not in o.kind]
    check_issued(expected, issued)
    with pytest.raises(ValueError, match=r"operation 4 of 5 .* nothing more; .* reduce_scatter"):
        check_issued(expected, issued[:-1])
    with pytest.raises(ValueError, match=r"operation 5 of 5 .* gather .*; the trace has nothing"):
        check_issued(expected, [*issued, issued[0]])
    with pytest.raises(ValueError, match=r"operation 0 of 5 .* 767 bytes; .* 768 bytes: forward"):
        check_issued(expected, [replace(issued[0], bytes=767), *issued[1:]])
    with pytest.raises(ValueError, match=r"operation 1 of 5 .*receive .*; the trace has send"):
        check_issued(expected, [issued[0], issued[2], issued[1], *issued[3:]])


def test_what_does_not_fit_is_refused() -> None:
    plan, model = small()
    layout = parse_layout("Et|tL", pp=2, layers=2)
    with pytest.raises(ValueError, match="the plan is for 2 lanes, pp 2 and vpp 1, but"):
        trace(plan, layout, 0, model=model, axes=Axes(lanes=4, pp=2))

    with pytest.raises(ValueError, match=r"align is 1, so that tp 2 does not divide .*; plan with"):
        trace(plan, layout, 0, model=model, axes=Axes(lanes=2, tp=2, pp=2))
    with pytest.raises(ValueError, match="the model has no experts"):
        trace(plan, layout, 0, model=model, axes=Axes(lanes=2, pp=2, ep=2))

    class OwnConfig(AttentionConfig):
        pass

    own = LayerConfig(OwnConfig(heads=2, kv_heads=2, head_dim=4), None)
    config = replace(model.config, layers=(own, own))
    with pytest.raises(ValueError, match="which collectives OwnConfig issues; known are"):
        trace(plan, layout, 0, model=replace(model, config=config), axes=Axes(lanes=2, pp=2))
