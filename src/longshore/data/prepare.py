"""Prepare: files of raw samples become a store, in parallel; a killed `prepare` resumes.

In: files of samples (inputs.py), a tokenizer folder unless all have input_ids, and where the store
goes: a folder that the user names (`prepare`), or one in a cache (`cache_folder`, `prepare_cache`).
Out: a store (store.py), rejected.jsonl, and a summary. Three lines, of which the second is broken,
give a store of two sequences and

    {"file": "chats.jsonl", "line": 2, "reason": "broken JSON", "detail": "Expecting value: …"}

The inputs are cut into ranges that depend on their sizes alone, never on the number of workers.
Each range becomes one shard: a worker writes the shard, then a record that the range is done, each
to a temporary file that is synced and renamed. A rerun does the ranges without a record
(prepare_job.py). After the last one the index, rejected.jsonl and finally the manifest are written,
and the records are removed: the bytes are the same after any number of kills.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TextIO, TypeVar

from longshore.data.chats import RENAMED, has_renamed_roles
from longshore.data.columns import sides
from longshore.data.inputs import (
    MAX_BYTES,
    Range,
    content_digest,
    cut_ranges,
    find_inputs,
    is_compressed,
    read_range,
    unit_of,
)
from longshore.data.prepare_job import (
    Job,
    RangeRecord,
    load_tokenizer,
    locked_folder,
    make_job,
    read_record,
    write_record,
)
from longshore.data.rejected import LONGEST_DETAIL, REJECTED, Rejections, rejections_of
from longshore.data.source import Field, SampleError, TokenizedSample, parse_field
from longshore.data.store import (
    MANIFEST,
    Manifest,
    ShardInfo,
    finish_store,
    read_manifest,
    shard_name,
    write_durably,
    write_shard,
)
from longshore.data.tokenize import Rules, SampleTokenizer
from longshore.data.training_templates import OWN, is_file_choice, templates_digest
from longshore.settings import LossOn, TooLong

Task = TypeVar("Task")
Start = Callable[[], Callable[[Task], Iterable[int] | None]]
OnPart = Callable[[Any, int], None]


def run_tasks(
    start: Start[Task],
    tasks: Sequence[Task],
    workers: int,
    *,
    on_part: OnPart = lambda task, number: None,
) -> Iterator[Task]:
    """Runs tasks in worker processes, or in this one, and yields each when it is done.

    start: called once by each worker; returns the function for one task, which may yield numbers
    that say how far it is, for `on_part`. An error in a worker is raised here and stops the others;
    a killed worker is an error too, not a hang. Workers end with this process, even if it is
    killed. They do not import the script that runs: one that trains at its top level, without
    `if __name__ == "__main__"`, would train again in each of them.
    """
    if min(workers, len(tasks)) > 1:
        yield from _in_processes(start, tasks, min(workers, len(tasks)), on_part)
    elif tasks:
        work = start()
        for task in tasks:
            for number in work(task) or ():
                on_part(task, number)
            yield task


def _in_processes(
    start: Start[Task], tasks: Sequence[Task], workers: int, on_part: OnPart
) -> Iterator[Task]:
    waiting = deque(tasks)
    processes: dict[Connection, SpawnProcess] = {}
    running: dict[Connection, Task] = {}
    try:
        context = multiprocessing.get_context("spawn")
        for _ in range(workers):
            connection, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(start, theirs), daemon=True)
            with _hidden_script():
                process.start()
            theirs.close()
            processes[connection] = process
            running[connection] = waiting.popleft()
            with _error_if_dead(process):
                connection.send(running[connection])
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                with _error_if_dead(processes[ready]):
                    message = ready.recv()
                if isinstance(message, int):
                    on_part(running[ready], message)
                    continue
                if message is not None:
                    raise message
                yield running.pop(ready)
                if waiting:
                    running[ready] = waiting.popleft()
                    with _error_if_dead(processes[ready]):
                        ready.send(running[ready])
    finally:
        for connection, process in processes.items():
            process.kill()
            process.join()
            process.close()
            connection.close()


@contextlib.contextmanager
def _hidden_script() -> Iterator[None]:
    """The main module has no file and no name, so that a spawned process does not import it."""
    attributes = vars(sys.modules["__main__"])
    names = [name for name in ("__file__", "__spec__") if name in attributes]
    before: dict[str, Any] = {name: attributes[name] for name in names}
    attributes.update(dict.fromkeys(names))
    try:
        yield
    finally:
        attributes.update(before)


@contextlib.contextmanager
def _error_if_dead(process: SpawnProcess) -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        process.join()
        raise ChildProcessError(
            errno.ECHILD,
            f"a worker ended with exit code {process.exitcode}; if it ran out of memory, use fewer "
            "workers",
        ) from None


def _worker(start: Start[Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work = start()
        while True:
            for number in work(connection.recv()) or ():
                connection.send(number)
            connection.send(None)
    except EOFError:
        return
    except (ValueError, OSError) as error:
        connection.send(error)
    except Exception:
        connection.send(RuntimeError(f"in a worker:\n{traceback.format_exc()}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the total."""


