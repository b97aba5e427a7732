"""The record of a run: metrics, steps, evals and warnings as .jsonl, the display and the trackers.

In: StepReports and Evaluations, one after another, on rank 0; other ranks record nothing but their
pipeline stages and the batches of a failed step. Out: one JSON object per line in each file. A run
that resumes after step 40 first removes the lines of steps 41, 42, … from the files, with what a
killed run has left of its last line.

    with RunRecord(folder, display="auto", steps=100, after=0, is_first=True) as record:
        record.note("4 ranks on cpu")
        record.write(report)

warnings.jsonl holds what users should know of a run when they look at its page, by the step after
which it was seen, 0 before the first: {"step": 12, "text": "the loss is …"}.
"""

import errno
import importlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch

from longshore.batch import MicroBatch
from longshore.data.steps import Step
from longshore.distributed.collectives import gather
from longshore.distributed.topology import Topology
from longshore.files import parse_json, reason, write_atomically
from longshore.plan.simulate import make_timeline, simulate
from longshore.plan.types import Plan
from longshore.train.display import Display, graphed_text, make_display
from longshore.train.evaluation import Evaluation
from longshore.train.loss import Faults
from longshore.train.safetensors_stream import write_safetensors
from longshore.train.step import Stepper, StepReport, StepResult
from longshore.train.supervision import writing

Warn = Callable[[str], None]
Sink = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]
"""How a tracker takes the numbers of a step, and how it is closed."""
MODULES = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "wandb": ("wandb", "init")}


class Tracker:
    """Where a step's numbers go; it is dropped after its first failure."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], warn: Warn) -> None:
        self.name, self._warn = name, warn
        self._sink: Sink | None = self._try(TRACKERS[name], folder, config)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        if self._sink is not None:
            self._try(self._sink[0], step, numbers(values))

    def close(self) -> None:
        if self._sink is not None:
            self._try(self._sink[1])
        self._sink = None

    def _try(self, act: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401
        try:
            return act(*given)
        except Exception as error:  # whatever it is, training continues
            self._sink = None
            self._warn(f"{self.name} stopped, the run continues: {type(error).__name__}: {error}")
            return None


def make_trackers(
    names: Iterable[str], folder: Path, config: Mapping[str, Any], *, warn: Warn
) -> list[Tracker]:
    """One for each name; raises for an unknown name, or if its package is not installed.

    config: by section.key. warn: called once if a tracker fails.
    """
    unique = list(dict.fromkeys(names))
    check_trackers(unique)
    return [Tracker(name, folder, config, warn) for name in unique]


def check_trackers(names: Iterable[str]) -> None:
    """Raises what make_trackers would raise."""
    for name in names:
        if name not in MODULES:
            raise ValueError(f"unknown tracker {name!r}; known are {', '.join(MODULES)}")
        _entry(name)


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers but the step; entry i of a list, from 1, becomes name/i, and entry k of a
    table name/k."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple):
            flat |= {f"{name}/{i}": item for i, item in enumerate(value, start=1)}
        elif isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": item for inner, item in value.items()}
        elif name != "step":
            flat[name] = value
    return {
        name: float(value)
        for name, value in flat.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _tensorboard(folder: Path, config: Mapping[str, Any]) -> Sink:
    """Scalars in the folder's `tensorboard`, for `tensorboard --logdir`."""
    writer = _entry("tensorboard")(log_dir=str(folder / "tensorboard"))
    lines = [f"    {key} = {json.dumps(value, default=str)}" for key, value in config.items()]
    writer.add_text("config", "\n".join(lines), 0)

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(folder: Path, config: Mapping[str, Any]) -> Sink:
    """A run of Weights & Biases; it reads WANDB_MODE, WANDB_PROJECT and so on itself."""
    run = _entry("wandb")(name=folder.resolve().name, dir=str(folder), config=dict(config))
    return lambda step, values: run.log(values, step=step), run.finish


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}


