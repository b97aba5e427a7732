"""StageCosts: how the stages of a pipeline share what a round costs.

In: for each stage its forward and backward, in any unit. Out: whole numbers that say what part of
an average rank's cost each stage has, of the linear part and of the quadratic part apart.

A profile says what a round costs an average rank, forward and backward together. Two ranks of one
stage, backward twice the forward, the second stage twice as expensive as the first: with `whole` 9
the first stage has 2 + 4 parts and the second 4 + 8, and all together 18 = pp · whole.

Where experts are split over ranks, lanes meet inside every layer that has them: before the experts
and after them. Then a stage takes the slowest lane's time up to the experts, and the slowest lane's
time in them. The first are the mixers, the second is token-wise: it grows with tokens only, so it
is a part of the linear part.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache

FINE = 1 << 20
"""Parts of a rank's cost where stages differ."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Parts of an average rank's cost; the parts of all stages add up to pp · whole."""

    forward_linear: tuple[int, ...]
    """Of each stage's forward, in the part that grows with tokens."""
    backward_linear: tuple[int, ...]
    """Of its backward."""
    forward_quadratic: tuple[int, ...]
    """Of its forward, in the part that grows with squared lengths, and in what is gathered."""
    backward_quadratic: tuple[int, ...]
    """Of its backward."""
    streams: tuple[int, ...]
    """How many rows a stage sends on for each token."""
    whole: int
    """The parts of an average rank: a walk's unit is 1/whole quantum."""
    forward_tokenwise: tuple[int, ...] = field(default=(), repr=False)
    """Of each stage's forward_linear, what runs between meetings of its own; (): all of it."""
    backward_tokenwise: tuple[int, ...] = field(default=(), repr=False)
    """Of its backward_linear."""

    @property
    def stages(self) -> int:
        return len(self.streams)

    @property
    def tokenwise(self) -> tuple[int, ...]:
        """The token-wise parts of all forwards, then of all backwards."""
        forward = self.forward_tokenwise or self.forward_linear
        return forward + (self.backward_tokenwise or self.backward_linear)

    def of_rank(self, rank: int, pp: int) -> tuple[int, int]:
        """The linear and quadratic parts of all a rank's stages."""
        linear = self.forward_linear[rank::pp] + self.backward_linear[rank::pp]
        quadratic = self.forward_quadratic[rank::pp] + self.backward_quadratic[rank::pp]
        return sum(linear), sum(quadratic)


@lru_cache(maxsize=64)
def equal_stages(pp: int, vpp: int) -> StageCosts:
    """All stages alike, backward twice the forward."""
    one, two = (1,) * (pp * vpp), (2,) * (pp * vpp)
    return StageCosts(one, two, one, two, one, 3 * vpp)


def share_out(
    *,
    linear: Seq[tuple[int, int]],
    quadratic: Seq[tuple[int, int]],
    streams: Seq[int],
    pp: int,
    tokenwise: Seq[tuple[int, int]] = (),
) -> StageCosts:
    """From each stage's (forward, backward) in any unit; a part that is 0 everywhere is even.

    tokenwise: what of `linear` is token-wise, in the same unit; without it, all.
    """
    pairs = [_parts(costs, pp * FINE) for costs in (linear, quadratic)]
    (forward_linear, backward_linear), (forward_quadratic, backward_quadratic) = pairs
    return StageCosts(
        forward_linear,
        backward_linear,
        forward_quadratic,
        backward_quadratic,
        tuple(streams),
        FINE,
        *_of_linear(tokenwise, linear, (forward_linear, backward_linear)),
    )


def _of_linear(
    tokenwise: Seq[tuple[int, int]],
    linear: Seq[tuple[int, int]],
    parts: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The token-wise share of each part, rounded down."""
    if not tokenwise:
        return (), ()
    forward, backward = (
        tuple(
            part * some[way] // max(1, whole[way])
            for part, some, whole in zip(parts[way], tokenwise, linear, strict=True)
        )
        for way in (0, 1)
    )
    return forward, backward


def _parts(costs: Seq[tuple[int, int]], total: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Whole numbers in these proportions whose sum is the total: each ends where its sum does."""
    flat = [cost for pair in costs for cost in pair]
    if not sum(flat):
        flat = [1, 2] * len(costs)
    whole = sum(flat)
    parts, before, ended = [], 0, 0
    for cost in flat:
        before += cost
        end = before * total // whole
        parts.append(end - ended)
        ended = end
    return tuple(parts[0::2]), tuple(parts[1::2])
