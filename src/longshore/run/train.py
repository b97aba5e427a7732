"""The way in: from a RunConfig to a trained model, on one rank of a run.

In: a checked configuration and this rank's place. Out: a run folder with config.toml,
metrics.jsonl, checkpoints/ and weights/. All ranks call `train` together; rank 0 writes and shows.

    train(config, Ranks(rank=0, world_size=1, local_rank=0, local_size=1, rendezvous="file:///…"))

The order of a run, and the module of each part:

    process.py   the process takes its device and joins the other ranks
    job.py       the sequences are opened (data.py), and what is "auto" is decided (auto.py)
    resume.py    the run's folder is opened, a new one or an earlier run's (folder.py)
    parts.py     the loader, the model with its optimizer, and the checkpoints are built
    resume.py    a resumed run loads its newest checkpoint
    loop.py      steps are trained; between them the run saves, evaluates and reacts to signals
    weights.py   after the last step the weights are written
"""

import signal
from collections import Counter
from itertools import chain, islice

from longshore.config.schema import RunConfig
from longshore.ops.backends import kernels_line
from longshore.run.job import TrainingJob, make_job
from longshore.run.loop import train_steps
from longshore.run.parts import Parts, build_parts, make_evaluator
from longshore.run.process import joined_ranks
from longshore.run.ranks import Ranks
from longshore.run.resume import FRESH, OpenRun, Start, keep_settings, load_checkpoint, open_run
from longshore.run.weights import write_weights
from longshore.train.checkpoint import Saver
from longshore.train.heartbeat import SAVING
from longshore.train.loop import Progress
from longshore.train.metrics import graphed_text
from longshore.train.record import RunRecord, recording
from longshore.train.stage_times import stage_times
from longshore.train.stop import StoppedError


def train(config: RunConfig, ranks: Ranks, start: Start = FRESH) -> None:
    """Trains up to the last step, from the first or from a checkpoint, and leaves a run folder."""
    with joined_ranks(config, ranks, attempt=start.attempt) as (topology, stop):
        job = make_job(config, topology, stop=stop, local_size=ranks.local_size)
        with open_run(job.config, start, topology, steps=job.steps) as run:
            job.status.folder = str(run.folder)
            done = _run_job(job, run)
    if done < job.steps:
        then = f"resume with --resume {run.folder}"
        if not config.output.keep:
            then = "nothing is saved, because output.keep is 0"
        text = f"stopped after step {done} of {job.steps}; {then}"
        raise StoppedError(text, stop.number or signal.SIGTERM)


def _run_job(job: TrainingJob, run: OpenRun) -> int:
    """Builds the parts, trains, and closes them; returns the steps done."""
    parts = build_parts(job, run.folder)
    if run.is_resumed:
        job.tell("loading the checkpoint…")
    start, notes = load_checkpoint(run, parts.checkpoints, parts.loader, steps=job.steps)
    done = _train_and_save(job, parts, run, start=start, notes=notes)
    job.status.at("ending")
    parts.close()
    return done


def _train_and_save(
    job: TrainingJob, parts: Parts, run: OpenRun, *, start: Progress, notes: list[str]
) -> int:
    """From the progress so far to the last step, or to a signal; returns the steps done."""
    output = job.config.output
    saver = Saver(parts.checkpoints, parts.loader, every=output.save_every, start=start)
    recorded = recording(
        run.folder,
        display=output.display,
        trackers=output.trackers,
        steps=job.steps,
        after=start.step,
        is_first=job.topology.rank == 0,
    )
    with job.stop.after_steps():
        with recorded as record:
            _train_and_record(job, parts, run, saver=saver, record=record, notes=notes)
        job.status.at(SAVING)
        saver.finish()
        if saver.progress.step >= job.steps:
            write_weights(job, parts.stepper.model, folder=run.folder, note=record.note)
    return saver.progress.step


def _train_and_record(
    job: TrainingJob,
    parts: Parts,
    run: OpenRun,
    *,
    saver: Saver,
    record: RunRecord,
    notes: list[str],
) -> None:
    """Trains and records each step; the first must work before the run's settings change."""
    after = saver.progress.step
    evaluator = make_evaluator(job, parts.stepper, tell=record.evaluated)
    for line in (*notes, *(parts.checkpoints.room_warning() if saver.is_on else ())):
        record.note(line)
    job.status.at("waiting for data", step=after + 1)
    reports = train_steps(job, parts, saver=saver, evaluator=evaluator, record=record)
    first = list(islice(reports, 1))
    if job.topology.device.type == "cuda":
        record.note(f"kernels: {kernels_line()}")
    keep_settings(job.config, run, job.topology, step=after)
    with stage_times(run.folder, job.topology, after=after) as write_stages:
        graphed, graph_gib = Counter[str](), None
        for report in chain(first, reports):
            record.write(report)
            write_stages(report)
            graphed.update(report.metrics.graphed or {})
            graph_gib = report.metrics.graph_gib
    if graphed:
        record.note(graphed_text(graphed, graph_gib))
    if evaluator is not None:
        evaluator.held_out.steps.close()
