"""Parts: what a run is put together from on one rank, built in one order and closed in one.

In: a job and the run's folder. Out: Parts, with weights but without what a checkpoint holds.
Building makes process groups, so all ranks build together: on 4 lanes with CP sizes 1, 2 and 4 the
CP groups come first, then those of the loader's thread, then those of the checkpoints' thread.
"""

from dataclasses import dataclass
from pathlib import Path

from longshore.data.loader import Loader
from longshore.distributed.cp_groups import CPGroups
from longshore.run.job import TrainingJob
from longshore.run.loader import make_loader
from longshore.run.model import make_cp_groups, make_stepper
from longshore.train.checkpoint import Checkpoints
from longshore.train.step import Stepper


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """groups: of lanes that share packs. stepper: the model, its optimizer and its loss."""

    groups: CPGroups
    loader: Loader
    stepper: Stepper
    checkpoints: Checkpoints

    def close(self) -> None:
        """Only after success: closing waits for all ranks, and one that failed never comes."""
        self.loader.close()
        self.checkpoints.close()
        self.groups.close()


def build_parts(job: TrainingJob, folder: Path) -> Parts:
    """All ranks call it together. folder: of the run, for its checkpoints."""
    job.status.at("building the model")
    groups = make_cp_groups(job)
    loader = make_loader(job)
    job.tell("loading the weights…" if job.config.model.from_hf else "building the model…")
    stepper = make_stepper(job, groups)
    checkpoints = Checkpoints(
        folder,
        stepper.model,
        stepper.optimizer,
        topology=job.topology,
        keep=job.config.output.keep,
    )
    return Parts(groups, loader, stepper, checkpoints)
