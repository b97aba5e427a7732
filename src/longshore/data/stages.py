"""Stages: a lane's first rank shares its micro-batches with the other ranks of the lane.

In: the plan, and on the first rank of the lane the step's micro-batches. Out: on every rank the
micro-batches of its pipeline stage. Boundaries, positions and groups follow from the plan, so every
rank makes them itself and nothing of them travels. The first stage gets token ids, the last
targets, a stage with multi-token prediction its depths, a middle one nothing at all.

With 4096 tokens, pp 4 and no depth, the last stage's first rank receives 4096 labels and 4096 mask
values in one message, the two middle stages receive none.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.batch import Counts, Depth, MicroBatch, Targets
from longshore.data.context import lane_context
from longshore.data.fields import Field
from longshore.distributed.collectives import agreed, broadcast
from longshore.distributed.topology import Groups
from longshore.plan.types import Plan


@dataclass(frozen=True, slots=True)
class Stage:
    """What a pipeline rank's stages need: the first token ids, the last targets, MTP its depths."""

    first: bool
    last: bool
    mtp: bool

    @property
    def needs_tokens(self) -> bool:
        return self.first or self.last or self.mtp


def usual_stages(pp: int, *, depths: int) -> tuple[Stage, ...]:
    """One stage a rank; multi-token prediction at the last."""
    return tuple(Stage(i == 0, i == pp - 1, depths > 0 and i == pp - 1) for i in range(pp))


@dataclass(frozen=True, slots=True)
class Form:
    """What, beside the plan, decides the shapes of a lane's micro-batches."""

    lane: int
    depths: int
    fields: tuple[Field, ...]
    buckets: tuple[int, ...]


def share_step(
    plan: Plan,
    batches: Seq[MicroBatch] | None,
    groups: Groups,
    stages: Seq[Stage],
    *,
    form: Form,
    counts: Counts,
) -> list[MicroBatch]:
    """The step's micro-batches for this rank's stage. All ranks of all lanes call it together.

    `batches` are whole on the first rank of the lane and None elsewhere; `stages` has one entry for
    each pipeline rank. All that may fail between two messages is agreed on.
    """
    stage = stages[groups.pp.rank()]
    with agreed(groups):
        held = shells(plan, form, counts, stage) if batches is None else list(batches)
        parts = _parts(held, batches is not None, groups, stages)
    received = _along_pipeline(parts, batches is not None, groups)
    with agreed(groups):
        if received is not None:
            _fill(held, received)
        held = [for_stage(stage, batch) for batch in held]
        flat = _flat(held) if stage.needs_tokens and groups.tp.size() > 1 else None
    if flat is not None:
        broadcast(flat, groups.tp)
    with agreed(groups):
        if flat is not None:
            _fill(held, flat)
    return held


def _parts(
    held: Seq[MicroBatch], is_source: bool, groups: Groups, stages: Seq[Stage]
) -> dict[int, Tensor]:
    """What the first stage's rank sends to each other one, or room for what another receives."""
    if groups.tp.rank():
        return {}
    if not is_source:
        mine = groups.pp.rank()
        return {mine: torch.empty_like(_flat(held))} if stages[mine].needs_tokens else {}
    return {
        other: _flat([for_stage(stage, batch) for batch in held])
        for other, stage in enumerate(stages)
        if other and stage.needs_tokens
    }


def _along_pipeline(parts: dict[int, Tensor], is_source: bool, groups: Groups) -> Tensor | None:
    """The first stage's rank sends each other stage that needs tokens its part."""
    for other, part in parts.items():
        if not is_source:
            dist.recv(part, group=groups.pp, group_src=0)
            return part
        dist.send(part, group=groups.pp, group_dst=other)
    return None


def for_stage(stage: Stage, batch: MicroBatch) -> MicroBatch:
    return batch.for_stage(first=stage.first, last=stage.last, mtp=stage.mtp)


def shells(plan: Plan, form: Form, counts: Counts, stage: Stage) -> list[MicroBatch]:
    """Micro-batches of the right shapes whose numbers have yet to come."""
    return [
        for_stage(stage, _shell(plan, number, form, counts)) for number in range(len(plan.rounds))
    ]


def _shell(plan: Plan, number: int, form: Form, counts: Counts) -> MicroBatch:
    ctx = lane_context(plan, number, form.lane, buckets=form.buckets)

    def ids() -> Tensor:
        return torch.zeros(ctx.tokens, dtype=torch.int64)

    def targets() -> Targets:
        return Targets(ids(), torch.zeros(ctx.tokens, dtype=torch.bool))

    def extra(field: Field, rows: int) -> Tensor:
        return torch.zeros((rows, *field.shape), dtype=getattr(torch, field.dtype))

    rows = len(ctx.sequences) + 1
    return MicroBatch(
        lane=form.lane,
        round=number,
        rounds=len(plan.rounds),
        ctx=ctx,
        counts=counts,
        token_ids=ids(),
        targets=targets(),
        mtp=tuple(Depth(ids(), targets()) for _ in range(form.depths)),
        token_fields={f.name: extra(f, ctx.tokens) for f in form.fields if f.per != "sequence"},
        sequence_fields={f.name: extra(f, rows) for f in form.fields if f.per == "sequence"},
    )


def _contents(batches: Seq[MicroBatch]) -> Iterator[Tensor]:
    """All tensors but the context's, in a fixed order."""
    for batch in batches:
        for path, tensor in batch.to_tensors().items():
            if not path.startswith("ctx."):
                yield tensor


def _flat(batches: Seq[MicroBatch]) -> Tensor:
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in _contents(batches)]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _fill(batches: Seq[MicroBatch], data: Tensor) -> None:
    """Writes bytes into the batches' tensors."""
    at = 0
    for tensor in _contents(batches):
        view = tensor.view(-1).view(torch.uint8)
        view.copy_(data[at : at + view.numel()])
        at += view.numel()
