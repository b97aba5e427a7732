"""The job of `prepare`, and its state in the folder between two runs.

In: the settings and inputs of a run. Out: a Job, its folder locked for it, and a record of each
range of input that is done. A run killed after one of two ranges leaves

    shard-00000.arrow
    prepare.work/lock              held by a running prepare, free after any kill
    prepare.work/job.json          the settings, the inputs with their sizes and times
    prepare.work/range-00000.json  {"job": …, "lines": 70, "shards": [{…}], "rejected": …, …}

and the next run with the same job does range 1 alone. A run with another job is refused, or starts
over; records of the old job then no longer count, because each names its job.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from longshore.data.chat_template import DATE
from longshore.data.columns import (
    ALL,
    FORMS,
    KNOWN_FIELDS,
    NO_TOKENIZER,
    PAIR_FIELDS,
    TOKENS,
    is_pair,
    known_fields,
    refuse_file,
    sides,
    unknown_columns,
    unused_columns,
)
from longshore.data.inputs import (
    Input,
    Range,
    Sample,
    content_digest,
    is_store_file,
    read_range,
    unit_of,
    whole_range,
)
from longshore.data.rejected import REJECTED
from longshore.data.source import SampleError, TokenizedSample
from longshore.data.store import MANIFEST, ShardInfo, read_manifest, write_durably
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer, is_chat
from longshore.data.training_templates import AUTO

LEAST_RANGE, MOST_RANGE, RANGES = 2**20, 2**26, 64
LOOKED_AT = 100


def load_tokenizer(folder: Path | None, template: str | None) -> Tokenizer | None:
    """The tokenizer of a folder; None where there is no folder, because samples have input_ids."""
    if folder is not None:
        return Tokenizer(folder, template=template)
    if (template or AUTO) != AUTO:
        raise ValueError(
            "data.template is for chats, which need a tokenizer; set data.tokenizer too, or leave "
            "data.template out"
        )
    return None


@dataclass(frozen=True, slots=True)
class Job:
    """All that decides the content of a store."""

    out: Path
    """The folder of the store."""
    load_tokenizer: Callable[[], Tokenizer | None]
    """Called by each worker."""
    rules: Rules
    """How samples become sequences."""
    inputs: tuple[Input, ...]
    """The files of samples."""
    settings: Mapping[str, Any]
    """The rules and limits as JSON, with digests of the tokenizer and the template."""
    digest: str
    """Identifies settings and inputs."""
    template_note: str = ""
    """Which chat template was chosen, where it is not the tokenizer's own."""
    warnings: tuple[str, ...] = ()
    """What is probably wrong with the tokenizer, for people."""

    @property
    def work(self) -> Path:
        return self.out / "prepare.work"

    def as_json(self) -> dict[str, Any]:
        return {**self.settings, "inputs": [asdict(file) for file in self.inputs]}


@dataclass(frozen=True, slots=True)
class RangeRecord:
    """The result of a range that is done."""

    job: str
    """The digest of its job."""
    lines: int
    """Lines of the range."""
    truncated: int
    """Sequences cut to max_length."""
    shards: Sequence[ShardInfo]
    """None if no line became a sequence, several of a large compressed file."""
    rejected: Sequence[tuple[int, str, str]]
    """(line, reason, detail) of each sample left out."""
    highest: tuple[int, int]
    """The highest token id, and the first line that has it; (-1, 0) if there is no sequence."""
    renamed: int = 0
    """Samples in which ShareGPT's roles became the usual ones."""


def make_job(
    out: Path,
    inputs: tuple[Input, ...],
    *,
    rules: Rules,
    load: Callable[[], Tokenizer | None],
    shard_bytes: int | None,
    max_bytes: int,
) -> Job:
    """The job, after checking the tokenizer and the first sample of each input."""
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    if max_bytes < 1:
        raise ValueError(f"data.max_bytes is {max_bytes}; it must be at least 1")
    size = sum(file.bytes for file in inputs) // RANGES
    rules = with_known_fields(inputs, rules, max_bytes)
    loaded = load()
    has_chats, warnings = check_first(inputs, SampleTokenizer(loaded, rules), max_bytes)
    settings = {
        "content": content_digest(inputs),
        "tokenizer": "" if loaded is None else loaded.digest,
        "template": "" if loaded is None else loaded.template_digest,
        "date": DATE.isoformat(),
        "loss_on": rules.loss_on,
        "max_length": rules.max_length,
        "too_long": rules.too_long,
        "fields": [str(field) for field in rules.fields],
        "ignore": list(rules.ignore),
        "max_bytes": max_bytes,
        "shard_bytes": shard_bytes or min(max(size, LEAST_RANGE), MOST_RANGE),
    }
    note = loaded.template_note if has_chats and loaded is not None else ""
    job = Job(out, load, rules, inputs, settings, "", note, warnings)
    return replace(job, digest=hashlib.sha256(json.dumps(job.as_json()).encode()).hexdigest())


