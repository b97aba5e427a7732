"""The Trainer: a run from its start to its end, read downwards, as an object of a script.

In: a recipe, its keys as arguments, or both. Out: metrics of each step as a dict, and a run folder
with config.toml, metrics.jsonl, checkpoints/ and weights/. `longshore train` runs through it too.

    with Trainer(model={"preset": "tiny-qwen3"}, data={"mock": …, "batch": 8}) as trainer:
        for metrics in trainer:
            print(metrics["step"], metrics["loss"])      1 5.54, then 2 5.41, …

This process is one rank of the run: the only one, or one of several, which all make the same calls
together; rank 0 writes and shows. A Trainer joins the ranks when it is built and leaves them when
it is closed, so another can follow in the same process. It handles signals only if it is asked to.

The loop reads a step's numbers on a GPU after the next step was queued, so that the device never
waits for the host: with steps 1, 2, 3, 4 those of 2, 3 and 4 are read after 3, 4 and 4 were queued.
The first step, steps that are evaluated and steps that a script wants one by one are read at once;
so are all on a CPU, and those that follow a step of SLOW_S seconds. Before each step, and before
its sequences are drawn, the ranks ask each other whether to stop: a rank that is asked in step 2
ends the run after step 2 or, where step 3 is queued already, after 3.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longshore.arch.costs import step_flops
from longshore.config.load import load_config
from longshore.config.schema import RunConfig
from longshore.data.steps import Step
from longshore.distributed.collectives import PeerError, agreed
from longshore.distributed.process_group import Ranks, alone, loopback, ranks_from_environment
from longshore.ops.backends import kernels_line
from longshore.parallel.pipeline import Model, Timestamp
from longshore.plan.planner import PlaceError
from longshore.plan.types import Plan
from longshore.run.data import is_in_memory, saved_samples, tokenizer_warnings
from longshore.run.folder import newest_runs
from longshore.run.parts import (
    build_parts,
    check_before_text,
    joined_ranks,
    make_job,
    open_held_out,
)
from longshore.run.resume import (
    FRESH,
    Start,
    checked_config,
    keep_settings,
    load_checkpoint,
    names_run,
    open_run,
    recipe_of,
    restore_folder,
    start_from_environment,
)
from longshore.run.score import with_reference
from longshore.run.weights import export_weights, write_weights
from longshore.train.checkpoint import Position
from longshore.train.checkpoint_files import checkpoint_folder
from longshore.train.device import peak_flops
from longshore.train.evaluation import evaluate
from longshore.train.optimizer import Schedule
from longshore.train.record import EVALS, LossWatch, RunRecord, explain, has_step, stage_times
from longshore.train.refine import refining
from longshore.train.step import QueuedStep, StepReport, check_gradient, queue_step, read_step
from longshore.train.supervision import SAVING, RunError

Metrics = dict[str, Any]
"""What metrics.jsonl has of a step, or evals.jsonl of an evaluation, by its names there."""
Callback = Callable[["Trainer", Metrics], None]
REFUSALS = (ValueError.__name__, PlaceError.__name__)
PATHS = ("path", "eval_path")
SLOW_S = 2.0
"""After a step this long none is queued ahead: it could not be stopped, and would gain little."""


class Trainer:
    """A run on this rank: steps, evaluations, checkpoints and weights. All ranks call together."""

    _on_step: Callback | None = None
    _on_evaluation: Callback | None = None

    def __init__(
        self,
        recipe: str | Path | RunConfig | None = None,
        *,
        overrides: Seq[str] = (),
        resume: bool | str | Path = False,
        force: bool = False,
        signals: bool = False,
        on_step: Callback | None = None,
        on_evaluation: Callback | None = None,
        **sections: Any,  # noqa: ANN401 - tables of keys, or data
    ) -> None:
        """Builds the run, as far as its first step.

        recipe: the path of a TOML file, TOML itself, or a RunConfig; None: the demo, unless data or
        a model are given. overrides: "section.key=value", as on the command line. resume: the
        folder of a run; or True for the newest of output.folder. force: resume with other data too.
        signals: Ctrl-C, SIGTERM and SIGHUP end the run after a step, with a checkpoint. on_step,
        on_evaluation: called with the Trainer and the metrics. sections: keys by section, such as
        train={"lr": 3e-4, "steps": 100}; data={"path": …} may also be a list of samples (dicts) or
        a `datasets.Dataset`, and so may data itself. output.display "auto" shows nothing here.
        """
        place = ranks_from_environment()
        start = start_from_environment() if place is not None else FRESH
        start = replace(start, is_asked=bool(resume), is_forced=force)
        config = configured(recipe, overrides, sections, resume=resume, force=force)
        is_first = place is None or place.rank == 0
        size = place.world_size if place is not None else 1
        config = checked_config(config, size, start, is_first=is_first)
        shown = config.output.display
        display = "none" if shown == "auto" else shown  # config.toml keeps "auto" for the command
        self._start(config, place, start, signals=signals, display=display)
        self._on_step, self._on_evaluation = on_step, on_evaluation

    @classmethod
    def on_rank(
        cls, config: RunConfig, ranks: Ranks, start: Start = FRESH, *, signals: bool = False
    ) -> Self:
        """A Trainer of a configuration that was checked before, on a given rank."""
        trainer = cls.__new__(cls)
        trainer._start(config, ranks, start, signals=signals, display=config.output.display)
        return trainer

    # The start: what happens before the first step, in this order.

    def _start(
        self,
        config: RunConfig,
        place: Ranks | None,
        start: Start,
        *,
        signals: bool,
        display: str,
    ) -> None:
        """place: None for a run of one rank."""
        self._last: StepReport | None = None
        self._failure: BaseException | None = None
        self._is_ended = self._is_closed = self._reads_all = False
        self._evaluated_step, self._is_evaluation_cut, self._elapsed_s = 0, False, 0.0
        with ExitStack() as opened:  # closed only if something fails here
            self._ranks = place if place is not None else opened.enter_context(alone())
            with loopback(self._ranks):
                notes = self._build(config, start, opened, signals=signals, display=display)
            self._job.stop.can_save = True
            self._files = opened.enter_context(ExitStack())
            self._open_record()
            with loopback(self._ranks):
                self._held_out = open_held_out(self._job, self.model)
            self._show_notes(notes)
            self._reports = self._train()
            self._opened = opened.pop_all()

    def _build(
        self, config: RunConfig, start: Start, opened: ExitStack, *, signals: bool, display: str
    ) -> list[str]:
        """Joins the ranks, checks, opens data and folder, builds, loads; returns notes."""
        ranks = self._ranks
        topology, stop = opened.enter_context(
            joined_ranks(config, ranks, attempt=start.attempt, signals=signals)
        )
        with agreed(topology.groups):
            if topology.rank == 0:
                check_before_text(config)
        job = make_job(config, topology, stop=stop, local_size=ranks.local_size, display=display)
        self._job = job = with_reference(job)
        run = opened.enter_context(open_run(job.config, start, topology, steps=job.steps))
        self._run, job.status.folder = run, str(run.folder)
        self._parts = parts = build_parts(job, run.folder)
        opened.push(self._close_parts)
        if run.is_resumed:
            job.tell("loading the checkpoint…")
        self._done, self._updates, notes = load_checkpoint(
            run, parts.checkpoints, parts.loader, steps=job.steps, refiner=parts.refiner
        )
        self._done_before = self._done
        self._keeps = parts.checkpoints.keep > 0
        self._peak_flops = peak_flops(topology.device, job.dtype)
        return notes

    def _close_parts(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._job.status.at("ending")
        elif self._job.topology.world_size > 1:
            return  # closing would wait for the others; the groups end with the process
        else:
            self._parts.checkpoints.abandon()
        self._parts.close()

    def _open_record(self) -> None:
        job = self._job
        self._record = self._files.enter_context(
            RunRecord(
                self.folder,
                display=job.display,
                steps=job.steps,
                after=self._done_before,
                is_first=self.is_first,
                trackers=job.config.output.trackers,
                watch=LossWatch(job.config.train.loss, job.decoder.vocab_size),
            )
        )
        self._writers: tuple[Callable[[StepReport], None], ...] = ()

    def _show_notes(self, notes: Seq[str]) -> None:
        job, record = self._job, self._record
        for text in tokenizer_warnings(job.config, job.source) if self.is_first else ():
            if self._done_before:  # a resumed run has it on its page already
                record.note(text)
            else:
                record.warn(0, text.removeprefix("warning: "))
        warnings = self._parts.checkpoints.disk_warning() if self._keeps else ()
        for line in (*notes, *warnings):
            record.note(line)
        job.status.at("waiting for data", step=self._done + 1)

    # What a script may ask.

    @property
    def config(self) -> RunConfig:
        """The configuration, with what was "auto" decided."""
        return self._job.config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._run.folder

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self._job.topology.rank == 0

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self._job.steps

    @property
    def done(self) -> int:
        """Steps done so far, those of an earlier run included."""
        return self._done

    @property
    def stopped_by(self) -> int | None:
        """The number of the signal that asked the run to stop, if one has."""
        return self._job.stop.number

    @property
    def is_finished(self) -> bool:
        """Whether the last step is done, and no signal has ended its evaluation."""
        # What cannot be resumed is finished without it.
        return self.done >= self.steps and not (self._is_evaluation_cut and self._keeps)

    @property
    def model(self) -> Model:
        """The model, as it is split over the ranks."""
        return self._parts.stepper.model

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step."""
        return self._last.step.plan if self._last is not None else None

    # The loop: a step for each report that is read.

    def __iter__(self) -> Iterator[Metrics]:
        """Trains a step for each dict of metrics that is read, to the last step."""
        while (metrics := self.step()) is not None:
            yield metrics

    def step(self) -> Metrics | None:
        """Trains one step, and returns its metrics; None once the run is at its end.

        What the config asks for between steps, such as a checkpoint, is done when it returns.
        """
        self._check_open()
        self._reads_all = True
        report = self._advance()
        return None if report is None else report.metrics.as_dict()

    def run(self) -> Metrics | None:
        """Trains to the last step, and returns its metrics; None if nothing was left to do."""
        self._check_open()
        # Without a callback nobody needs the model of just this step, so a GPU never waits.
        self._reads_all = self._on_step is not None
        while self._advance() is not None:
            pass
        return None if self._last is None else self._last.metrics.as_dict()

    def _advance(self) -> StepReport | None:
        """The next report; after the last one the run is ended."""
        if self._is_ended:
            return None
        with self._noting_failure():
            report = next(self._reports, None)
            if report is None:
                self._end()
                return None
            self._last = report
            if self._on_step is not None:
                self._on_step(self, report.metrics.as_dict())
            return report

    def _train(self) -> Iterator[StepReport]:
        """The loop; it yields a step's report once all is done that comes before the next step."""
        parts, device = self._parts, self._job.topology.device
        schedule = _schedule(self.config, self.steps)
        self._make_up_evaluation()
        coming, begin = self._steps_left(), Timestamp(device)
        waiting: QueuedStep | None = None  # queued, and not yet read
        is_first = True
        while True:
            wants = [self._wants_stop(), self._elapsed_s >= SLOW_S]
            stops, is_slow = parts.any_rank(wants)
            if stops or (step := next(coming, None)) is None:
                break
            queued = queue_step(parts.stepper, step, schedule.at(self._updates), begin=begin)
            reports = []
            if waiting is not None:
                reports.append(self._report(waiting))
                parts.checkpoints.confirm(waiting.number)
            waiting, is_at_once = queued, is_first or is_slow or device.type != "cuda"
            if is_at_once or self._reads_all or self._is_evaluated(queued.number):
                reports.append(self._report(queued, is_first=is_first))
                waiting = None
            is_first = False
            self._after_step(queued)
            if waiting is None:
                parts.checkpoints.confirm(queued.number)  # after its checkpoint may have begun
            yield from reports
            begin = Timestamp(device)  # time between steps is not part of the next step
        if waiting is not None:
            report = self._report(waiting)
            parts.checkpoints.confirm(waiting.number)
            yield report

    def _wants_stop(self) -> bool:
        """Whether this rank wants the run to stop: asked to, or because it cannot go on."""
        is_asked = self._job.stop.is_asked
        return is_asked or self._parts.checkpoints.has_failed or self._run.is_lost

    def _steps_left(self) -> Iterator[Step]:
        """The loader's steps; what may take long before the first report is shown."""
        if self._done >= self.steps:
            return
        self._show_phase("planning")
        for number, step in enumerate(self._parts.loader):
            if number == 0:
                self._show_phase("first step")
            yield step
            if self._done >= self.steps:
                return

    def _show_phase(self, name: str) -> None:
        """The first step may take long; it says why."""
        why = ""
        if name == "first step" and self._job.topology.device.type == "cuda":
            why = " (compiling kernels)"
        elif name == "first step" and self._job.resolved.compile:
            why = " (compiling)"
        self._record.phase(f"{name}{why}…")

    def _report(self, queued: QueuedStep, *, is_first: bool = False) -> StepReport:
        """Reads a step's numbers and records them; all ranks have the same loss and norm."""
        stepper = self._parts.stepper
        flops = step_flops(self._job.decoder, [s.length for s in queued.step.plan.sequences])
        report = read_step(queued, stepper, flops=flops, peak_flops=self._peak_flops)
        self._elapsed_s = report.metrics.elapsed_s
        if is_first:
            check_gradient(queued, stepper.loss.name)
        loss, norm = report.metrics.loss, report.metrics.grad_norm
        if not all(number is None or math.isfinite(number) for number in (loss, norm)):
            assert queued.result is not None
            advice = explain(self.folder, stepper, queued.step, queued.result)
            raise RunError(
                f"step {queued.number}: the loss is {loss} and the gradient norm {norm}; {advice}"
            )
        self._write(report)
        return report

    def _write(self, report: StepReport) -> None:
        """Files and display, the times of pipeline stages, what the refined cost profile learns."""
        if not self._writers:
            self._begin_files()
        for write in self._writers:
            write(report)

    def _begin_files(self) -> None:
        """The first step has worked, or none was left, so the run's settings may change.

        With train.steps 100 before and 200 now, config.toml has 200 after step 101. With 40, where
        step 40 is done, they end the run, and config.toml has 40.
        """
        job, folder, after = self._job, self.folder, self._done_before
        if job.topology.device.type == "cuda":
            self._record.note(f"kernels: {kernels_line()}")
        keep_settings(job.config, self._run, job.topology, step=after)
        stages = self._files.enter_context(stage_times(folder, job.topology, after=after))
        self._writers = (self._record.write, stages)
        if refiner := self._parts.refiner:
            note = self._record.note
            refine = refining(folder, refiner, job.topology, after=after, note=note)
            self._writers += (refine,)

    def _after_step(self, queued: QueuedStep) -> None:
        """A step was queued and the next was not, so the model is that of this step."""
        self._done, self._updates = queued.number, self._updates + (queued.result is not None)
        status, every = self._job.status, self.config.output.save_every
        status.at(SAVING)
        if self._keeps and every and self._done % every == 0:
            self._save()
        self._evaluate_if_due()
        status.at("waiting for data", step=self._done + 1)

    def _save(self) -> None:
        """Begins a checkpoint; a thread writes it, and it counts once the step is confirmed."""
        parts, step = self._parts, self._done
        shared = parts.refiner.saved(step) if parts.refiner is not None else None
        state = parts.loader.state_dict()
        parts.checkpoints.save(Position(step, self._updates, state, shared))

    def _is_evaluated(self, step: int) -> bool:
        """Whether train.eval_every asks for an evaluation after this step."""
        every = self.config.train.eval_every
        if not every or step == self._evaluated_step:
            return False
        return step == self.steps or step % every == 0

    def _evaluate_if_due(self) -> None:
        step, parts, held_out = self._done, self._parts, self._held_out
        if not self._is_evaluated(step):
            return
        assert held_out is not None
        self._evaluated_step = step
        evaluation = evaluate(
            held_out,
            parts.stepper.executor,
            self._job.status,
            stops=lambda: parts.any_rank([self._wants_stop()])[0],
        )
        self._is_evaluation_cut |= evaluation is None
        if evaluation is not None:
            self._record.evaluated(step, evaluation)
            if self._on_evaluation is not None:
                self._on_evaluation(self, {"step": step, **asdict(evaluation)})

    def _make_up_evaluation(self) -> None:
        """Evaluates the step that a run resumes after, if a signal or a kill has prevented it."""
        if not self._done or not self._is_evaluated(self._done):
            return
        is_missing = self.is_first and not has_step(self.folder / EVALS, self._done)
        if self._parts.any_rank([is_missing])[0]:
            self._evaluate_if_due()
            self._job.status.at("waiting for data")

    # Between steps: what a script may do with the model of the last step.

    def evaluate(self) -> Metrics:
        """The loss on the run's held-out data (data.eval_path or data.eval_mock) as it is now."""
        self._check_open()
        with self._noting_failure(refusals=True):
            if self._held_out is None:
                with loopback(self._ranks):
                    self._held_out = open_held_out(self._job, self.model, on_demand=True)
            if self._held_out is None:
                raise ValueError("there is no held-out data; give data.eval_path or data.eval_mock")
            executor = self._parts.stepper.executor
            evaluation = evaluate(self._held_out, executor, self._job.status)
            assert evaluation is not None, "nothing stops it here"
            return asdict(evaluation)

    def save(self) -> Path:
        """Writes a checkpoint of the last step, if there is none, and returns its folder."""
        self._check_open()
        if not self._keeps:
            raise ValueError("output.keep is 0, so no checkpoint is kept; set it to 1 or more")
        if not self.done:
            raise ValueError("no step is done yet, so there is nothing to save")
        with self._noting_failure():
            self._save_last()
        return checkpoint_folder(self.folder, self.done)

    def export(self, folder: str | Path) -> Path:
        """Writes the weights as they are now as a Hugging Face folder, a new one."""
        self._check_open()
        with self._noting_failure(refusals=True):
            export_weights(self._job, self.model, str(folder))
        return Path(folder)

    @contextmanager
    def _noting_failure(self, *, refusals: bool = False) -> Iterator[None]:
        """An error of the block is the end of this Trainer. refusals: but not a ValueError.

        That of another rank is a ValueError here too, so that all ranks go on alike.
        """
        try:
            yield
        except BaseException as error:
            if refusals and isinstance(error, PeerError) and error.kind in REFUSALS:
                raise ValueError(error.message) from None
            if not (refusals and isinstance(error, ValueError)):
                self._failure = error
            raise

    def _check_open(self) -> None:
        if self._is_closed or self._failure is not None:
            state = "is closed" if self._failure is None else "has failed"
            raise ValueError(
                f"this Trainer {state}; build another, with resume={str(self.folder)!r} to go "
                "from its last checkpoint"
            )

    # The end: the last checkpoint, the weights, and leaving the ranks.

    def _end(self) -> None:
        """After the last step, or before it: the last checkpoint, and the weights at the end."""
        if self._is_ended:
            return
        self._is_ended = True
        if not self._writers and self._done_before >= self.steps:
            self._begin_files()
        self._record.end()
        self._files.close()
        self._job.status.at(SAVING)
        self._check_folder()
        self._save_last()
        if self.is_finished:
            write_weights(self._job, self.model, folder=self.folder, note=self._record.note)

    def _check_folder(self) -> None:
        """Raises RunError if the run's folder is gone, after saving what can be saved."""
        run, parts, folder = self._run, self._parts, self.folder
        is_lost, is_taken = parts.any_rank([run.is_lost, run.is_taken])
        if not is_lost:
            return
        stopped = f"while it was trained; stopped after step {self.done}"
        if is_taken:
            raise RunError(
                f"{folder} was replaced {stopped}; nothing is saved, because what is there now is "
                "another's"
            )
        then = "nothing is saved, because output.keep is 0"
        if self._keeps:
            restore_folder(self.config, run, self._job.topology)
            parts.checkpoints.save_again()
            self._save_last()
            then = (
                f"its settings and a checkpoint of this step are in a new {folder}; resume with "
                f"--resume {folder}"
            )
        raise RunError(f"{folder} was deleted or moved {stopped}; {then}")

    def _save_last(self) -> None:
        """Saves the last step, unless it is saved, and waits; no step is left to be read."""
        checkpoints = self._parts.checkpoints
        if self._keeps and self._done and checkpoints.last != self._done:
            self._save()
        checkpoints.confirm(self._done)
        checkpoints.wait()

    def close(self) -> None:
        """Leaves the other ranks. A run that is not at its end saves a checkpoint, to be resumed.

        After a failure nothing is saved; several ranks then end with their processes.
        """
        if self._is_closed:
            return
        if self._failure is not None:
            self._leave(self._failure)
            return
        try:
            self._end()
            if self._held_out is not None:
                self._held_out.close()
        except BaseException as error:
            self._leave(error)
            raise
        self._is_closed = True
        self._opened.close()

    def _leave(self, error: BaseException) -> None:
        """Closes what can be closed after an error."""
        self._is_closed = True
        self._opened.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_closed:
            self._leave(error)


