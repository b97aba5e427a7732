"""Where a tensor of ours lies in a Hugging Face folder: one class for each way it can lie there.

In: a folder's files, or a tensor of ours. Out: rows of ours, or their tensors by name. No torch
until a tensor is touched.

    Source("lm_head.weight")                       one of theirs, as it stands
    Copied("lm_head.weight", copies=("a", "b"))    and the same again under other names
    PerExpert("mlp.experts", parts=("gate_proj", "up_proj"))
        row e of ours is mlp.experts.e.gate_proj.weight above mlp.experts.e.up_proj.weight
    Turned("q_proj.weight", block=6, turned=4)
        of every 6 rows the last 4, theirs 0 1 2 3, are ours in the order 0 2 1 3
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Rows(Protocol):
    """Files whose tensors are read by rows."""

    def shape(self, name: str) -> Shape: ...

    def rows(self, name: str, start: int, stop: int) -> "Tensor": ...


@dataclass(frozen=True, slots=True)
class Source:
    """It is one of theirs, as it stands."""

    theirs: str

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shape of each of their tensors, for this shape of ours."""
        return {self.theirs: shape}

    def read(self, files: Rows, start: int, stop: int) -> "Tensor":
        """Rows start…stop of ours."""
        return files.rows(self.theirs, start, stop)

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        """Their tensors."""
        yield self.theirs, tensor


@dataclass(frozen=True, slots=True)
class Copied(Source):
    """It lies there several times."""

    copies: tuple[str, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return dict.fromkeys((self.theirs, *self.copies), shape)

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        yield self.theirs, tensor
        for name in self.copies:
            # A file takes no two tensors of the same memory.
            yield name, tensor.clone()


@dataclass(frozen=True, slots=True)
class PerExpert(Source):
    """Its rows are experts, each in `parts` of its own, one above the other."""

    parts: tuple[str, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        experts, rows, *rest = shape
        part = (rows // len(self.parts), *rest)
        return {name: part for expert in range(experts) for name in self._names(expert)}

    def read(self, files: Rows, start: int, stop: int) -> "Tensor":
        import torch

        if start == stop:
            rows, *rest = files.shape(self._names(0)[0])
            empty = files.rows(self._names(0)[0], 0, 0)
            return empty.new_empty(0, rows * len(self.parts), *rest)
        return torch.stack(
            [
                torch.cat([files.rows(name, 0, files.shape(name)[0]) for name in self._names(i)])
                for i in range(start, stop)
            ]
        )

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        for expert, rows in enumerate(tensor):
            yield from zip(self._names(expert), rows.chunk(len(self.parts)), strict=True)

    def _names(self, expert: int) -> list[str]:
        return [f"{self.theirs}.{expert}.{part}.weight" for part in self.parts]


@dataclass(frozen=True, slots=True)
class Turned(Source):
    """Of every `block` rows the last `turned` stand in another order.

    They turn in pairs with the position: theirs are rows 2i and 2i + 1, ours i and i + turned/2.
    """

    block: int
    turned: int

    def read(self, files: Rows, start: int, stop: int) -> "Tensor":
        first = start // self.block * self.block
        last = min(-(-stop // self.block) * self.block, files.shape(self.theirs)[0])
        found = files.rows(self.theirs, first, max(first, last))
        kept, turned = self._split(found)
        turned = turned.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return self._joined(kept, turned)[start - first : stop - first]

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        kept, turned = self._split(tensor)
        turned = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        yield self.theirs, self._joined(kept, turned)

    def _split(self, rows: "Tensor") -> tuple["Tensor", "Tensor"]:
        """The first and the turned rows of each block."""
        blocks = rows.unflatten(0, (-1, self.block))
        kept, turned = blocks.split([self.block - self.turned, self.turned], dim=1)
        return kept, turned

    def _joined(self, kept: "Tensor", turned: "Tensor") -> "Tensor":
        import torch

        return torch.cat([kept, turned], dim=1).flatten(0, 1)
