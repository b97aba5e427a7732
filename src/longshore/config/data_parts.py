"""The parts of data.path: each with a weight of its own, or all as one.

In: data.path, one name or several: files, globs, folders. Out: for each name a DataPart, with its
prepared folders and the names of its other data, which become one prepared folder in the cache.

    path = ["a.jsonl", "b/*.parquet"], weights = [3, 1]     two parts, drawn a a a b, a a a b, …
    path = ["a.jsonl", "prepared"]                          two parts, joined: each sequence once
"""

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from longshore.config.located import in_keys
from longshore.config.schema import DataConfig, RunConfig
from longshore.data.paths import files_of, matches
from longshore.train.loss_fields import needed_fields

MANIFEST = "manifest.json"
PACKAGES = ("tokenizers", "jinja2")
"""What text needs."""


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
        prepared, texts = list[Path](), list[str]()
        for path in matches(name):
            if is_prepared(path):
                prepared.append(path)
            else:
                texts.append(str(path))
        parts.append(DataPart(name, tuple(prepared), tuple(texts)))
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
    """The tokenizer folder of a run, "" for none: data.tokenizer, or the model's if it is usable.

    A model's folder without tokenizer.json, or without the packages to read it, is still enough
    for rows of input_ids.
    """
    if config.data.tokenizer:
        return config.data.tokenizer
    folder = config.model.from_hf
    return folder if has_tokenizer(folder) and not missing_packages() else ""


def loss_columns(config: RunConfig) -> list[str]:
    """The columns that the run's loss reads."""
    return [field.name for field in needed_fields(config.train.loss, config.train.loss_options)]


def has_tokenizer(folder: str) -> bool:
    return bool(folder) and (Path(folder) / "tokenizer.json").is_file()


def missing_packages() -> list[str]:
    """Those of PACKAGES that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def is_prepared(path: str | Path) -> bool:
    """Whether a path is a folder made by `longshore prepare`, finished or not."""
    return (Path(path) / MANIFEST).exists() or (Path(path) / "prepare.work").exists()


def check_parts(data: DataConfig) -> tuple[DataPart, ...]:
    """The parts, after checking that their weights fit, and that no data is named twice."""
    with in_keys("data.path"):
        parts = data_parts(data)
        named = [(path, part.name) for part in parts for path in _places(part)]
    if data.weights and len(data.weights) != len(parts):
        raise ValueError(
            f"data.weights has {len(data.weights)} numbers, but data.path has {len(parts)} "
            f"name{'s' if len(parts) > 1 else ''}; give one weight for each name"
        )
    places: dict[Path, str] = {}
    for path, name in named:
        other = places.setdefault(path.resolve(), name)
        if other != name:
            raise ValueError(
                f"data.path: {path} is in both {other} and {name}; name it once, and use "
                "data.weights to draw it more often"
            )
    if len(set(path_names(data))) < len(parts):
        twice = next(name for name in path_names(data) if path_names(data).count(name) > 1)
        raise ValueError(
            f"data.path: {twice} is named more than once; name it once, and use data.weights to "
            "draw it more often"
        )
    return parts


def _places(part: DataPart) -> Iterable[Path]:
    return [*part.prepared, *(files_of(part.texts) if part.texts else ())]
