"""The data of a run, before it is used: is it there, and does it have what it needs?

In: a config. Out: nothing, or a ValueError of one line; from `known_longest` the longest sequence,
which is known for synthetic and prepared data, 0 for text, and for a stream its limit. data.path is
one name or several: files, globs, folders. Each is a DataPart, with its prepared folders and the
names of its other data, which become one prepared folder in the cache:

    path = ["a.jsonl", "b/*.parquet"], weights = [3, 1]     two parts, drawn a a a b, a a a b, …
    path = ["a.jsonl", "prepared"]                          two parts, joined: each sequence once
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from longshore.config.schema import DataConfig, RunConfig, in_keys
from longshore.data.inputs import Input, files_of, find_inputs, matches
from longshore.data.mock import mock_lengths
from longshore.data.prepare_job import check_first, load_tokenizer, with_known_fields
from longshore.data.rejected import rejections_of
from longshore.data.source import Field, check_declared, parse_field
from longshore.data.store import MANIFEST, read_manifest
from longshore.data.tokenize import Rules, SampleTokenizer
from longshore.data.training_templates import check_choice
from longshore.files import parse_json
from longshore.plan.types import policy_named
from longshore.train.loss_fields import needed_fields

PACKAGES = ("tokenizers", "jinja2")  # what text needs
TEXT_ONLY = ("template", "loss_on", "max_length", "too_long", "fields", "ignore", "max_bytes")


@dataclass(frozen=True, slots=True)
class DataPart:
    """What one name of data.path stands for."""

    name: str
    """As the user wrote it."""
    prepared: tuple[Path, ...]
    """Folders made by `longshore prepare`."""
    texts: tuple[str, ...]
    """Files and folders of samples."""


def data_parts(data: DataConfig) -> tuple[DataPart, ...]:
    """The parts of data.path; a glob that matches nothing is a ValueError."""
    parts = []
    for name in path_names(data):
        paths = matches(name)
        marks = (MANIFEST, "prepare.work")  # of a prepared folder, finished or not
        prepared = tuple(path for path in paths if any((path / mark).exists() for mark in marks))
        texts = tuple(str(path) for path in paths if path not in prepared)
        parts.append(DataPart(name, prepared, texts))
    return tuple(parts)


def path_names(data: DataConfig) -> tuple[str, ...]:
    """The names in data.path; none where there is none."""
    if isinstance(data.path, str):
        return (data.path,) if data.path else ()
    return data.path


def shown_path(data: DataConfig) -> str:
    """data.path for people."""
    return ", ".join(path_names(data))


def tokenizer_of(config: RunConfig) -> str:
    """The tokenizer folder of a run: data.tokenizer, or the model's if it is usable; else ""."""
    if config.data.tokenizer:
        return config.data.tokenizer
    folder = config.model.from_hf
    return folder if has_tokenizer(folder) and not missing_packages() else ""


def loss_columns(config: RunConfig) -> list[str]:
    """The columns that the run's loss reads."""
    return list(needed_fields(config.train.loss, config.train.loss_options))


def has_tokenizer(folder: str) -> bool:
    return bool(folder) and (Path(folder) / "tokenizer.json").is_file()


