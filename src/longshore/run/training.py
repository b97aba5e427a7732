"""A run on one rank, joined, built and loaded, for as long as a block lasts.

In: a checked configuration and this rank's place. Out: a Training, from which steps can be trained:
of a run that resumes after step 40, its saver's progress is 40 and its loader begins with step 41.
All ranks enter together, and leave together after success; after an error a rank of several leaves
its groups to the end of its process, since closing them would wait for the others.

What can be refused without the data is refused before text is tokenized, which may take hours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from longshore.config.schema import RunConfig, in_keys
from longshore.distributed.agreement import agreed
from longshore.hf.checkpoint import open_weights
from longshore.run.data import text_rules
from longshore.run.job import TrainingJob, make_job
from longshore.run.parts import Parts, build_parts, data_loss
from longshore.run.process import joined_ranks
from longshore.run.ranks import Ranks
from longshore.run.resume import OpenRun, Start, load_checkpoint, open_run
from longshore.run.score import with_reference
from longshore.train.checkpoint import Saver, nothing_shared
from longshore.train.device import pick_device
from longshore.train.record import check_trackers


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """A run on this rank, ready for its next step."""

    job: TrainingJob
    """What this rank is to do."""
    run: OpenRun
    """The run's folder."""
    parts: Parts
    """Loader, model with optimizer, checkpoints."""
    saver: Saver
    """Saves, and knows the progress."""
    notes: list[str]
    """For the user, before the first step."""


def check_before_text(config: RunConfig) -> None:
    """Refuses what only torch and other packages can tell, before any text is tokenized."""
    pick_device(config.train.device, 0)
    with in_keys("output.trackers"):
        check_trackers(config.output.trackers)
    if (rules := text_rules(config)) is not None:
        data_loss(config, rules)
    if config.model.from_hf and config.model.code == "longshore":
        open_weights(config.model.from_hf)


@contextmanager
def joined_training(
    config: RunConfig, ranks: Ranks, start: Start, *, signals: bool, display: str
) -> Iterator[Training]:
    """Joins the other ranks, builds the parts and loads the checkpoint of a resumed run."""
    with joined_ranks(config, ranks, attempt=start.attempt, signals=signals) as (topology, stop):
        with agreed(topology.groups):
            if topology.rank == 0:
                check_before_text(config)
        job = make_job(config, topology, stop=stop, local_size=ranks.local_size, display=display)
        job = with_reference(job)
        with open_run(job.config, start, topology, steps=job.steps) as run:
            job.status.folder = str(run.folder)
            parts = build_parts(job, run.folder)
            try:
                yield _loaded(job, run, parts)
            except BaseException:
                if topology.world_size == 1:  # several ranks would wait for each other
                    parts.checkpoints.abandon()
                    parts.close()
                raise
            job.status.at("ending")
            parts.close()


def _loaded(job: TrainingJob, run: OpenRun, parts: Parts) -> Training:
    if run.is_resumed:
        job.tell("loading the checkpoint…")
    refiner = parts.refiner
    start, notes = load_checkpoint(
        run, parts.checkpoints, parts.loader, steps=job.steps, refiner=refiner
    )
    saver = Saver(
        parts.checkpoints,
        parts.loader,
        every=job.config.output.save_every,
        start=start,
        shared=refiner.saved if refiner is not None else lambda step: nothing_shared,
    )
    return Training(job, run, parts, saver, notes)
