"""Reads the folder of a run, and judges its cost model, its pipeline and its refined profile.

In: a folder. Out: a RunFolder with one array for each metric, NaN where a step has none, and data
for drawing. The lines

    {"step": 1, "loss": 5.5, …}
    {"step": 2, "loss": 4.0, …}
    {"step": 2, "loss": 3.9, …}

of a run that was resumed give step [1, 2] and loss [5.5, 3.9]: the later line counts. An incomplete
last line, which a killed run leaves, is ignored; any other broken line is a ValueError. A missing
file but metrics.jsonl has no lines.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.plan.layout import layout_stages, parse_layout
from longshore.report.run_journal import (
    MOST_NUMBER,
    MOST_POINTS,
    JournalLine,
    JournalSteps,
    Json,
    curve,
    edges,
    read_journal,
    rounded,
)

Floats = NDArray[np.float64]

MOST_DOTS = 1200
FEW = 5
ALIKE = 0.05
JUDGEMENTS = ((0.05, "very good"), (0.12, "good"), (0.25, "rough"), (math.inf, "poor"))


@dataclass(frozen=True, slots=True)
class CostFit:
    """How well predicted seconds of rounds match measured ones, after scaling by the best factor.

    A profile made for another machine is off by one factor, which does not change plans; so it is
    removed first. Rounds predicted at 1, 2 and 3 s that took 2, 4 and 9 s have ratios 2, 2 and 3:
    the factor is their median, 2, and the errors are 0 %, 0 % and 50 %, with median 0 %.
    """

    rounds: int
    """Rounds that were compared."""
    factor: float
    """The median of measured / predicted."""
    low: float
    """The 5th percentile of measured / predicted, relative to `factor`."""
    high: float
    """The 95th percentile of measured / predicted, relative to `factor`."""
    error: float
    """The median relative error after scaling."""
    correlation: float | None
    """Correlation of predicted and measured; None if either is constant."""
    variety: float
    """How much predictions differ: standard deviation / mean."""
    skipped: int | None
    """The first step, which is left out, or None."""


def cost_data(lines: Mapping[int, JournalLine], *, refined: int = 0) -> Json | None:
    """The fit, its text, dots for a scatter plot, and the ratio over steps; None without times.

    The first step, in which memory and kernels warm up, is left out of the fit and of the dots if
    there are enough others; so are those before the step `refined`, planned with other profiles.
    """
    measured = {step: line for step, line in lines.items() if line.measured}
    if not measured:
        return None
    kept = {step: line for step, line in measured.items() if step >= refined}
    if len(kept) < FEW:
        kept, refined = measured, 0
    first = next(iter(kept)) if len(kept) >= FEW and not refined else None
    kept = {step: line for step, line in kept.items() if step != first}
    predicted = np.concatenate([line.predicted for line in kept.values()])
    elapsed = np.concatenate([line.elapsed for line in kept.values()])
    steps = np.concatenate([np.full(len(line.elapsed), step) for step, line in kept.items()])
    fit = fit_cost(predicted, elapsed, skipped=first)
    dots = choose_dots(predicted, elapsed / predicted)
    return {
        **{name: _short(value) for name, value in asdict(fit).items()},
        "verdict": verdict(fit),
        "words": cost_text(fit, refined=refined),
        "dots": {
            "predicted": rounded(predicted[dots]),
            "elapsed": rounded(elapsed[dots]),
            "step": steps[dots].tolist(),
        },
        "ratio": ratio_curve(measured),
    }


def fit_cost(predicted: Floats, elapsed: Floats, *, skipped: int | None = None) -> CostFit:
    ratios = elapsed / predicted
    factor = float(np.median(ratios))
    low, high = np.quantile(ratios, (0.05, 0.95)) / factor
    spread = predicted.std() * elapsed.std()
    together = ((predicted - predicted.mean()) * (elapsed - elapsed.mean())).mean()
    still = spread <= 1e-12 * predicted.mean() * elapsed.mean()
    return CostFit(
        rounds=len(ratios),
        factor=factor,
        low=float(low),
        high=float(high),
        error=float(np.median(np.abs(ratios / factor - 1))),
        correlation=None if still else float(together / spread),
        variety=float(predicted.std() / predicted.mean()),
        skipped=skipped,
    )


def verdict(fit: CostFit) -> str:
    return next(word for most, word in JUDGEMENTS if fit.error <= most)


def cost_text(fit: CostFit, *, refined: int = 0) -> str:
    """The verdict, for readers new to cost models."""
    sentences = [
        f"The cost model is {verdict(fit)} here: after scaling by one factor, half of the "
        f"{fit.rounds:,} rounds were within {fit.error:.0%} of the prediction.",
        f"The factor is {fit.factor:.3g}: a round takes {fit.factor:.3g} times as long as "
        "predicted. A factor other than 1 means that the profile is for another machine or model; "
        "plans do not depend on it.",
        f"Nine of ten rounds took {fit.low:.2f} to {fit.high:.2f} times the scaled prediction.",
    ]
    if fit.variety < ALIKE:
        sentences.append(
            "Predictions hardly differ from round to round, so correlation says little."
        )
    elif fit.correlation is not None:
        sentences.append(
            f"The correlation of predicted and measured times is {fit.correlation:.2f} (1 is best)."
        )
    if fit.skipped is not None:
        sentences.append(f"Step {fit.skipped}, in which memory and kernels warm up, is left out.")
    if refined:
        sentences.append(
            f"Steps before {refined} are left out: plan.refine last corrected the profile there."
        )
    return " ".join(sentences)


def choose_dots(predicted: Floats, ratios: Floats, *, most: int = MOST_DOTS) -> list[int]:
    """All indices, or of each group of similar predictions the first and the two extremes."""
    if len(predicted) <= most:
        return list(range(len(predicted)))
    order = np.argsort(predicted, kind="stable")
    at = edges(len(order), most=most // 3)
    chosen: set[int] = set()
    for start, end in pairwise(at.tolist()):
        group = order[start:end]
        low, high = group[ratios[group].argmin()], group[ratios[group].argmax()]
        chosen |= {int(group[0]), int(low), int(high)}
    return sorted(chosen)


def ratio_curve(lines: Mapping[int, JournalLine]) -> Json:
    """Measured / predicted of each step, thinned like the other curves."""
    steps = np.array(list(lines), dtype=np.int64)
    ratios = np.array([line.elapsed.sum() / line.predicted.sum() for line in lines.values()])
    at = edges(len(steps), most=MOST_POINTS)
    return {"step": steps[at[1:] - 1].tolist(), **curve(ratios, at)}


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else rounded([value], 4)[0]


MOST_RANKS = 1 << 10  # as parallel.pp takes them
ROUNDING = 1e-9  # a predicted bubble of 0 may have been written as -1e-16


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A step of one pipeline rank, as shares of its time."""

    stages: tuple[int, ...]
    """The numbers of the rank's stages."""
    forward: tuple[float, ...]
    """The forwards of each stage."""
    backward: tuple[float, ...]
    """The backwards of each stage."""
    bubble: float
    """The rank worked on none of its stages."""
    predicted: float
    """The bubble that the plan predicted."""


