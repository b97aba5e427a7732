"""Several sources as one, drawn in proportion to their weights.

In: sources and a weight for each. Out: a source, or a stream, of their sequences in one order.

Weights: `Mixture([a, b], [3, 1], seed=0)` draws a a a b, a a a b, …; after n draws the count of
each source differs from n·share by less than one. Each pass over a source is a fresh permutation.
An epoch ends when every source was drawn completely, so sources that are small for their weight
repeat.

No weights: `Joined([a, b])` has each sequence once, those of a before those of b.
"""

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import count, islice
from math import gcd, isfinite, lcm

import numpy as np
from numpy.typing import NDArray

from longshore.data.batches import shuffled
from longshore.data.source import (
    IndexedSource,
    Ints,
    TokenizedSample,
    checked_index,
    sequence_values,
    source_digest,
)


class Mixture:
    """Several indexed sources as one. Sequence i is the i-th draw, and i is its id."""

    def __init__(
        self, sources: Sequence[IndexedSource], weights: Sequence[float], *, seed: int
    ) -> None:
        shares = _shares(weights, len(sources))
        _check_alike(sources)
        self._sources = tuple(sources)
        self.fields = sources[0].fields
        sizes = [len(source) for source in sources]
        self.drawn_from = _epoch_of_draws(sizes, shares, seed)
        self.drawn_index = np.empty(len(self.drawn_from), dtype=np.int64)
        self.lengths: Ints = np.empty_like(self.drawn_index)
        self.loss_tokens: Ints = np.empty_like(self.drawn_index)
        for number, source in enumerate(sources):
            draws = np.flatnonzero(self.drawn_from == number)
            passes = range(-(-len(draws) // sizes[number]))
            orders = [shuffled(sizes[number], seed, 0, number, i) for i in passes]
            indices = np.concatenate(orders or [draws])[: len(draws)]
            self.drawn_index[draws] = indices
            self.lengths[draws] = source.lengths[indices]
            self.loss_tokens[draws] = source.loss_tokens[indices]

    @property
    def digest(self) -> str:
        """Identifies the sequences in their order, as far as the sources identify theirs."""
        return _digest(self._sources, self.drawn_from.tobytes(), self.drawn_index.tobytes())

    def __len__(self) -> int:
        return len(self.drawn_from)

    def __getitem__(self, index: int) -> TokenizedSample:
        i = checked_index(index, len(self))
        sample = self._sources[int(self.drawn_from[i])][int(self.drawn_index[i])]
        return replace(sample, id=i)

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        i = checked_index(index, len(self))
        source = self._sources[int(self.drawn_from[i])]
        return source.mask_head(int(self.drawn_index[i]), count)


class Joined:
    """Several indexed sources, one after another. Sequence i of all is i, and i is its id."""

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        _check_alike(sources)
        self._sources = tuple(sources)
        self.fields = sources[0].fields
        self.lengths: Ints = np.concatenate([source.lengths for source in sources])
        self.loss_tokens: Ints = np.concatenate([source.loss_tokens for source in sources])
        self._ends = np.cumsum([len(source) for source in sources])

    def sequence_values(self, name: str) -> Ints:
        """An integer field of every sequence."""
        return np.concatenate([sequence_values(source, name) for source in self._sources])

    @property
    def digest(self) -> str:
        return _digest(self._sources)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedSample:
        source, inner, i = self._find(index)
        return replace(source[inner], id=i)

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        source, inner, _ = self._find(index)
        return source.mask_head(inner, count)

    def _find(self, index: int) -> tuple[IndexedSource, int, int]:
        """The source of a sequence, its index there, and its index in all."""
        i = checked_index(index, len(self))
        number = int(np.searchsorted(self._ends, i, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return self._sources[number], i - before, i


def _digest(sources: Sequence[IndexedSource], *order: bytes) -> str:
    parts = [source_digest(source).encode() for source in sources]
    return hashlib.sha256(b"\0".join([*parts, *order])).hexdigest()


def _check_alike(sources: Sequence[IndexedSource]) -> None:
    """Sources of a mixture must have the same extra fields and, where known, the same tokenizer."""
    tokenizers: dict[str, int] = {}
    for number, source in enumerate(sources):
        if not len(source):
            raise ValueError(f"mixture: source {number} is empty; leave it out")
        if source.fields != sources[0].fields:
            raise ValueError(
                f"mixture: the extra fields of source {number} differ from those of source 0; "
                "declare the same ones for all"
            )
        if digest := getattr(source, "tokenizer_digest", ""):
            tokenizers.setdefault(digest, number)
    if len(tokenizers) > 1:
        first, second, *_ = tokenizers.values()
        raise ValueError(
            f"mixture: sources {first} and {second} were made with different tokenizers; "
            "prepare them with the same one"
        )


def draw_order(weights: Sequence[float], *, seed: int) -> Iterator[int]:
    """Which source each draw comes from, without end.

    The j-th draw of a source of share w falls into the window from ⌊j/w⌋ to ⌈(j+1)/w⌉. Each draw
    serves the open window that closes first; ties go by a seeded order. Such a schedule exists for
    any shares that sum to 1, and keeps each count within 1 of n·w.
    """
    shares = _shares(weights, len(weights))
    total = sum(shares)
    rank = [int(r) for r in np.argsort(shuffled(len(shares), seed))]
    closed = [(0, rank[i], i, 0) for i in range(len(shares))]
    heapq.heapify(closed)
    opened: list[tuple[int, int, int, int]] = []
    for now in count():
        while closed and closed[0][0] <= now:
            _, tie, source, j = heapq.heappop(closed)
            heapq.heappush(opened, (-(-(j + 1) * total // shares[source]), tie, source, j))
        _, tie, source, j = heapq.heappop(opened)
        heapq.heappush(closed, ((j + 1) * total // shares[source], tie, source, j + 1))
        yield source


def _shares(weights: Sequence[float], sources: int) -> list[int]:
    """The weights as integers in the same proportion."""
    if not sources or len(weights) != sources:
        raise ValueError(f"mixture: {sources} sources, but {len(weights)} weights")
    for number, weight in enumerate(weights):
        if not isfinite(weight) or weight <= 0:
            raise ValueError(
                f"mixture: the weight of source {number} is {weight}; it must be above 0, "
                "so leave a source out that should not be drawn"
            )
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(fraction.denominator for fraction in exact))
    integers = [int(fraction * scale) for fraction in exact]
    common = gcd(*integers)
    return [share // common for share in integers]


def _epoch_of_draws(sizes: Sequence[int], shares: Sequence[int], seed: int) -> NDArray[np.int32]:
    """Which source each draw of an epoch comes from."""
    period = sum(shares)
    longest = max(-(-size * period // share) for size, share in zip(sizes, shares, strict=True))
    once = np.fromiter(islice(draw_order(shares, seed=seed), min(period, longest)), np.int32)
    draws = np.resize(once, longest)
    last = [np.flatnonzero(draws == i)[size - 1] for i, size in enumerate(sizes)]
    return draws[: int(max(last)) + 1]
