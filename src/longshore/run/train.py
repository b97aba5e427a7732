"""The way in: from a RunConfig to a trained model, on one rank of a run.

In: a checked configuration and this rank's place. Out: a run folder with config.toml,
metrics.jsonl, checkpoints/ and weights/. All ranks call `train` together; rank 0 writes and shows.

    train(config, Ranks(rank=0, world_size=1, local_rank=0, local_size=1, rendezvous="file:///…"))

The order of a run, and the module of each part:

    trainer.py        the Trainer: all of this as one object, step by step or to the end
    arguments.py      a Trainer's arguments become a configuration
    job.py            the process joins the other ranks, the sequences are opened (data.py), and
                      what is "auto" is decided (auto.py)
    score.py          DPO's data are scored under the reference, if they are not yet
    resume.py         the run's folder is opened, a new one or an earlier run's (folder.py)
    parts.py          the loader, the model with its optimizer, and the checkpoints are built
    resume.py         a resumed run loads its newest checkpoint
    loop.py           steps are trained; between them the run saves, evaluates, reacts to signals
    step_recorder.py  each step is written and shown
    weights.py        after the last step the weights are written
"""

import signal

from longshore.config.schema import RunConfig
from longshore.distributed.process_group import Ranks
from longshore.run.resume import FRESH, Start
from longshore.run.trainer import Trainer
from longshore.train.stop import StoppedError


def train(config: RunConfig, ranks: Ranks, start: Start = FRESH) -> None:
    """Trains up to the last step, from the first or from a checkpoint, and leaves a run folder."""
    with Trainer.on_rank(config, ranks, start, signals=True) as trainer:
        trainer.run()
    if not trainer.is_finished:
        then = f"resume with --resume {trainer.folder}"
        if not config.output.keep:
            then = "nothing is saved, because output.keep is 0"
        where = ", in its evaluation" if trainer.done >= trainer.steps else ""
        text = f"stopped after step {trainer.done} of {trainer.steps}{where}; {then}"
        raise StoppedError(text, trainer.stopped_by or signal.SIGTERM)