RankSteps = Mapping[int, StageTimes]
"""By step, in ascending order."""


def read_pipeline(folder: Path) -> dict[int, RankSteps]:
    """The steps of each pipeline rank that has some; none without the folder."""
    if not folder.is_dir():
        return {}
    paths: dict[int, Path] = {}
    for path in folder.iterdir():
        name = re.fullmatch(r"rank-(0|[1-9][0-9]{0,4})\.jsonl", path.name)
        if name and path.is_file() and int(name[1]) < MOST_RANKS:
            paths[int(name[1])] = path
    read = {rank: read_rank(paths[rank]) for rank in sorted(paths)}
    return {rank: steps for rank, steps in read.items() if steps}


def read_rank(path: Path) -> RankSteps:
    """The steps of a file; of two lines for a step the later counts."""
    steps = dict(_read_rank(text, where) for where, text in complete_lines(path))
    return {step: steps[step] for step in sorted(steps)}


def pipeline_data(
    ranks: Mapping[int, RankSteps], config: Mapping[str, object], *, few: int = FEW
) -> Json | None:
    """How busy each pipeline rank was, a row for each; None for a run without a pipeline.

    The lines

        {"step": 1, "elapsed_s": 4.0, "stages": [[0, 1.0, 1.0]], "bubble": 0.5, "predicted": 0.2}
        {"step": 2, "elapsed_s": 1.0, "stages": [[0, 0.3, 0.6]], "bubble": 0.1, "predicted": 0.3}

    of rank 0 give medians of 0.275 in forwards, 0.425 in backwards, and a bubble of 0.3, predicted
    0.25. Medians need not add up to 1.
    The first step, in which memory and kernels warm up, is left out if there are enough others.
    """
    pp = config.get("parallel.pp")
    size = pp if isinstance(pp, int) else 1 + max(ranks, default=0)
    counted = {rank: steps for rank, steps in ranks.items() if rank < size}
    # Ranks that the pipeline has no more, because the run was resumed with a smaller one.
    former = [max(steps) for rank, steps in ranks.items() if rank >= size]
    common = common_steps(counted, after=max(former, default=-1))
    if size < 2 or not common:
        return None
    skipped = common[0] if len(common) >= few else None
    texts = stage_texts(config.get("parallel.layout"), size)
    return {
        "rows": [
            rank_row(rank, [steps[step] for step in common if step != skipped], texts)
            for rank, steps in counted.items()
        ],
        "skipped": skipped,
        "missing": [rank for rank in range(min(size, MOST_RANKS)) if rank not in counted],
    }


