"""A model cut into stages: its modules, their messages, and the executor that runs them.

In: a config and a layout, then the lane's micro-batches, this rank's queue, and what to do with a
stage's output. Out: Stages, a module with one Decoder for each of the rank's stages; gradients in
the parameters, and the times of all actions. A model without a pipeline is the case of one stage,
whose queue is F0 B0 F1 B1 …

Names are those of the whole decoder, on every layout, so a checkpoint written under one is read
under another. With "Et|tL" and tied weights, rank 1 has layers.1 and a copy of embed.weight, which
its own module calls head.weight.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup

from longshore.arch.cuts import TensorCut
from longshore.arch.decoder import DecoderConfig
from longshore.arch.memory import sent_width
from longshore.batch import MicroBatch
from longshore.distributed.collectives import marks, sum_over
from longshore.distributed.topology import Topology, destroy_groups, new_group_if_in
from longshore.model.decoder import Decoder
from longshore.model.interface import LanguageModel, Output, Reader
from longshore.parallel.fsdp import begin_round, local_part
from longshore.plan.layout import Action, Kind, Layout, Stage, make_order, one_stage
from longshore.plan.simulate import Batch, Message, Queue, pipeline_walk, rank_queues, walk
from longshore.plan.types import Plan
from longshore.settings import ShardMode

EMBEDDING = "embed.weight"


class Stages(nn.Module):
    """One Decoder for each stage of a pipeline rank, by the stage's number as text."""

    def __init__(self, config: DecoderConfig, layout: Layout, *, pp_rank: int) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        stages = {str(number): layout.stages[number] for number in layout.of_rank(pp_rank)}
        self.parts = nn.ModuleDict({key: Decoder(config, stage) for key, stage in stages.items()})


Model = LanguageModel | Stages


def stages_of(model: Model) -> dict[int, LanguageModel]:
    """The rank's stages by their number."""
    if isinstance(model, LanguageModel):
        return {0: model}
    parts = {int(name): part for name, part in model.parts.items()}
    assert all(isinstance(part, Decoder) for part in parts.values())
    return parts  # type: ignore[return-value]


def layout_of(model: Model) -> Layout:
    if isinstance(model, LanguageModel):
        return one_stage(layers=len(model.config.layers), depths=len(model.config.mtp))
    return model.layout


def cut_tensors_by_name(model: Model) -> Iterator[tuple[str, Tensor, TensorCut | None]]:
    """Parameters, then saved buffers, by their names in the whole decoder, each with its cut."""
    for part in stages_of(model).values():
        for name, parameter in part.named_parameters():
            yield whole_name(model.config, name), parameter, part.cuts.get(name)
    for part in stages_of(model).values():
        for name, buffer in saved_buffers(part):
            yield name, buffer, None


def saved_buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are part of a checkpoint, as torch calls persistent."""
    for prefix, module in part.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def tensor_names(config: DecoderConfig, stage: Stage | None = None) -> list[str]:
    """Names of the parameters, then of the buffers, of a stage or of the whole decoder."""
    with torch.device("meta"):
        model = Decoder(config, stage)
    return [name for name, _ in chain(model.named_parameters(), model.named_buffers())]


def whole_name(config: DecoderConfig, name: str) -> str:
    """A stage's parameter as the whole decoder calls it."""
    return EMBEDDING if config.tied and name == "head.weight" else name