def missing_packages() -> list[str]:
    """Those of PACKAGES that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def check_parts(data: DataConfig) -> tuple[DataPart, ...]:
    """The parts, after checking that their weights fit, and that no data is named twice."""
    with in_keys("data.path"):
        parts = data_parts(data)
        files = [[*part.prepared, *(files_of(part.texts) if part.texts else ())] for part in parts]
    if data.weights and len(data.weights) != len(parts):
        raise ValueError(
            f"data.weights has {len(data.weights)} numbers, but data.path has {len(parts)} "
            f"name{'s' if len(parts) > 1 else ''}; give one weight for each name"
        )
    first: dict[Path, DataPart] = {}
    for part, paths in zip(parts, files, strict=True):
        for path in paths:
            other = first.setdefault(path.resolve(), part)
            if other is not part:
                twice = f"{path} is in both {other.name} and {part.name}"
                if other.name == part.name:
                    twice = f"{part.name} is named more than once"
                raise ValueError(
                    f"data.path: {twice}; name it once, and use data.weights to draw it more often"
                )
    return parts


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
            "there is no data; give data.path, files of JSONL, JSON, Parquet or Arrow or a folder "
            "of them, of `datasets` or of `longshore prepare`, or data.mock for synthetic sequences"
        )
    if policy_named(config.plan.policy).needs_packs and (data.mock or data.stream):
        raise ValueError(
            "plan.policy=given reads all packs from the data's field `pack` before the first step, "
            f"which data.{'mock' if data.mock else 'stream=true'} does not allow; give "
            "data.path with data.fields=pack:per_sequence:int64, or choose another plan.policy"
        )
    if data.mock:
        _refuse_text_keys(data, "data.mock generates")
    else:
        _check_path(config, vocab_size)
    if data.path and data.count:
        raise ValueError(
            "data.count works only with data.mock, not with data.path; leave data.count out"
        )
    if data.weights and not data.path:
        raise ValueError("data.weights works only with data.path; leave data.weights out")
    if data.stream:
        check_stream(config)


def _check_path(config: RunConfig, vocab_size: int) -> None:
    """Every part of data.path: prepared, or text with all that it needs."""
    data = config.data
    parts = check_parts(data)
    with in_keys("data.path"):
        for folder in (folder for part in parts for folder in part.prepared):
            rejections_of(folder, read_manifest(folder).about).check(data.max_rejected)
    texts = [name for part in parts for name in part.texts]
    if not texts:
        _refuse_text_keys(data, "data.path is a prepared folder and already has")
        return
    _check_text(config, texts)
    # A checkpoint's tokenizer may have ids that no text uses.
    if data.tokenizer and not config.model.from_hf:
        _check_vocabulary(data.tokenizer, vocab_size)


def check_stream(config: RunConfig) -> None:
    """Refuses a stream of what is no stream, and one without the limits that it needs."""
    data = config.data
    if not data.path:
        raise ValueError("data.stream reads files; give data.path, or leave data.stream out")
    if prepared := [folder for part in data_parts(data) for folder in part.prepared]:
        raise ValueError(
            f"data.stream: {prepared[0]} is a prepared folder, whose sequences are known; leave "
            "data.stream out"
        )
    if not config.train.steps:
        raise ValueError(
            "data.stream: the length of an epoch is not known; give train.steps, the number of "
            "steps, and leave train.epochs out"
        )
    if not data.max_length:
        raise ValueError(
            "data.stream: the longest sequence is not known before it is read; give "
            "data.max_length, and data.too_long=truncate to cut longer ones instead of leaving "
            "them out"
        )


def known_longest(config: RunConfig) -> int:
    """The longest sequence of the data, where it is known before text is tokenized; else 0."""
    data = config.data
    if data.mock:
        with in_keys("data.mock"):
            path = data.mock.get("path", "")
            if data.mock.get("mode") == "file" and not isinstance(path, str):
                raise ValueError(f"path is {path!r}; it must be a string")
            return int(mock_lengths(data.mock, count=data.count or None, seed=data.seed).max())
    if data.stream:
        return data.max_length
    with in_keys("data.path"):
        folders = [folder for part in data_parts(data) for folder in part.prepared]
        return max((read_manifest(folder).longest for folder in folders), default=0)


def _refuse_text_keys(data: DataConfig, what: str) -> None:
    for field in fields(DataConfig):
        if field.name in TEXT_ONLY and getattr(data, field.name) != field.default:
            raise ValueError(
                f"data.{field.name} is for text, but {what} tokens; leave data.{field.name} out"
            )


def _check_text(config: RunConfig, names: Sequence[str]) -> None:
    data = config.data
    with in_keys("data.path"):
        inputs = find_inputs(names)
    if data.tokenizer and not has_tokenizer(data.tokenizer):
        raise ValueError(
            f"data.tokenizer: {data.tokenizer} has no tokenizer.json; set data.tokenizer to a "
            "folder that has one"
        )
    check_choice(data.template)
    with in_keys("data.fields"):
        fields = check_declared([parse_field(text) for text in data.fields])
    if not tokenizer_of(config):
        _check_token_rows(config, inputs, fields)
        return
    with in_keys("data.path"):
        _check_packages(data)


def _check_token_rows(config: RunConfig, inputs: Sequence[Input], fields: Sequence[Field]) -> None:
    """Without a tokenizer the first sample of each file must have input_ids."""
    data = config.data
    none = load_tokenizer(None, data.template)
    with in_keys("data.path"):
        rules = Rules(fields=tuple(fields), ignore=data.ignore)
        rules = with_known_fields(inputs, rules, data.max_bytes, reads=loss_columns(config))
        try:
            check_first(inputs, SampleTokenizer(none, rules), data.max_bytes)
        except ValueError as error:
            if "data.tokenizer" in str(error) and has_tokenizer(config.model.from_hf):
                _check_packages(data)  # the model's tokenizer would do
            raise


def _check_packages(data: DataConfig) -> None:
    for name in missing_packages():
        raise ValueError(
            f"{shown_path(data)} is text, and the package {name}, which tokenizes it, is missing; "
            "install it with: pip install 'longshore[hf]'"
        )


def _check_vocabulary(tokenizer: str, vocab_size: int) -> None:
    path = Path(tokenizer) / "tokenizer.json"
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
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