def common_steps(ranks: Mapping[int, RankSteps], *, after: int) -> list[int]:
    """The steps that all ranks have, after a step, with the stages of the last one.

    A run that was resumed with another pipeline has steps of both: ranks that it has no more end
    before, new ones begin later, and with another parallel.vpp the stages differ. Another layout of
    as many stages cannot be told.
    """
    steps = [set(each) for each in ranks.values()]
    common = [step for step in sorted(set.intersection(*steps)) if step > after] if steps else []
    return [
        step
        for step in common
        if all(each[step].stages == each[common[-1]].stages for each in ranks.values())
    ]


def rank_row(rank: int, steps: list[StageTimes], texts: list[str]) -> Json:
    """A rank's medians over its steps, and those of its stages; texts: of all stages, or none."""
    forward, backward = (
        np.array([getattr(times, kind) for times in steps]) for kind in ("forward", "backward")
    )
    stages = steps[0].stages
    return {
        "rank": rank,
        "steps": len(steps),
        "forward": _median(forward.sum(axis=1)),
        "backward": _median(backward.sum(axis=1)),
        "bubble": _median([times.bubble for times in steps]),
        "predicted": _median([times.predicted for times in steps]),
        "stages": [
            {
                "number": number,
                "text": texts[number] if number < len(texts) else None,
                "forward": _median(forward[:, i]),
                "backward": _median(backward[:, i]),
            }
            for i, number in enumerate(stages)
        ],
    }


def stage_texts(layout: object, pp: int) -> list[str]:
    """The parts of each stage of parallel.layout, as "Ett"; none if it is not given or not valid.

    "E(t|)*2tL" gives Et, t and tL.
    """
    if not isinstance(layout, str) or not layout:
        return []
    try:
        layers, depths = _count(layout, "t"), _count(layout, "m")
        parsed = parse_layout(layout, pp=pp, layers=layers, depths=depths)
        return [str(stage) for stage in parsed.stages]
    except ValueError:
        return []


def pipeline_text(data: Json) -> str:
    """The bubbles in one line.

    "bubble of 2 pipeline ranks: 5.7% to 9.2% measured, 23% predicted"
    """
    rows = data["rows"]
    said = [_span([row[key] for row in rows]) for key in ("bubble", "predicted")]
    ranks = f"{len(rows)} pipeline ranks" if len(rows) > 1 else f"pipeline rank {rows[0]['rank']}"
    return f"bubble of {ranks}: {said[0]} measured, {said[1]} predicted"


