"""The step in which a run failed, written to RUN/failed-step-N for inspection.

In: a step and its result. Out: the micro-batches of each lane, and the sequences in them:

    lane-0.safetensors    round.0.token_ids, round.0.targets.labels, round.0.ctx.positions, …
    lane-0.json           {"step": 7, "lane": 0, "rounds": [{"loss": "nan", "sequences":
                          [{"id": 93, "length": 180, "cp_size": 2}, …]}, …]}

`loss` is this lane's part of the step's loss in that round, so it shows where the first NaN was. If
a user's loss function caused it, a round has "fault": {"sequence": 93, "position": 17, "of":
"value", "nan_field": ""}: at that token nll was finite, and the function's value, or its gradient,
was not. nan_field: a field of the data that is NaN there, which then is the cause.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longshore.batch import MicroBatch
from longshore.data.steps import Step
from longshore.distributed.collectives import gather
from longshore.distributed.topology import Topology
from longshore.files import reason
from longshore.train.loss import Faults
from longshore.train.safetensors_stream import write_safetensors
from longshore.train.step import Stepper, StepResult

SHOWN = 3
"""Tokens named in a message, at most."""


@dataclass(frozen=True, slots=True)
class FaultyToken:
    """A token at which a user's loss function is not finite."""

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
    row = (
        [
            1,
            mine[0].sequence,
            mine[0].position,
            Faults._fields.index(mine[0].of),
            bool(mine[0].nan_field),
        ]
        if mine
        else [0] * 5
    )
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
    """Writes this rank's part, and returns a text about it.

    topology: with a pipeline each of its ranks has other tensors, in a file of its own.
    """
    folder = run / f"failed-step-{step.place.step + 1}"
    name = f"lane-{step.batches[0].lane}"
    if topology.pp > 1:
        name += f"-pipeline-{topology.pp_rank}"
    try:
        _write(folder, name, step, result)
    except OSError as error:
        for part in folder.glob(f"{name}.*"):
            part.unlink(missing_ok=True)
        return f"its sequences cannot be kept in {folder} ({reason(error)})"
    return f"its sequences are in {folder}"


def _write(folder: Path, name: str, step: Step, result: StepResult) -> None:
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
        about_round = {"loss": _number(losses[0].item()), "sequences": _sequences(step, batch)}
        token = _faulty_token(step, batch, faults)
        rounds.append({**about_round, "fault": asdict(token)} if token else about_round)
    about = {"step": step.place.step + 1, "lane": step.batches[0].lane, "rounds": rounds}
    (folder / f"{name}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def _sequences(step: Step, batch: MicroBatch) -> list[dict[str, int]]:
    sequences = []
    for pack in batch.ctx.packs:
        for index in batch.ctx.sequences[pack.sequences]:
            sequence = step.plan.sequences[index]
            about = {"id": sequence.id, "length": sequence.length}
            sequences.append({**about, "cp_size": pack.group.cp_size})
    return sequences


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
