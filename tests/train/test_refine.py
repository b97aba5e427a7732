"""When measured times correct a run's profile; tests/ranks/test_refine.py has it on ranks."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from longshore.data.source import BatchSize, MemorySource, TokenizedSample
from longshore.data.steps import IndexedSteps, Loader
from longshore.plan import make_plan
from longshore.plan.cost import CostProfile
from longshore.plan.refine import predicted_seconds, round_parts
from longshore.train.refine import Refiner, refining

TRUE = CostProfile(linear=1.0, quadratic=0.1, gather=(0.1, 0.1), node=8, pack=4.0, round=2.0)
WRONG = replace(TRUE, quadratic=0.01)
SPREAD = np.random.default_rng(3).integers(1, 60, 48).tolist()


def true_seconds(plan):
    return [predicted_seconds(part.amounts, TRUE) for part in round_parts(plan)]


def loader_of(refiner, *, prefetch=2):
    samples = (
        TokenizedSample(i, np.arange(n, dtype=np.int32), np.ones(n, dtype=np.bool_))
        for i, n in enumerate(SPREAD)
    )
    steps = IndexedSteps(
        MemorySource(samples),
        planner=lambda sequences: make_plan(
            sequences, lanes=1, capacity=64, policy="static", profile=refiner.profile
        ),
        batch=BatchSize("sequences", 12),
        seed=1,
        before_plan=refiner.before_plan,
    )
    return Loader(steps, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [1, 4])
def test_times_that_are_read_late_as_on_a_gpu_come_in_time(prefetch):
    """A step is reported after the next was taken; the profile switches at steps known before."""
    refiner = Refiner(WRONG, prefetch=prefetch, lane=0)
    profiles, news, waiting = {}, [], None
    with loader_of(refiner, prefetch=prefetch) as loader:
        for number in range(1, 44):
            step = next(loader)
            profiles[number] = step.plan.setting.profile
            if waiting is not None:
                refiner.measured(number - 1, waiting.plan, true_seconds(waiting.plan))
                news += refiner.news(number - 1)
            waiting = step
    first, second = 16 + prefetch + 3, 32 + prefetch + 3
    assert [n for n in range(2, 44) if profiles[n] != profiles[n - 1]] == [first, second]
    assert [(each.step, each.window) for each in news] == [(first, (5, 16)), (second, (17, 32))]
    rounds = [each.refit.rounds + each.refit.left_out for each in news]
    assert rounds[1] >= 16, "no step of the window is missing"
    errors = [each.refit.errors[1:] for each in news]
    assert errors[0][0] > 0.3 > 0.05 > errors[1][1]


def test_times_that_a_rank_does_not_have_are_left_out():
    refiner = Refiner(WRONG, prefetch=1, lane=0)
    for number in range(1, 24):
        refiner.before_plan(number, None)
    assert refiner.profile == WRONG
    assert refiner.news(99) == []


def test_a_skipped_step_has_no_times():
    refiner = Refiner(WRONG, prefetch=1, lane=0)
    plan = make_plan(SPREAD, lanes=1, capacity=64, policy="static", profile=WRONG)
    for number in range(1, 24):
        refiner.before_plan(number, None)
        refiner.measured(number, plan, () if number % 2 else true_seconds(plan))
    (news,) = refiner.news(99)
    assert news.refit.rounds + news.refit.left_out == 6 * len(plan.rounds)


def test_what_is_recorded_and_shown(tmp_path):
    lines, refiner = [], Refiner(WRONG, prefetch=1, lane=0)
    (tmp_path / "refine.jsonl").write_text('{"step": 2}\n{"step": 30}\n', encoding="utf-8")
    first = SimpleNamespace(rank=0)
    take = refining(tmp_path, refiner, first, after=2, note=lines.append)
    rng = np.random.default_rng(0)
    for number in range(1, 22):
        refiner.before_plan(number, None)
        lengths = rng.integers(1, 60, 12).tolist()
        plan = make_plan(lengths, lanes=1, capacity=64, policy="static", profile=refiner.profile)
        metrics = SimpleNamespace(step=number)
        step = SimpleNamespace(plan=plan)
        take(SimpleNamespace(metrics=metrics, step=step, rounds_s=tuple(true_seconds(plan))))
    texts = (tmp_path / "refine.jsonl").read_text(encoding="utf-8").splitlines()
    kept, line = map(json.loads, texts)
    assert kept == {"step": 2}, "what a resumed run did before"
    assert (line["step"], line["window"], line["changed"]) == (20, [5, 16], True)
    assert line["factors"]["quadratic"] > 3 * line["factors"]["linear"]
    assert [kind for kind, *_ in line["kinds"]] == [1]
    (shown,) = lines
    assert shown.startswith("step 20: the cost profile is refined by steps 5 to 16: linear × ")
