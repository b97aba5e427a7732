"""Rejected samples: how many, why, an example of each reason and the way out.

In: what a prepared folder counted. Out: text for people, and a ValueError where the share of
rejected samples is above a limit.

    rejected 170 of 407 samples (41.8 %); each is in prepared/rejected.jsonl
      150 spans not located, such as chats.jsonl line 3: the template rewrites turns …
          use a template with {% generation %} marks, data.template=FILE, or train on every token, …
       20 no loss tokens, such as chats.jsonl line 9: none of its 12 tokens is a target of …
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longshore.data.inputs import unit_of

REJECTED = "rejected.jsonl"
MAX_REJECTED = 0.05
LONGEST_DETAIL = 400
SHOWN_DETAIL = 120
MOST_LOOKED_AT = 100_000

WAYS_OUT: Mapping[str, str] = {
    "bad field": "fix its value, or declare the field differently",
    "bad message": "fix the messages: each has a role and content",
    "bad tokens": "fix the row, or leave its column out, data.ignore=NAME",
    "broken JSON": "fix it: a sample is a JSON object in UTF-8",
    "no loss tokens": (
        "add the answer if it is missing; to train on every token instead, set data.loss_on=all"
    ),
    "no messages": (
        "give it messages, conversations, a prompt and completion, an "
        "instruction and output, a text, or input_ids"
    ),
    "no tokenizer": "give it input_ids, or a tokenizer, data.tokenizer=DIR",
    "spans not located": (
        "use a template with {% generation %} marks, data.template=FILE, "
        "or train on every token, data.loss_on=all"
    ),
    "too large": "raise the limit, data.max_bytes=N, or split the sample",
    "too long": "raise the limit, data.max_length=N, or truncate, data.too_long=truncate",
    "undeclared field": "ignore the column, data.ignore=NAME",
}
"""What to do about each reason."""


@dataclass(frozen=True, slots=True)
class Rejections:
    """What `prepare` left out of a folder. reasons: how many samples for each."""

    folder: Path
    samples: int
    reasons: Mapping[str, int]

    @property
    def share(self) -> float:
        return sum(self.reasons.values()) / self.samples if self.samples else 0.0

    def _head(self) -> str:
        total = sum(self.reasons.values())
        return f"rejected {total:,} of {self.samples:,} samples ({_percent(self.share)})"

    def in_short(self) -> str:
        """On one line, the most frequent reason first."""
        counted = ", ".join(f"{number:,} {reason}" for reason, number in self._by_number())
        return f"{self._head()}: {counted}"

    def example(self) -> str:
        """A sample of the most frequent reason, and what is wrong with it."""
        return self._examples().get(self._by_number()[0][0], "")

    def explain(self) -> str:
        """A paragraph with an example and the way out for each reason."""
        lines = [f"{self._head()}; each is in {self.folder / REJECTED}"]
        examples = self._examples()
        width = max(len(f"{number:,}") for number in self.reasons.values())
        for reason, number in self._by_number():
            example = f", such as {examples[reason]}" if reason in examples else ""
            lines.append(f"  {number:>{width},} {reason}{example}")
            if way_out := WAYS_OUT.get(reason):
                lines.append(f"  {' ' * width}   {way_out}")
        return "\n".join(lines)

    def check(self, limit: float) -> None:
        """Refuses a folder of which more than this share was rejected."""
        if self.share <= limit:
            return
        enough = f"{math.ceil(self.share * 100) / 100:g}"
        raise ValueError(
            f"{self.folder}: {self.in_short()}; data.max_rejected={limit:g} allows at most "
            f"{_percent(limit)}. The prepared data are kept: read {self.folder / REJECTED}, then "
            "fix the data or the settings, or train on the rest with "
            f"data.max_rejected={enough}"
        )

    def _by_number(self) -> list[tuple[str, int]]:
        return sorted(self.reasons.items(), key=lambda entry: (-entry[1], entry[0]))

    def _examples(self) -> dict[str, str]:
        """The first sample of each reason, from the folder's list."""
        examples: dict[str, str] = {}
        try:
            with (self.folder / REJECTED).open(encoding="utf-8") as file:
                for _, line in zip(range(MOST_LOOKED_AT), file, strict=False):
                    entry = json.loads(line)
                    if entry["reason"] not in examples:
                        name, detail = str(entry["file"]), str(entry["detail"])
                        if len(detail) > SHOWN_DETAIL:
                            detail = detail[: SHOWN_DETAIL - 1] + "…"
                        where = f"{name} {unit_of(name)} {entry['line']}"
                        examples[entry["reason"]] = f"{where}: {detail}"
                    if len(examples) == len(self.reasons):
                        break
        except (OSError, ValueError, LookupError, TypeError):
            pass  # the text then has no example
        return examples


def rejections_of(folder: Path, about: Mapping[str, object]) -> Rejections:
    """From a store's manifest; a store that `prepare` did not make has rejected none."""
    reasons, samples = about.get("rejected"), about.get("samples")
    if not isinstance(reasons, Mapping) or not isinstance(samples, int):
        return Rejections(folder, 0, {})
    return Rejections(folder, samples, {str(name): int(n) for name, n in reasons.items()})


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