class EmbeddingCopies:
    """This rank's copies of the embedding, and the group of the pipeline ranks that have some.

    Their gradients are summed, so every copy takes the same update, and they stay equal without
    being sent. "Et|tm|L" with tied weights has three: for the tokens, for the tokens ahead of the
    depth, and as the head. Lane 1's ranks 0, 1 and 2 of the pipeline have the same rows of it, and
    sum those. All ranks construct and close it together. counted: those parameters of the model
    that the norm counts, and a checkpoint saves, on this rank.
    """

    def __init__(self, model: Model, topology: Topology) -> None:
        layout, tied = layout_of(model), model.config.tied
        # The stages with a copy, the one with the embedding itself first.
        self.stages = [
            number
            for number, stage in enumerate(layout.stages)
            if stage.has_embedding or (tied and stage.head)
        ]
        ranks = sorted({layout.rank_of(stage) for stage in self.stages})
        self.mine = [
            part.get_parameter(EMBEDDING if part.stage.has_embedding else "head.weight")
            for number, part in stages_of(model).items()
            if number in self.stages
        ]
        # One copy is counted: the first rank's first.
        others = self.mine[1:] if topology.pp_rank == ranks[0] else self.mine
        uncounted = {id(copy) for copy in others}
        self.counted = [each for each in model.parameters() if id(each) not in uncounted]
        self.group: ProcessGroup | None = None
        if len(ranks) > 1:
            blocks = [
                [topology.rank_at(lane=lane, tp_rank=tp, pp_rank=rank) for rank in ranks]
                for lane in range(topology.lanes)
                for tp in range(topology.tp)
            ]
            self.group = new_group_if_in(blocks, backend=topology.backends[topology.device.type])

    def sum_gradients(self) -> None:
        """Gives every copy the sum of all their gradients. The ranks that have one call it."""
        if len(self.stages) == 1 or not self.mine or not self.mine[0].requires_grad:
            return
        total, *others = (local_part(copy.grad) for copy in self.mine)  # type: ignore[arg-type]
        for other in others:
            total += other
        if self.group is not None:
            sum_over(total, self.group)
        for other in others:
            other.copy_(total)

    def close(self) -> None:
        if self.group is not None:
            destroy_groups([self.group])


Shape = tuple[tuple[int, ...], torch.dtype]


class Mailbox:
    """What one rank sends and receives in a pass over a plan.

    Messages are sent without waiting, and waited for when their rows are needed. Shapes are never
    sent: both sides know the plan. A receiver that expects rows of another number than were sent
    would wait or take wrong ones, which is why the ranks compare digests of their plans.

    shape: says that of a message's rows. number: one that differs for all messages of the pass.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        shape: Callable[[Message], Shape],
        number: Callable[[Message], int],
    ) -> None:
        self.group = group
        self.device = device
        self.shape = shape
        self.number = number
        self.is_batched = device.type == "cuda" and "nccl" in str(dist.get_backend_config(group))
        # gloo cannot send from a GPU's memory.
        self.memory = device if self.is_batched else torch.device("cpu")
        # What to wait for, and the rows that it reads or writes until then.
        self._sent: list[tuple[Any, Tensor]] = []
        self._received: dict[Action, tuple[Any, Tensor]] = {}
        self._ready: dict[Action, Tensor] = {}

    def put(self, action: Action, rows: Tensor) -> None:
        """Rows that an action made, for the batch that sends them, or for a stage of this rank."""
        self._ready[action] = rows

    def post(self, batch: Batch) -> None:
        """Begins to send and receive a batch, all of it at once and in the order of the batch.

        Both sides share that order, so NCCL pairs sends and receives rightly, also where two ranks
        are each other's both neighbours. Over gloo every message has a tag of its own.
        """
        self._sent = [(work, rows) for work, rows in self._sent if not work.is_completed()]
        mine = self.group.rank()
        operations: list[tuple[Message, Any, Tensor, int]] = []
        for message in batch:
            if message.source == mine:
                rows = self._ready.pop(message.action).to(self.memory).contiguous()
                operations.append((message, dist.isend, rows, message.target))
            else:
                size, dtype = self.shape(message)
                rows = torch.empty(size, dtype=dtype, device=self.memory)
                operations.append((message, dist.irecv, rows, message.source))
        works = self._issue(operations)
        for (message, send_or_receive, rows, _), work in zip(operations, works, strict=True):
            if send_or_receive is dist.isend:
                self._sent.append((work, rows))
            else:
                self._received[message.needed_by] = (work, rows)

    def _issue(self, operations: list[tuple[Message, Any, Tensor, int]]) -> list[Any]:
        if not self.is_batched:  # both functions take the peer's rank in the group last
            return [
                send_or_receive(rows, None, self.group, self.number(message), peer)
                for message, send_or_receive, rows, peer in operations
            ]
        batch = [
            P2POp(send_or_receive, rows, group=self.group, group_peer=peer)
            for _, send_or_receive, rows, peer in operations
        ]
        works = dist.batch_isend_irecv(batch)
        # NCCL returns one work for all of them.
        return works if len(works) == len(batch) else works * len(batch)

    def take(self, action: Action) -> Tensor:
        """The rows that an action needs, once they have come."""
        if action not in self._received:
            step = -1 if action.kind == "forward" else 1
            return self._ready.pop(Action(action.kind, action.stage + step, action.round))
        work, rows = self._received.pop(action)
        work.wait()
        return rows.to(self.device)

    def finish(self) -> None:
        """Waits until everything was sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        assert not self._received, f"rows came that nothing took: {list(self._received)}"
        assert not self._ready, f"rows were never sent: {list(self._ready)}"


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


