"""Sources of sequences, the fields that travel with them, and the batch that each step takes.

In: token ids, loss masks and extra values. Out: TokenizedSamples, from an iterator or, where the
source knows all lengths, by index. tokenize.py makes them of chats and texts, mock.py of numbers.

A `Field` is declared, as `weight:per_token:float32`; one `per_target` (advantages) has a value for
each token too, but belongs to it as a target: it is shifted where labels are. Nothing is dropped or
cast silently: an undeclared field, a missing one or one of the wrong length is a ValueError.

`Batches` cuts each epoch's shuffle into steps. It depends on lengths, a seed and the size of a
global batch, never on lanes or ranks, so a run resumes at any step on any number of lanes. Lengths
5 1 4 2 by 6 tokens, unshuffled, are the steps (0, 1) and (2, 3); by 3 sequences (0, 1, 2) and (3,).
Sequences of one group, such as a pair's chosen and rejected one, are always in one step.

`Joined([a, b])` has the sequences of a, then those of b. `Mixture([a, b], [3, 1], seed=0)` draws
a a a b, a a a b, …; after n draws the count of each source differs from n·share by less than one.
An epoch ends when every source was drawn completely, so small sources repeat, freshly shuffled.
"""

import hashlib
import heapq
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count, islice
from math import gcd, isfinite, lcm, prod
from typing import Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import Ints

Array = NDArray[Any]
Per = Literal["token", "target", "sequence"]

PER = ("token", "target", "sequence")
INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8")
FLOATS = ("float16", "float32", "float64")
TAKEN = ("id", "tokens", "loss_mask", "loss_tokens", "checksum", "boundaries", "positions")


@dataclass(frozen=True, slots=True)
class Field:
    """A declared field: (length, *shape) values per token or target, (*shape) per sequence."""

    name: str
    per: Per
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in TAKEN:
            raise ValueError(
                f"field {self.name!r}: the name must be an identifier, and not one of the "
                f"reserved names {', '.join(TAKEN)}"
            )
        if self.per not in PER:
            raise ValueError(
                f"field {self.name}: is declared per {self.per!r}; it must be one of "
                f"{', '.join(PER)}"
            )
        if self.dtype not in (*INTEGERS, *FLOATS):
            raise ValueError(
                f"field {self.name}: its dtype is {self.dtype!r}; it must be one of "
                f"{', '.join((*INTEGERS, *FLOATS))}"
            )
        if min(self.shape, default=1) < 1:
            raise ValueError(
                f"field {self.name}: shape {self.shape} has no values; each dim must be 1 or more"
            )

    @property
    def width(self) -> int:
        """Numbers in one value."""
        return prod(self.shape)

    def array_shape(self, length: int) -> tuple[int, ...]:
        """The shape of this field's array for a sequence of `length` tokens."""
        return self.shape if self.per == "sequence" else (length, *self.shape)

    def __str__(self) -> str:
        text = f"{self.name}:per_{self.per}:{self.dtype}"
        return f"{text}:{'x'.join(map(str, self.shape))}" if self.shape else text


def parse_field(text: str) -> Field:
    """A field from `name:per_token:dtype`, as a command line gives it; str(field) undoes it."""
    match = re.fullmatch(r"(\w+):per_(\w+):(\w+)(?::([0-9]{1,9}(?:x[0-9]{1,9})*))?", text)
    if not match:
        raise ValueError(
            f"field {text!r}: must be name:per_token:dtype, name:per_target:dtype or "
            "name:per_sequence:dtype, followed by :4x2 if each value has a shape"
        )
    name, per, dtype, shape = match.groups()
    sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
    return Field(name, cast(Per, per), dtype, sizes)  # Field refuses any other


