"""What each pipeline rank does, one after another: its actions, and the messages between them.

In: an order of work and the times at which its actions would run. Out: for each rank one queue of
actions and batches of messages; the executor issues them in this order, and so do traces.

A message is sent at the time its action ends, by both sides: the receiver takes it in then, and
keeps it until its own action begins. So every entry of every queue has a place on one time line,
and a rank's queue follows it. That is why nothing can deadlock, not even where a send blocks until
it is received: of all entries not done, the earliest has everything before it done on all the ranks
that take part. Messages of one rank at one time make a batch, in a fixed order.

Two ranks, one stage each, two rounds; a forward takes 1 and a backward 2 units:

    rank 0:  F0  send F0  F1  send F1  recv B0  B0  recv B1  B1
    rank 1:  recv F0  F0  recv F1  B0  send B0  F1  B1  send B1
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from longshore.plan.order import Action
from longshore.plan.pipeline_times import Walk


@dataclass(frozen=True, slots=True)
class Message:
    """What an action hands to the next stage (forward) or to the one before (backward)."""

    action: Action
    """The action that made it: a forward's rows, or the gradient of a backward's input."""
    source: int
    """The pipeline rank that sends it."""
    target: int
    """The pipeline rank that receives it."""

    @property
    def needed_by(self) -> Action:
        step = 1 if self.action.kind == "forward" else -1
        return Action(self.action.kind, self.action.stage + step, self.action.round)


Batch = tuple[Message, ...]
"""Messages that a rank sends and receives together."""

Queue = tuple[Action | Batch, ...]


def rank_queues(walk: Walk, *, pp: int, stages: int) -> tuple[Queue, ...]:
    """The queue of every pipeline rank. A message inside a rank, as with pp 1, is none.

    Every action of the walk takes some time, or its message would come before it.
    """
    entries: list[dict[tuple[int, int], list[Message] | Action]] = [{} for _ in range(pp)]
    for rank, (actions, ends) in enumerate(zip(walk.order, walk.ends, strict=True)):
        for number, (action, end) in enumerate(zip(actions, ends, strict=True)):
            start = walk.starts[rank][number]
            assert start < end, f"{action} takes no time"
            entries[rank][start, 1] = action
            message = message_of(action, pp=pp, stages=stages)
            if message is not None:
                for side in (message.source, message.target):
                    batch = entries[side].setdefault((end, 0), [])
                    assert isinstance(batch, list)
                    batch.append(message)
    return tuple(_sorted(each) for each in entries)


def message_of(action: Action, *, pp: int, stages: int) -> Message | None:
    """What an action sends; None from the last forward, the first backward and inside a rank."""
    following = action.stage + (1 if action.kind == "forward" else -1)
    if not 0 <= following < stages or following % pp == action.stage % pp:
        return None
    return Message(action, action.stage % pp, following % pp)


def _sorted(entries: dict[tuple[int, int], list[Message] | Action]) -> Queue:
    in_order = (entries[time] for time in sorted(entries))
    return tuple(each if isinstance(each, Action) else _batch(each) for each in in_order)


def _batch(messages: Seq[Message]) -> Batch:
    """In an order that both sides of every pair share."""
    return tuple(sorted(messages, key=lambda m: (m.action.kind, m.action.stage, m.action.round)))
