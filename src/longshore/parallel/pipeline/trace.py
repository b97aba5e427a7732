"""The trace: every operation of a rank in a step, from the plan alone, before anything runs.

In: a plan, a layout, a rank's queue, and of the model its config and the choices of a recipe. Out:
the rank's operations in the order in which it issues them, each with its group and its bytes. No
tensors, no processes. checker.py runs the traces of all ranks; `check_issued` compares a trace with
what distributed/collectives.py recorded.

Rank 0 of two pipeline ranks with one lane, one round, 6 rows of width 4 in 8 bytes:

    send     (0, 1)  192  forward of round 0, stage 0
    receive  (1, 0)  192  backward of round 0, stage 1

Exact: messages, and the collectives of shared packs, recomputation included (pack_collectives.py).
FSDP's collectives have the order of torch's FSDP2 (fsdp_trace.py), but their bytes are those of a
module's parameters, without the padding of shards. Not in a trace: what a step does after its last
backward (sums of losses and of embeddings' copies, the norm), the data path, and tensor
parallelism, which does not exist yet: with tp 2 a trace counts all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from longshore.arch.decoder import DecoderConfig
from longshore.choices import AttentionKind, Recompute, ScanKind, ShardMode
from longshore.distributed.collectives import Call
from longshore.distributed.topology import Axes
from longshore.parallel.pipeline.pack_collectives import SharedPack, Ways, part_collectives
from longshore.parallel.pipeline.stage_trace import LaneCollective, Slot, StageTrace
from longshore.plan.cost import Ints
from longshore.plan.layout import Layout
from longshore.plan.order import Action
from longshore.plan.pipeline_queue import Batch, Message, Queue, rank_queues
from longshore.plan.shapes import lane_packs, lane_tokens, padded_lengths
from longshore.plan.simulate import pipeline_walk
from longshore.plan.types import Plan

ALONE = -1
"""The batch of an operation that is in none."""


class Operation(NamedTuple):
    """One collective or message of a rank."""

    kind: str
    """send, receive, a name of distributed/collectives.py, or "fsdp …"."""
    group: tuple[int, ...]
    """The ranks of the collective; the sender and the receiver of a message."""
    bytes: int
    """Of a message; that this rank receives from others in a collective of a pack; of all
    parameters in one of FSDP."""
    what: str
    """Whose it is, the same on all ranks of the group."""
    total: int
    """Bytes of a collective over all its ranks; of a message its bytes."""
    batch: int = ALONE
    """Messages with one number are issued together."""

    def __str__(self) -> str:
        ranks = " → ".join(map(str, self.group)) if self.batch != ALONE else f"{self.group}"
        return f"{self.kind} {ranks}, {self.bytes:,} bytes: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """What a trace needs to know of a model and of how it is trained."""

    config: DecoderConfig
    """The model, layer by layer."""
    mode: ShardMode
    """How FSDP shards the parameters."""
    item: int
    """Bytes of a number of the arithmetic."""
    kept: int
    """Bytes of a parameter as the optimizer has it."""
    attention: AttentionKind = "auto"
    """How attention serves a shared pack."""
    scan: ScanKind = "auto"
    """How Mamba2 and delta net serve one."""
    recompute: Recompute = "none"
    """What is computed again in backward."""


class Tracer:
    """The traces of a plan's ranks; what several ranks have alike is computed once."""

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        *,
        model: TracedModel,
        axes: Axes,
        queues: Sequence[Queue] | None = None,
        buckets: Sequence[int] = (),
    ) -> None:
        """queues: of each pipeline rank; None for the plan's own. buckets: see plan/shapes.py."""
        setting, stages = plan.setting, len(layout.stages)
        if (setting.lanes, setting.pp, setting.vpp) != (axes.lanes, layout.pp, layout.vpp):
            raise ValueError(
                f"the plan is for {setting.lanes} lanes, pp {setting.pp} and vpp {setting.vpp}, "
                f"but there are {axes.lanes} lanes, and the layout has pp {layout.pp} and vpp "
                f"{layout.vpp}"
            )
        self.plan, self.layout, self.model, self.axes = plan, layout, model, axes
        self.buckets = buckets
        self.queues = queues or rank_queues(pipeline_walk(plan), pp=layout.pp, stages=stages)
        self.ways = Ways(model.attention, model.scan, model.item)
        self._steps: dict[int, list[Slot | LaneCollective | Batch]] = {}
        self._packs: dict[tuple[int, int], tuple[SharedPack, ...]] = {}

    def of(self, rank: int) -> list[Operation]:
        """The operations of a rank, numbered over all ranks."""
        axes = self.axes
        lane, pp_rank = axes.lane_of(rank), axes.pp_rank_of(rank)
        ranks = [
            axes.rank_at(lane=other, tp_rank=axes.tp_rank_of(rank), pp_rank=pp_rank)
            for other in range(axes.lanes)
        ]
        operations: list[Operation] = []
        everyone = tuple(ranks)
        for number, step in enumerate(self._rank_steps(pp_rank)):
            if isinstance(step, Slot):
                operations += self._shared(step, lane, ranks)
            elif isinstance(step, LaneCollective):
                if len(everyone) > 1:
                    total = step.bytes * len(everyone)
                    operations.append(Operation(step.kind, everyone, step.bytes, step.what, total))
            else:
                operations += [self._sent(message, rank, number) for message in step]
        return operations

    def _rank_steps(self, pp_rank: int) -> list[Slot | LaneCollective | Batch]:
        """What all lanes of a pipeline rank do, with slots for the packs of each."""
        if pp_rank not in self._steps:
            stages = {number: self._stage(number) for number in self.layout.of_rank(pp_rank)}
            steps: list[Slot | LaneCollective | Batch] = []
            last = len(self.plan.rounds) - 1
            for entry in self.queues[pp_rank]:
                if isinstance(entry, Action):
                    steps += stages[entry.stage].run(entry, is_last=entry.round == last)
                else:
                    steps.append(entry)
            self._steps[pp_rank] = steps
        return self._steps[pp_rank]

    def _stage(self, number: int) -> StageTrace:
        model = self.model
        return StageTrace(
            model.config,
            self.layout.stages[number],
            name=f"stage {number}",
            mode=model.mode,
            recompute=model.recompute,
            item=model.item,
            kept=model.kept,
        )

    def _shared(self, slot: Slot, lane: int, ranks: Sequence[int]) -> list[Operation]:
        """The collectives of a part for the packs that the lane shares."""
        packs = self._lane_packs(slot.round, lane)
        if not packs:
            return []
        calls = part_collectives(slot.part, packs, self.ways, forward=slot.forward)
        return [
            Operation(
                kind,
                tuple(ranks[pack.first_lane : pack.first_lane + pack.cp_size]),
                received,
                f"{slot.where}: {name}",
                total,
            )
            for kind, pack, received, total, name in calls
        ]

    def _lane_packs(self, number: int, lane: int) -> tuple[SharedPack, ...]:
        """Those that it shares in a round, by falling CP size."""
        if (number, lane) not in self._packs:
            self._packs[number, lane] = tuple(
                SharedPack(
                    pack.first_lane,
                    pack.cp_size,
                    lane - pack.first_lane,
                    pack.tokens_per_lane,
                    self._padded(pack.sequences, pack.cp_size),
                )
                for pack in lane_packs(self.plan, number, lane)
                if pack.cp_size > 1
            )
        return self._packs[number, lane]

    def _padded(self, sequences: Sequence[int], cp_size: int) -> tuple[int, ...]:
        lengths: Ints = np.array([self.plan.sequences[at].length for at in sequences])
        return tuple(padded_lengths(self.plan, lengths, cp_size).tolist())

    def _sent(self, message: Message, rank: int, batch: int) -> Operation:
        """A message as one of its two sides has it."""
        axes, action = self.axes, message.action
        lane, tp_rank = axes.lane_of(rank), axes.tp_rank_of(rank)
        source, target = (
            axes.rank_at(lane=lane, tp_rank=tp_rank, pp_rank=side)
            for side in (message.source, message.target)
        )
        amount = self._message_bytes(message, lane)
        what = f"{action.kind} of round {action.round}, stage {action.stage}"
        kind = "send" if rank == source else "receive"
        return Operation(kind, (source, target), amount, what, amount, batch)

    def _message_bytes(self, message: Message, lane: int) -> int:
        """Rows of the border between two stages, in the dtype of the hidden states."""
        action, config = message.action, self.model.config
        before = action.stage if action.kind == "forward" else action.stage - 1
        tokens = lane_tokens(self.plan, action.round, lane, buckets=self.buckets)
        # The last norm gives rows of the arithmetic's dtype, and depths read these.
        wide = config.float32_residual and self.layout.streams(before) == 1
        item = max(self.model.item, 4) if wide else self.model.item
        return tokens * self.layout.streams(before) * config.width * item


