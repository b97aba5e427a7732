"""Streams: samples tokenized while a run trains, without an index, from files of any length.

In: files of samples, in one part or in several with weights. Out: for each lane an endless iterator
of sequences from its own share of the files, whose position can be saved. No torch.

The files are cut into pieces, several for each lane. In every pass each lane gets a share of them
with as many bytes as every other; where several lanes share a piece (a compressed file is one),
each takes a part of its rows. With `shuffle` every pass has another order of pieces, and so other
shares, while rows keep their order inside a piece: in the long run all rows come equally often.

The lanes take all rows of little data in turn instead, over all passes, if there are fewer pieces
than lanes or no `shuffle`. With 2 lanes and one chats.jsonl.gz of 5 rows, lane 0 reads rows 0 2 4 1
3 0 …, lane 1 rows 1 3 0 2 4 1 ….

A position is (sequences drawn, rows read of each part). To resume, a lane reads as many rows again,
but does not tokenize them: exact, as long as the files, settings and number of lanes are the same.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

from longshore.data.inputs import Input, Range, Sample, cut_ranges, read_range, unit_of
from longshore.data.source import (
    GAMMA,
    LIMIT,
    Field,
    SampleError,
    TokenizedSample,
    draw_order,
    shuffled,
)
from longshore.data.tokenize import SampleTokenizer

PIECES = 8
"""Pieces of each lane, where files can be cut."""
MOST_PIECE = 1 << 26
MOST_IN_TURN = 1 << 28
"""Bytes of the largest part whose rows lanes take in turn, for which each of them reads all."""
SHARES = "by bytes"
"""How lanes share files, in a checkpoint's digest; positions of another way mean other rows."""
DRY_PASSES = 100
"""Passes in a row without a sequence before a lane stops; others may have one."""
LOOKED_AT = 100
"""Rows before the share of rejected ones counts."""


@dataclass(frozen=True, slots=True, eq=False)
class TextStream:
    """Files of samples, and how their sequences are drawn; the same on all ranks."""

    parts: tuple[tuple[Input, ...], ...]
    """The files of each part."""
    content: str
    """Identifies the text of all files: `content_digest` of them."""
    weights: tuple[float, ...]
    """How often each part is drawn."""
    tokenizer: SampleTokenizer
    """Makes sequences of samples; its rules have a max_length."""
    check: Callable[[TokenizedSample, str], None]
    """Raises a ValueError for a sequence that the model cannot read; takes its file and row too."""
    max_bytes: int
    """The largest raw sample."""
    max_rejected: float
    """A lane stops if a larger share of its samples is rejected."""
    shuffle: bool
    """A new order of the pieces for every pass over the files."""
    seed: int
    """The seed of the shuffle, and of the order in which parts are drawn."""
    warnings: tuple[str, ...] = ()
    """What is probably wrong with the tokenizer, for people."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for files in self.parts for file in files)

    @property
    def fields(self) -> tuple[Field, ...]:
        """Extra fields of each sequence."""
        return self.tokenizer.rules.fields

    @property
    def longest(self) -> int:
        """The most tokens of a sequence."""
        return self.tokenizer.rules.max_length or 0

    @property
    def numbers(self) -> int:
        """How many numbers a position has."""
        return 1 + len(self.parts)

    @property
    def digest(self) -> str:
        """Identifies the files, by name, size and content, and what decides the order."""
        files = [[(file.name, file.bytes) for file in part] for part in self.parts]
        order = [SHARES, self.weights, self.shuffle, self.seed, self.longest, self.tokenizer.digest]
        identity = json.dumps([files, self.content, order])
        return hashlib.sha256(identity.encode()).hexdigest()

    def lane(self, lane: int, lanes: int) -> "LaneStream":
        return LaneStream(self, lane, lanes)


class LaneStream(Iterator[TokenizedSample]):
    """One lane's sequences, without end."""

    def __init__(self, stream: TextStream, lane: int, lanes: int) -> None:
        self.stream = stream
        self.drawn = 0
        numbers = range(len(stream.parts))
        self._parts = [_PartStream(stream, number, lane=lane, lanes=lanes) for number in numbers]
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
        self.drawn += 1
        return sample


