"""Reads the lengths of sequences from a CSV file, cuts them into steps and plans those.

In: a file with one length a line. It may begin with the header `length`, or with `length,pack`, and
then a second column says which sequences already form a pack. Blank lines are skipped. Out: lengths
that know their lines, so that an error can name them. The file

    length,pack
    900,a
    5000,b
    700,a

gives the lengths (900, 5000, 700), the lines (2, 3, 4) and the packs (0, 2) and (1,).
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from longshore.plan.planner import PlaceError, make_plan
from longshore.plan.types import Plan, policy_named

HEADERS = (["length"], ["length", "pack"])
MOST_DIGITS = 12
SAMPLES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".gz", ".zst")
"""Endings of files that have lengths only after `longshore prepare`."""
SHOWN = 40


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths from a file, with the line of each."""

    name: str
    """Of the file or folder."""
    lengths: tuple[int, ...]
    """In tokens."""
    lines: tuple[int, ...]
    """The line of each; from a folder, the number of each sequence."""
    labels: tuple[str, ...]
    """The pack of each, or empty."""
    counted: str = "line"
    """What `lines` count: "line", or "sequence" for a folder."""

    def part(self, places: Iterable[int]) -> "Lengths":
        """Some of them, in this order."""
        chosen = list(places)
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in chosen),
            lines=tuple(self.lines[i] for i in chosen),
            labels=tuple(self.labels[i] for i in chosen) if self.labels else (),
        )

    def packs(self) -> list[tuple[int, ...]]:
        """The places of the sequences that share a label, by the label's first appearance."""
        members: dict[str, list[int]] = {}
        for place, label in enumerate(self.labels):
            members.setdefault(label, []).append(place)
        return [tuple(places) for places in members.values()]

    def plan(self, policy: str, options: Mapping[str, Any]) -> Plan:
        """make_plan of all these lengths as one step; its errors name the file and the line."""
        needs_packs = policy_named(policy).needs_packs
        if needs_packs and not self.labels:
            raise ValueError(
                f"{self.name}: plan.policy {policy} needs to know your packs; make 'length,pack' "
                "the first line and name the pack of each sequence in a second column"
            )
        packs = self.packs() if needs_packs else None
        try:
            return make_plan(self.lengths, policy=policy, packs=packs, **options)
        except PlaceError as error:
            is_pack = error.kind == "pack"
            place = self.packs()[error.number][0] if is_pack else error.number
            pack = f": pack {self.labels[place]!r}" if is_pack else ""
            line = f"{self.name} {self.counted} {self.lines[place]}"
            raise ValueError(f"{line}{pack}{error.problem}") from None


def read_lengths(path: str | Path) -> Lengths:
    """Lengths from a file that the user named."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return parse_lengths(file, str(path))
    except ValueError as error:
        if Path(path).name.endswith(SAMPLES):
            raise ValueError(
                f"{path}: is a file of samples, not of lengths; tokenize it first, with longshore "
                f"prepare {path} --out FOLDER, and name that folder"
            ) from None
        if isinstance(error, UnicodeDecodeError):
            raise ValueError(f"{path}: is not a text file (it must be UTF-8)") from None
        raise
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def demo_lengths() -> Lengths:
    """A long-tailed sample: lognormal with median 1024 and sigma 1.5, within 16 and 131072."""
    name = "demo_lengths.csv"
    text = files("longshore.plan").joinpath(name).read_text(encoding="utf-8")
    return parse_lengths(text.splitlines(), name)


def parse_lengths(lines: Iterable[str], name: str) -> Lengths:
    """Lengths from the lines of a file; errors begin with its name and the line."""
    rows = list(_rows(lines, name))
    header = ["length"]
    if rows and _is_header(rows[0][1]):
        header = [cell.lower() for cell in rows.pop(0)[1]]
    elif rows:
        _refuse_unknown_header(*rows[0], name)
    if not rows:
        raise ValueError(f"{name}: contains no lengths")
    for number, cells in rows:
        _check_columns(cells, header, f"{name} line {number}")
    return Lengths(
        name=name,
        lengths=tuple(_length(cells[0], f"{name} line {number}") for number, cells in rows),
        lines=tuple(number for number, _ in rows),
        labels=tuple(cells[1] for _, cells in rows) if len(header) > 1 else (),
    )


def _rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that is not blank, with its number."""
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        try:
            cells = next(csv.reader([text])) if '"' in text else text.split(",")
        except csv.Error as error:
            raise ValueError(f"{name} line {number}: is not CSV ({error})") from None
        yield number, [cell.strip() for cell in cells]


def _is_header(cells: list[str]) -> bool:
    return [cell.lower() for cell in cells] in HEADERS


def _refuse_unknown_header(number: int, cells: list[str], name: str) -> None:
    """A first line that starts with a letter was meant as a header."""
    if cells[0][:1].isalpha():
        raise ValueError(
            f"{name} line {number}: {_shown(','.join(cells))} is neither a length nor a header; "
            "the header is 'length' or 'length,pack', or left out"
        )


def _check_columns(cells: list[str], header: list[str], where: str) -> None:
    if len(cells) != len(header):
        raise ValueError(
            f"{where}: has {len(cells)} column{'s'[: len(cells) > 1]}, not {len(header)}; "
            "a file has one length a line, or the header 'length,pack' and two columns"
        )
    if not all(cells[1:]):
        raise ValueError(f"{where}: the name of its pack, the second column, is empty")


def _length(text: str, where: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"{where}: {_shown(text)} is not a whole number of tokens")
    digits = text.lstrip("+-").lstrip("0")
    if text.startswith("-") or not digits:
        raise ValueError(
            f"{where}: its length is {_shown(text)}; a sequence has at least 1 token, "
            "so leave empty ones out"
        )
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"{where}: {_shown(text)} is too large; a length has at most {MOST_DIGITS} digits"
        )
    return int(digits)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
