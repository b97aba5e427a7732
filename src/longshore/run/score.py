"""Scores: the log-probability of every token of a data set under a model, beside its row.

In: a checked configuration with the data and the model, this rank's place, and where the scores
go. Out: a prepared folder, or a Parquet file, with the same sequences in the same order, their
fields, and a new field of one value for each token as a target. It is planned, packed and run as a
step of training is, forward only; all ranks call `score` together, and rank 0 writes.

Tokens 5 6 7 with p(6 | 5) = ½ and p(7 | 5 6) = ¼ get 0, log ½ and log ¼: nothing predicts the first
token. Training reads the field with `data.path=scored`, as `batch.token_fields["ref_logprobs"]`.
A run of train.loss=dpo does this itself, before its first step, for data without the field.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longshore.batch import IGNORE, MicroBatch
from longshore.config.schema import RunConfig
from longshore.data.source import (
    REF_LOGPROBS,
    Array,
    Field,
    IndexedSource,
    Place,
    TokenizedSample,
    source_digest,
)
from longshore.data.steps import IndexedSteps, Step
from longshore.data.store import MANIFEST, Store, write_store
from longshore.data.stream import TextStream
from longshore.distributed.collectives import agreed, sum_over
from longshore.distributed.process_group import Ranks
from longshore.files import new_folder
from longshore.hf.lora import find_base
from longshore.model.interface import Output
from longshore.parallel.pipeline import Executor, Handlers
from longshore.run.data import Readable, check_pairs
from longshore.run.folder import check_scored
from longshore.run.parts import (
    TrainingJob,
    joined_ranks,
    make_cp_groups,
    make_job,
    make_model,
    make_steps,
    scores_reference,
)
from longshore.run.weights import write_shared
from longshore.train.evaluation import reshard
from longshore.train.loss import TEMPERATURE, LossCall
from longshore.train.losses import make_loss

Rows = Iterable[TokenizedSample]

ROWS = 1024
"""Rows of a row group of Parquet."""


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Where scores go."""

    out: str
    """A folder, or a file that ends in .parquet; it must not exist."""
    field: str = REF_LOGPROBS
    """The name of the new field."""
    temperature: float = 1.0
    """What logits are divided by."""


def score(config: RunConfig, ranks: Ranks, task: ScoreTask) -> None:
    """Scores the data of the configuration, on all its ranks."""
    with joined_ranks(config, ranks, attempt=0, signals=True) as (topology, stop):
        job = make_job(
            config,
            topology,
            stop=stop,
            local_size=ranks.local_size,
            display=config.output.display,
        )
        _score(job, task)


def _score(job: TrainingJob, task: ScoreTask) -> None:
    with agreed(job.topology.groups):
        if job.topology.rank == 0:
            fields = (*job.indexed_source.fields, score_field(job, task))
            check_scored(task.out, fields, job.indexed_source.lengths)
    groups = make_cp_groups(job)
    job.tell("loading the weights…" if job.config.model.from_hf else "building the model…")
    executor = Executor(make_model(job, groups), job.topology, mode=job.resolved.shard)
    steps = make_steps(job, job.config, source=job.indexed_source, shuffle=False, is_grouped=False)
    write_scores(job, executor, steps, task)
    job.status.at("ending")
    steps.close()
    groups.close()


def with_reference(job: TrainingJob) -> TrainingJob:
    """The job with the field ref_logprobs, where train.loss=dpo needs it and the data have none.

    The reference is the model as the run begins, before any checkpoint is loaded. Its scores are
    written to a folder of data.cache, whose name is a digest of the base, the data and what else
    decides them, so that a resumed run, or another one, finds them there.
    """
    config, topology, source = job.config, job.topology, job.source
    if not scores_reference(config, source.fields):
        return job
    assert not isinstance(source, TextStream), "pairs are not streamed"
    temperature = float(config.train.loss_options.get(TEMPERATURE, 1.0))
    with agreed(topology.groups):
        make_loss(config.train.loss, config.train.loss_count, config.train.loss_options)
        check_pairs(config, source)
        base = find_base(job.decoder, config.model.from_hf, seed=config.train.seed)
        about = json.dumps([base.digest, source_digest(source), str(job.dtype), temperature])
        digest = hashlib.sha256(about.encode()).hexdigest()
        folder = Path(config.data.cache) / f"reference-{digest[:12]}"
    is_there = torch.tensor([float(topology.rank == 0 and (folder / MANIFEST).exists())])
    if not sum_over(is_there.to(topology.device), topology.groups.world):
        job.tell(
            f"the data have no {REF_LOGPROBS}: scoring them with the model as it is now, the "
            f"reference of train.loss=dpo, into {folder}"
        )
        _score(job, ScoreTask(str(folder), REF_LOGPROBS, temperature))
        gc.collect()  # the model that scored: the run builds its own
    with agreed(topology.groups):
        scored = Readable(Store(folder), job.decoder.vocab_size, name=str(folder))
    # Scores differ in the last digits from machine to machine; a run may resume on another one.
    scored.digest, scored.tokenizer_digest = digest, getattr(source, "tokenizer_digest", "")
    return replace(job, source=scored)


def score_field(job: TrainingJob, task: ScoreTask) -> Field:
    return Field(task.field, "target", "float64" if job.dtype == torch.float64 else "float32")


def write_scores(
    job: TrainingJob, executor: Executor, steps: IndexedSteps, task: ScoreTask
) -> None:
    """Runs the steps, while rank 0 writes their rows; if it cannot, all ranks raise."""
    spec = score_field(job, task)

    def write(rows_of_steps: Iterator[Rows]) -> None:
        write_rows(task.out, chain.from_iterable(rows_of_steps), job.indexed_source, spec)

    scored = _scored_steps(job, executor, steps, task, spec)
    write_shared(scored, job.topology.groups, write, target=Path(task.out), then="score again")


