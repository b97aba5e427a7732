"""Sources of sequences, the TokenizedSample that all of them return, and several sources as one.

In: token ids and loss masks. Out: TokenizedSamples, from an iterator or, where the source knows all
lengths, by index. Tokens 5 6 7 with the mask 0 1 1 are a sequence of length 3 with two loss tokens.
Chats and texts come through tokenize.py, mock data from mock.py.

`Joined([a, b])` has each sequence once, those of a before those of b. `Mixture([a, b], [3, 1],
seed=0)` draws a a a b, a a a b, …; after n draws the count of each source differs from n·share by
less than one. Each pass over a source is a fresh permutation. An epoch ends when every source was
drawn completely, so sources that are small for their weight repeat.
"""

import hashlib
import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, islice
from math import gcd, isfinite, lcm
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longshore.data.batches import shuffled
from longshore.data.fields import Field, check_declared

Ints = NDArray[np.int64]
LARGEST_TOKEN = 2**31 - 1
PAIR, SIGN = "pair", "sign"
"""Fields of preferences: equal values of the first keep sequences in one step."""
ADVANTAGES, OLD_LOGPROBS, REF_LOGPROBS = "advantages", "old_logprobs", "ref_logprobs"
"""Fields of rollouts; a reference's log-probabilities are also one of preferences."""
TEACHER_IDS, TEACHER_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Fields of distillation: of each target the teacher's likeliest tokens."""


class SampleError(ValueError):
    """A sample that cannot become a sequence. `reason` is a short fixed phrase, for statistics."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedSample:
    """A sequence with its content.

    loss_mask[i] says that predicting token i counts in the loss; nothing predicts the first token.
    The arrays may be read-only views of a memory map.
    """

    id: int
    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    fields: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask[1:]))

    @property
    def nbytes(self) -> int:
        arrays = (self.tokens, self.loss_mask, *self.fields.values())
        return sum(array.nbytes for array in arrays)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenizedSample):
            return NotImplemented
        mine = {"tokens": self.tokens, "loss_mask": self.loss_mask, **self.fields}
        theirs = {"tokens": other.tokens, "loss_mask": other.loss_mask, **other.fields}
        return (
            self.id == other.id
            and mine.keys() == theirs.keys()
            and all(mine[k].dtype == theirs[k].dtype for k in mine)
            and all(np.array_equal(mine[k], theirs[k]) for k in mine)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays cannot be hashed


class IndexedSource(Protocol):
    """A source that knows all lengths and returns any sequence by its index, which is its id."""

    @property
    def lengths(self) -> Ints: ...
    @property
    def loss_tokens(self) -> Ints: ...
    @property
    def fields(self) -> tuple[Field, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> TokenizedSample: ...
    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        """The first `count` values of a loss mask, or all if it is shorter; it must be cheap."""


def source_digest(source: IndexedSource) -> str:
    """Identifies the content of a source: its own `digest`, or else one of its lengths."""
    own = getattr(source, "digest", None)
    if isinstance(own, str):
        return own
    arrays = (source.lengths, source.loss_tokens)
    return hashlib.sha256(b"".join(np.asarray(a, np.int64).tobytes() for a in arrays)).hexdigest()


def sequence_values(source: IndexedSource, name: str) -> Ints:
    """int64 (sequences): an integer field of every sequence."""
    spec = next((spec for spec in source.fields if spec.name == name), None)
    if spec is None or spec.per != "sequence" or spec.shape or "int" not in spec.dtype:
        state = "the data do not have" if spec is None else f"is declared {spec}"
        raise ValueError(
            f"field {name}: {state}; to keep sequences together, declare it as "
            f"{name}:per_sequence:int64"
        )
    own = getattr(source, "sequence_values", None)
    if own is not None:
        return np.asarray(own(name), dtype=np.int64)
    return np.array([int(source[i].fields[name]) for i in range(len(source))], dtype=np.int64)


def groups_of(source: IndexedSource, name: str = "") -> Ints | None:
    """For each sequence the group of those that share its step; None if there are no groups.

    name: of the field that says it; by default `pair`, if it is a field of sequences.
    """
    if not name and not any(spec.name == PAIR and spec.per == "sequence" for spec in source.fields):
        return None
    return sequence_values(source, name or PAIR)


def checked_index(index: int, size: int) -> int:
    """An index into a source of `size` sequences; a negative one counts from the end."""
    number = operator.index(index)
    if not -size <= number < size:
        raise IndexError(f"sequence {number} is out of range: the source has {size} sequences")
    return number % size


class MemorySource:
    """An indexed source of samples in memory, renumbered in their order."""

    def __init__(self, samples: Iterable[TokenizedSample], fields: Sequence[Field] = ()) -> None:
        self.fields = check_declared(fields)
        self._samples = [replace(sample, id=i) for i, sample in enumerate(samples)]
        self.lengths: Ints = np.array([s.length for s in self._samples], dtype=np.int64)
        self.loss_tokens: Ints = np.array([s.loss_tokens for s in self._samples], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> TokenizedSample:
        return self._samples[checked_index(index, len(self))]

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        return self[index].loss_mask[:count]


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
            indices = np.concatenate(orders)[: len(draws)]
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