def configured(
    recipe: str | Path | RunConfig | None,
    overrides: Seq[str],
    sections: Mapping[str, Any],
    *,
    resume: bool | str | Path,
    force: bool,
) -> RunConfig:
    """The configuration that a Trainer's arguments describe; refuses what the command refuses too.

    With resume="runs/x-1" and train={"steps": 200} it is that of runs/x-1 with train.steps 200.
    """
    if force and not resume:
        raise ValueError("force works only with resume")
    if is_in_memory(sections.get("data")):
        sections = {**sections, "data": {"path": sections["data"]}}
    if isinstance(resume, str | Path) and resume:
        own = recipe_of(Path(resume), asked_by="resume")
        recipe, overrides = recipe or own, [*overrides, f"output.folder={resume}"]
    elif resume and recipe is None and not names_run(_keys(overrides, sections)):
        raise ValueError(f"resume: which run? {newest_runs()}")
    if isinstance(recipe, RunConfig):
        recipe = recipe.to_toml()
    data = sections.get("data")
    given = {key: data[key] for key in PATHS if key in data} if isinstance(data, Mapping) else {}
    samples = {key: value for key, value in given.items() if is_in_memory(value)}
    if not samples:
        return load_config(recipe, overrides, values=sections)
    named = {**sections, "data": {**sections["data"], **dict.fromkeys(samples, "samples")}}
    cache = Path(load_config(recipe, overrides, values=named).data.cache)
    saved = {key: saved_samples(value, cache, f"data.{key}") for key, value in samples.items()}
    return load_config(recipe, overrides, values={**named, "data": {**named["data"], **saved}})


def _keys(overrides: Seq[str], sections: Mapping[str, Mapping[str, object]]) -> list[str]:
    given = [word.partition("=")[0].strip() for word in overrides]
    tables = {name: table for name, table in sections.items() if isinstance(table, Mapping)}
    return given + [f"{name}.{key}" for name, table in tables.items() for key in table]


def _schedule(config: RunConfig, steps: int) -> Schedule:
    train = config.train
    return Schedule(
        kind=train.schedule,
        lr=train.lr,
        warmup=warmup_steps(train.warmup, steps),
        updates=steps,
        min_lr=train.min_lr,
    )


def warmup_steps(warmup: float, steps: int) -> int:
    """Steps of a warmup that is given in steps, or as a share of all steps."""
    return max(1, round(warmup * steps)) if 0 < warmup < 1 else int(warmup)
