"""Streams: samples tokenized while a run trains, without an index, from files of any length.

In: files of samples, in one part or in several with weights. Out: for each lane an endless iterator
of sequences from its own share of the files, whose position can be saved. No torch.

The files are cut into pieces, several for each lane, and lane r of n takes every n-th piece from
its r-th on; where there are fewer pieces than lanes (compressed files have one), the lanes of a
piece take its rows in turn. When its share is read, a lane begins it again; with `shuffle` in
another order of pieces, while rows keep their order inside a piece. With 2 lanes and one
chats.jsonl.gz of 5 rows, lane 0 reads rows 0 2 4 0 2 …, lane 1 rows 1 3 1 3 ….

A position is (sequences drawn, rows read of each part). To continue, a lane reads as many rows
again, but does not tokenize them: exact, as long as the files, the settings and the number of lanes
are the same.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from longshore.data.batches import shuffled
from longshore.data.columns import leaves_out
from longshore.data.fields import Field
from longshore.data.inputs import Input, Range, Sample, cut_ranges, read_range
from longshore.data.mixture import draw_order
from longshore.data.source import SampleError, TokenizedSample
from longshore.data.tokenize import SampleTokenizer
from longshore.errors import SettingError

PIECES = 8
"""Of each lane, where files can be cut."""
MOST_PIECE = 1 << 26
LOOKED_AT = 100
"""Rows before the share of rejected ones counts."""


@dataclass(frozen=True, slots=True, eq=False)
class TextStream:
    """Files of samples, and how their sequences are drawn; the same on all ranks."""

    parts: tuple[tuple[Input, ...], ...]
    """The files of each part."""
    weights: tuple[float, ...]
    """How often each part is drawn."""
    make_tokenizer: Callable[[], SampleTokenizer]
    """Called by each lane."""
    check: Callable[[TokenizedSample], None]
    """Raises a ValueError for a sequence that the model cannot read."""
    tokenizer_digest: str
    """Of the tokenizer and its chat template."""
    fields: tuple[Field, ...]
    """Extra fields of each sequence."""
    longest: int
    """The most tokens of a sequence."""
    max_bytes: int
    """The largest raw sample."""
    max_rejected: float
    """A lane stops if a larger share of its samples is rejected."""
    shuffle: bool
    """A new order of the pieces for every pass over the files."""
    seed: int
    """Of the shuffle, and of the order in which parts are drawn."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for files in self.parts for file in files)

    @property
    def numbers(self) -> int:
        """How many numbers a position has."""
        return 1 + len(self.parts)

    @property
    def digest(self) -> str:
        """Of the files, by name and size, and of what decides the order."""
        files = [[(file.name, file.bytes) for file in part] for part in self.parts]
        order = [self.weights, self.shuffle, self.seed, self.longest, self.tokenizer_digest]
        identity = json.dumps([files, order])
        return hashlib.sha256(identity.encode()).hexdigest()

    def lane(self, lane: int, lanes: int) -> "LaneStream":
        return LaneStream(self, lane, lanes)


class LaneStream(Iterator[TokenizedSample]):
    """One lane's sequences, without end."""

    def __init__(self, stream: TextStream, lane: int, lanes: int) -> None:
        self.stream = stream
        self.drawn = 0
        tokenizer = stream.make_tokenizer()
        self._parts = [
            _PartStream(stream, files, tokenizer, lane=lane, lanes=lanes, number=number)
            for number, files in enumerate(stream.parts)
        ]
        self._due = draw_order(stream.weights, seed=stream.seed)

    @property
    def position(self) -> tuple[int, ...]:
        """Where the next sequence begins."""
        return (self.drawn, *(part.rows for part in self._parts))

    def skip_to(self, position: Sequence[int]) -> None:
        """From the start to a position."""
        assert not self.drawn
        assert len(position) == self.stream.numbers
        self.drawn, *rows = position
        for _ in islice(self._due, self.drawn):
            pass
        for part, read in zip(self._parts, rows, strict=True):
            part.skip(read)

    def __next__(self) -> TokenizedSample:
        sample = self._parts[next(self._due)].draw(self.drawn)
        self.stream.check(sample)
        self.drawn += 1
        return sample


