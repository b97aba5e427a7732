"""Trackers: the metrics of a run, sent to TensorBoard or Weights & Biases.

In: names, the run's folder and its configuration. Out: trackers that log each step, on rank 0.

    trackers = make_trackers(["tensorboard"], Path("runs/demo-1"), {"train.lr": 0.005})
    for tracker in trackers:
        tracker.log(1, {"loss": 5.54, "mfu": None, "mtp_losses": [5.6, 5.7]})
        tracker.close()

writes loss, mtp_losses/1 and mtp_losses/2 at step 1; values that are not numbers are left out. A
tracker that fails is dropped with one warning, and the run continues.
"""

import importlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

Warn = Callable[[str], None]
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Tracker(Protocol):
    """Where a step's numbers go."""

    def log(self, step: int, values: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def make_trackers(
    names: Iterable[str], folder: str | Path, config: Mapping[str, Any], *, warn: Warn = _warn
) -> list[Tracker]:
    """One for each name; raises for an unknown name, or if its package is not installed.

    config: by section.key. warn: called once if a tracker fails.
    """
    unique = list(dict.fromkeys(names))
    check_trackers(unique)
    return [_Guarded(name, TRACKERS[name], Path(folder), config, warn) for name in unique]


def check_trackers(names: Iterable[str]) -> None:
    """Raises what make_trackers would raise."""
    for name in names:
        if name not in MODULES:
            raise ValueError(f"unknown tracker {name!r}; known are {', '.join(MODULES)}")
        _package(name)


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers but the step; entry i of a list, from 1, becomes name/i, and entry k of a
    table name/k."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, list | tuple):
            flat |= {f"{name}/{i}": item for i, item in enumerate(value, start=1)}
        elif isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": item for inner, item in value.items()}
        elif name != "step":
            flat[name] = value
    return {
        name: float(value)
        for name, value in flat.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


class TensorBoard:
    """Scalars in the folder's `tensorboard`, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.writer = _package("tensorboard").SummaryWriter(log_dir=str(folder / "tensorboard"))
        lines = [f"    {key} = {json.dumps(value, default=str)}" for key, value in config.items()]
        self.writer.add_text("config", "\n".join(lines), 0)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        for name, value in numbers(values).items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; it reads WANDB_MODE, WANDB_PROJECT and so on itself."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.run = _package("wandb").init(
            name=folder.resolve().name, dir=str(folder), config=dict(config)
        )

    def log(self, step: int, values: Mapping[str, object]) -> None:
        self.run.log(numbers(values), step=step)

    def close(self) -> None:
        self.run.finish()


Maker = Callable[[Path, Mapping[str, Any]], Tracker]
TRACKERS: dict[str, Maker] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class _Guarded:
    """A tracker that is dropped after its first failure."""

    def __init__(
        self, name: str, make: Maker, folder: Path, config: Mapping[str, Any], warn: Warn
    ) -> None:
        self.name = name
        self.warn = warn
        self.tracker: Tracker | None = None
        self._try(lambda: self._set(make(folder, config)))

    def log(self, step: int, values: Mapping[str, object]) -> None:
        if (tracker := self.tracker) is not None:
            self._try(lambda: tracker.log(step, values))

    def close(self) -> None:
        if (tracker := self.tracker) is not None:
            self._try(tracker.close)
        self.tracker = None

    def _set(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever it is, training continues
            self.tracker = None
            self.warn(f"{self.name} stopped, the run continues: {type(error).__name__}: {error}")


def _package(name: str) -> ModuleType:
    """Its module. A folder `wandb` in the working directory imports too, but is empty."""
    entry = {"tensorboard": "SummaryWriter", "wandb": "init"}[name]
    try:
        module = importlib.import_module(MODULES[name])
        if hasattr(module, entry):
            return module
    except ImportError:
        pass
    raise ValueError(f'{name} is not installed; install it with: pip install "longshore[{name}]"')