def with_known_fields(
    inputs: Sequence[Input], rules: Rules, max_bytes: int, *, reads: Sequence[str] = ()
) -> Rules:
    """The rules with fields that nobody has to declare: pairs', and columns of ready losses.

    The first sample says whether a value is one of a sequence or of a token. reads: names of
    columns that the run's loss reads, which "*" in `ignore` does not leave out.
    """
    names = [name for name in KNOWN_FIELDS if name in reads or ALL not in rules.ignore]

    def skips(name: str) -> bool:
        return name not in names and rules.leaves_out(name)

    for _, _, first in _first_samples(inputs, skips, max_bytes):
        sample = {name: value for name, value in first.items() if name not in rules.ignore}
        if is_pair(sample, rules.ignore):
            own = {field.name for field in PAIR_FIELDS}
            others = [field for field in rules.fields if field.name not in own]
            return replace(rules, fields=(*others, *PAIR_FIELDS))
        if fields := known_fields(sample, names, rules.fields):
            return replace(rules, fields=(*rules.fields, *fields))
    return rules


def _first_samples(
    inputs: Sequence[Input], leaves_out: Callable[[str], bool], max_bytes: int
) -> Iterator[tuple[str, str, Sample]]:
    """The first sample of each input that can be read, with its file and its line."""
    for file in inputs:
        rows = read_range(whole_range(file), leaves_out=leaves_out, max_bytes=max_bytes)
        for line, sample in rows:
            if not isinstance(sample, SampleError):
                yield file.name, f"{unit_of(file.name)} {line}", sample
                break


def check_first(
    inputs: Sequence[Input], tokenizer: SampleTokenizer, max_bytes: int
) -> tuple[bool, tuple[str, ...]]:
    """Refuses unknown columns, and text without a tokenizer, by the first sample of each input.

    Returns whether one of these samples is a chat, and a warning if one has no end token.
    """
    has_chats, warnings, rules = False, tuple[str, ...](), tokenizer.rules
    for file, row, sample in _first_samples(inputs, rules.leaves_out, max_bytes):
        try:
            sequence = tokenizer.untruncated(sides(sample, rules.ignore, 0)[0], 0)
            warnings = warnings or _no_end(tokenizer, sample, sequence, f"{file} {row}")
        except SampleError as error:
            if error.reason == NO_TOKENIZER:
                columns = [name for name in sample if name not in rules.ignore]
                raise refuse_file(file, row, columns) from None
            if error.reason == "undeclared field":
                names, form = _unused(inputs, rules, max_bytes)
                why = unknown_columns(names, form, sample)
                raise ValueError(f"{file} {row}: {why}") from None
        has_chats = has_chats or is_chat(sample)
    return has_chats, warnings


def _no_end(
    tokenizer: SampleTokenizer, sample: Sample, sequence: TokenizedSample, where: str
) -> tuple[str, ...]:
    """A warning if no end token follows what is learned from a sample of text."""
    loaded = tokenizer.tokenizer
    if loaded is None or TOKENS in sample or not sequence.loss_tokens or loaded.is_ended(sequence):
        return ()
    return (
        f"warning: {where}: has no end token after its last words, so the model does not learn to "
        f"stop; name eos_token in {loaded.folder / 'tokenizer_config.json'}, or use a chat "
        "template that ends the assistant's turns with a special token",
    )