def check_declared(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The fields as a tuple; one name is declared once."""
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"field {name}: is declared more than once")
    return tuple(fields)


def collect_fields(
    given: Mapping[str, object], fields: Sequence[Field], *, length: int, where: str
) -> dict[str, Array]:
    """The declared fields of one sequence as arrays, in the order of their declaration."""
    for name in given:
        if not any(field.name == name for field in fields):
            raise ValueError(
                f"{where}: field {name!r} is not declared; declare it as {name}:per_target:float32 "
                f"or {name}:per_sequence:float32, or leave it out of the data"
            )
    arrays = {}
    for declared in fields:
        name = declared.name
        if name not in given:
            raise ValueError(f"{where}: the declared field {name!r} is missing")
        array = _as_array(given[name], declared, where)
        wanted = declared.array_shape(length)
        if array.shape != wanted:
            raise ValueError(
                f"{where}: field {name!r} holds {_shape(array.shape)}; declared "
                f"per {declared.per}, with {length} tokens, it must hold {_shape(wanted)}"
            )
        arrays[name] = array
    return arrays


def _as_array(value: object, field: Field, where: str) -> Array:
    """The value in the field's dtype. Floats are rounded to it; whole numbers must fit exactly."""
    try:
        raw = np.asarray(value)
    except (ValueError, OverflowError, TypeError, RuntimeError):  # the last two of tensors
        raw = np.asarray(None)
    if raw.dtype.kind not in "biuf":
        raise ValueError(f"{where}: field {field.name!r} holds {_shown(value)}, not numbers")
    if field.dtype not in FLOATS and raw.dtype.kind == "f" and (np.abs(raw) >= 2.0**53).any():
        raise ValueError(
            f"{where}: field {field.name!r} holds {_shown(value)} as floats, which may have been "
            "rounded: from 2^53 on they do not hold every whole number; write whole numbers"
        )
    with np.errstate(all="ignore"):
        array = raw.astype(field.dtype)
    if field.dtype in FLOATS:
        fits = np.array_equal(np.isinf(array), np.isinf(raw))
    else:
        fits = np.array_equal(array, raw)
    if not fits:
        raise ValueError(
            f"{where}: field {field.name!r} holds {_shown(value)}, which {field.dtype} cannot "
            "hold; declare a wider dtype"
        )
    return array


def _shape(shape: tuple[int, ...]) -> str:
    return f"{' × '.join(map(str, shape))} values" if shape else "one value"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


ORDER = "splitmix64"
"""The shuffle's name in a checkpoint; early checkpoints have NumPy's shuffle, and no name."""
GAMMA = 0x9E3779B97F4A7C15
LIMIT = 2**64
BLOCK = 1 << 16
"""Numbers computed at a time, so that temporary arrays stay small."""


def shuffled(size: int, *key: int) -> Ints:
    """A permutation of 0 … size − 1 that depends on the size and the key (seed, epoch, …) alone.

    It is the same on every machine and with every NumPy. Resumed runs rely on it, so it must never
    change. Index i gets the i-th number of SplitMix64, whose state begins with a hash of the key;
    the number's last bits, as many as the largest index needs, are replaced by the index; the
    numbers are sorted, and their last bits are the order. No two numbers are equal, so every
    sorting algorithm gives the same. With 4 indices and key (0, 0) the numbers begin 1956…, a329…,
    88e8… and 5c9e…: the order is 0 3 2 1. 10⁸ indices take 0.8 GB.
    """
    last_bits = np.uint64((1 << max(size - 1, 0).bit_length()) - 1)
    numbers = _numbers(size, _state(key), last_bits)
    numbers.sort()
    numbers &= last_bits
    return numbers.view(np.int64)


def _state(key: tuple[int, ...]) -> int:
    state = len(key)
    for part in key:
        if not 0 <= part < LIMIT:
            raise ValueError(
                f"the key of a shuffle (seed, epoch, …) has {part}; it must be from 0 to 2⁶⁴ − 1"
            )
        state = int(_mix(np.array([(state + GAMMA) % LIMIT ^ part], dtype=np.uint64))[0])
    return state


def _numbers(size: int, state: int, last_bits: np.uint64) -> NDArray[np.uint64]:
    """For each index its random number, with the index as its last bits."""
    numbers = np.empty(size, dtype=np.uint64)
    for first in range(0, size, BLOCK):
        indices = np.arange(first, min(first + BLOCK, size), dtype=np.uint64)
        block = (indices + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(state)
        numbers[first : first + BLOCK] = _mix(block) & ~last_bits | indices
    return numbers


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A global batch: a number of sequences, or as many as come closest to a number of tokens.

    By tokens, a step ends with the sequence that reaches the number, or with the one before where
    that total is closer; a step always has at least one sequence.
    """

    unit: str
    amount: int

    def __post_init__(self) -> None:
        if self.unit not in ("sequences", "tokens"):
            raise ValueError(f"a batch is counted in sequences or tokens, not in {self.unit!r}")
        if self.amount < 1:
            raise ValueError(f"the batch is {self.amount} {self.unit}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a step: its epoch, its number in the epoch, and its number in the run."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0

    @property
    def following(self) -> "Place":
        """The place of the next step; after the last step of an epoch, still with that epoch."""
        return Place(self.epoch, self.step_in_epoch + 1, self.step + 1)


class Batches:
    """The steps of all epochs of one source."""

    def __init__(
        self,
        lengths: Ints,
        size: BatchSize,
        *,
        seed: int,
        shuffle: bool = True,
        groups: Ints | None = None,
    ) -> None:
        """groups: one number for each sequence, the same for those that share a step."""
        if not len(lengths):
            raise ValueError("the source has no sequences, so there is nothing to train on")
        self.groups = None if groups is None else _by_group(groups)
        self.lengths = lengths
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self._cuts = [0]

    def from_place(self, place: Place) -> Iterator[tuple[Place, Ints]]:
        """All steps from a place on, without end: the place and the indices of the sequences."""
        while True:
            self._open(place.epoch)
            if place.step_in_epoch >= self.steps():
                place = Place(place.epoch + 1, 0, place.step)
                continue
            first, stop = self._cuts[place.step_in_epoch : place.step_in_epoch + 2]
            yield place, self._order[first:stop]
            place = place.following

    def steps(self, epoch: int | None = None) -> int:
        """Steps of an epoch; they differ between epochs where batches are counted in tokens."""
        if epoch is not None:
            self._open(epoch)
        return len(self._cuts) - 1

    def _open(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        count = len(self.lengths) if self.groups is None else len(self.groups[1])
        order = shuffled(count, self.seed, epoch) if self.shuffle else np.arange(count)
        if self.groups is not None:
            self._order, self._cuts = self._open_groups(order, *self.groups)
        elif self.size.unit == "sequences":
            self._order, self._cuts = order, [*range(0, count, self.size.amount), count]
        else:
            self._order, self._cuts = order, _cuts_by_weight(self.lengths[order], self.size.amount)
        self._epoch = epoch

    def _open_groups(self, order: Ints, members: Ints, sizes: Ints) -> tuple[Ints, list[int]]:
        """All sequences in the order of their groups, and where each step begins."""
        starts, sizes = (np.cumsum(sizes) - sizes)[order], sizes[order]
        ends = np.cumsum(sizes)
        within = np.arange(len(members)) - np.repeat(ends - sizes, sizes)
        sequences = members[np.repeat(starts, sizes) + within]
        weights = sizes
        if self.size.unit == "tokens":
            weights = np.add.reduceat(self.lengths[sequences], ends - sizes)
        cuts = _cuts_by_weight(weights, self.size.amount)
        return sequences, [0, *ends[np.array(cuts[1:]) - 1].tolist()]


def _by_group(groups: Ints) -> tuple[Ints, Ints]:
    """The sequences, those of a group next to each other, and how many each group has.

    Groups are in the order in which they first occur.
    """
    _, first, index = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.argsort(rank[index], kind="stable"), np.bincount(rank[index])


def _cuts_by_weight(weights: Ints, amount: int) -> list[int]:
    """Steps whose weights come closest to the amount."""
    count, ends = len(weights), np.cumsum(weights)
    cuts = [0]
    while cuts[-1] < count:
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        reached = int(np.searchsorted(ends, before + amount))
        if reached >= count:
            cuts.append(count)
            continue
        over = int(ends[reached]) - before - amount
        under = before + amount - int(ends[reached - 1])
        is_closer_before = reached > cuts[-1] and under < over
        cuts.append(reached if is_closer_before else reached + 1)
    return cuts


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
