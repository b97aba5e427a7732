"""Refines the cost profile while a run trains: measured times of rounds correct it between steps.

In: each step's plan and what its rounds took on this rank. Out: the profile to plan a step with,
the same bits on all ranks.

Three threads meet here. The training loop reports a step's times, which are read from the device
anyway. The loader's thread, before it plans a step, takes the largest over the lanes of the times
of an earlier step, over its own process groups, and corrects the profile after each window of
EVERY steps. The thread that writes a checkpoint does the same with the times so far.

Which step that is follows from numbers alone. With data.prefetch 2, step 21 may be planned while
step 18 runs, of which the loop has reported step 16: so times of step 16 correct the profile from
step 21 on, 2 + 3 steps later, and no rank ever waits for times.

    step 1 … 16   planned with the run's profile, measured (the first 4 steps are left out)
    step 21       the first that is planned with the profile corrected by steps 5 … 16
    step 37       the first with the next correction, by steps 17 … 32
"""

import json
import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from longshore.distributed.collectives import agreed, max_over, sum_over
from longshore.distributed.topology import Groups, Topology
from longshore.plan.cost import CostProfile, parse_profile
from longshore.plan.refine import (
    MOST_ROUNDS,
    PARTS,
    UNCORRECTED,
    Correction,
    ObservedRound,
    Refit,
    coefficients,
    refit,
    round_parts,
)
from longshore.plan.types import Plan
from longshore.train.record import cut_steps
from longshore.train.step import StepReport
from longshore.train.supervision import writing

EVERY = 16
"""Steps of a window."""
WARMUP = 4
"""Steps at the beginning of a run that are left out."""
STATE = "refine"
"""The key of the saved state."""
UNKNOWN = 1 << 50
"""Nanoseconds that stand for a time that a rank does not have."""


@dataclass(frozen=True, slots=True)
class Refinement:
    """What a window of steps said about the profile."""

    step: int
    """The first step that is planned with it."""
    window: tuple[int, int]
    """The first and the last step whose times it follows from."""
    refit: Refit


Measured = tuple[Plan, tuple[float, ...]]
"""A step's plan, and the seconds of its rounds on this rank; () for a skipped step."""
Window = dict[int, tuple[ObservedRound, ...]]
"""Rounds by step."""


