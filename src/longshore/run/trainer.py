"""Trainer: what `longshore train` does, as an object of a script or a notebook.

In: a recipe, its keys as arguments, or both. Out: metrics of each step as a dict, and the same run
folder that the command leaves. The command itself runs through it (run/train.py).

    with Trainer(model={"preset": "tiny-qwen3"}, data={"mock": …, "batch": 8}) as trainer:
        for metrics in trainer:
            print(metrics["step"], metrics["loss"])      1 5.54, then 2 5.41, …

This process is one rank of the run: the only one, or under torchrun one of torchrun's, which all
make the same calls together. A Trainer joins the ranks when it is built and leaves them when it is
closed, so another can follow in the same process. It handles signals only if it is asked to.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longshore.config.schema import RunConfig
from longshore.distributed.agreement import PeerError
from longshore.parallel.pipeline import Model
from longshore.plan.planner import PlaceError
from longshore.plan.types import Plan
from longshore.run.arguments import configured
from longshore.run.loop import StepHooks, train_steps
from longshore.run.parts import make_evaluator
from longshore.run.ranks import Ranks, alone, loopback, ranks_from_environment
from longshore.run.resume import (
    FRESH,
    Start,
    checked_config,
    restore_folder,
    start_from_environment,
)
from longshore.run.step_recorder import StepRecorder
from longshore.run.training import joined_training
from longshore.run.weights import export_weights, write_weights
from longshore.train.checkpoint_files import checkpoint_folder
from longshore.train.evaluation import Evaluation, Evaluator
from longshore.train.heartbeat import SAVING
from longshore.train.loop import StepReport
from longshore.train.record import RunRecord, recording
from longshore.train.stop import RunError

Metrics = dict[str, Any]
"""Of a step, by the names of metrics.jsonl; or of an evaluation, by those of evals.jsonl."""
Callback = Callable[["Trainer", Metrics], None]
REFUSALS = (ValueError.__name__, PlaceError.__name__)


class Trainer:
    """A run on this rank: steps, evaluations, checkpoints and weights. All ranks call together."""

    _on_step: Callback | None
    _on_evaluation: Callback | None

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
        self._begin(config, place, start, signals=signals, display=display)
        self._on_step, self._on_evaluation = on_step, on_evaluation

    @classmethod
    def on_rank(
        cls, config: RunConfig, ranks: Ranks, start: Start = FRESH, *, signals: bool = False
    ) -> Self:
        """A Trainer of a configuration that was checked before, on a given rank."""
        trainer = cls.__new__(cls)
        trainer._begin(config, ranks, start, signals=signals, display=config.output.display)
        return trainer

    def _begin(
        self,
        config: RunConfig,
        place: Ranks | None,
        start: Start,
        *,
        signals: bool,
        display: str,
    ) -> None:
        """place: None for a run of one rank."""
        self._on_step = self._on_evaluation = None
        self._last: StepReport | None = None
        self._failure: BaseException | None = None
        self._is_ended, self._is_closed, self._reads_all = False, False, False
        with ExitStack() as opened:  # closed only if something fails here
            self._ranks = place if place is not None else opened.enter_context(alone())
            with self._connecting():
                self._training = training = opened.enter_context(
                    joined_training(config, self._ranks, start, signals=signals, display=display)
                )
            opened.enter_context(training.job.stop.after_steps())
            self._recorded = recorded = opened.enter_context(ExitStack())
            self._record = recorded.enter_context(self._recording())
            self._evaluator = self._make_evaluator()
            self._recorder = StepRecorder(
                training.job,
                training.parts,
                training.run,
                record=self._record,
                after=self.done,
                opened=recorded,
            )
            self._reports = self._make_reports()
            self._opened = opened.pop_all()

    def _connecting(self) -> AbstractContextManager[None]:
        """For a block that makes process groups."""
        return loopback() if self._ranks.is_one_machine else nullcontext()

    def _make_evaluator(self, *, on_demand: bool = False) -> Evaluator | None:
        job, parts = self._training.job, self._training.parts
        with self._connecting():
            return make_evaluator(
                job,
                parts,
                tell=self._evaluated,
                wants_stop=self._wants_stop,
                on_demand=on_demand,
            )

    def _wants_stop(self) -> bool:
        """Whether this rank wants the run to stop: asked to, or because it cannot go on."""
        training = self._training
        is_asked = training.job.stop.is_asked
        return is_asked or training.parts.checkpoints.has_failed or training.run.is_lost

    def _recording(self) -> AbstractContextManager[RunRecord]:
        job = self._training.job
        return recording(
            self.folder,
            display=job.display,
            trackers=job.config.output.trackers,
            steps=job.steps,
            after=self.done,
            is_first=self.is_first,
        )

    def _make_reports(self) -> Iterator[StepReport]:
        """The loop, which trains a step for each report that is read."""
        training, saver = self._training, self._training.saver
        warnings = training.parts.checkpoints.room_warning() if saver.is_on else ()
        for line in (*training.notes, *warnings):
            self._record.note(line)
        training.job.status.at("waiting for data", step=self.done + 1)
        step_hooks = StepHooks(
            saver=saver,
            evaluator=self._evaluator,
            record=self._record,
            report=self._recorder.write,
            wants_stop=self._wants_stop,
            wants_report=lambda: self._reads_all,
        )
        return train_steps(training.job, training.parts, step_hooks)

    @property
    def config(self) -> RunConfig:
        """The configuration, with what was "auto" decided."""
        return self._training.job.config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._training.run.folder

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self._training.job.topology.rank == 0

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self._training.job.steps

    @property
    def done(self) -> int:
        """Steps done so far, those of an earlier run included."""
        return self._training.saver.progress.step

    @property
    def stopped_by(self) -> int | None:
        """The number of the signal that asked the run to stop, if one has."""
        return self._training.job.stop.number

    @property
    def is_finished(self) -> bool:
        """Whether the last step is done, and no signal has ended its evaluation."""
        is_cut = self._evaluator is not None and self._evaluator.is_cut
        # What cannot be resumed is finished without it.
        return self.done >= self.steps and not (is_cut and self._training.saver.is_on)

    @property
    def model(self) -> Model:
        """The model, as it is split over the ranks."""
        return self._training.parts.stepper.model

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step."""
        return self._last.step.plan if self._last is not None else None

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

    def _end(self) -> None:
        """After the last step, or before it: the last checkpoint, and the weights at the end."""
        if self._is_ended:
            return
        self._is_ended = True
        training = self._training
        self._recorder.end()
        self._recorded.close()
        training.job.status.at(SAVING)
        self._check_folder()
        training.saver.finish()
        if self.is_finished:
            model = training.parts.stepper.model
            write_weights(training.job, model, folder=self.folder, note=self._record.note)

    def _check_folder(self) -> None:
        """Raises RunError if the run's folder is gone, after saving what can be saved."""
        training, folder = self._training, self.folder
        run, parts, saver = training.run, training.parts, training.saver
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
        if saver.is_on:
            restore_folder(training.job.config, run, training.job.topology)
            parts.checkpoints.save_again()
            saver.finish()
            then = (
                f"its settings and a checkpoint of this step are in a new {folder}; resume with "
                f"--resume {folder}"
            )
        raise RunError(f"{folder} was deleted or moved {stopped}; {then}")

    def evaluate(self) -> Metrics:
        """The loss on the run's held-out data (data.eval_path or data.eval_mock) as it is now."""
        self._check_open()
        with self._noting_failure(refusals=True):
            if self._evaluator is None:
                self._evaluator = self._make_evaluator(on_demand=True)
            if self._evaluator is None:
                raise ValueError("there is no held-out data; give data.eval_path or data.eval_mock")
            evaluator = self._evaluator
            status = self._training.job.status
            evaluation = evaluator.held_out.evaluate(evaluator.executor, status)
            assert evaluation is not None, "nothing stops it here"
            return asdict(evaluation)

    def _evaluated(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation that train.eval_every asks for."""
        self._record.evaluated(step, evaluation)
        if self._on_evaluation is not None:
            self._on_evaluation(self, {"step": step, **asdict(evaluation)})

    def save(self) -> Path:
        """Writes a checkpoint of the last step, if there is none, and returns its folder."""
        self._check_open()
        saver = self._training.saver
        if not saver.is_on:
            raise ValueError("output.keep is 0, so no checkpoint is kept; set it to 1 or more")
        if not self.done:
            raise ValueError("no step is done yet, so there is nothing to save")
        with self._noting_failure():
            saver.finish()
        return checkpoint_folder(self.folder, self.done)

    def export(self, folder: str | Path) -> Path:
        """Writes the weights as they are now as a Hugging Face folder, a new one."""
        self._check_open()
        with self._noting_failure(refusals=True):
            model = self._training.parts.stepper.model
            export_weights(self._training.job, model, str(folder))
        return Path(folder)

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
            if self._evaluator is not None:
                self._evaluator.held_out.steps.close()
        except BaseException as error:
            self._leave(error)
            raise
        self._is_closed = True
        self._opened.close()

    def _leave(self, error: BaseException) -> None:
        """Closes what can be closed after an error."""
        self._is_closed = True
        self._opened.__exit__(type(error), error, error.__traceback__)

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
