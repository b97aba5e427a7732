"""Which part of which tensors a rank has, as data: tensor and expert parallelism. Pure Python.

In: numbers of heads, groups, channels or experts, the number of ranks, a rank. Out: a TensorCut,
which says where the rank's tensor lies in the whole one. Each part of a layer says itself which of
its tensors are cut, and in which units (`Part.tp_cuts`, `Part.tp_units`); others are whole on every
rank. Attention of 4 heads and 2 KV heads of 16 dims on 2 ranks; rank 1 has 2 heads and 1 KV head:

    q_proj.weight   TensorCut(dim 0 of 64, (Span(32, 64),))        its heads' rows
    k_proj.weight   TensorCut(dim 0 of 32, (Span(16, 32),))
    o_proj.weight   TensorCut(dim 1 of 64, (Span(32, 64),))        its heads' columns

Mamba2's in_proj has rows of z, x, B, C and dt, one after the other; a rank has its heads' or
groups' rows of each, so its cut has five spans. Where there are fewer KV heads or groups than ranks
several ranks have the same ones: a Span says which copy it is, of how many. A bias that follows a
sum over the ranks is on the first alone; the others' cut has no span. 8 experts on 4 EP ranks:
rank 2 has dim 0 of 8, (Span(4, 6),), axis "ep".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Axis = Literal["tp", "ep"]


@dataclass(frozen=True, slots=True)
class Span:
    """Indices start … stop of a dim. `copies` ranks have them; this rank is number `copy`."""

    start: int
    stop: int
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A rank's part of a tensor: some spans of one dim, one after the other."""

    dim: int
    """The dim that is cut."""
    size: int
    """Indices of that dim in the whole tensor."""
    spans: tuple[Span, ...]
    """In the order of the rank's tensor; () if the rank does not have the tensor at all."""
    axis: Axis = "tp"
    """Over which ranks: those of tensor or of expert parallelism."""

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from that of a rank's."""
        return (*local[: self.dim], self.size, *local[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class TPRank:
    """One of `tp` ranks: which part of a dim of equal units it has."""

    tp: int
    rank: int

    def span(self, units: int, width: int = 1) -> Span:
        """A rank's part of `units` heads of `width` indices each; ranks may share one."""
        if units % self.tp == 0:
            each = units // self.tp * width
            return Span(self.rank * each, (self.rank + 1) * each)
        copies = self.tp // units
        unit = self.rank // copies
        return Span(unit * width, (unit + 1) * width, self.rank % copies, copies)

    def joined(self, parts: Sequence[tuple[int, int]], *, dim: int = 0) -> TensorCut:
        """Parts of (units, width) one after the other along `dim`."""
        spans, start = list[Span](), 0
        for units, width in parts:
            span = self.span(units, width)
            spans.append(replace(span, start=start + span.start, stop=start + span.stop))
            start += units * width
        return TensorCut(dim, start, tuple(spans))

    def of(self, units: int, width: int = 1, *, dim: int = 0) -> TensorCut:
        return self.joined([(units, width)], dim=dim)

    def first_only(self, size: int) -> TensorCut:
        """A vector that the first rank alone has."""
        return TensorCut(0, size, () if self.rank else (Span(0, size),))

    def vocabulary(self, rows: int) -> TensorCut:
        """A rank's rows of the embedding or the head: as even as can be."""
        start, stop = (rows * rank // self.tp for rank in (self.rank, self.rank + 1))
        return TensorCut(0, rows, (Span(start, stop),))


@dataclass(frozen=True, slots=True)
class TPUnits:
    """Heads, groups or channels of a part that TP ranks divide."""

    field: str
    """Name of the config's field that counts them."""
    name: str
    """In an error's words."""
    count: int
    """In the whole part."""
    shared: bool = False
    """Whether several ranks may have the same one, where there are fewer than ranks."""

    def divides(self, tp: int) -> bool:
        """Whether `tp` ranks can divide them."""
        return self.count % tp == 0 or (self.shared and tp % self.count == 0)

    def local(self, tp: int) -> int:
        """Units of one rank."""
        return max(1, self.count // tp)


def expert_cut(experts: int, *, ep: int, ep_rank: int) -> TensorCut:
    """An EP rank's experts, of a parameter (experts, …)."""
    assert experts % ep == 0, "check_ep comes first"
    each = experts // ep
    return TensorCut(0, experts, (Span(ep_rank * each, (ep_rank + 1) * each),), "ep")