def _unused(inputs: Sequence[Input], rules: Rules, max_bytes: int) -> tuple[list[str], str]:
    """All unknown columns in the first samples of all inputs, and the samples' form."""
    names: dict[str, str] = {}
    for file in inputs:
        part = whole_range(file)
        rows = read_range(part, leaves_out=rules.leaves_out, max_bytes=max_bytes)
        for _, sample in islice(rows, LOOKED_AT):
            if isinstance(sample, SampleError):
                continue
            if is_pair(sample, rules.ignore):
                sample = sides(sample, rules.ignore, 0)[0]
            form = next((name for name in FORMS if name in sample), None)
            others = unused_columns(sample, form, rules.ignore, rules.fields) if form else []
            names.update(dict.fromkeys(others, form or ""))
    return list(names), next(iter(names.values()))


@contextlib.contextmanager
def locked_folder(job: Job, start_over: bool) -> Iterator[bool]:
    """Locks the folder for this job. Yields True if its store is already finished."""
    if job.out.is_dir() and not job.work.is_dir():
        others = [p.name for p in job.out.iterdir()]
        if others and MANIFEST not in others:
            _refuse_others(job.out, others, start_over)
    job.work.mkdir(parents=True, exist_ok=True)
    with (job.work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{job.out}: another 'prepare' is writing to this folder; wait for it to end"
            ) from None
        try:
            finished = _check_same_job(job, start_over)
        except ValueError:
            if (job.out / MANIFEST).exists():
                shutil.rmtree(job.work)  # a finished store stays as it is
            raise
        for leftover in job.work.glob("*.tmp"):
            leftover.unlink()  # of a killed run, which may have filled the disk
        yield finished
        shutil.rmtree(job.work)


def _refuse_others(folder: Path, names: Sequence[str], start_over: bool) -> None:
    """Refuses a folder with other files, or with the remains of a store unless starting over."""
    others = sorted(name for name in names if not is_store_file(name) and name != REJECTED)
    if others or (REJECTED in names and len(names) == 1):
        raise ValueError(f"{folder}: has {sorted(names)[0]} but is no store; use an empty folder")
    if not start_over:
        raise ValueError(
            f"{folder}: is a prepared folder without its {MANIFEST}, so it is damaged; copy it "
            "again, or start over (remove the folder, or prepare it with --start-over)"
        )


def _check_same_job(job: Job, start_over: bool) -> bool:
    """Whether the job's store is finished; a folder of another job is refused or started over."""
    path = job.work / "job.json"
    finished = (job.out / MANIFEST).exists()
    before = _earlier_job(job, path, finished)
    mine = json.loads(json.dumps(job.as_json()))
    if before == mine:
        return finished
    if before is not None and not start_over:
        changed = [name for name in mine if before.get(name) != mine[name]]
        raise ValueError(
            f"{job.out}: was started with other settings or inputs ({', '.join(changed)} differ); "
            "use the same ones, choose another folder, or start over (remove the folder, or "
            "prepare it with --start-over)"
        )
    # The new job is written first: a kill from here on leaves a folder that can be resumed.
    write_durably(path, json.dumps(mine).encode(), scratch=job.work)
    (job.out / MANIFEST).unlink(missing_ok=True)
    return False


def _earlier_job(job: Job, path: Path, finished: bool) -> dict[str, Any] | None:
    """The job that made this folder, or started it."""
    if not finished:
        return json.loads(path.read_text()) if path.exists() else None
    about = read_manifest(job.out).about
    finished_ns = (job.out / MANIFEST).stat().st_mtime_ns
    inputs = [dict(entry) for entry in about.get("inputs", [])]
    for entry, file in zip(inputs, job.inputs, strict=False):
        entry["mtime_ns"] = min(file.mtime_ns, finished_ns)  # an input newer than the store differs
    return {**about.get("settings", {}), "inputs": inputs}


def write_record(job: Job, part: Range, record: RangeRecord) -> None:
    text = json.dumps(asdict(record))
    write_durably(_record_path(job, part), text.encode(), scratch=job.work)


def _record_path(job: Job, part: Range) -> Path:
    return job.work / f"range-{part.number:05}.json"


def read_record(job: Job, part: Range) -> RangeRecord | None:
    """The record of a range, if it is done by this job and its shards are there."""
    try:
        data = json.loads(_record_path(job, part).read_text())
        shards = [ShardInfo(**shard) for shard in data["shards"]]
        record = RangeRecord(**{**data, "shards": shards, "highest": tuple(data["highest"])})
        is_complete = all((job.out / s.file).stat().st_size == s.bytes for s in shards)
    except (OSError, KeyError):  # or one that an earlier version wrote
        return None
    return record if is_complete and record.job == job.digest else None
