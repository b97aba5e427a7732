"""The highest token id of a prepared folder, and the row that has it.

In: what `prepare` wrote into the manifest. Out: an error before the first step where a model has
fewer token ids. With "highest_token": {"id": 300, "file": "rows.jsonl", "line": 12} a model of 256
ids is refused:

    rows.jsonl line 12 has the token id 300, but the model knows only 0 to 255; …
"""

from collections.abc import Mapping
from dataclasses import dataclass

from longshore.data.inputs import unit_of

HIGHEST = "highest_token"
"""The key in the manifest."""


@dataclass(frozen=True, slots=True)
class HighestToken:
    """The highest token id of some sequences; file and line: the first row that has it."""

    id: int
    file: str
    line: int

    def check(self, vocab_size: int) -> None:
        """Refuses an id that a model of so many does not have."""
        if self.id >= vocab_size:
            where = f"{self.file} {unit_of(self.file)} {self.line}"
            raise unknown_token(where, self.id, vocab_size)


def highest_of(about: Mapping[str, object]) -> HighestToken:
    """From a store's manifest; id -1 for one that does not say it."""
    match about.get(HIGHEST):
        case {"id": int(id), "file": str(file), "line": int(line)}:
            return HighestToken(id, file, line)
    return HighestToken(-1, "", 0)


def unknown_token(where: str, id: int, vocab_size: int) -> ValueError:
    """The error for a token id that the model does not have."""
    return ValueError(
        f"{where} has the token id {id}, but the model knows only 0 to {vocab_size - 1}; use the "
        "model's tokenizer, or with model.preset a larger model.vocab_size"
    )