def _span(shares: list[float]) -> str:
    low, high = f"{min(shares):.1%}", f"{max(shares):.1%}"
    return low if low == high else f"{low} to {high}"


def _count(layout: str, letter: str) -> int:
    """How often a letter is in a layout, its repetitions written out: | is what can be counted."""
    return layout_stages(layout.translate(str.maketrans(f"{letter}|", f"|{letter}"))) - 1


def _read_rank(text: bytes, where: str) -> tuple[int, StageTimes]:
    try:
        data = json.loads(text)
        elapsed = _stage_number(data["elapsed_s"], math.inf) or math.inf
        times = StageTimes(
            stages=tuple(_whole(number) for number, _, _ in data["stages"]),
            forward=tuple(_stage_number(f, math.inf) / elapsed for _, f, _ in data["stages"]),
            backward=tuple(_stage_number(b, math.inf) / elapsed for _, _, b in data["stages"]),
            bubble=_stage_number(data["bubble"], 1),
            predicted=_stage_number(data["predicted"], 1),
        )
        if not times.stages or not np.isfinite([*times.forward, *times.backward]).all():
            raise ValueError(data)
        return _whole(data["step"]), times
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(
            f"{where}: is not a step of a pipeline rank; delete the line to continue without it"
        ) from None


def _whole(value: Any) -> int:  # noqa: ANN401 - raw JSON
    if not 0 <= int(value) <= MOST_NUMBER:
        raise ValueError(value)
    return int(value)


def _stage_number(value: Any, most: float) -> float:  # noqa: ANN401 - raw JSON
    """A finite number from 0 to `most`, but for rounding."""
    number = float(value)
    if not -ROUNDING <= number <= most + ROUNDING or number == math.inf:
        raise ValueError(value)
    return min(max(number, 0.0), most)


def _median(values: Floats | list[float]) -> float | None:
    return rounded([float(np.median(values))])[0]


MOST_ROWS = 12


@dataclass(frozen=True, slots=True)
class RefineLine:
    """What a window of steps said about the profile."""

    window: tuple[int, int]
    """The first and the last of these steps."""
    changed: bool
    """Whether the profile was changed."""
    rounds: int
    """Rounds that it follows from."""
    left_out: int
    """Rounds that were left out."""
    factors: Mapping[str, float]
    """Factors of each part of the profile, relative to the first profile."""
    errors: tuple[float, float, float]
    """The typical error of a round under the first profile, before and after."""
    kinds: Mapping[int, tuple[float, float, float]]
    """By largest CP size, measured / predicted in the same order."""


def read_refined(path: Path) -> dict[int, RefineLine]:
    """By the first step planned with it; of two lines for a step the later counts."""
    if not path.is_file():
        return {}
    lines = dict(_read_refined(text, where) for where, text in complete_lines(path))
    return {step: lines[step] for step in sorted(lines)}


def last_change(lines: Mapping[int, RefineLine]) -> int:
    """The first step planned with the last profile; 0 for a run with one profile."""
    return max((step for step, line in lines.items() if line.changed), default=0)


def refine_data(lines: Mapping[int, RefineLine]) -> Json | None:
    """Ratios of each kind and the last changes; None for a run that refined nothing.

    A kind of rounds (their largest CP size) has measured / predicted over steps, under the profile
    that the run began with and under the refined one: each before the correction that follows from
    these very steps.
    """
    if not lines:
        return None
    parts = list(dict.fromkeys(part for line in lines.values() for part in line.factors))
    changes = [(step, line) for step, line in lines.items() if line.changed]
    return {
        "parts": parts,
        "rows": [
            {
                "step": step,
                "window": list(line.window),
                "rounds": line.rounds,
                "left_out": line.left_out,
                "factors": rounded([line.factors.get(part, math.nan) for part in parts], 4),
                "errors": rounded(line.errors, 4),
            }
            for step, line in changes[-MOST_ROWS:]
        ],
        "kinds": [
            _kind(kind, list(lines.values()))
            for kind in sorted({kind for line in lines.values() for kind in line.kinds})
        ],
    }


