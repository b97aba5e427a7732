"""The executor: runs the rounds of a plan through the stages of this rank, forward and backward.

In: the lane's micro-batches, this rank's queue, and what to do with a stage's output. Out:
gradients in the parameters, and the times of all actions. A model without a pipeline is the case of
one stage, whose queue is F0 B0 F1 B1 …

A stage's input is a leaf of its own autograd graph. Its backward begins at the rows that it sent
on, with the gradient that came back, and at its own losses; the gradient of its input goes to the
stage before. So a rank holds the graphs of as many rounds as its queue has forwards before the
first backward: pp − p on rank p with 1F1B, however many rounds there are.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longshore.arch.stage_memory import sent_width
from longshore.batch import MicroBatch
from longshore.choices import ShardMode
from longshore.distributed.recording import mark
from longshore.distributed.topology import Topology
from longshore.model.interface import LanguageModel, Output, Reader
from longshore.parallel.fsdp import begin_round
from longshore.parallel.pipeline.messages import Mailbox, Shape
from longshore.parallel.pipeline.stages import Model, layout_of, stages_of
from longshore.plan.order import Action, Kind, make_order
from longshore.plan.pipeline_queue import Message, Queue, rank_queues
from longshore.plan.pipeline_times import walk
from longshore.plan.simulate import pipeline_walk
from longshore.plan.types import Plan


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the caller does with the micro-batches and outputs of a pass."""

    prepare: Callable[[MicroBatch], MicroBatch]
    """Brings a micro-batch to the device, before the rank's first action of its round."""
    read: Callable[[Output, MicroBatch, int], Tensor]
    """Reads the output of the stage of a number; returns the scalar that its backward begins at,
    besides the rows that it sent on."""
    begin: Callable[[Action], None] = lambda action: None
    """Called before each action."""
    summed: bool = False
    """Whether losses of tokens are only added up, see Decoder."""
    reader: Callable[[MicroBatch], Reader] | None = None
    """What the head's stage computes of a micro-batch; None: the losses of its labels."""


class Timestamp:
    """A moment on the device, taken without waiting: now on a CPU; on a GPU an event in its stream.

    So a forward that was only queued still has its real time.
    """

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Waits until the device has reached it."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, other: "Timestamp") -> float:
        """Seconds since another one; the device has reached both."""
        if self.event is None or other.event is None:
            return self.time - other.time
        return float(other.event.elapsed_time(self.event)) / 1e3


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """An action, and when the device began and ended it."""

    action: Action
    begin: Timestamp
    end: Timestamp


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    """What a stage's forward leaves for its backward."""

    x: Tensor | None
    """The rows that came in; None where token ids did."""
    rows: Tensor | None
    """The rows that went on; None from the head."""
    loss: Tensor


class Executor:
    """Runs queues on this rank's stages.

    most_graphs: the largest number of the last pass's forwards whose backward was still to come.
    """

    def __init__(self, model: Model, topology: Topology, *, mode: ShardMode) -> None:
        self.layout = layout_of(model)
        self.stages = stages_of(model)
        self.topology = topology
        self.mode = mode
        self.config = model.config
        self.most_graphs = 0

    def queue(self, plan: Plan | None, *, rounds: int, backward: bool = True) -> Queue:
        """What this rank does in a step, or in an evaluation. plan: needed with a pipeline."""
        layout = self.layout
        if layout.pp == 1:
            kinds: tuple[Kind, ...] = ("forward", "backward") if backward else ("forward",)
            return tuple(Action(kind, 0, each) for each in range(rounds) for kind in kinds)
        assert plan is not None, "the order of a pipeline's messages follows from the plan"
        if backward:
            times = pipeline_walk(plan)
        else:
            order = make_order(rounds, pp=layout.pp, vpp=layout.vpp)
            only = tuple(tuple(a for a in each if a.kind == "forward") for each in order)
            times = walk(only, [1] * rounds, pp=layout.pp, vpp=layout.vpp)
        queues = rank_queues(times, pp=layout.pp, stages=len(layout.stages))
        return queues[self.topology.pp_rank]

    def run(self, batches: Sequence[MicroBatch], queue: Queue, handlers: Handlers) -> list[Timed]:
        """One pass over the rounds; the lanes of this rank's stages run it together."""
        current = _Pass(self, batches, queue, handlers)
        for entry in queue:
            if isinstance(entry, Action):
                mark(f"{entry.kind} of round {entry.round}, stage {entry.stage}")
                current.run(entry)
            else:
                mark("messages")
                current.mailbox.post(entry)
        mark("")
        if self.layout.pp > 1:
            current.mailbox.finish()
        self.most_graphs = current.most_graphs
        return current.times

    def rows_dtype(self, stage: int) -> torch.dtype:
        """Of the rows that a stage sends on."""
        dtype = next(iter(self.stages.values())).computing_dtype
        if self.config.float32_residual and not self.layout.is_normed(stage):
            return torch.promote_types(dtype, torch.float32)
        return dtype