class _PartStream:
    """A lane's sequences of one part."""

    def __init__(
        self,
        stream: TextStream,
        files: Sequence[Input],
        tokenizer: SampleTokenizer,
        *,
        lane: int,
        lanes: int,
        number: int,
    ) -> None:
        self.stream = stream
        self.files = files
        self.tokenizer = tokenizer
        self.key = (stream.seed, number)
        self.lane = lane
        self.lanes = lanes
        total = sum(file.bytes for file in files)
        size = min(max(total // (lanes * PIECES), 1), MOST_PIECE)
        self.pieces = cut_ranges(files, size)
        self.rows = 0
        self._tried = 0
        self._rejected = 0
        self._raw = self._endless()

    def draw(self, id: int) -> TokenizedSample:
        """The next row that becomes a sequence."""
        while True:
            sample, where = next(self._raw)
            self._tried += 1
            try:
                if isinstance(sample, SampleError):
                    raise sample
                sequence = self.tokenizer(sample, id)
            except SampleError as error:
                self._rejected += 1
                self._check_rejected(f"{where}: {error.detail}")
                continue
            return sequence

    def skip(self, rows: int) -> None:
        for _ in islice(self._raw, rows):
            pass

    def _check_rejected(self, example: str) -> None:
        share = self._rejected / self._tried
        if self._tried < LOOKED_AT or share <= self.stream.max_rejected:
            return
        raise SettingError(
            "rejected {rejected:,} of {tried:,} samples of lane {lane}, such as {example}; "
            "{max_rejected:{limit}} allows fewer: fix the data or the settings, or allow more",
            rejected=self._rejected,
            tried=self._tried,
            lane=self.lane,
            example=example,
            limit=f"{self.stream.max_rejected:g}",
        )

    def _endless(self) -> Iterator[tuple[Sample | SampleError, str]]:
        """All rows of the lane's share, again and again, with their names for errors."""
        for turn in count():
            before, rejected = self.rows, self._rejected
            for piece, line, sample in self._pass(turn):
                self.rows += 1
                yield sample, f"{piece.input.name} {_place(piece, line)}"
            read, bad = self.rows - before, self._rejected - rejected
            if bad >= read:
                names = ", ".join(file.name for file in self.files[:3])
                raise ValueError(
                    f"no sample of lane {self.lane} of {self.lanes} in {names} became a sequence: "
                    f"its share has {read:,} samples, and {bad:,} were rejected; use fewer ranks, "
                    "or leave the stream out"
                )

    def _pass(self, turn: int) -> Iterator[tuple[Range, int, Sample | SampleError]]:
        pieces = len(self.pieces)
        if pieces < self.lanes:
            if not pieces:
                return
            first, sharing = self.lane % pieces, self.lane // pieces
            lanes = -(-(self.lanes - first) // pieces)
            rows = islice(self._read(self.pieces[first]), sharing, None, lanes)
            yield from rows
            return
        order = shuffled(pieces, *self.key, turn) if self.stream.shuffle else range(pieces)
        for number in order[self.lane :: self.lanes]:
            yield from self._read(self.pieces[int(number)])

    def _read(self, piece: Range) -> Iterator[tuple[Range, int, Sample | SampleError]]:
        rules = self.tokenizer.rules

        def skips(name: str) -> bool:
            return leaves_out(name, rules.ignore, rules.fields)

        limit = self.stream.max_bytes
        for line, sample in read_range(piece, leaves_out=skips, max_bytes=limit):
            yield piece, line, sample


def _place(piece: Range, line: int) -> str:
    """Lines are counted from the start of a piece; those before it are not known."""
    unit = piece.input.unit
    return f"{unit} {line}" if not piece.start else f"{unit} {line} after byte {piece.start:,}"