def _kind(kind: int, lines: list[RefineLine]) -> Json:
    with_kind = [line for line in lines if kind in line.kinds]
    at = edges(len(with_kind), most=MOST_POINTS)[1:] - 1
    chosen = [with_kind[i] for i in at.tolist()]
    return {
        "kind": kind,
        "step": [line.window[1] for line in chosen],
        "first": rounded([line.kinds[kind][0] for line in chosen], 4),
        "before": rounded([line.kinds[kind][1] for line in chosen], 4),
    }


def _read_refined(text: bytes, where: str) -> tuple[int, RefineLine]:
    try:
        data: dict[str, Any] = json.loads(text)
        first, last = (int(step) for step in data["window"])
        line = RefineLine(
            window=(first, last),
            changed=bool(data["changed"]),
            rounds=int(data["rounds"]),
            left_out=int(data["left_out"]),
            factors={str(name): float(value) for name, value in data["factors"].items()},
            errors=_three(data["errors"]),
            kinds={int(kind): _three(ratios) for kind, _, *ratios in data["kinds"]},
        )
        positive = [*line.factors.values(), *(r for three in line.kinds.values() for r in three)]
        if not all(0 < value < math.inf for value in positive):
            raise ValueError("a factor or ratio is not positive")
        if not 0 <= (step := int(data["step"])) <= MOST_NUMBER or last > MOST_NUMBER:
            raise ValueError(f"step {step}")
        return step, line
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError(
            f"{where}: is not what a refined profile leaves; delete the line to continue without it"
        ) from None


def _three(values: list[float]) -> tuple[float, float, float]:
    first, before, after = np.array(values, dtype=np.float64).tolist()
    return first, before, after


METRICS = (
    *("loss", "balance_loss", "index_loss", "grad_norm", "lr", "tokens", "sequences"),
    *("loss_tokens", "epoch", "elapsed_s", "tokens_per_s", "tflops", "mfu", "rounds"),
    *("efficiency", "padding", "plan_s", "data_wait_s", "memory_gib", "graph_gib", "skipped"),
)
GRAPHED = ("whole", "halves", "eager")
"""The numbers of `graphed`, which become graphed_whole and so on."""


@dataclass(frozen=True, slots=True, eq=False)
class RunFolder:
    """The content of a run's folder."""

    name: str
    """The folder's name."""
    folder: Path
    """As given by the user."""
    config: Mapping[str, object]
    """By section.key."""
    metrics: Mapping[str, Floats]
    """An array for "step" and each metric, sorted by step; depths of multi-token prediction are
    depth_1, depth_2, …, and metrics of the loss function own_NAME."""
    evals: Mapping[str, list[tuple[int, float]]]
    """(step, loss) by the held-out set's name."""
    warnings: list[tuple[int, str]]
    """What users should know of the run, by the step after which it was seen."""
    journal: JournalSteps
    """The plans and the times of the rounds, from steps.jsonl."""
    pipeline: Mapping[int, RankSteps]
    """The times of the stages by pipeline rank, from pipeline/rank-0.jsonl and so on."""
    refined: Mapping[int, RefineLine]
    """What windows of steps said about the cost profile, by the first step planned with it."""

    @property
    def steps(self) -> Floats:
        return self.metrics["step"]


def read_run(folder: str | Path) -> RunFolder:
    """Everything of a run but its weights; raises ValueError for a folder without steps."""
    path = Path(folder)
    if not path.is_dir():
        what = "a file" if path.exists() else "missing"
        raise ValueError(f"{folder} is {what}; name the folder of a run, such as runs/demo-1")
    return RunFolder(
        name=path.resolve().name,
        folder=path,
        config=read_config(path / "config.toml"),
        metrics=read_metrics(path / "metrics.jsonl"),
        evals=read_evals(path / "evals.jsonl"),
        warnings=read_warnings(path / "warnings.jsonl"),
        journal=read_journal(path / "steps.jsonl"),
        pipeline=read_pipeline(path / "pipeline"),
        refined=read_refined(path / "refine.jsonl"),
    )


