"""The protocol that the config of every mixer and feed-forward part follows. Pure Python.

In: numbers. Out: the protocol `Part` and what a part costs. A new kind of mixer or feed-forward is
a config that follows `Part`, a module, and its registration; docs/adding-a-mixer.md says how. A
part may also have `products(width)`, the Products of its forward: then its time is predicted from
measured products (advisor/step_time.py), otherwise from its FLOPs alone.

    causal_pairs(5) = 15 pairs of a token and one it sees, itself included; window=2 leaves 9
"""

from dataclasses import dataclass, field
from typing import Protocol

from longshore.arch.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMS norms of a decoder."""

    eps: float
    zero_centred: bool = False
    """The scale is 1 + weight, and weights are initialised to 0."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How lanes share a pack: parallel.attention and parallel.scan of a recipe, such as heads."""

    attention: str
    scan: str


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a part's forward: for each token a row of k numbers becomes one of n."""

    k: int
    n: int
    name: str = field(default="", compare=False)
    """Of its linear layer below the part, which may have low-rank factors; "" where it has none."""

    @property
    def flops(self) -> int:
        """Of one token."""
        return 2 * self.k * self.n


class Part(Protocol):
    """The config of a mixer or feed-forward part: what it costs at hidden width `width`."""

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary tables it reads, each with its `rotary_dim`."""
        ...

    def parameters(self, width: int) -> int: ...

    def flops(self, width: int, length: int) -> int:
        """FLOPs of the forward matrix products over one sequence of `length` tokens."""
        ...

    def saved(self, width: int) -> "Saved":
        """What is saved for backward per token, without the part's input."""
        ...

    def gathered(self) -> int:
        """Values a lane gathers for each token of a pack that several lanes share."""
        ...

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        """Numbers that a CP size must divide, where lanes share heads; () for no limit."""
        ...


def check_part(part: object) -> None:
    """Raises ValueError for a config that lacks a method of `Part`, and names it."""
    expected = ("ropes", "parameters", "flops", "saved", "gathered", "shared_heads")
    if lacking := [name for name in expected if not hasattr(part, name)]:
        raise ValueError(
            f"{type(part).__name__} has no {lacking[0]}; a part of a layer must have "
            f"{', '.join(expected)}, see longshore/arch/part.py"
        )


@dataclass(frozen=True, slots=True)
class Saved:
    """Numbers saved for backward per token."""

    values: int
    """In the model's dtype."""
    stats: int = 0
    """Always in float32 or more."""

    def __add__(self, other: "Saved") -> "Saved":
        return Saved(self.values + other.values, self.stats + other.stats)


def causal_pairs(length: int, *, window: int | None = None) -> int:
    """Pairs of a token and one it sees: 5 tokens make 15, with a window of 2 only 9."""
    near = length if window is None else min(window, length)
    return near * (near + 1) // 2 + (length - near) * near
