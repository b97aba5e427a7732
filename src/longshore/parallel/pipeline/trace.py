"""The trace: every operation of a rank in a step, from the plan alone, before anything runs.

In: a plan, a layout, a rank's queue, and of the model its config and the choices of a recipe. Out:
the rank's operations in the order in which it issues them, each with its group and its bytes. No
tensors, no processes. checker.py runs the traces of all ranks; `check_issued` compares a trace with
what distributed/collectives.py recorded.

Rank 0 of two pipeline ranks with one lane, one round, 6 rows of width 4 in 8 bytes:

    send     (0, 1)  192  forward of round 0, stage 0
    receive  (1, 0)  192  backward of round 0, stage 1

Exact: messages, the collectives of shared packs (pack_collectives.py) and those of tensor
parallelism (stage_trace.py), recomputation included. Those of expert parallelism have their place,
but rows go where the router sends them: their bytes are UNKNOWN, except for the counts that tell
ranks how many rows come. FSDP's collectives have the order of torch's FSDP2 (fsdp_trace.py), but
their bytes are those of a module's parameters on this rank, without the padding of shards. Not in a
trace: what a step does after its last backward (gradients summed over TP and over embeddings'
copies, losses, the norm), the data path, and collectives of one rank.

With 2 lanes and tp 2, rank 1 gathers the 6 rows of its lane from ranks 0 and 1 before attention,
3 · 4 · 8 = 96 bytes from rank 0, shares packs with rank 3 for its own heads, and scatters the sum:

    gather (0, 1)  96, gather (1, 3) …, reduce_scatter (0, 1)  96
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from longshore.arch.cuts import TPRank
from longshore.arch.decoder import DecoderConfig
from longshore.arch.expert_cuts import check_ep
from longshore.arch.stage_memory import sent_width
from longshore.choices import AttentionKind, Recompute, ScanKind, ShardMode
from longshore.distributed.collectives import Call
from longshore.distributed.topology import Axes
from longshore.parallel.pipeline.fsdp_trace import Over
from longshore.parallel.pipeline.pack_collectives import SharedPack, Ways, part_collectives
from longshore.parallel.pipeline.stage_trace import (
    RowCollective,
    ShardCollective,
    Slot,
    StageTrace,
    Step,
)
from longshore.plan.cost import Ints
from longshore.plan.layout import Layout
from longshore.plan.order import Action
from longshore.plan.pipeline_queue import Batch, Message, Queue, rank_queues
from longshore.plan.shapes import lane_packs, lane_tokens, padded_lengths
from longshore.plan.simulate import pipeline_walk
from longshore.plan.types import Plan

ALONE = -1
"""The batch of an operation that is in none."""
UNKNOWN = -1
"""Bytes that do not follow from the plan."""


class Operation(NamedTuple):
    """One collective or message of a rank."""

    kind: str
    """send, receive, a name of distributed/collectives.py, or "fsdp …"."""
    group: tuple[int, ...]
    """The ranks of the collective; the sender and the receiver of a message."""
    bytes: int
    """Of a message; that this rank receives from others in a collective of activations, or
    UNKNOWN; of all parameters in one of FSDP."""
    what: str
    """Whose it is, the same on all ranks of the group."""
    total: int
    """Bytes of a collective over all its ranks, or UNKNOWN; of a message its bytes."""
    batch: int = ALONE
    """Messages with one number are issued together."""

    def __str__(self) -> str:
        ranks = " → ".join(map(str, self.group)) if self.batch != ALONE else f"{self.group}"
        amount = "unknown" if self.bytes == UNKNOWN else f"{self.bytes:,}"
        return f"{self.kind} {ranks}, {amount} bytes: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """What a trace needs to know of a model and of how it is trained."""

    config: DecoderConfig
    """The whole model, layer by layer."""
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
    statistics: bool = False
    """Whether the loss reads more of a token's logits than its nll."""


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
        if setting.align % axes.tp:
            raise ValueError(
                f"the plan's align is {setting.align}, so that tp {axes.tp} does not divide a "
                f"lane's rows; plan with align={axes.tp}"
            )
        check_ep(model.config, axes.ep)
        self.plan, self.layout, self.model, self.axes = plan, layout, model, axes
        self.buckets = buckets
        self.queues = queues or rank_queues(pipeline_walk(plan), pp=layout.pp, stages=stages)
        self.ways = Ways(model.attention, model.scan, model.item)
        self._steps: dict[tuple[int, int], list[Step | Batch]] = {}
        self._packs: dict[tuple[int, int], tuple[SharedPack, ...]] = {}
        self._sizes: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, rank: int) -> list[Operation]:
        """The operations of a rank, numbered over all ranks."""
        lane, groups = self.axes.lane_of(rank), groups_of(self.axes, rank)
        operations: list[Operation] = []
        for number, step in enumerate(self._rank_steps(rank)):
            if isinstance(step, Slot):
                operations += self._shared(step, lane, groups["lanes"])
            elif isinstance(step, ShardCollective):
                group = groups[step.over]
                if len(group) > 1:
                    total = step.bytes * len(group)
                    operations.append(Operation(step.kind, group, step.bytes, step.what, total))
            elif isinstance(step, RowCollective):
                operations.append(self._exchanged(step, lane, groups[step.over]))
            else:
                operations += [self._sent(message, rank, number) for message in step]
        return operations

    def _rank_steps(self, rank: int) -> list[Step | Batch]:
        """What all lanes of a TP and pipeline rank do, with slots for the packs of each."""
        tp_rank, pp_rank = place = self.axes.tp_rank_of(rank), self.axes.pp_rank_of(rank)
        if place not in self._steps:
            numbers = self.layout.of_rank(pp_rank)
            stages = {number: self._stage(number, tp_rank) for number in numbers}
            steps: list[Step | Batch] = []
            last = len(self.plan.rounds) - 1
            for entry in self.queues[pp_rank]:
                if isinstance(entry, Action):
                    steps += stages[entry.stage].run(entry, is_last=entry.round == last)
                else:
                    steps.append(entry)
            self._steps[place] = steps
        return self._steps[place]

    def _stage(self, number: int, tp_rank: int) -> StageTrace:
        model = self.model
        return StageTrace(
            model.config,
            self.layout.stages[number],
            at=TPRank(self.axes.tp, tp_rank),
            ep=self.axes.ep,
            name=f"stage {number}",
            mode=model.mode,
            recompute=model.recompute,
            item=model.item,
            kept=model.kept,
            statistics=model.statistics,
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

    def _exchanged(self, step: RowCollective, lane: int, group: tuple[int, ...]) -> Operation:
        """A collective about a lane's rows; the ranks of a TP group have the same lane."""
        if step.each is None:
            return Operation(step.kind, group, UNKNOWN, step.what, UNKNOWN)
        received = (len(group) - 1) * step.each.of(*self._lane_size(step.round, lane))
        return Operation(step.kind, group, received, step.what, len(group) * received)

    def _lane_size(self, number: int, lane: int) -> tuple[int, int]:
        """Of a lane in a round: rows of each TP rank, and sequences."""
        if (number, lane) not in self._sizes:
            tokens = lane_tokens(self.plan, number, lane, buckets=self.buckets)
            packs = lane_packs(self.plan, number, lane)
            sequences = sum(len(pack.sequences) for pack in packs)
            self._sizes[number, lane] = tokens // self.axes.tp, sequences
        return self._sizes[number, lane]

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
        rows, _ = self._lane_size(action.round, lane)
        # The last norm gives rows of the arithmetic's dtype, and depths read these.
        wide = config.float32_residual and not self.layout.is_normed(before)
        item = max(self.model.item, 4) if wide else self.model.item
        return rows * sent_width(config, self.layout, before) * item


def groups_of(axes: Axes, rank: int) -> dict[Over, tuple[int, ...]]:
    """The ranks of this rank's group along each axis, in their order."""
    lanes, tp, ep = axes.lanes, axes.tp, axes.ep
    first = rank // (lanes * tp) * lanes * tp
    ranks = range(first, first + lanes * tp)
    place = rank - first
    return {
        "lanes": tuple(ranks[place % tp :: tp]),
        "tp": tuple(ranks[place // tp * tp :][:tp]),
        "ep": tuple(ranks[place // ep * ep :][:ep]),
        "expert_replicas": tuple(ranks[place % ep :: ep]),
    }


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
        if wanted is None or call is None or not _is_as_traced(call, wanted):
            raise ValueError(
                f"operation {number} of {len(visible)} differs from the trace: issued was "
                f"{_call_text(call)}; the trace has {'nothing more' if wanted is None else wanted}"
            )


def _is_as_traced(call: Call, operation: Operation) -> bool:
    same = (call.name, call.ranks) == (operation.kind, operation.group)
    return same and operation.bytes in (UNKNOWN, call.bytes)


def _call_text(call: Call | None) -> str:
    return "nothing more" if call is None else f"{call.name} {call.ranks}, {call.bytes:,} bytes"