def trace(
    plan: Plan,
    layout: Layout,
    rank: int,
    *,
    model: TracedModel,
    axes: Axes,
    queues: Sequence[Queue] | None = None,
    buckets: Sequence[int] = (),
) -> list[Operation]:
    """The operations of one rank; for many ranks a Tracer is faster."""
    return Tracer(plan, layout, model=model, axes=axes, queues=queues, buckets=buckets).of(rank)


def check_issued(expected: Sequence[Operation], issued: Sequence[Call]) -> None:
    """Raises ValueError at the first operation that differs from the trace.

    FSDP's collectives are left out: torch issues them, and nothing records them.
    """
    visible = [operation for operation in expected if not operation.kind.startswith("fsdp")]
    for number, (wanted, call) in enumerate(zip_longest(visible, issued)):
        if wanted is None or call is None or _as_call(wanted) != call:
            raise ValueError(
                f"operation {number} of {len(visible)} differs from the trace: issued was "
                f"{_call_text(call)}; the trace has {'nothing more' if wanted is None else wanted}"
            )


def _as_call(operation: Operation) -> Call:
    return Call(operation.kind, operation.bytes, operation.group)


def _call_text(call: Call | None) -> str:
    return "nothing more" if call is None else f"{call.name} {call.ranks}, {call.bytes:,} bytes"