Graph = tuple[Tensor | None, Tensor | None, Tensor]
"""What a stage's forward leaves for its backward: the rows that came in, or None where token ids
did; the rows that went on, or None from the head; and the loss."""


class Executor:
    """Runs queues on this rank's stages.

    A stage's input is a leaf of its own autograd graph. Its backward begins at the rows that it
    sent on, with the gradient that came back, and at its own losses; the gradient of its input goes
    to the stage before. So a rank holds the graphs of as many rounds as its queue has forwards
    before the first backward: pp − p on rank p with 1F1B, however many rounds there are.

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
                marks.set(f"{entry.kind} of round {entry.round}, stage {entry.stage}")
                current.run(entry)
            else:
                marks.set("messages")
                current.mailbox.post(entry)
        marks.set("")
        if self.layout.pp > 1:
            current.mailbox.finish()
        self.most_graphs = current.most_graphs
        return current.times


class _Pass:
    """One pass over the rounds of a plan."""

    def __init__(
        self, executor: Executor, batches: Sequence[MicroBatch], queue: Queue, handlers: Handlers
    ) -> None:
        self.executor, self.batches, self.handlers = executor, batches, handlers
        self.times: list[Timed] = []
        self.most_graphs = 0
        self._graphs: dict[tuple[int, int], Graph] = {}
        self._on_device: dict[int, MicroBatch] = {}
        actions = [entry for entry in queue if isinstance(entry, Action)]
        self._left = Counter(action.round for action in actions)
        self._backwards = Counter(action.stage for action in actions if action.kind == "backward")
        if executor.layout.pp > 1:
            groups = executor.topology.groups
            self.mailbox = Mailbox(groups.pp, groups.device, shape=self._shape, number=self._number)

    def run(self, action: Action) -> None:
        self.handlers.begin(action)
        stage = self._part(action).stage
        is_first = stage.embed if action.kind == "forward" else stage.head
        # The rows from the stage before, or their gradient from the one after.
        rows = None if is_first else self.mailbox.take(action)
        begin = Timestamp(self.executor.topology.device)  # waiting for rows is not work
        if action.kind == "forward":
            self._forward(action, rows)
        else:
            self._backward(action, rows)
        self.times.append(Timed(action, begin, Timestamp(self.executor.topology.device)))
        self._left[action.round] -= 1
        if not self._left[action.round]:
            del self._on_device[action.round]

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
            self._graphs[action.stage, action.round] = (x, rows, loss)
            self.most_graphs = max(self.most_graphs, len(self._graphs))

    def _backward(self, action: Action, gradient: Tensor | None) -> None:
        part = self._part(action)
        x, rows, loss = self._graphs.pop((action.stage, action.round))
        self._backwards[action.stage] -= 1
        begin_round(part, mode=self.executor.mode, is_last=not self._backwards[action.stage])
        roots = [
            (root, grad)
            for root, grad in ((rows, gradient), (loss, None))
            if root is not None and root.requires_grad
        ]
        if roots:  # nothing of a first stage may be trained
            tensors, gradients = zip(*roots, strict=True)
            torch.autograd.backward(tensors, gradients)
        if x is not None:
            assert x.grad is not None
            self.mailbox.put(action, x.grad)

    def _part(self, action: Action) -> LanguageModel:
        return self.executor.stages[action.stage]

    def _batch(self, number: int) -> MicroBatch:
        if number not in self._on_device:
            self._on_device[number] = self.handlers.prepare(self.batches[number])
        return self._on_device[number]

    def _shape(self, message: Message) -> Shape:
        """Shape of a forward's rows, or of the gradient of the rows that the stage before sent."""
        action, executor = message.action, self.executor
        config, layout = executor.config, executor.layout
        sender = action.stage if action.kind == "forward" else action.stage - 1
        rows = self.batches[action.round].ctx.tokens // executor.topology.tp
        streams = layout.streams(sender)
        width = sent_width(config, layout, sender) // streams
        dtype = next(iter(executor.stages.values())).computing_dtype
        if config.float32_residual and not layout.is_normed(sender):
            dtype = torch.promote_types(dtype, torch.float32)
        return (rows * streams, width), dtype

    def _number(self, message: Message) -> int:
        action, stages = message.action, len(self.executor.layout.stages)
        return 2 * (action.round * stages + action.stage) + (action.kind == "backward")
