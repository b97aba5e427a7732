"""The order of work in a pipeline, as data.

In: the number of rounds, the pipeline size and the stages per rank. Out: for every pipeline rank
the actions it runs, one after another. The executor and the simulator walk the same data, and
neither knows which schedule made it: a new schedule is one more function that returns an `Order`.

Stages are numbered over the whole pipeline; stage s belongs to rank s % pp. Two ranks, one stage
each, three rounds (F0 is the forward of round 0):

    rank 0, stage 0:  F0 F1 B0 F2 B1 B2
    rank 1, stage 1:  F0 B0 F1 B1 F2 B2

With two stages each and two rounds, rank 0 runs stage 0 on both rounds, then stage 2, and goes
back the same way:

    rank 0:  F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from longshore.errors import SettingError

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward or backward of one round."""

    kind: Kind
    stage: int
    round: int


Order = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=8)
def make_order(rounds: int, *, pp: int, vpp: int) -> Order:
    """1F1B for one stage per rank, interleaved 1F1B for several; one list for each rank."""
    for name, value in (("rounds", rounds), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise SettingError(f"{{{name}}} is {value}; it must be at least 1")
    if vpp == 1:
        return one_forward_one_backward(rounds, pp=pp)
    return interleaved(rounds, pp=pp, vpp=vpp)


def one_forward_one_backward(rounds: int, *, pp: int) -> Order:
    """1F1B: rank p holds the activations of at most pp − p rounds."""
    order = []
    for rank in range(pp):
        forwards = [Action("forward", rank, round_) for round_ in range(rounds)]
        backwards = [Action("backward", rank, round_) for round_ in range(rounds)]
        order.append(_alternate(forwards, backwards, warmup=pp - rank - 1))
    return tuple(order)


def interleaved(rounds: int, *, pp: int, vpp: int) -> Order:
    """Interleaved 1F1B: a rank takes pp rounds through its first stage, then through its next.

    Rank p holds at most 2·(pp − p − 1) + (vpp − 1)·pp + 1 stage activations.
    """
    if rounds % pp:
        raise ValueError(
            f"{rounds} rounds cannot be interleaved over {pp} pipeline ranks; "
            f"add {-rounds % pp} empty rounds, or use one stage per rank"
        )
    places = [
        (stage, round_)
        for first in range(0, rounds, pp)
        for stage in range(vpp)
        for round_ in range(first, first + pp)
    ]
    order = []
    for rank in range(pp):
        forwards = [Action("forward", s * pp + rank, r) for s, r in places]
        backwards = [Action("backward", (vpp - 1 - s) * pp + rank, r) for s, r in places]
        warmup = 2 * (pp - rank - 1) + (vpp - 1) * pp
        order.append(_alternate(forwards, backwards, warmup=warmup))
    return tuple(order)


def _alternate(
    forwards: list[Action], backwards: list[Action], *, warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - warmup :])
