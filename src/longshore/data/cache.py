"""The sequences of a run: from a prepared folder, or from files that are prepared into a cache.

In: a path, a tokenizer and rules. Out: the folder of a store. The cache of chats.jsonl is
CACHE/chats-1f3a…, named after all that decides its content, so other settings get another folder
and the same ones find what is there; a killed run goes on where it was.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from longshore.data.families import OWN, is_file_choice, templates_digest
from longshore.data.fields import parse_field
from longshore.data.inputs import find_inputs
from longshore.data.prepare import Report, Summary, prepare
from longshore.data.tokenize import LossOn, TooLong


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How files of samples become sequences; "" and 0 mean what `longshore prepare` does."""

    tokenizer: str
    template: str
    loss_on: LossOn
    max_length: int
    too_long: TooLong
    fields: Sequence[str]
    ignore: Sequence[str]
    max_bytes: int


def cache_folder(path: str, rules: TextRules, cache: str) -> Path:
    """Where the sequences of these files, made by these rules, lie in the cache."""
    inputs = [(str(Path(f.name).resolve()), f.bytes, f.mtime_ns) for f in find_inputs([path])]
    tokenizer = [
        (found.name, found.stat().st_mtime_ns)
        for found in sorted(Path(rules.tokenizer).glob("*"))
        if found.suffix in (".json", ".jinja", ".txt", ".model")
    ]
    template = _template_digest(rules.template)
    told = json.dumps([inputs, tokenizer, asdict(rules), template], default=str)
    return Path(cache) / f"{Path(path).stem}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def _template_digest(choice: str) -> str:
    """What a choice of template stands for today: a file's content, or our templates'."""
    if is_file_choice(choice):
        return hashlib.sha256(Path(choice).read_bytes()).hexdigest()
    return "" if choice == OWN else templates_digest()


def prepare_cache(
    path: str, rules: TextRules, folder: Path, *, workers: int, progress: Report | None = None
) -> Summary:
    """Makes the folder, or finds it made."""
    return prepare(
        path,
        rules.tokenizer,
        folder,
        workers=workers,
        template=rules.template or None,
        loss_on=rules.loss_on,
        max_length=rules.max_length or None,
        too_long=rules.too_long,
        fields=[parse_field(text) for text in rules.fields],
        ignore=rules.ignore,
        max_bytes=rules.max_bytes,
        progress=progress,
    )
