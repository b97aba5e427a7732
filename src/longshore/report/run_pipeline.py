"""How busy the ranks of a pipeline were: shares of a step in forwards, backwards and the bubble.

In: RUN/pipeline/rank-0.jsonl and so on, as train/stage_times.py writes them, and the run's
configuration. Out: a StageTimes for each step of each rank, and a row for each rank to draw. The
lines

    {"step": 1, "elapsed_s": 4.0, "stages": [[0, 1.0, 1.0]], "bubble": 0.5, "predicted": 0.2}
    {"step": 2, "elapsed_s": 1.0, "stages": [[0, 0.3, 0.6]], "bubble": 0.1, "predicted": 0.3}

of rank 0 give medians of 0.275 in forwards, 0.425 in backwards, and a bubble of 0.3, predicted
0.25. Medians need not add up to 1. An incomplete last line is ignored, any other broken line is a
ValueError; a rank without a file is left out.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.plan.layout import layout_stages, parse_layout
from longshore.report.page_data import Json
from longshore.report.run_cost import FEW
from longshore.report.run_curves import rounded
from longshore.report.run_journal import MOST_NUMBER

Floats = NDArray[np.float64]

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
    steps: dict[int, StageTimes] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, start=1):
            if text.endswith(b"\n") and text.strip():
                step, times = _read(text, f"{path}, line {number}")
                steps[step] = times
    return {step: steps[step] for step in sorted(steps)}


def pipeline_data(
    ranks: Mapping[int, RankSteps], config: Mapping[str, object], *, few: int = FEW
) -> Json | None:
    """A row for each pipeline rank; None for a run without a pipeline.

    The first step, in which memory and kernels warm up, is left out if there are enough others.
    """
    pp = config.get("parallel.pp")
    size = pp if isinstance(pp, int) else 1 + max(ranks, default=0)
    counted = {rank: steps for rank, steps in ranks.items() if rank < size}
    common = common_steps(counted, after=_last(ranks[rank] for rank in ranks if rank >= size))
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
                "forward": _median(forward[:, place]),
                "backward": _median(backward[:, place]),
            }
            for place, number in enumerate(stages)
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


def _last(ranks: Iterable[RankSteps]) -> int:
    """The last step of any rank; -1 without ranks."""
    return max((max(steps) for steps in ranks), default=-1)


def _read(text: bytes, where: str) -> tuple[int, StageTimes]:
    try:
        data = json.loads(text)
        elapsed = _number(data["elapsed_s"], math.inf) or math.inf
        times = StageTimes(
            stages=tuple(_whole(number) for number, _, _ in data["stages"]),
            forward=tuple(_number(seconds, math.inf) / elapsed for _, seconds, _ in data["stages"]),
            backward=tuple(_number(seconds, math.inf) / elapsed for *_, seconds in data["stages"]),
            bubble=_number(data["bubble"], 1),
            predicted=_number(data["predicted"], 1),
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


def _number(value: Any, most: float) -> float:  # noqa: ANN401 - raw JSON
    """A finite number from 0 to `most`, but for rounding."""
    number = float(value)
    if not -ROUNDING <= number <= most + ROUNDING or number == math.inf:
        raise ValueError(value)
    return min(max(number, 0.0), most)


def _median(values: Floats | list[float]) -> float | None:
    return rounded([float(np.median(values))])[0]
