"""Paths: from what a user names to the files of samples.

In: files, globs and folders, of plain files or saved by Hugging Face `datasets`. Out: the files,
each once, in a fixed order: as they are named, those of a folder or a glob sorted by name.

    files_of(["a.jsonl", "b/*.parquet"])     a.jsonl, b/0.parquet, b/1.parquet
    files_of(["dolly"])                      dolly/data-00000-of-00001.arrow, after save_to_disk

A folder of a DatasetDict has several splits, of which the user names one, dolly/train.
"""

import glob
from collections.abc import Sequence
from pathlib import Path

from longshore.data.compressed import CODECS, kind_of
from longshore.data.store import INDEX
from longshore.files import parse_json

JSONL = (".jsonl", ".ndjson")
JSON = (*JSONL, ".json")
SUFFIXES = (*JSON, ".parquet")
"""What is taken from a folder."""
STORE_FILES = (*INDEX, "prepare.work")
SAVED_SPLITS = "dataset_dict.json"
SAVED_STATE = "state.json"
SAVED_INFO = "dataset_info.json"


def files_of(names: Sequence[str | Path]) -> list[Path]:
    """All files that the names stand for; a file that two of them stand for is refused."""
    paths = [path for name in names for place in matches(name) for path in _files_at(place)]
    if not paths:
        raise ValueError("no input is given; name files or folders of samples")
    first: dict[Path, Path] = {}
    for path in paths:
        other = first.setdefault(path.resolve(), path)
        if other is not path:
            also = "" if other == path else f", also as {other}"
            raise ValueError(
                f"{path}: is named more than once{also}; for more weight, use a mixture"
            )
    return paths


def matches(name: str | Path) -> list[Path]:
    """The files and folders that a glob matches, sorted; a name without wildcards as it is."""
    if Path(name).exists() or not glob.has_magic(str(name)):
        return [Path(name)]
    paths = sorted(glob.glob(str(name), recursive=True))
    if not paths:
        raise ValueError(f"{name}: nothing matches; check the folder and the pattern")
    return [Path(path) for path in paths]


def has_ending(path: Path, endings: Sequence[str]) -> bool:
    """Whether a file is of one of these kinds; only JSON may be compressed."""
    kind = kind_of(path)
    return kind in endings and (kind == path.suffix or kind in JSON)


def listed_endings() -> str:
    return f"{', '.join(SUFFIXES)} or .arrow; those of JSON also with {' or '.join(CODECS)}"


def _files_at(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    if (place / SAVED_SPLITS).is_file():
        raise ValueError(_name_a_split(place))
    if (place / SAVED_STATE).is_file() and (place / SAVED_INFO).is_file():
        return _saved_files(place)
    return _files_in(place)


def _name_a_split(folder: Path) -> str:
    splits = _saved(folder / SAVED_SPLITS).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(s, str) for s in splits):
        raise ValueError(f"{folder / SAVED_SPLITS}: is damaged (it lists no splits); save it again")
    return (
        f"{folder}: is a DatasetDict with the splits {', '.join(splits)}; name one of them, such "
        f"as {folder / splits[0]}"
    )


def _saved_files(folder: Path) -> list[Path]:
    """The files of a Dataset that save_to_disk wrote, in the order of its rows."""
    state = _saved(folder / SAVED_STATE)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ValueError(
            f"{folder}: was saved with an index over its rows by an old version of datasets; load "
            "it and save it again with flatten_indices().save_to_disk(…)"
        )
    try:
        files = [folder / str(entry["filename"]) for entry in state["_data_files"]]  # type: ignore[attr-defined]
    except (LookupError, TypeError):
        raise ValueError(
            f"{folder / SAVED_STATE}: is damaged (it lists no files); save the dataset again"
        ) from None
    if absent := [path.name for path in files if not path.is_file()]:
        raise ValueError(
            f"{folder}: is incomplete: {SAVED_STATE} lists {absent[0]}, which is missing; copy it "
            "again"
        )
    if not files:
        raise ValueError(f"{folder}: the dataset has no rows; leave it out")
    return files


def _saved(path: Path) -> dict[str, object]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ValueError(f"{path}: is damaged (it is not JSON); save the dataset again") from None
    return data if isinstance(data, dict) else {}


def _files_in(folder: Path) -> list[Path]:
    names = sorted(path.name for path in folder.iterdir())
    if any(is_store_file(name) for name in names):
        raise ValueError(
            f"{folder}: is a prepared folder without its manifest.json, so it is unfinished or "
            "damaged; copy it again, or repeat the 'longshore prepare' command that made it, with "
            "--start-over if that refuses to resume"
        )
    inputs = [folder / name for name in names if has_ending(Path(name), SUFFIXES)]
    if not inputs:
        raise ValueError(f"{folder}: the folder has no file ending in {', '.join(SUFFIXES)}")
    return inputs


def is_store_file(name: str) -> bool:
    """Whether a file is one that only a prepared folder has."""
    return name in STORE_FILES or (name.startswith("shard-") and name.endswith(".arrow"))
