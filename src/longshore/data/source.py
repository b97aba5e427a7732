"""Sources of sequences, and the TokenizedSample that all of them return.

In: token ids and loss masks. Out: TokenizedSamples, from an iterator or, where the source knows all
lengths, by index. Tokens 5 6 7 with the mask 0 1 1 are a sequence of length 3 with two loss tokens.
Chats and texts come through tokenize.py, mock data from mock.py.
"""

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longshore.data.fields import Field, check_declared, collect_fields

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


def make_sample(
    tokens: ArrayLike,
    loss_mask: ArrayLike,
    *,
    id: int,
    given: Mapping[str, object],
    fields: Sequence[Field],
    where: str,
) -> TokenizedSample:
    """A TokenizedSample from anything array-like, checked. Errors begin with `where`."""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not len(ids):
        raise ValueError(f"{where}: tokens must be a list of at least one token id")
    if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > LARGEST_TOKEN:
        raise ValueError(f"{where}: token ids must be whole numbers from 0 to {LARGEST_TOKEN}")
    mask = np.asarray(loss_mask)
    if mask.shape != ids.shape:
        raise ValueError(f"{where}: {ids.size} tokens, but the loss mask has {mask.size} values")
    if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{where}: the loss mask must have only True and False, or 1 and 0")
    extra = collect_fields(given, fields, length=len(ids), where=where)
    return TokenizedSample(id, ids.astype(np.int32), mask.astype(np.bool_), extra)


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