def _scored_steps(
    job: TrainingJob, executor: Executor, steps: IndexedSteps, task: ScoreTask, spec: Field
) -> Iterator[Rows]:
    """For each step, on rank 0 its sequences with their scores, in order; elsewhere none."""
    scorer, source = Scorer(executor, temperature=task.temperature), job.indexed_source
    report = _tenths(int(source.lengths.sum()), job.tell)
    done = 0
    for step in islice(steps.from_place(Place(), lambda: False), steps.batches.steps(0)):
        job.status.at("scoring", step=step.place.step + 1)
        with torch.no_grad():
            flat = scorer.scores(step).cpu()
        is_first = job.topology.rank == 0
        yield _with_scores(step, flat.numpy().astype(spec.dtype), source, spec) if is_first else ()
        done += sum(sequence.length for sequence in step.plan.sequences)
        report(done)
    reshard(executor)


def _with_scores(
    step: Step, flat: Array, source: IndexedSource, spec: Field
) -> Iterator[TokenizedSample]:
    start = 0
    for sequence in step.plan.sequences:
        sample = source[sequence.id]
        scores = flat[start : start + sequence.length]
        yield replace(sample, fields={**sample.fields, spec.name: scores})
        start += sequence.length


class Scorer:
    """Computes the log-probabilities of a step's tokens."""

    def __init__(self, executor: Executor, *, temperature: float = 1.0) -> None:
        self.executor = executor
        self.call = LossCall(_logprobs, temperature=temperature)

    def scores(self, step: Step) -> Tensor:
        """(tokens of the step): all sequences one after the other, the same on all ranks.

        All ranks call it together, without gradient.
        """
        executor, lengths = self.executor, [s.length for s in step.plan.sequences]
        groups = executor.topology.groups
        starts = torch.tensor([*accumulate(lengths, initial=0)], device=groups.device)
        flat = torch.zeros(sum(lengths) + 1, dtype=torch.float64, device=groups.device)

        def read(out: Output, batch: MicroBatch, stage: int) -> Tensor:
            if executor.layout.stages[stage].head:
                _write(flat, starts, out.values, batch)
            return flat

        handlers = Handlers(
            prepare=lambda host: host.to(groups.device, non_blocking=True),
            read=read,
            reader=None if self.call.reads_nll_alone else lambda batch: self.call.statistics,
        )
        queue = executor.queue(step.plan, rounds=len(step.batches), backward=False)
        executor.run(step.batches, queue, handlers)
        return sum_over(sum_over(flat, groups.lanes), groups.pp)[:-1]


def _logprobs(logprobs: Tensor) -> Tensor:
    return logprobs


def _write(flat: Tensor, starts: Tensor, values: Tensor, batch: MicroBatch) -> None:
    """Writes what a row says to the place of the next token; rows without a label go to the end."""
    assert batch.targets is not None
    ctx, past = batch.ctx, len(flat) - 1
    logprobs_T = -values if values.ndim == 1 else values[:, 0]
    places = torch.tensor([*ctx.sequences, len(starts) - 1], device=flat.device)
    first_T = starts[places][ctx.sequence_index]
    has_label_T = ctx.is_real & (batch.targets.labels != IGNORE)
    index_T = (first_T + ctx.positions + 1).where(has_label_T, past)
    flat[index_T] = logprobs_T.double().where(has_label_T, 0.0)


def write_rows(
    out: str, rows: Iterator[TokenizedSample], source: IndexedSource, spec: Field
) -> None:
    """Writes all sequences with their scores, while they are computed."""
    fields = (*source.fields, spec)
    if out.endswith(".parquet"):
        _write_parquet(out, rows, fields)
        return
    manifest = getattr(getattr(source, "source", source), "manifest", None)
    about = dict(manifest.about) if manifest is not None else {}
    with new_folder(out) as partial:
        write_store(partial, rows, fields=fields, about=about)


def _write_parquet(out: str, rows: Iterator[TokenizedSample], fields: tuple[Field, ...]) -> None:
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = pa.schema(
        [
            ("tokens", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.bool_())),
            *((field.name, _arrow_type(field)) for field in fields),
        ]
    )
    temporary = Path(f"{out}.tmp")
    try:
        with ParquetWriter(temporary, schema, write_page_checksum=True) as writer:
            while some := list(islice(rows, ROWS)):
                writer.write_table(pa.table(_columns(some, fields), schema=schema))
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _columns(samples: list[TokenizedSample], fields: tuple[Field, ...]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "tokens": [sample.tokens.tolist() for sample in samples],
        "loss_mask": [sample.loss_mask.tolist() for sample in samples],
    }
    for field in fields:
        columns[field.name] = [sample.fields[field.name].tolist() for sample in samples]
    return columns


def _arrow_type(field: Field) -> Any:  # noqa: ANN401 - pyarrow has no types
    import pyarrow as pa

    kind = pa.from_numpy_dtype(field.dtype)
    for _ in range(len(field.shape) + (field.per != "sequence")):
        kind = pa.list_(kind)
    return kind


def _tenths(total: int, tell: Callable[[str], None]) -> Callable[[int], None]:
    shown = 0

    def report(done: int) -> None:
        nonlocal shown
        if (tenth := 10 * done // max(total, 1)) > shown:
            shown = tenth
            tell(f"scored {10 * tenth} % of {total:,} tokens")

    return report