def _entry(name: str) -> Callable[..., Any]:
    """What a package is called by. A folder `wandb` in the working directory imports too."""
    module, entry = MODULES[name]
    try:
        return getattr(importlib.import_module(module), entry)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        text = f'{name} is not installed; install it with: pip install "longshore[{name}]"'
        raise ValueError(text) from None


MOST_BYTES = 256 << 20
"""Size at which steps.jsonl stops growing."""
METRICS, PLANS, EVALS, WARNINGS = FILES = [
    f"{name}.jsonl" for name in ("metrics", "steps", "evals", "warnings")
]


def append_line(file: FileIO, text: str) -> None:
    """Hands a line to the operating system, in one call."""
    line = (text + "\n").encode()
    try:
        written = os.write(file.fileno(), line)
    except OSError as error:
        raise OSError(error.errno, reason(error), file.name) from None
    if written < len(line):
        raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were written", file.name)


def has_step(path: Path, step: int) -> bool:
    """Whether a file has a line of a step; all its lines can be read."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return any(parse_json(line)["step"] == step for line in lines)


def cut_steps(path: Path, last: int) -> list[str]:
    """Removes the lines of steps after `last` and an incomplete line: they will be written again.

    Unreadable lines go to PATH.unreadable; returns a warning about them.
    """
    if path.is_symlink():
        text = "it is a link, and a run writes only into its own folder"
        raise OSError(errno.ELOOP, text, str(path))
    if not path.exists():
        return []
    kept, broken = _spans(path, last)
    if broken:
        aside = path.with_name(f"{path.name}.unreadable")
        with aside.open("ab") as file:
            file.write(broken)
    if not broken and [start for start, _ in kept] in ([], [0]):
        os.truncate(path, kept[0][1] if kept else 0)  # the usual case, which needs no disk space
    else:
        with path.open("rb") as file:
            content = file.read()
        write_atomically(path, b"".join(content[start:stop] for start, stop in kept))
    count = broken.count(b"\n")
    text = f"warning: {path}: {count} unreadable line(s) were moved to {path.name}.unreadable"
    return [text] if broken else []


def _spans(path: Path, last: int) -> tuple[list[tuple[int, int]], bytes]:
    """The byte spans of the lines to keep, neighbours joined, and the unreadable lines."""
    kept: list[tuple[int, int]] = []
    broken, stop = bytearray(), 0
    with path.open("rb") as file:
        for line in file:
            start, stop = stop, stop + len(line)
            if not line.endswith(b"\n"):
                break
            try:
                is_kept = parse_json(line)["step"] <= last
            except (ValueError, LookupError, TypeError):
                broken += line
                continue
            if is_kept and kept and kept[-1][1] == start:
                kept[-1] = (kept[-1][0], stop)
            elif is_kept:
                kept.append((start, stop))
    return kept, bytes(broken)


def step_as_line(report: StepReport) -> dict[str, object]:
    """A line of steps.jsonl, for the run's report: the plan, and how long its rounds took.

        {"step": 1, "lanes": 2, "capacity": 64, "sync": "round", "cost": {…}, "lengths": [7, 50],
         "rounds": [[[0, 2, [1]], [0, 1, [0]]]], "predicted_s": [0.11], "elapsed_s": [0.13]}

    A pack is [first lane, CP size, indices of its sequences]; `experts`, for models that have any,
    is the tokens routed to each expert, by MoE layer.
    """
    plan = report.step.plan
    setting = plan.setting
    line: dict[str, object] = {
        "step": report.metrics.step,
        "lanes": setting.lanes,
        "capacity": setting.capacity,
        "sync": setting.sync,
        "cost": asdict(setting.profile),
        "lengths": [sequence.length for sequence in plan.sequences],
        "rounds": [
            [[pack.first_lane, pack.cp_size, list(pack.sequences)] for pack in round_.packs]
            for round_ in plan.rounds
        ],
        "predicted_s": round_costs(plan),
        "elapsed_s": list(report.rounds_s),
    }
    return {**line, "experts": report.experts} if report.experts else line


def round_costs(plan: Plan) -> list[float]:
    """Estimated seconds of each round: from the end of the previous one, on the latest lane."""
    ends = make_timeline(plan).end.max(axis=1).tolist()
    return [end - before for before, end in zip([0.0, *ends[:-1]], ends, strict=True)]


NLL = ("", "cross_entropy")
"""Values of train.loss that are the negative log-likelihood of a token."""
MANY = 1000
HIGH_STEPS = 3


class LossWatch:
    """Says once that a loss is far too high. vocab_size: of the model; loss: as train.loss has it.

    That is above 2·log V, twice the loss of a uniform guess over V tokens, or for other losses than
    cross entropy above 1000 times its first value (of at least 1), in three steps one after the
    other, or in the last step. With V 256, losses 5.6, 12, 12, 12 are told after the fourth.
    """

    def __init__(self, loss: str, vocab_size: int) -> None:
        self._is_nll = loss in NLL
        self._vocab_size = vocab_size
        self._first: float | None = None
        self._last = (0, 0.0, 0.0)
        self._high = 0
        self._is_told = False

    def warning(self, step: int, loss: float | None, lr: float) -> str:
        """The warning after a step, or ""; loss: None for a skipped step."""
        if loss is not None:
            self._first = loss if self._first is None else self._first
            self._last = (step, loss, lr)
            self._high = self._high + 1 if loss > self._limit else 0
        return self._told() if self._high >= HIGH_STEPS else ""

    def last_warning(self) -> str:
        """The warning after the last step, or ""."""
        return self._told() if self._high else ""

    @property
    def step(self) -> int:
        """The last step that had a loss."""
        return self._last[0]

    @property
    def _limit(self) -> float:
        if self._is_nll:
            return 2 * math.log(self._vocab_size)
        return MANY * max(1.0, abs(self._first or 0.0))

    def _told(self) -> str:
        if self._is_told:
            return ""
        self._is_told = True
        step, loss, lr = self._last
        limit = f"{MANY:,} times its first value"
        if self._is_nll:
            limit = f"twice that of a uniform guess over {self._vocab_size:,} tokens"
        return (
            f"the loss is {loss:,.6g} at step {step}, above {self._limit:,.4g}, {limit}; training "
            f"has probably diverged; begin again with a lower train.lr (now {lr:.3g}) or a longer "
            "train.warmup"
        )


class RunRecord:
    """Where a run reports to: its files, the display and the trackers; nothing but on rank 0.

    steps: of the whole run; after: done before, whose lines stay in the files.
    """

    def __init__(
        self,
        folder: Path,
        *,
        display: str,
        steps: int,
        after: int,
        is_first: bool,
        trackers: Sequence[str] = (),
        watch: LossWatch | None = None,
    ) -> None:
        self.folder, self.steps, self.is_first = folder, steps, is_first
        self._watch = watch
        self._graphed = Counter[str]()
        self._graph_gib: float | None = None
        self._opened, self._view = ExitStack(), Display()
        self._sinks: list[Tracker] = []
        if not is_first:
            return
        files = [folder / name for name in FILES]
        with writing(folder):
            notes = [note for path in files for note in cut_steps(path, after)]
        view = make_display(display, steps, stream=sys.stdout, title=str(folder), done=after)
        self._sinks = make_trackers(trackers, folder, {"folder": str(folder)}, warn=view.note)
        with ExitStack() as opened:
            with writing(folder):
                self._metrics = opened.enter_context((folder / METRICS).open("ab", 0))
                self._plans = opened.enter_context((folder / PLANS).open("ab", 0))
            self._plan_bytes = os.fstat(self._plans.fileno()).st_size
            self._view = opened.enter_context(view)
            for note in notes:
                view.note(note)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        self._opened.__exit__(*error)
        for tracker in self._sinks if error[0] is None else ():
            tracker.close()

    def note(self, text: str) -> None:
        """Shows a line, also after the last step."""
        self._view.note(text)

    def phase(self, text: str) -> None:
        """Shows what happens now, before the first step."""
        self._view.phase(text)

    def warn(self, step: int, text: str) -> None:
        """Shows a warning after a step (0: before the first), and keeps it for the run's page."""
        if self.is_first:
            self._append(WARNINGS, {"step": step, "text": text})
            self._view.note_on_step(f"warning: {text}")

    def write(self, report: StepReport) -> None:
        """Records and shows a step."""
        if not self.is_first:
            return
        metrics = report.metrics
        with writing(self.folder):
            append_line(self._metrics, metrics.to_json())
            self._write_plan(report)
        self._view.update(metrics)
        for tracker in self._sinks:
            tracker.log(metrics.step, asdict(metrics))
        self._graphed.update(metrics.graphed or {})
        self._graph_gib = metrics.graph_gib
        if self._watch and (text := self._watch.warning(metrics.step, metrics.loss, metrics.lr)):
            self.warn(metrics.step, text)

    def _write_plan(self, report: StepReport) -> None:
        line = json.dumps(step_as_line(report), allow_nan=False)
        self._plan_bytes += len(line) + 1
        if self._plan_bytes <= MOST_BYTES:
            append_line(self._plans, line)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Records and shows an evaluation after a step."""
        if not self.is_first:
            return
        line = {"step": step, **asdict(evaluation)}
        if not evaluation.mtp_losses:
            del line["mtp_losses"]
        self._append(EVALS, line)
        loss = "none" if evaluation.loss is None else f"{evaluation.loss:.4f}"
        self._view.note_on_step(f"step {step}: {evaluation.name} loss {loss}")
        for tracker in self._sinks:
            tracker.log(step, {f"{evaluation.name}/loss": evaluation.loss})

    def end(self) -> None:
        """After the last step: what is said about all of them."""
        watch = self._watch
        if watch and watch.step == self.steps and (text := watch.last_warning()):
            self.warn(self.steps, text)
        if self._graphed:
            self.note(graphed_text(self._graphed, self._graph_gib))

    def _append(self, name: str, line: dict[str, object]) -> None:
        with writing(self.folder), open(self.folder / name, "a", encoding="utf-8") as out:
            out.write(json.dumps(line, allow_nan=False) + "\n")


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
        file = path.open("ab", 0)

    def write(report: StepReport) -> None:
        if report.stages:
            with writing(run):
                append_line(file, json.dumps(stage_line(report, topology.pp_rank), allow_nan=False))

    with file:
        yield write


def stage_line(report: StepReport, pp_rank: int) -> dict[str, object]:
    """A line of pipeline/rank-N.jsonl: [stage, seconds of forwards, seconds of backwards] for each.

    The bubble is the share of the step in which the rank worked on none, as measured (optimizer and
    waiting for data count as waiting too) and as the plan predicted it.
    """
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


SHOWN = 3
"""Tokens named in a message, at most."""


@dataclass(frozen=True, slots=True)
class FaultyToken:
    """A token at which a user's loss function is not finite, although nll is."""

    sequence: int
    """The sequence's id."""
    position: int
    of: str
    """What is not finite: "value" or "gradient"."""
    nan_field: str
    """A field of the data that is NaN there; "" if none is."""


