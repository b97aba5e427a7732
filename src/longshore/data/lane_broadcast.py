"""Lane broadcast: a lane's first rank sends its micro-batches to the other ranks of the lane.

In: the plan, and on the first rank of the lane the step's micro-batches. Out: on every rank the
micro-batches of its pipeline stage. Boundaries, positions and groups follow from the plan, so every
rank computes them itself and they are never sent. The first stage gets token ids, the last stage
targets, a stage with multi-token prediction its depths, a middle stage nothing at all.

With 4096 tokens, pp 4 and no depth, the last stage's first rank receives 4096 labels and 4096 mask
values in one message, the two middle stages receive none.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.batch import Counts, Depth, MicroBatch, TableMaker, Targets
from longshore.data.fields import Field
from longshore.data.lane_context import lane_context
from longshore.distributed.agreement import agreed
from longshore.distributed.collectives import broadcast
from longshore.distributed.topology import Groups
from longshore.plan.layout import StageInputs
from longshore.plan.types import Plan


@dataclass(frozen=True, slots=True)
class LaneShape:
    """What, besides the plan, decides the shapes of a lane's micro-batches."""

    lane: int
    """The lane, from 0."""
    depths: int
    """Of multi-token prediction."""
    fields: tuple[Field, ...]
    """Extra fields of tokens and sequences."""
    buckets: tuple[int, ...]
    """Token totals that a lane's micro-batch is rounded up to."""
    tables: tuple[TableMaker, ...] = ()
    """What makes the tables of each pack that the model needs."""


def broadcast_step(
    plan: Plan,
    batches: Seq[MicroBatch] | None,
    groups: Groups,
    stages: Seq[StageInputs],
    *,
    shape: LaneShape,
    counts: Counts,
) -> list[MicroBatch]:
    """The step's micro-batches for this rank's stage. All ranks of all lanes call it together.

    `batches` are complete on the first rank of the lane and None elsewhere; `stages` has one entry
    for each pipeline rank. Between two messages all ranks agree that none of them failed.
    """
    stage, is_sender = stages[groups.pp.rank()], batches is not None
    with agreed(groups):
        output = zero_batches(plan, shape, counts, stage) if batches is None else list(batches)
        messages = _pipeline_messages(output, is_sender, groups, stages)
    received = _along_pipeline(messages, is_sender, groups)
    with agreed(groups):
        if received is not None:
            _fill(output, received)
        output = [for_stage(stage, batch) for batch in output]
        tp_message = _to_bytes(output) if stage.any and groups.tp.size() > 1 else None
    if tp_message is not None:
        broadcast(tp_message, groups.tp)
    with agreed(groups):
        if tp_message is not None:
            _fill(output, tp_message)
    return output


def _pipeline_messages(
    batches: Seq[MicroBatch], is_sender: bool, groups: Groups, stages: Seq[StageInputs]
) -> dict[int, Tensor]:
    """By pipeline rank: on the sender what each other rank gets, elsewhere this rank's buffer."""
    if groups.tp.rank():
        return {}
    if not is_sender:
        mine = groups.pp.rank()
        return {mine: torch.empty_like(_to_bytes(batches))} if stages[mine].any else {}
    return {
        other: _to_bytes([for_stage(stage, batch) for batch in batches])
        for other, stage in enumerate(stages)
        if other and stage.any
    }


def _along_pipeline(messages: dict[int, Tensor], is_sender: bool, groups: Groups) -> Tensor | None:
    """The first stage's rank sends to each other stage that needs tokens; returns what came."""
    for other, message in messages.items():
        if not is_sender:
            dist.recv(message, group=groups.pp, group_src=0)
            return message
        dist.send(message, group=groups.pp, group_dst=other)
    return None


def for_stage(stage: StageInputs, batch: MicroBatch) -> MicroBatch:
    return batch.only(**asdict(stage))


def zero_batches(
    plan: Plan, shape: LaneShape, counts: Counts, stage: StageInputs
) -> list[MicroBatch]:
    """Micro-batches of the right shapes, filled with zeros."""
    return [
        for_stage(stage, _zero_batch(plan, number, shape, counts))
        for number in range(len(plan.rounds))
    ]


def _zero_batch(plan: Plan, number: int, shape: LaneShape, counts: Counts) -> MicroBatch:
    ctx = lane_context(plan, number, shape.lane, buckets=shape.buckets, tables=shape.tables)

    def ids() -> Tensor:
        return torch.zeros(ctx.tokens, dtype=torch.int64)

    def targets() -> Targets:
        return Targets(ids(), torch.zeros(ctx.tokens, dtype=torch.bool))

    def extra(field: Field, rows: int) -> Tensor:
        return torch.zeros((rows, *field.shape), dtype=getattr(torch, field.dtype))

    rows = len(ctx.sequences) + 1
    return MicroBatch(
        lane=shape.lane,
        round=number,
        rounds=len(plan.rounds),
        ctx=ctx,
        counts=counts,
        token_ids=ids(),
        targets=targets(),
        mtp=tuple(Depth(ids(), targets()) for _ in range(shape.depths)),
        token_fields={f.name: extra(f, ctx.tokens) for f in shape.fields if f.per != "sequence"},
        sequence_fields={f.name: extra(f, rows) for f in shape.fields if f.per == "sequence"},
    )


def _sent_tensors(batches: Seq[MicroBatch]) -> Iterator[Tensor]:
    """All tensors but the context's, in a fixed order."""
    for batch in batches:
        for path, tensor in batch.to_tensors().items():
            if not path.startswith("ctx."):
                yield tensor


def _to_bytes(batches: Seq[MicroBatch]) -> Tensor:
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in _sent_tensors(batches)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _fill(batches: Seq[MicroBatch], message: Tensor) -> None:
    """Writes the bytes of a message into the batches' tensors."""
    at = 0
    for tensor in _sent_tensors(batches):
        view = tensor.view(-1).view(torch.uint8)
        view.copy_(message[at : at + view.numel()])
        at += view.numel()
