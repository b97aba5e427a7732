"""The arguments of a Trainer, as the configuration that they describe.

In: a recipe, overrides, sections, and what to resume. Out: a RunConfig, or a ValueError for what
the command refuses too. With resume="runs/x-1" and train={"steps": 200} it is the configuration of
runs/x-1 with train.steps 200.

Data may be in memory, a list of samples or a `datasets.Dataset`. They are saved in data.cache under
a name of their content, so that the same data are the same file again, also for a resumed run:

    data={"path": [{"text": "a b"}], "batch": 8}     data.path=runs/prepared/samples-6e1c5ee9…
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longshore.config.load import load_config
from longshore.config.schema import RunConfig
from longshore.files import new_folder
from longshore.run.folder import newest_runs
from longshore.run.resume import names_run, recipe_of

PATHS = ("path", "eval_path")


def configured(
    recipe: str | Path | RunConfig | None,
    overrides: Sequence[str],
    sections: Mapping[str, Any],
    *,
    resume: bool | str | Path,
    force: bool,
) -> RunConfig:
    """The arguments are those of Trainer."""
    if force and not resume:
        raise ValueError("force works only with resume")
    if is_in_memory(sections.get("data")):
        sections = {**sections, "data": {"path": sections["data"]}}
    if isinstance(resume, str | Path) and resume:
        own = recipe_of(Path(resume), asked_by="resume")
        recipe, overrides = recipe or own, [*overrides, f"output.folder={resume}"]
    elif resume and recipe is None and not names_run(_keys(overrides, sections)):
        raise ValueError(f"resume: which run? {newest_runs()}")
    if isinstance(recipe, RunConfig):
        recipe = recipe.to_toml()
    data = sections.get("data")
    given = {key: data[key] for key in PATHS if key in data} if isinstance(data, Mapping) else {}
    samples = {key: value for key, value in given.items() if is_in_memory(value)}
    if not samples:
        return load_config(recipe, overrides, values=sections)
    named = {**sections, "data": {**sections["data"], **dict.fromkeys(samples, "samples")}}
    cache = Path(load_config(recipe, overrides, values=named).data.cache)
    saved = {key: saved_samples(value, cache, f"data.{key}") for key, value in samples.items()}
    return load_config(recipe, overrides, values={**named, "data": {**named["data"], **saved}})


def _keys(overrides: Sequence[str], sections: Mapping[str, Mapping[str, object]]) -> list[str]:
    given = [word.partition("=")[0].strip() for word in overrides]
    tables = {name: table for name, table in sections.items() if isinstance(table, Mapping)}
    return given + [f"{name}.{key}" for name, table in tables.items() for key in table]


def is_in_memory(value: object) -> bool:
    """Whether a value is data itself: samples, or an object of `datasets`."""
    if isinstance(value, list | tuple) and value:
        return isinstance(value[0], Mapping)
    return type(value).__module__.partition(".")[0] == "datasets"


def saved_samples(samples: Any, cache: Path, key: str) -> str:  # noqa: ANN401
    """The folder that has these samples. key: for errors."""
    if isinstance(samples, list | tuple):
        lines = [_as_line(sample, f"{key}: sample {i}") for i, sample in enumerate(samples)]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()[:16]
        folder = cache / f"samples-{digest}"
    elif hasattr(samples, "save_to_disk") and hasattr(samples, "_fingerprint"):
        folder = cache / f"dataset-{samples._fingerprint}"
    else:
        raise ValueError(
            f"{key} is a {type(samples).__name__}; give a Dataset, such as one split of it, or a "
            "list of samples"
        )
    if folder.exists():
        return str(folder)
    try:
        with new_folder(folder) as partial:
            if isinstance(samples, list | tuple):
                (partial / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
            else:
                samples.save_to_disk(str(partial))
    except OSError as error:
        raise ValueError(f"{key}: {folder} cannot be written ({error.strerror})") from None
    except ValueError:
        if not folder.exists():  # else another rank was faster
            raise
    return str(folder)


def _as_line(sample: Mapping[str, object], where: str) -> str:
    try:
        return json.dumps(sample, default=lambda value: value.tolist(), ensure_ascii=False) + "\n"
    except (TypeError, ValueError, AttributeError):
        raise ValueError(
            f"{where} cannot be written as JSON; it must hold strings, numbers, lists and dicts"
        ) from None