class _Pass:
    """One pass over the rounds of a plan."""

    def __init__(
        self,
        executor: Executor,
        batches: Sequence[MicroBatch],
        queue: Queue,
        handlers: Handlers,
    ) -> None:
        self.executor, self.batches, self.handlers = executor, batches, handlers
        self.times: list[Timed] = []
        self.most_graphs = 0
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._on_device: dict[int, MicroBatch] = {}
        actions = [entry for entry in queue if isinstance(entry, Action)]
        self._left = Counter(action.round for action in actions)
        self._backwards = Counter(action.stage for action in actions if action.kind == "backward")
        if executor.layout.pp > 1:
            groups = executor.topology.groups
            self.mailbox = Mailbox(groups.pp, groups.device, shape=self._shape, number=self._number)

    def run(self, action: Action) -> None:
        self.handlers.begin(action)
        rows = self._incoming(action)
        begin = Timestamp(self.executor.topology.device)  # waiting for rows is not work
        if action.kind == "forward":
            self._forward(action, rows)
        else:
            self._backward(action, rows)
        self.times.append(Timed(action, begin, Timestamp(self.executor.topology.device)))
        self._left[action.round] -= 1
        if not self._left[action.round]:
            del self._on_device[action.round]

    def _incoming(self, action: Action) -> Tensor | None:
        """The rows from the stage before, or their gradient from the one after."""
        stage = self._part(action).stage
        is_first = stage.embed if action.kind == "forward" else stage.head
        return None if is_first else self.mailbox.take(action)

    def _forward(self, action: Action, x: Tensor | None) -> None:
        part, batch = self._part(action), self._batch(action.round)
        stage = part.stage
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        first = batch.token_ids if x is None else x
        assert first is not None
        targets = batch.targets if stage.head else None
        options: dict[str, Any] = {}
        if part.reads_ids and not stage.embed:
            options["token_ids"] = batch.token_ids
        if stage.head and self.handlers.reader is not None:
            options["reader"] = self.handlers.reader(batch)
        out = part(
            first,
            batch.ctx,
            targets.labels if targets is not None else None,
            batch.mtp if stage.head or stage.depths else (),
            summed=self.handlers.summed,
            **options,
        )
        loss = self.handlers.read(out, batch, action.stage)
        rows = None if stage.head else out.values
        if rows is not None:
            self.mailbox.put(action, rows.detach())
        if torch.is_grad_enabled():
            self._graphs[action.stage, action.round] = _Graph(x, rows, loss)
            self.most_graphs = max(self.most_graphs, len(self._graphs))

    def _backward(self, action: Action, gradient: Tensor | None) -> None:
        part = self._part(action)
        graph = self._graphs.pop((action.stage, action.round))
        self._backwards[action.stage] -= 1
        begin_round(part, mode=self.executor.mode, is_last=not self._backwards[action.stage])
        roots: list[Tensor] = []
        gradients: list[Tensor | None] = []
        if graph.rows is not None and graph.rows.requires_grad:
            roots.append(graph.rows)
            gradients.append(gradient)
        if graph.loss.requires_grad:
            roots.append(graph.loss)
            gradients.append(None)
        if roots:  # nothing of a first stage may be trained
            torch.autograd.backward(roots, gradients)
        if graph.x is not None:
            assert graph.x.grad is not None
            self.mailbox.put(action, graph.x.grad)

    def _part(self, action: Action) -> LanguageModel:
        return self.executor.stages[action.stage]

    def _batch(self, number: int) -> MicroBatch:
        if number not in self._on_device:
            self._on_device[number] = self.handlers.prepare(self.batches[number])
        return self._on_device[number]

    def _shape(self, message: Message) -> Shape:
        """Of a forward's rows, or of the gradient of the rows that the stage before sent."""
        action = message.action
        sender = action.stage if action.kind == "forward" else action.stage - 1
        executor = self.executor
        rows = self.batches[action.round].ctx.tokens // executor.topology.tp
        streams, config = executor.layout.streams(sender), executor.config
        width = sent_width(config, executor.layout, sender) // streams
        return (rows * streams, width), executor.rows_dtype(sender)

    def _number(self, message: Message) -> int:
        action, stages = message.action, len(self.executor.layout.stages)
        place = action.round * stages + action.stage
        return 2 * place + (action.kind == "backward")