def explain(run: Path, stepper: Stepper, step: Step, result: StepResult) -> str:
    """Writes the step and returns the likely cause; all ranks call it together."""
    pairs = zip(step.batches, result.rounds.faults, strict=True)
    mine = [token for batch, faults in pairs if (token := _faulty_token(step, batch, faults))]
    tokens = _over_ranks(mine, stepper)  # first: writing may fail on one rank
    written = keep_batch(run, step, result, stepper.topology)
    if not tokens:
        own = f", or look at train.loss={name}" if (name := stepper.loss.name) else ""
        return f"{written}; lower train.lr, or set train.clip{own}"
    places = [f"its {t.of} at sequence {t.sequence}, position {t.position}" for t in tokens[:SHOWN]]
    more = f" and {len(tokens) - SHOWN} more" if len(tokens) > SHOWN else ""
    way_out = "look at the function's divisions, logarithms and roots"
    if field := next((token.nan_field for token in tokens if token.nan_field), ""):
        way_out = f"{field} of the data is NaN there: fix the data, or leave the row out"
    return (
        f"{written}; train.loss={stepper.loss.name} is not finite where the model's own loss is: "
        f"{', '.join(places)}{more}; {way_out}"
    )


def _faulty_token(step: Step, batch: MicroBatch, faults: Faults | None) -> FaultyToken | None:
    """The first token of a round at which the loss function is not finite."""
    for of, row in faults._asdict().items() if faults else ():
        if row >= 0:
            index = batch.ctx.sequences[batch.ctx.sequence_index[row.cpu()]]
            position = int(batch.ctx.positions[row.cpu()])
            id_ = step.plan.sequences[index].id
            return FaultyToken(id_, position, of, _nan_field(batch, int(row)))
    return None


