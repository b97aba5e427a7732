"""Messages between pipeline ranks: sent without waiting, waited for when their rows are needed.

In: batches of messages, in the order of the rank's queue. Out: the rows that came. All of a batch
is issued at once, in an order that both sides share, so NCCL pairs sends and receives rightly, also
where two ranks are each other's both neighbours. Over gloo every message has a tag of its own.

Shapes are never sent: both sides know the plan. A receiver that expects rows of another number than
were sent would wait or take wrong ones, which is why the ranks compare digests of their plans.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from longshore.plan.order import Action
from longshore.plan.pipeline_queue import Batch, Message

Shape = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A message on its way: what to wait for, and its rows."""

    work: Any
    rows: Tensor


class Mailbox:
    """What one rank sends and receives in a pass over a plan.

    shape: of a message's rows. number: of a message, different for all messages of the pass.
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
        self._sent: list[_Pending] = []
        self._received: dict[Action, _Pending] = {}
        self._ready: dict[Action, Tensor] = {}

    def put(self, action: Action, rows: Tensor) -> None:
        """Rows that an action made, for the batch that sends them, or for a stage of this rank."""
        self._ready[action] = rows

    def post(self, batch: Batch) -> None:
        """Begins to send and receive a batch."""
        self._sent = [pending for pending in self._sent if not pending.work.is_completed()]
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
                self._sent.append(_Pending(work, rows))
            else:
                self._received[message.needed_by] = _Pending(work, rows)

    def _issue(self, operations: list[tuple[Message, Any, Tensor, int]]) -> list[Any]:
        if not self.is_batched:
            return [
                _tagged(send_or_receive, rows, peer, self.group, self.number(message))
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
        pending = self._received.pop(action, None)
        if pending is None:
            step = -1 if action.kind == "forward" else 1
            return self._ready.pop(Action(action.kind, action.stage + step, action.round))
        pending.work.wait()
        return pending.rows.to(self.device)

    def finish(self) -> None:
        """Waits until everything was sent."""
        for pending in self._sent:
            pending.work.wait()
        self._sent.clear()
        assert not self._received, f"rows came that nothing took: {list(self._received)}"
        assert not self._ready, f"rows were never sent: {list(self._ready)}"


def _tagged(
    send_or_receive: Callable[..., Any], rows: Tensor, peer: int, group: ProcessGroup, tag: int
) -> Any:  # noqa: ANN401
    if send_or_receive is dist.isend:
        return dist.isend(rows, group=group, group_dst=peer, tag=tag)
    return dist.irecv(rows, group=group, group_src=peer, tag=tag)