def read_config(path: Path) -> dict[str, object]:
    """Values by section.key; without the file, none."""
    if not path.is_file():
        return {}
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is not TOML ({error})") from None
    return dict(_flat(sections, ""))


def read_metrics(path: Path) -> dict[str, Floats]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}: it is not a run, or has no step yet")
    rows: dict[int, dict[str, float]] = {}
    for where, line in read_lines(path):
        rows[_integer(line, "step", where)] = _numbers(line, where)
    if not rows:
        raise ValueError(f"{path} has no step yet; wait for the first step to end")
    steps = sorted(rows)
    others = dict.fromkeys(name for row in rows.values() for name in row)
    own = [name for name in others if name.startswith("own_")]
    depths = [name for name in others if name.startswith("depth_")]
    depths.sort(key=lambda name: int(name.removeprefix("depth_")))
    names = [*METRICS, *(f"graphed_{way}" for way in GRAPHED), *depths, *own]
    columns = {name: [rows[step].get(name, math.nan) for step in steps] for name in names}
    return {name: np.array(values) for name, values in {"step": steps, **columns}.items()}


def read_evals(path: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, loss) of each evaluation by name; of two lines for a step the later counts."""
    if not path.is_file():
        return {}
    by_name: dict[str, dict[int, float]] = {}
    for where, line in read_lines(path):
        loss = _number(line.get("loss"), f"{where}: loss")
        name = str(line.get("name", "held-out"))
        by_name.setdefault(name, {})[_integer(line, "step", where)] = loss
    return {
        name: [(step, loss) for step, loss in sorted(losses.items()) if math.isfinite(loss)]
        for name, losses in by_name.items()
    }


def read_warnings(path: Path) -> list[tuple[int, str]]:
    """(step, text) of each warning, once: a run that resumes may give it again."""
    if not path.is_file():
        return []
    lines = [
        (_integer(line, "step", where), str(line.get("text", "")))
        for where, line in read_lines(path)
    ]
    return sorted(dict.fromkeys(lines))


def complete_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each complete line that is not blank, with "file, line n" for error messages."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                yield f"{path}, line {number}", line


def read_lines(path: Path) -> Iterator[tuple[str, Json]]:
    """Each complete line as an object."""
    for where, line in complete_lines(path):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(
                f"{where}: is not a JSON object; delete the line to continue without it"
            )
        yield where, value


def _numbers(line: Mapping[str, Any], where: str) -> dict[str, float]:
    depths = line.get("mtp_losses") or ()
    if not isinstance(depths, list | tuple):
        raise ValueError(f"{where}: mtp_losses is {depths!r}; it must be a list")
    graphed, own = line.get("graphed") or {}, line.get("loss_metrics") or {}
    for name, value in (("graphed", graphed), ("loss_metrics", own)):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {name} is {value!r}; it must be an object")
    values = {name: line.get(name) for name in METRICS}
    values |= {f"own_{name}": value for name, value in own.items()}
    values |= {f"graphed_{way}": graphed.get(way) for way in GRAPHED}
    values |= {f"depth_{depth}": loss for depth, loss in enumerate(depths, start=1)}
    return {
        name: _number(value, f"{where}: {name}")
        for name, value in values.items()
        if value is not None
    }


def _number(value: object, where: str) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value) if isinstance(value, int | float) else None
    except OverflowError:
        number = None
    if number is None:
        raise ValueError(f"{where} is {value!r}; it must be a number or null")
    return number if math.isfinite(number) else math.nan


def _integer(line: Mapping[str, Any], key: str, where: str) -> int:
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_NUMBER:
        raise ValueError(
            f"{where}: {key} is {value!r}; it must be a whole number from 0 to {MOST_NUMBER}"
        )
    return value


def _flat(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value