def _nan_field(batch: MicroBatch, row: int) -> str:
    """The first field of the data that is NaN at a token, or for its sequence."""
    index = batch.ctx.sequence_index[row]
    values = {name: field[row] for name, field in batch.token_fields.items()}
    values |= {name: field[index] for name, field in batch.sequence_fields.items()}
    return next((name for name, value in values.items() if value.isnan().any()), "")


def _over_ranks(mine: list[FaultyToken], stepper: Stepper) -> list[FaultyToken]:
    """The first such token of each rank; the same on all ranks but for the names of fields."""
    row = [0] * 5
    if mine:
        of = Faults._fields.index(mine[0].of)
        row = [1, mine[0].sequence, mine[0].position, of, bool(mine[0].nan_field)]
    device, world = stepper.topology.device, stepper.topology.groups.world
    rows = gather(torch.tensor([row], device=device), world).tolist()
    # The name of another rank's field is in its lane-N.json.
    return [
        mine[0]
        if values == row
        else FaultyToken(id_, position, Faults._fields[of], "a field" if is_nan else "")
        for values in rows
        for is_set, id_, position, of, is_nan in [values]
        if is_set
    ]


def keep_batch(run: Path, step: Step, result: StepResult, topology: Topology) -> str:
    """Writes this rank's part of RUN/failed-step-N, and returns a text about it.

        lane-0.safetensors    round.0.token_ids, round.0.targets.labels, round.0.ctx.positions, …
        lane-0.json           {"step": 7, "lane": 0, "rounds": [{"loss": "nan", "sequences":
                              [{"id": 93, "length": 180, "cp_size": 2}, …]}, …]}

    `loss` is this lane's part of the step's loss in that round, so it shows where the first NaN
    was; "fault" is a FaultyToken, if a user's loss function caused it. With a pipeline each of its
    ranks has other tensors, in a file of its own.
    """
    folder = run / f"failed-step-{step.place.step + 1}"
    name = f"lane-{step.batches[0].lane}"
    if topology.pp > 1:
        name += f"-pipeline-{topology.pp_rank}"
    try:
        _write_failed(folder, name, step, result)
    except OSError as error:
        for part in folder.glob(f"{name}.*"):
            part.unlink(missing_ok=True)
        return f"its sequences cannot be kept in {folder} ({reason(error)})"
    return f"its sequences are in {folder}"


def _write_failed(folder: Path, name: str, step: Step, result: StepResult) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"round.{batch.round}.{path}": tensor.cpu().contiguous()
        for batch in step.batches
        for path, tensor in batch.to_tensors().items()
    }
    write_safetensors(folder / f"{name}.safetensors", tensors)
    rounds = []
    parts = zip(step.batches, result.rounds.losses, result.rounds.faults, strict=True)
    for batch, losses, faults in parts:
        loss = losses[0].item()
        about_round = {
            "loss": loss if math.isfinite(loss) else str(loss),
            "sequences": [
                {"id": sequence.id, "length": sequence.length, "cp_size": pack.group.cp_size}
                for pack in batch.ctx.packs
                for index in batch.ctx.sequences[pack.sequences]
                for sequence in [step.plan.sequences[index]]
            ],
        }
        token = _faulty_token(step, batch, faults)
        rounds.append({**about_round, "fault": asdict(token)} if token else about_round)
    about = {"step": step.place.step + 1, "lane": step.batches[0].lane, "rounds": rounds}
    (folder / f"{name}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
