"""JSON lists: the records of a file `[{…}, {…}, …]`, one at a time, whatever the file's size.

In: an open file, and where its first record begins. Out: each record's bytes, located by counting
brackets outside of strings, so that a broken record does not affect the others. The file

    [{"a": "]"}, 7 ]

has records at bytes 1…11 and 12…15, white space included. At most `limit` bytes of a record are in
memory; of a longer record only the size is returned.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK = 1 << 20
# What can be skipped: whole strings, and everything but brackets and, between records, commas.
IN_RECORD = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
BETWEEN = re.compile(rb'(?:[^"\[\]{},]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
QUOTE, COMMA, END = b'",]'


@dataclass(frozen=True, slots=True)
class Element:
    """A record in bytes [start, stop) of the file. text: "" if longer than the limit.

    ended_by: "," or "]", or "" where the bytes end.
    """

    start: int
    stop: int
    text: bytes
    ended_by: str

    @property
    def size(self) -> int:
        return self.stop - self.start


def read_elements(file: BinaryIO, start: int, stop: int, *, limit: int) -> Iterator[Element]:
    """The records in bytes [start, stop), where a record begins at `start`; ends after a ]."""
    file.seek(start)
    text, begin, at = bytearray(), start, start
    for kind, data, end in _pieces(file, start, stop):
        if end - begin <= limit:
            text += data
        else:
            text.clear()
        at = end
        if kind:
            yield Element(begin, end, bytes(text), kind)
            text.clear()
            begin = at = end + 1
        if kind == "]":
            return
    yield Element(begin, at, bytes(text), "")


def _pieces(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[str, bytes, int]]:
    """Parts of records: what ends the record there ("" if nothing does), bytes, their end."""
    depth, in_string, first_byte = 0, False, 0
    while start < stop and (chunk := file.read(min(CHUNK, stop - start))):
        begin, here = 0, first_byte
        while (here := _skip(chunk, here, depth, in_string)) < len(chunk):
            mark, here = chunk[here], here + 1
            if in_string:
                in_string = mark != QUOTE
                here += in_string  # a backslash: what it escapes is in the next chunk
            elif mark == QUOTE:
                in_string = True  # of a string that ends in another chunk
            elif mark in b"{[":
                depth += 1
            elif depth:
                depth -= 1
            elif mark in (COMMA, END):
                yield chr(mark), chunk[begin : here - 1], start + here - 1
                begin = here
        first_byte = here - len(chunk)
        start += len(chunk)
        yield "", chunk[begin:], start


def _skip(chunk: bytes, here: int, depth: int, in_string: bool) -> int:
    """The next byte that opens, closes or ends something, or the chunk's end."""
    pattern = IN_STRING if in_string else IN_RECORD if depth else BETWEEN
    match = pattern.match(chunk, here)
    return max(here, match.end()) if match else here
