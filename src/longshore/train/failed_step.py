"""The step in which a run failed, kept for a look: RUN/failed-step-N.

In: a step and what it left. Out: of each lane its micro-batches, and which sequences they hold:

    lane-0.safetensors    round.0.token_ids, round.0.targets.labels, round.0.ctx.positions, …
    lane-0.json           {"step": 7, "lane": 0, "rounds": [{"loss": "nan", "sequences":
                          [{"id": 93, "length": 180, "cp_size": 2}, …]}, …]}

`loss` is this lane's part of the step's loss in that round, so it tells where the first NaN was.
Where a loss function of the user made it, a round has "fault": {"sequence": 93, "position": 17,
"of": "value"}: at that token nll was finite, and its value, or the gradient of it, was not.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longshore.batch import MicroBatch
from longshore.data.steps import Step
from longshore.distributed.collectives import gather
from longshore.files import reason
from longshore.train.checkpoint_storage import write_safetensors
from longshore.train.loss import Faults
from longshore.train.step import Stepper, Trained

SHOWN = 3
"""Tokens that a message names."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """A token at which a loss function went wrong. of: "value" or "gradient"."""

    sequence: int
    position: int
    of: str


def explain(run: Path, stepper: Stepper, step: Step, trained: Trained) -> str:
    """Keeps the step and says whose fault it is; all ranks call it together."""
    pairs = zip(step.batches, trained.rounds.faults, strict=True)
    mine = [token for batch, faults in pairs if (token := _blamed(step, batch, faults))]
    tokens = _over_ranks(mine, stepper)  # first, for to write may fail on one rank
    kept = keep_batch(run, step, trained)
    if not tokens:
        own = f", or look at train.loss={name}" if (name := stepper.loss.name) else ""
        return f"{kept}; lower train.lr, or set train.clip{own}"
    places = [f"the {t.of} at sequence {t.sequence}, position {t.position}" for t in tokens[:SHOWN]]
    more = f" and at {len(tokens) - SHOWN} more" if len(tokens) > SHOWN else ""
    return (
        f"{kept}; train.loss={stepper.loss.name} made {', '.join(places)}{more} not finite, where "
        "the model's own loss is: look at what the function divides by, or takes a logarithm or a "
        "root of"
    )


def _blamed(step: Step, batch: MicroBatch, faults: Faults | None) -> Blamed | None:
    """The first token of a round at which a loss function went wrong."""
    for of, row in faults._asdict().items() if faults else ():
        if row >= 0:
            place = batch.ctx.sequences[batch.ctx.sequence_index[row.cpu()]]
            position = int(batch.ctx.positions[row.cpu()])
            return Blamed(step.plan.sequences[place].id, position, of)
    return None


def _over_ranks(mine: list[Blamed], stepper: Stepper) -> list[Blamed]:
    """The first of each rank, the same on all."""
    row = (
        [1, mine[0].sequence, mine[0].position, Faults._fields.index(mine[0].of)]
        if mine
        else [0] * 4
    )
    device, world = stepper.topology.device, stepper.topology.groups.world
    rows = gather(torch.tensor([row], device=device), world).tolist()
    return [Blamed(id_, position, Faults._fields[of]) for any_, id_, position, of in rows if any_]


def keep_batch(run: Path, step: Step, trained: Trained) -> str:
    """Writes this lane's part, and returns what there is to say of it."""
    folder = run / f"failed-step-{step.place.step + 1}"
    try:
        _write(folder, step, trained)
    except OSError as error:
        for part in folder.glob(f"lane-{step.batches[0].lane}.*"):
            part.unlink(missing_ok=True)
        return f"its sequences cannot be kept in {folder} ({reason(error)})"
    return f"its sequences are in {folder}"


def _write(folder: Path, step: Step, trained: Trained) -> None:
    lane = step.batches[0].lane
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"round.{batch.round}.{path}": tensor.cpu().contiguous()
        for batch in step.batches
        for path, tensor in batch.to_tensors().items()
    }
    write_safetensors(folder / f"lane-{lane}.safetensors", tensors)
    rounds = []
    parts = zip(step.batches, trained.rounds.losses, trained.rounds.faults, strict=True)
    for batch, losses, faults in parts:
        about_round = {"loss": _number(losses[0].item()), "sequences": _sequences(step, batch)}
        token = _blamed(step, batch, faults)
        rounds.append({**about_round, "fault": asdict(token)} if token else about_round)
    about = {"step": step.place.step + 1, "lane": lane, "rounds": rounds}
    (folder / f"lane-{lane}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def _sequences(step: Step, batch: MicroBatch) -> list[dict[str, int]]:
    found = []
    for pack in batch.ctx.packs:
        for place in batch.ctx.sequences[pack.sequences]:
            sequence = step.plan.sequences[place]
            about = {"id": sequence.id, "length": sequence.length}
            found.append({**about, "cp_size": pack.group.cp_size})
    return found


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