class Refiner:
    """The correction of one run's profile, on one rank.

    base: the profile that the run began with. prefetch: of the loader. lane: of this rank.
    """

    def __init__(
        self, base: CostProfile, *, prefetch: int, lane: int, pp: int = 1, every: int = EVERY
    ) -> None:
        self.base = base
        self.delay = prefetch + 3
        self.every = every
        self._lane, self._pp = lane, pp
        self._lock = threading.Lock()
        self._local: dict[int, Measured] = {}
        self._observed: Window = {}
        self._corrections = [(1, UNCORRECTED)]
        self._window = 0  # the last step of the last window that was fitted
        self._resumed: tuple[int, int, Window] = (0, 0, {})
        """The step that the run resumed after, the last step of the last window that corrects the
        next step's profile, and the rounds measured after that window."""
        self._news: list[Refinement] = []

    @property
    def profile(self) -> CostProfile:
        """The profile of the step that is planned now; for the loader's thread."""
        return self._corrections[-1][1].applied(self.base)

    def measured(self, step: int, plan: Plan, seconds: Seq[float]) -> None:
        """For the training loop: this rank's seconds of each round; () for a skipped step."""
        with self._lock:
            self._local[step] = (plan, tuple(seconds))
            oldest = step - self.every - self.delay
            self._local = {s: kept for s, kept in self._local.items() if s >= oldest}

    def news(self, step: int) -> list[Refinement]:
        """For the training loop: what is new of the steps up to this one."""
        with self._lock:
            due = [each for each in self._news if each.step <= step]
            self._news = [each for each in self._news if each.step > step]
        return due

    def before_plan(self, step: int, groups: Groups | None) -> None:
        """For the loader's thread, before it plans a step; all ranks call it together."""
        last = step - self.delay
        if last > self._resumed[0]:
            with self._lock:
                local = {last: self._local.get(last)}
            self._observed |= self._over_lanes(local, groups)
        while self._window + self.every + self.delay <= step:
            with _agreed(groups):
                self._fit(step)

    def _fit(self, step: int) -> None:
        first, self._window = self._window + 1, self._window + self.every
        used = range(max(first, WARMUP + 1), self._window + 1)
        rounds = [each for s in used for each in self._observed.get(s, ())]
        self._observed = {s: kept for s, kept in self._observed.items() if s > self._window}
        fitted = refit(rounds, self.base, self._corrections[-1][1])
        if fitted is None:
            return
        with self._lock:
            if fitted.is_changed:
                self._corrections.append((step, fitted.correction))
            self._news.append(Refinement(step, (used[0], used[-1]), fitted))

    def _over_lanes(self, times: Mapping[int, Measured | None], groups: Groups | None) -> Window:
        """The rounds of these steps: of the lanes that wait for each other, the slowest counts.

        A lane's time is the mean over its pipeline ranks, as in the profile. What a round consists
        of is computed here, not in the training loop: in large plans that takes milliseconds.
        """
        with _agreed(groups):
            parts, mine = {}, []
            for step, local in times.items():
                row = [0] * MOST_ROUNDS if local else [UNKNOWN] * MOST_ROUNDS
                if local and local[1]:
                    plan, seconds = local
                    parts[step] = tuple(round_parts(plan))
                    for number, part in enumerate(parts[step]):
                        if self._lane in part.lanes:
                            row[number] = round(seconds[part.round] * 1e9)
                mine.append(row)
            rows = torch.tensor(mine, dtype=torch.int64)
        if groups is not None:
            max_over(sum_over(rows, groups.pp), groups.world)
        window: Window = {}
        for (step, local), row in zip(times.items(), rows.tolist(), strict=True):
            if local is not None and max(row) < UNKNOWN:  # else no rank uses them
                window[step] = tuple(
                    ObservedRound(part.kind, part.amounts, nanoseconds / self._pp / 1e9)
                    for part, nanoseconds in zip(parts.get(step, ()), row, strict=False)
                )
        return window

    def saved(self, step: int) -> Callable[[Groups], dict[str, object]]:
        """For the training loop after a step: a function that makes the state to resume from there.

        The function is for another thread, with groups of its own; all ranks call it together.
        """
        resumed_step, resumed_window, resumed_rounds = self._resumed
        fits = max(0, (step + 1 - self.delay - resumed_window) // self.every)
        window = resumed_window + fits * self.every
        with self._lock:
            correction = [kept for since, kept in self._corrections if since <= step + 1][-1]
            local = {s: t for s, t in self._local.items() if max(window, resumed_step) < s <= step}

        def state(groups: Groups) -> dict[str, object]:
            rounds = {s: known for s, known in resumed_rounds.items() if s > window}
            rounds |= self._over_lanes(local, groups) if local else {}
            entries = [
                [s, each.kind, each.seconds, list(each.amounts)]
                for s, measured in rounds.items()
                for each in measured
            ]
            about = {"scale": correction.scale, "parts": list(correction.parts)}
            about |= {"fits": correction.fits, "rounds": entries}
            return {STATE: {"base": self.base.as_json(), "window": window, **about}}

        return state

    def load(self, state: Mapping[str, object], step: int) -> list[str]:
        """Resumes from a loader's saved state, after a step and before the first plan.

        Returns notes for the user.
        """
        raw = state.get(STATE)
        if not isinstance(raw, dict) or parse_profile(raw["base"], STATE) != self.base:
            self._resumed = (step, step, {})
            self._window = step
            why = "the cost profile is another one" if raw else "the checkpoint has no factors"
            return [f"plan.refine begins with step {step + 1}: {why}"]
        rounds: Window = {}
        for number, kind, seconds, amounts in raw["rounds"]:
            each = ObservedRound(kind, tuple(amounts), seconds)
            rounds[number] = (*rounds.get(number, ()), each)
        self._window = raw["window"]
        self._resumed = (step, self._window, rounds)
        self._corrections = [(1, Correction(raw["scale"], tuple(raw["parts"]), raw["fits"]))]
        self._observed = dict(rounds)
        return []


def _agreed(groups: Groups | None) -> AbstractContextManager[None]:
    """A block that fails on all ranks if it fails on one."""
    return agreed(groups) if groups is not None else nullcontext()


FILE = "refine.jsonl"


def refining(
    run: Path,
    refiner: Refiner,
    topology: Topology,
    *,
    after: int,
    note: Callable[[str], None],
) -> Callable[[StepReport], None]:
    """A function that takes each step's report, before the loop takes another step.

    after: the steps of an earlier run that stay in the file. note: shows a line.
    """
    path, is_first = run / FILE, topology.rank == 0
    if is_first:
        with writing(run):
            cut_steps(path, after)

    def take(report: StepReport) -> None:
        step = report.metrics.step
        refiner.measured(step, report.step.plan, report.rounds_s)
        for news in refiner.news(step) if is_first else ():
            line = json.dumps(refine_line(news, refiner.base), allow_nan=False)
            with writing(run), open(path, "a", encoding="utf-8") as out:
                out.write(line + "\n")
            if news.refit.is_changed:
                note(as_text(news, refiner.base))

    return take


def refine_line(news: Refinement, base: CostProfile) -> dict[str, object]:
    """A line of refine.jsonl, once the first step that was planned with it has run.

        {"step": 21, "window": [5, 16], "changed": true, "rounds": 23, "left_out": 1, "factors":
         {"linear": 1.17, "quadratic": 5.63, …}, "errors": [0.34, 0.34, 0.11],
         "kinds": [[1, 5, 1.17, 1.17, 0.95], [4, 12, 1.8, 1.8, 1.14]]}

    Factors are relative to the profile that the run began with. Ratios are medians of measured /
    predicted seconds: under that profile, before this correction and after it; a kind is [largest
    CP size, rounds, ratios].
    """
    fitted = news.refit
    return {
        "step": news.step,
        "window": list(news.window),
        "changed": fitted.is_changed,
        "rounds": fitted.rounds,
        "left_out": fitted.left_out,
        "factors": _factors(news, base),
        "errors": list(fitted.errors),
        "kinds": [list(kind) for kind in fitted.kinds],
    }


def as_text(news: Refinement, base: CostProfile) -> str:
    factors = ", ".join(f"{name} × {value:.3g}" for name, value in _factors(news, base).items())
    _, before, after = news.refit.errors
    first, last = news.window
    return (
        f"step {news.step}: the cost profile is refined by steps {first} to {last}: {factors} of "
        f"the first profile; typical error of a round {before:.0%} before, {after:.0%} after"
    )


def _factors(news: Refinement, base: CostProfile) -> dict[str, float]:
    """Factors of those parts that the profile has."""
    named = zip(PARTS, coefficients(base), news.refit.correction.factors, strict=True)
    return {name: factor for name, value, factor in named if value}