class _PartStream:
    """A lane's sequences of one part."""

    def __init__(self, stream: TextStream, number: int, *, lane: int, lanes: int) -> None:
        self.stream = stream
        self.files = stream.parts[number]
        self.key = (stream.seed, number)
        self.lane = lane
        self.lanes = lanes
        total = sum(file.bytes for file in self.files)
        size = min(max(total // (lanes * PIECES), 1), MOST_PIECE)
        self.pieces = cut_ranges(self.files, size)
        is_small = total <= MOST_IN_TURN
        self.in_turn = is_small and (len(self.pieces) < lanes or not stream.shuffle)
        self.rows = 0
        self._rows_of_all = 0
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
                sequence = self.stream.tokenizer(sample, id)
            except SampleError as error:
                self._rejected += 1
                self._check_rejected(f"{where}: {error.detail}")
                continue
            self.stream.check(sequence, where)
            return sequence

    def skip(self, rows: int) -> None:
        for _ in islice(self._raw, rows):
            pass

    def _check_rejected(self, example: str) -> None:
        share = self._rejected / self._tried
        if self._tried < LOOKED_AT or share <= self.stream.max_rejected:
            return
        raise ValueError(
            f"rejected {self._rejected:,} of {self._tried:,} samples of lane {self.lane}, such as "
            f"{example}; data.max_rejected={self.stream.max_rejected:g} allows fewer: fix the data "
            "or the settings, or allow more"
        )

    def _endless(self) -> Iterator[tuple[Sample | SampleError, str]]:
        """All rows of the lane's shares, pass after pass, with their names for errors."""
        dry = 0
        for turn in count():
            good_before = self.rows - self._rejected  # skipped rows count as good
            for piece, line, sample in self._pass(turn):
                self.rows += 1
                # Lines are counted from the start of a piece; those before it are not known.
                where = f"{piece.input.name} {unit_of(piece.input.name)} {line}"
                yield sample, f"{where} after byte {piece.start:,}" if piece.start else where
            dry = dry + 1 if self.rows - self._rejected == good_before else 0
            if dry and self._is_hopeless(dry):
                names = ", ".join(file.name for file in self.files[:3])
                raise ValueError(
                    f"no sample of lane {self.lane} of {self.lanes} in {names} became a sequence, "
                    f"in {dry:,} passes over the files: {self._rejected:,} samples were rejected "
                    "so far; fix the data, use fewer ranks, or leave the stream out"
                )

    def _is_hopeless(self, dry: int) -> bool:
        """Whether passes to come are not expected to have a sequence, after some without one."""
        if not (self.in_turn or self.stream.shuffle):
            return True  # all passes are the same
        if self._tried >= LOOKED_AT and self._rejected == self._tried:
            return True
        return dry >= DRY_PASSES + self.lanes

    def _pass(self, turn: int) -> Iterator[tuple[Range, int, Sample | SampleError]]:
        pieces: Sequence[Range] = self.pieces
        if self.stream.shuffle:
            pieces = [pieces[number] for number in shuffled(len(pieces), *self.key, turn).tolist()]
        if not self.in_turn:
            for piece, start, stop in _share(pieces, self.lane, self.lanes):
                size = _size(piece)
                for row, sample in enumerate(self._read(piece)):
                    if start <= _spread(row, size) < stop:
                        yield sample
            return
        for piece in pieces:
            for sample in self._read(piece):
                is_mine = self._rows_of_all % self.lanes == self.lane
                self._rows_of_all += 1
                if is_mine:
                    yield sample

    def _read(self, piece: Range) -> Iterator[tuple[Range, int, Sample | SampleError]]:
        skips, limit = self.stream.tokenizer.rules.leaves_out, self.stream.max_bytes
        for line, sample in read_range(piece, leaves_out=skips, max_bytes=limit):
            yield piece, line, sample


def _share(pieces: Sequence[Range], lane: int, lanes: int) -> Iterator[tuple[Range, int, int]]:
    """The pieces of a lane, each with the bytes [start, stop) of it that are the lane's.

    Pieces of 4 and 2 bytes on 2 lanes: lane 0 has bytes 0…3 of the first, lane 1 byte 3 and all of
    the second.
    """
    total, begin = sum(map(_size, pieces)), 0
    first, end = (total * number // lanes for number in (lane, lane + 1))
    for piece in pieces:
        size = _size(piece)
        start, stop = max(first - begin, 0), min(end - begin, size)
        if start < stop:
            yield piece, start, stop
        begin += size


def _size(piece: Range) -> int:
    return max(piece.bytes, 1)


def _spread(row: int, size: int) -> int:
    """A number below `size` for each row of a piece, evenly spread: whose it is decides the lane.

    Multiples of the golden ratio, of which any rows in succession have nearly their share in any
    interval. With size 100 rows 0, 1, 2 and 3 have 0, 61, 23 and 85.
    """
    return (row * GAMMA % LIMIT) * size // LIMIT
