"""The arguments of a Trainer, as the configuration that they describe.

In: a recipe, overrides, sections, and what to resume. Out: a RunConfig, or a ValueError for what
the command refuses too. With resume="runs/x-1" and train={"steps": 200} it is the configuration of
runs/x-1 with train.steps 200.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from longshore.config.load import load_config
from longshore.config.schema import RunConfig
from longshore.run.folder import newest_runs
from longshore.run.resume import names_run, recipe_of


def configured(
    recipe: str | Path | RunConfig | None,
    overrides: Sequence[str],
    sections: Mapping[str, Mapping[str, object]],
    *,
    resume: bool | str | Path,
    force: bool,
) -> RunConfig:
    """The arguments are those of Trainer."""
    if force and not resume:
        raise ValueError("force works only with resume")
    if isinstance(resume, str | Path) and resume:
        own = recipe_of(Path(resume), asked_by="resume")
        recipe, overrides = recipe or own, [*overrides, f"output.folder={resume}"]
    elif resume and recipe is None and not names_run(_keys(overrides, sections)):
        raise ValueError(f"resume: which run? {newest_runs()}")
    if isinstance(recipe, RunConfig):
        recipe = recipe.to_toml()
    return load_config(recipe, overrides, values=sections)


def _keys(overrides: Sequence[str], sections: Mapping[str, Mapping[str, object]]) -> list[str]:
    given = [word.partition("=")[0].strip() for word in overrides]
    tables = {name: table for name, table in sections.items() if isinstance(table, Mapping)}
    return given + [f"{name}.{key}" for name, table in tables.items() for key in table]
