"""How long a pipeline's stages worked: RUN/pipeline/rank-0.jsonl and so on, for the run's report.

In: StepReports, on the ranks of lane 0. Out: one line for each step in the file of the pipeline
rank. A stage is [its number, seconds of its forwards, seconds of its backwards]; the bubble is the
share of the step in which the rank worked on none, as measured and as the plan predicted it:

    {"step": 3, "elapsed_s": 0.8, "stages": [[0, 0.1, 0.2], [2, 0.1, 0.2]], "bubble": 0.25,
     "predicted": 0.21}

A step's time has more in it than its stages: the optimizer, the gradient norm, waiting for data.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longshore.distributed.topology import Topology
from longshore.plan.simulate import simulate
from longshore.plan.types import Plan
from longshore.train.checkpoint_files import writing
from longshore.train.loop import StepReport
from longshore.train.metrics import cut_steps

FOLDER = "pipeline"


@contextmanager
def stage_times(
    run: Path, topology: Topology, *, after: int
) -> Iterator[Callable[[StepReport], None]]:
    """A function that records a step; it does nothing without a pipeline and on other lanes.

    after: the steps of an earlier run that stay in the file.
    """
    if topology.pp == 1 or topology.lane or topology.tp_rank:
        yield lambda report: None
        return
    path = run / FOLDER / f"rank-{topology.pp_rank}.jsonl"
    with writing(run):
        path.parent.mkdir(exist_ok=True)
        cut_steps(path, after)
        file = path.open("a", encoding="utf-8")

    def write(report: StepReport) -> None:
        if report.stages:
            with writing(run):
                file.write(json.dumps(as_line(report, topology.pp_rank), allow_nan=False) + "\n")
                file.flush()

    with file:
        yield write


def as_line(report: StepReport, pp_rank: int) -> dict[str, object]:
    elapsed = report.metrics.elapsed_s
    busy = sum(forward + backward for _, forward, backward in report.stages)
    return {
        "step": report.metrics.step,
        "elapsed_s": elapsed,
        "stages": [list(stage) for stage in report.stages],
        "bubble": max(0.0, 1 - busy / elapsed) if elapsed else 0.0,
        "predicted": predicted_bubble(report.step.plan, pp_rank),
    }


def predicted_bubble(plan: Plan, pp_rank: int) -> float:
    """The share of the simulated step in which a pipeline rank waits."""
    walk = simulate(plan).walk
    if walk is None or not walk.finish:
        return 0.0
    times = zip(walk.starts[pp_rank], walk.ends[pp_rank], strict=True)
    return 1 - sum(end - start for start, end in times) / walk.finish
