"""Equal digests, the same run: shapes, groups and order, written out for every rank."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.samples import CHARGED, TOKENS, examples

from longshore.plan import Plan, make_plan
from longshore.plan.layout import parse_layout
from longshore.plan.shapes import lane_packs, lane_tokens
from longshore.plan.simulate import pipeline_walk

LAYOUTS = {
    (1, 1): [None],
    (2, 1): [None, "Et|tttL", "Ett|ttL"],
    (2, 2): [None, "Et|t|t|tL", "E|tt|t|tL"],
}


def runs_as(plan: Plan) -> list[Any]:
    """What each rank does: its groups, its layers, its tensors in each round, and their order."""
    setting = plan.setting
    lengths = [sequence.length for sequence in plan.sequences]
    stage_ranks = setting.lanes * setting.tp
    events = [*pipeline_walk(plan).events()] if setting.pp > 1 else []
    order = sorted(events, key=lambda event: (event.start, event.end, event.rank))
    ranks: list[Any] = [[(event.kind, event.stage, event.round) for event in order]]
    for rank in range(stage_ranks * setting.pp):
        pp_rank, within = divmod(rank, stage_ranks)
        lane = within // setting.tp
        # The experts that it has, the ranks of its lane, of its CP groups, and of its pipeline.
        groups = (setting.ep, within // setting.ep, setting.tp, setting.cp_sizes, setting.pp)
        rounds = []
        for number in range(len(plan.rounds)):
            packs = [
                (pack.first_lane, pack.cp_size, [lengths[i] for i in pack.sequences])
                for pack in lane_packs(plan, number, lane)
            ]
            rows = lane_tokens(plan, number, lane) / setting.tp
            rounds.append((rows, packs))
        stages = setting.layout.split("|")[pp_rank :: setting.pp]
        ranks.append((groups, stages, setting.vpp, setting.sync, rounds))
    return ranks


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "lanes": st.sampled_from([2, 4]),
    "capacity": st.sampled_from([64, 80]),
    "align": st.sampled_from([1, 2, 4, 16]),
    "buckets": st.sampled_from([(), (32,), (16, 48)]),
    "tp": st.sampled_from([1, 2, 4]),
    "ep": st.sampled_from([1, 2]),
    "sync": st.sampled_from(["round", "step"]),
    "max_cp": st.sampled_from([None, 2]),
    "policy": st.sampled_from(["static", "mixed"]),
    "profile": st.sampled_from([TOKENS, replace(CHARGED, message=0.5)]),
    "pipeline": st.sampled_from([(pipe, text) for pipe in LAYOUTS for text in LAYOUTS[pipe]]),
}


def planned(lengths: list[int], asked: dict[str, Any]) -> Plan:
    others = {name: value for name, value in asked.items() if name != "pipeline"}
    (pp, vpp), text = asked["pipeline"]
    layout = text and parse_layout(text, pp=pp, layers=4)
    if pp > 1 or asked["ep"] > 1:
        others["sync"] = "round"
    return make_plan(lengths, **others, pp=pp, vpp=vpp, layout=layout)


@settings(max_examples=examples(33, fuzz=5_000), deadline=None)
@given(st.sampled_from([*FIELDS]), st.data(), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_settings_that_run_differently_have_different_digests(
    name: str, data: st.DataObject, lengths: list[int]
):
    """Two settings that differ in one place."""
    one = data.draw(st.fixed_dictionaries(FIELDS))
    other = data.draw(FIELDS[name].filter(lambda value: value != one[name]))
    plans = [planned(lengths, asked) for asked in (one, one | {name: other})]
    same = runs_as(plans[0]) == runs_as(plans[1])
    assert same or plans[0].digest != plans[1].digest


def test_each_of_them_counts_alone():
    base: dict[str, Any] = {"lanes": 4, "capacity": 64, "align": 4, "policy": "static", "ep": 2}
    changes: list[dict[str, Any]] = [
        *({}, {"tp": 2}, {"tp": 4}, {"ep": 1}, {"ep": 4}, {"buckets": (32,)}, {"buckets": (64,)}),
        {"buckets": (16, 32)},
    ]
    plans = [make_plan([30, 20], **{**base, **change}) for change in changes]
    assert all(plan.rounds == plans[0].rounds for plan in plans)
    assert len({plan.digest for plan in plans}) == len(plans)
    again = make_plan([30, 20], **base, buckets=[64, 32])
    assert again.digest == plans[5].digest, "the capacity is always a bucket"
