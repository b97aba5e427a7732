"""From a recipe and overrides to a RunConfig: every key known, every value of its kind.

In: a TOML file, or TOML itself, and overrides such as `train.lr=3e-4`. Out: a RunConfig with the
defaults that depend on other keys filled in; check.py says whether it makes sense. Without a
recipe, and with no override that names other data or another model, it is the demo of the package.

    load_config("chats.toml", ["train.lr=3e-4", "data.path=more.jsonl"])

A value is TOML; what is no TOML is a text without quotes, and so is every value of a text key.
"""

import tomllib
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

from longshore.config.other_systems import FOREIGN_VALUES, answer_key, answer_section
from longshore.config.schema import SECTIONS, Kind, RunConfig, toml_or_text

Tables = dict[str, dict[str, Any]]

NO_VALUES: Mapping[str, Mapping[str, object]] = MappingProxyType({})
DEMO = "demo.toml"
NOT_THE_DEMO = ("data.path", "model.preset", "model.from_hf", "model.module")
# A word for one of these takes the others out of the recipe.
EITHER = (
    ("data.path", "data.mock", "data.count"),
    ("data.mock", "data.path"),
    ("data.eval_path", "data.eval_mock", "data.eval_count"),
    ("data.eval_mock", "data.eval_path"),
    ("data.batch", "data.batch_tokens"),
    ("data.batch_tokens", "data.batch"),
    ("model.preset", "model.from_hf", "model.module"),
    ("model.from_hf", "model.preset", "model.layers", "model.vocab_size"),
    ("model.module", "model.preset", "model.from_hf", "model.layers", "model.vocab_size"),
    ("train.steps", "train.epochs"),
    ("train.epochs", "train.steps"),
)
DATA_FILES = (".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".gz", ".zst")
SHOWN = 60


def load_config(
    recipe: str | Path | None = None,
    overrides: Seq[str] = (),
    *,
    values: Mapping[str, Mapping[str, object]] = NO_VALUES,
) -> RunConfig:
    """The configuration of a run, or a ValueError of one line.

    recipe: the path of a TOML file, or TOML itself, of more than one line; None: the demo, unless
    data or a model are given. overrides: as on the command line, such as "train.lr=3e-4". values:
    the same as Python values by section, {"train": {"lr": 3e-4}}; they come before the overrides.
    """
    pairs = [_split(word) for word in overrides]
    _check_values(values)
    given = [f"{section}.{key}" for section, table in values.items() for key in table]
    given += [key for key, _ in pairs]
    name, tables = "train", Tables()
    if recipe is not None and "\n" in str(recipe):
        tables = _parse(str(recipe), "the recipe")
    elif recipe is not None:
        name, tables = Path(recipe).stem, _read(str(recipe))
    elif not any(key in NOT_THE_DEMO for key in given):
        name, tables = "demo", _parse(files("longshore").joinpath(DEMO).read_text("utf-8"), DEMO)
    for one, *others in EITHER:
        if any(f"{key}.".startswith(f"{one}.") for key in given):
            for section, other in (key.split(".") for key in others):
                tables.get(section, {}).pop(other, None)
    for section, table in values.items():
        tables.setdefault(section, {}).update({key: _as_toml(v) for key, v in table.items()})
    for key, text in pairs:
        _override(tables, key, text)
    sections = {section: _section(section, table) for section, table in tables.items()}
    return with_defaults(RunConfig(**sections), name)


def _check_values(values: Mapping[str, Mapping[str, object]]) -> None:
    for section, table in values.items():
        if section not in SECTIONS and isinstance(table, Mapping):
            raise ValueError(answer_section(section))
        if section not in SECTIONS:
            raise ValueError(
                f"{answer_key(section)} (keys are given by section, such as train={{'lr': 3e-4}})"
            )
        if not isinstance(table, Mapping):
            raise ValueError(
                f"{section} is {table!r}; it must be a table of its keys, such as {section}={{...}}"
            )


def _as_toml(value: object) -> object:
    """Paths as text, and a function of the user's as module:function; all else as it is."""
    if isinstance(value, list | tuple):
        return [_as_toml(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, FunctionType):
        return f"{value.__module__}:{value.__qualname__}"
    return value


def _read(recipe: str) -> Tables:
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml", ".json"):
        raise ValueError(f"{recipe}: a recipe is a TOML file; write [train] and below it lr = 3e-4")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{recipe}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{recipe}: is not UTF-8; a recipe is a TOML file") from None
    return _parse(text, recipe)


def _parse(text: str, name: str) -> Tables:
    try:
        tables = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: is not TOML ({error})") from None
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ValueError(f"{name}: every key belongs into a [section]; {answer_key(section)}")
    return tables


def _split(word: str) -> tuple[str, str]:
    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals:
        hint = "a recipe ends in .toml" if "." not in word else f"write {word}=VALUE"
        if word.endswith(DATA_FILES):
            hint = f"write data.path={word}"
        raise ValueError(
            f"{word!r} is not of the form section.key=value, such as train.lr=3e-4; {hint}"
        )
    section, dot, name = key.partition(".")
    if not dot or not section or not name:
        raise ValueError(answer_key(key) if key else f"{word!r} has no key before the =")
    return key, text.strip()


def _override(tables: Tables, key: str, text: str) -> None:
    """Sets section.key, or a key of a table such as data.mock.type."""
    section, name, *inner = key.split(".")
    kind = _kind(section, name)
    value = toml_or_text(text)
    if kind.is_text and not isinstance(value, str):
        value = text
    table = tables.setdefault(section, {})
    for step in inner:
        below = table.setdefault(name, {})
        if not isinstance(below, dict):
            raise ValueError(f"there is no {key}: {section}.{name} takes {kind.wants}, not a table")
        table, name = below, step
    table[name] = value


def _kind(section: str, name: str) -> Kind:
    for field in fields(SECTIONS[section]) if section in SECTIONS else ():
        if field.name == name:
            kind = field.metadata["kind"]
            assert isinstance(kind, Kind)
            return kind
    raise ValueError(answer_key(f"{section}.{name}"))


def _section(section: str, table: Mapping[str, object]) -> Any:  # noqa: ANN401 - one of seven
    if section not in SECTIONS and not table:
        raise ValueError(answer_section(section))
    values = {}
    for name, value in table.items():
        kind = _kind(section, name)
        values[name] = kind.read(value)
        if values[name] is None:
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            shown = shown if len(shown) <= SHOWN else shown[: SHOWN - 1] + "…"
            ours = FOREIGN_VALUES.get(value if isinstance(value, str) else shown)
            way_out = f"use {ours}" if ours in kind.names else f"it must be {kind.wants}"
            raise ValueError(f"{section}.{name} is {shown}; {way_out}")
    return SECTIONS[section](**values)


def with_defaults(config: RunConfig, name: str = "train") -> RunConfig:
    """Fills in what is not given and depends on other keys. name: of the run's folder."""
    train, output = config.train, config.output
    if not train.lr:
        usual = 2e-5 if config.model.from_hf else 3e-4
        train = replace(train, lr=2e-4 if config.model.lora.get("rank") else usual)
    if not train.steps and not train.epochs:
        train = replace(train, epochs=1)
    if not output.folder:
        output = replace(output, folder=f"runs/{name}-{{n}}")
    return replace(config, train=train, output=output)
