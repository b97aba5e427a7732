"""The data of a run, before anything is read: is it there, and does it have what it needs?

In: a config. Out: nothing, or a ValueError of one line. The lengths of synthetic and
prepared sequences are known here, so `known_longest` returns the longest; for text it returns 0.
"""

import importlib.util
import json
from dataclasses import fields
from pathlib import Path

from longshore.config.located import in_keys
from longshore.config.schema import DataConfig, RunConfig
from longshore.data.fields import check_declared, parse_field
from longshore.data.inputs import find_inputs
from longshore.data.mock import mock_lengths
from longshore.data.rejected import rejections_of
from longshore.data.training_templates import check_choice

MANIFEST = "manifest.json"
TEXT_ONLY = ("template", "loss_on", "max_length", "too_long", "fields", "ignore", "max_bytes")


def check_data(config: RunConfig, vocab_size: int) -> None:
    """vocab_size: the model's, which a tokenizer of the user's choice must not exceed."""
    data = config.data
    if data.batch and data.batch_tokens:
        raise ValueError("data.batch and data.batch_tokens are both given; leave one out")
    if not data.batch and not data.batch_tokens:
        raise ValueError(
            "give data.batch, the sequences in a step, or data.batch_tokens, the tokens in a step"
        )
    if data.path and data.mock:
        raise ValueError("data.path and data.mock are both given; leave one out")
    if not data.path and not data.mock:
        raise ValueError(
            "there is no data; give data.path, a JSONL, JSON or Parquet file or a prepared folder, "
            "or data.mock for synthetic sequences"
        )
    if data.mock:
        _refuse_text_keys(data, "data.mock generates")
    elif is_prepared(data.path):
        _refuse_text_keys(data, "data.path is a prepared folder and already has")
        _check_rejected(data)
    else:
        _check_text(data, data.tokenizer or config.model.from_hf)
        if not config.model.from_hf:  # a checkpoint's tokenizer may have ids that no text uses
            _check_vocabulary(data.tokenizer, vocab_size)
    if data.path and data.count:
        raise ValueError(
            "data.count works only with data.mock, not with data.path; leave data.count out"
        )


def is_prepared(path: str) -> bool:
    """Whether a path is a folder made by `longshore prepare`, finished or not."""
    return (Path(path) / MANIFEST).exists() or (Path(path) / "prepare.work").exists()


def _check_rejected(data: DataConfig) -> None:
    """Refuses a prepared folder that left out more samples than data.max_rejected allows."""
    from longshore.data.store import read_manifest

    with in_keys("data.path"):
        folder = Path(data.path)
        rejections_of(folder, read_manifest(folder).about).check(data.max_rejected)


def known_longest(config: RunConfig) -> int:
    """The longest sequence of synthetic or prepared data; 0 for text, not tokenized yet."""
    data = config.data
    if data.mock:
        with in_keys("data.mock"):
            _check_mock(data)
            return int(mock_lengths(data.mock, count=data.count or None, seed=data.seed).max())
    if not is_prepared(data.path):
        return 0
    from longshore.data.store import read_manifest

    with in_keys("data.path"):
        return read_manifest(Path(data.path)).longest


def _check_mock(data: DataConfig) -> None:
    if data.mock.get("mode") == "file" and not isinstance(data.mock.get("path", ""), str):
        raise ValueError(f"path is {data.mock['path']!r}; it must be a string")


def _refuse_text_keys(data: DataConfig, what: str) -> None:
    for field in fields(DataConfig):
        if field.name in TEXT_ONLY and getattr(data, field.name) != field.default:
            raise ValueError(
                f"data.{field.name} is for text, but {what} tokens; leave data.{field.name} out"
            )


def _check_text(data: DataConfig, tokenizer: str) -> None:
    with in_keys("data.path"):
        find_inputs([data.path])
    if not tokenizer:
        raise ValueError(
            f"data.path: {data.path} is text, which needs a tokenizer; set data.tokenizer to a "
            "folder with tokenizer.json"
        )
    if not (Path(tokenizer) / "tokenizer.json").is_file():
        key = "data.tokenizer"
        raise ValueError(
            f"{key}: {tokenizer} has no tokenizer.json; set {key} to a folder that has one"
        )
    with in_keys():
        check_choice(data.template)
    with in_keys("data.fields"):
        check_declared([parse_field(text) for text in data.fields])
    for name in ("tokenizers", "jinja2"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"data.path: {data.path} is text, and the package {name}, which tokenizes it, is "
                "missing; install it with: pip install 'longshore[hf]'"
            )


def _check_vocabulary(tokenizer: str, vocab_size: int) -> None:
    path = Path(tokenizer) / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content["model"]["vocab"]
        ids = known.values() if isinstance(known, dict) else range(len(known))
        highest = max([*ids, *(token["id"] for token in content["added_tokens"])])
    except (OSError, ValueError, LookupError, TypeError):
        return  # the error comes when it is read as a tokenizer
    if highest >= vocab_size:
        raise ValueError(
            f"data.tokenizer: {tokenizer} has token ids up to {highest}, but the model has only "
            f"{vocab_size}; set model.vocab_size={highest + 1}, or more"
        )