@contextlib.contextmanager
def show_progress(stream: TextIO) -> Iterator[OnProgress]:
    """A bar on a terminal; elsewhere, or without rich, a line for each tenth."""
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        yield _tenths(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("preparing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(file=stream))
    task = bar.add_task("", total=None)

    def report(done: int, total: int) -> None:
        bar.start()  # not before: nothing is shown where nothing is left to do
        bar.update(task, completed=done, total=total)

    try:
        yield report
    finally:
        if bar.live.is_started:
            bar.stop()


def _tenths(stream: TextIO) -> OnProgress:
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        if (tenth := 10 * done // max(total, 1)) > shown:
            shown = tenth
            stream.write(f"prepared {10 * tenth} % of {total / 1e6:,.1f} MB\n")
            stream.flush()

    return report


HIGHEST = "highest_token"
"""In a store's manifest: the highest token id, with the file and line of the first row with it."""


def check_highest(about: Mapping[str, object], vocab_size: int) -> None:
    """Refuses a store, by its manifest, with a token id that the model does not have."""
    match about.get(HIGHEST):
        case {"id": int(id), "file": str(file), "line": int(line)} if id >= vocab_size:
            raise unknown_token(f"{file} {unit_of(file)} {line}", id, vocab_size)


def unknown_token(where: str, id: int, vocab_size: int) -> ValueError:
    """The error for a token id that the model does not have."""
    return ValueError(
        f"{where} has the token id {id}, but the model knows only 0 to {vocab_size - 1}; use the "
        "model's tokenizer, or with model.preset a larger model.vocab_size"
    )


WARNINGS = "warnings"
"""In a store's manifest: what a run on it says too."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What is in a prepared store."""

    folder: Path
    """The folder of the store."""
    manifest: Manifest
    """Its content in numbers."""
    reused: int
    """Shards that were there before this call."""
    template_note: str = ""
    """Which chat template was chosen, where it is not the tokenizer's own."""
    warnings: tuple[str, ...] = ()
    """What is probably wrong with the tokenizer."""

    @property
    def rejections(self) -> Rejections:
        return rejections_of(self.folder, self.manifest.about)

    def explain(self, before: str = "") -> str:
        """The summary and the rejections as text, with `before` in front of the summary."""
        store, about = self.manifest, self.manifest.about
        cut = f" ({about['truncated']:,} truncated)" if about["truncated"] else ""
        reused = f" ({self.reused} from an earlier run)" if self.reused else ""
        text = (
            f"{self.folder}: {store.sequences:,} sequences{cut} of {about['samples']:,} samples, "
            f"{store.tokens:,} tokens, {store.loss_tokens:,} of them in the loss, "
            f"the longest sequence {store.longest:,}, {len(store.shards)} shards{reused}"
        )
        lines = [self.template_note] if self.template_note else []
        if renamed := about.get("renamed_roles", 0):
            roles = ", ".join(f"{name!r} as {role!r}" for name, role in RENAMED.items())
            lines.append(f"roles: in {renamed:,} samples ShareGPT's were read: {roles}")
        lines += [*self.warnings, f"{before}{text}"]
        return "\n".join([*lines, self.rejections.explain()] if about["rejected"] else lines)

    def __str__(self) -> str:
        return self.explain()


def prepare(
    inputs: Sequence[str | Path] | str | Path,
    tokenizer: str | Path | None,
    out: str | Path,
    *,
    workers: int = 1,
    template: str | Path | None = None,
    loss_on: LossOn = "assistant",
    max_length: int | None = None,
    too_long: TooLong = "reject",
    fields: Sequence[Field] = (),
    ignore: Sequence[str] = (),
    max_bytes: int = MAX_BYTES,
    shard_bytes: int | None = None,
    start_over: bool = False,
    progress: OnProgress | None = None,
) -> Summary:
    """Makes the store `out` from files of samples, or resumes it.

    tokenizer: a Hugging Face tokenizer folder; None where every sample has input_ids
    workers: processes; more than 1 are spawned
    template: a file, "auto", "own" or a family (tokenize.Tokenizer explains them)
    ignore: columns to leave out, "*" for all that are not used
    max_bytes: a larger sample is rejected unread
    shard_bytes: how much input makes one shard
    progress: called with the bytes done and the total
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1")
    rules = Rules(loss_on, max_length, too_long, tuple(fields), tuple(ignore))
    files = find_inputs([inputs] if isinstance(inputs, str | Path) else inputs)
    folder = Path(tokenizer) if tokenizer else None
    load = partial(load_tokenizer, folder, None if template is None else str(template))
    job = make_job(
        Path(out), files, rules=rules, load=load, shard_bytes=shard_bytes, max_bytes=max_bytes
    )
    is_there = (job.out / MANIFEST).exists()
    ranges = () if is_there else cut_ranges(files, job.settings["shard_bytes"])
    with _explained_os_errors(job), locked_folder(job, start_over) as finished:
        if not finished:
            ranges = ranges or cut_ranges(files, job.settings["shard_bytes"])
            todo = [part for part in ranges if read_record(job, part) is None]
            _make_shards(job, ranges, todo, workers, progress or (lambda done, total: None))
            _finish(job, ranges)
        manifest = read_manifest(job.out)
        reused = len(manifest.shards) if finished else len(ranges) - len(todo)
        return Summary(job.out, manifest, reused, job.template_note, job.warnings)


@contextlib.contextmanager
def _explained_os_errors(job: Job) -> Iterator[None]:
    """An OSError names the file, how many shards are finished and how to resume."""
    try:
        yield
    except OSError as error:
        ranges = cut_ranges(job.inputs, job.settings["shard_bytes"])
        done = sum(read_record(job, part) is not None for part in ranges)
        raise OSError(
            error.errno,
            f"{error.filename or job.out}: {error.strerror or error}; {done} of {len(ranges)} "
            "shards are finished, and once the cause is gone the same command resumes from there",
        ) from error


def _make_shards(
    job: Job, ranges: Sequence[Range], todo: Sequence[Range], workers: int, report: OnProgress
) -> None:
    total = sum(part.bytes for part in ranges)
    done = total - sum(part.bytes for part in todo)
    report(done, total)
    begun: dict[Range, int] = {}

    def read_some(part: Range, nbytes: int) -> None:
        begun[part] = nbytes
        report(done + sum(begun.values()), total)

    for part in run_tasks(partial(_shard_maker, job), todo, workers, on_part=read_some):
        begun.pop(part, None)
        done += part.bytes
        report(done + sum(begun.values()), total)


def _shard_maker(job: Job) -> Callable[[Range], Iterator[int]]:
    return partial(_make_shard, job, SampleTokenizer(job.load_tokenizer(), job.rules))


def _make_shard(job: Job, tokenizer: SampleTokenizer, part: Range) -> Iterator[int]:
    """Writes the shard of a range, then its record.

    A compressed file is one range, however large: it becomes a shard for each `shard_bytes` of
    sequences, so that memory stays bounded, and at each the bytes read so far are yielded.
    """
    if find_inputs([part.input.name]) != (part.input,):
        raise ValueError(f"{part.input.name}: was changed while it was being prepared; start over")
    sequences: list[TokenizedSample] = []
    shards: list[ShardInfo] = []
    rejected = []
    line = truncated = renamed = nbytes = packed = 0
    highest = (-1, 0)

    def count(read: int) -> None:
        nonlocal packed
        packed = read

    skips, limit = job.rules.leaves_out, job.settings["max_bytes"]
    for line, sample in read_range(part, leaves_out=skips, max_bytes=limit, on_packed=count):
        try:
            if isinstance(sample, SampleError):
                raise sample
            row = part.number << 32 | line
            both = sides(sample, tokenizer.rules.ignore, row, file=part.input.name)
            full = [tokenizer.untruncated(side, 0) for side in both]
            fitted = [tokenizer.fitted(side) for side in full]  # of a pair both or none
            sequences += fitted
            truncated += sum(a.length < b.length for a, b in zip(fitted, full, strict=True))
            renamed += any(map(has_renamed_roles, both))
            nbytes += sum(side.nbytes for side in fitted)
            token = max(int(side.tokens.max()) for side in fitted)
            highest = max(highest, (token, line), key=lambda entry: entry[0])
        except SampleError as error:
            rejected.append((line, error.reason, error.detail[:LONGEST_DETAIL]))
        if is_compressed(part.input.name) and nbytes >= job.settings["shard_bytes"]:
            shards.append(_write_piece(job, part, len(shards), sequences))
            sequences, nbytes = [], 0
            yield packed
    if sequences:
        shards.append(_write_piece(job, part, len(shards), sequences))
    write_record(
        job, part, RangeRecord(job.digest, line, truncated, shards, rejected, highest, renamed)
    )


def _write_piece(
    job: Job, part: Range, piece: int, sequences: Sequence[TokenizedSample]
) -> ShardInfo:
    path = job.out / shard_name(part.number, piece)
    return write_shard(path, sequences, fields=job.rules.fields, scratch=job.work)


def _finish(job: Job, ranges: Sequence[Range]) -> None:
    """Writes what covers all shards: rejected.jsonl, the index and, last, the manifest."""
    lines: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    shards: list[ShardInfo] = []
    rejected, truncated, renamed = [], 0, 0
    highest: dict[str, Any] = {"id": -1, "file": "", "line": 0}
    for part in ranges:
        record = read_record(job, part)
        assert record is not None
        for line, reason, detail in record.rejected:
            entry = {"file": part.input.name, "line": lines[part.input.name] + line}
            rejected.append(json.dumps({**entry, "reason": reason, "detail": detail}) + "\n")
            reasons[reason] += 1
        token, line = record.highest
        if token > highest["id"]:
            line += lines[part.input.name]
            highest = {"id": token, "file": part.input.name, "line": line}
        lines[part.input.name] += record.lines
        truncated += record.truncated
        renamed += record.renamed
        shards += record.shards
    write_durably(job.out / REJECTED, "".join(rejected).encode(), scratch=job.work)
    if not shards:
        why = "the inputs have no samples"
        if reasons:
            left_out, where = Rejections(job.out, lines.total(), reasons), job.out / REJECTED
            why = f"{left_out.in_short()}, such as {left_out.example()}; see {where}"
        raise ValueError(f"{job.out}: no sample became a sequence; {why}")
    for path in job.out.glob("shard-*.arrow"):
        if path.name not in {shard.file for shard in shards}:
            path.unlink()  # left by an earlier job
    about = {
        "settings": job.settings,
        "inputs": [{"name": file.name, "bytes": file.bytes} for file in job.inputs],
        "samples": lines.total(),
        "truncated": truncated,
        "renamed_roles": renamed,
        "rejected": dict(sorted(reasons.items())),
        HIGHEST: highest,
        "chat_template": job.template_note,
        WARNINGS: job.warnings,
    }
    finish_store(job.out, shards, fields=job.rules.fields, about=about, scratch=job.work)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How files of samples become sequences; `prepare` explains the values."""

    tokenizer: str
    """A Hugging Face tokenizer folder; "" for none, where every sample has input_ids."""
    template: str
    """A file, "auto", "own" or a family; "" is "auto"."""
    loss_on: LossOn
    """Which tokens are targets."""
    max_length: int
    """0 for no limit."""
    too_long: TooLong
    """What happens to sequences above max_length."""
    fields: Sequence[str]
    """Extra columns, each as name:per_token:dtype."""
    ignore: Sequence[str]
    """Columns to leave out."""
    max_bytes: int
    """The largest raw sample."""


def cache_folder(paths: Sequence[str], rules: TextRules, cache: str) -> Path:
    """The folder in the cache for these files and rules, such as CACHE/chats-1f3a….

    The name has a digest of all that decides the content, so the same settings find the store
    again and other settings get another folder.
    """
    # By both names: a folder knows its inputs as they were named, and refuses other names.
    files = find_inputs(paths)
    inputs = [
        (file.name, str(Path(file.name).resolve()), file.bytes, file.mtime_ns) for file in files
    ]
    tokenizer = [
        (file.name, file.stat().st_mtime_ns)
        for file in sorted(Path(rules.tokenizer).glob("*") if rules.tokenizer else ())
        if file.suffix in (".json", ".jinja", ".txt", ".model")
    ]
    template = "" if rules.template == OWN else templates_digest()
    if is_file_choice(rules.template):
        template = hashlib.sha256(Path(rules.template).read_bytes()).hexdigest()
    content = content_digest(files)
    identity = json.dumps([inputs, content, tokenizer, asdict(rules), template], default=str)
    name = re.sub(r"[*?\[\]]+", "_", Path(paths[0]).stem)
    return Path(cache) / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def prepare_cache(
    paths: Sequence[str],
    rules: TextRules,
    folder: Path,
    *,
    workers: int,
    progress: OnProgress | None = None,
) -> Summary:
    """Prepares the folder; if it is finished already, returns its summary."""
    return prepare(
        paths,
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
