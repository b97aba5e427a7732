"""The step in which a run failed, kept for a look: RUN/failed-step-N.

In: a step and what it left. Out: of each lane its micro-batches, and which sequences they hold:

    lane-0.safetensors    round.0.token_ids, round.0.targets.labels, round.0.ctx.positions, …
    lane-0.json           {"step": 7, "lane": 0, "rounds": [{"loss": "nan", "sequences":
                          [{"id": 93, "length": 180, "cp_size": 2}, …]}, …]}

`loss` is this lane's part of the step's loss in that round, so it tells where the first NaN was.
"""

import json
import math
from pathlib import Path

from longshore.batch import MicroBatch
from longshore.data.steps import Step
from longshore.files import reason
from longshore.train.step import Trained
from longshore.train.storage import write_safetensors


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
    rounds = [
        {"loss": _number(losses[0].item()), "sequences": _sequences(step, batch)}
        for batch, losses in zip(step.batches, trained.rounds.losses, strict=True)
    ]
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
