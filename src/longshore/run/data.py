"""The data of a run: text tokenized into its cache, sequences opened, steps counted. No torch.

In: a RunConfig and the decoder. Out: an indexed source, every sequence of which the model can read,
and the number of steps. Text is tokenized once: data.path=chats.jsonl becomes the folder
runs/prepared/chats-1f3a…, and a folder that `longshore prepare` wrote is used as it is. 1000
sequences, data.batch 64 and train.epochs 2 are 2 × 16 steps.

A token id past the model's vocabulary would be a device assert in the middle of a run, so each
sequence is checked on the host when it is read, and refused by its number.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longshore.arch.decoder import DecoderConfig
from longshore.config.check_data import MANIFEST, is_prepared
from longshore.config.located import as_key, in_keys
from longshore.config.schema import RunConfig
from longshore.data.batches import Batches, BatchSize
from longshore.data.fields import Field
from longshore.data.mock import MockSource
from longshore.data.prepare import TextRules, cache_folder, prepare_cache, show_progress
from longshore.data.rejected import rejections_of
from longshore.data.source import (
    IndexedSource,
    Ints,
    TokenizedSample,
    groups_of,
    sequence_values,
    source_digest,
)
from longshore.data.store import Store
from longshore.printable import printable


def text_folder(config: RunConfig) -> Path:
    """The folder of the run's tokenized sequences, which may not exist yet."""
    data = config.data
    if is_prepared(data.path):
        return Path(data.path)
    return cache_folder(data.path, _rules(config), data.cache)


def held_out(config: RunConfig) -> RunConfig | None:
    """The same run with its held-out data as its data; None if there is none to evaluate."""
    data = config.data
    if not config.train.eval_every:
        return None
    other = replace(
        data,
        path=data.eval_path,
        mock=data.eval_mock,
        count=data.eval_count,
        seed=data.seed + 1,  # other synthetic sequences than in training
    )
    return replace(config, data=other, train=replace(config.train, eval_every=0))


def text_is_ready(config: RunConfig) -> bool:
    """Whether no text is left to tokenize: synthetic data, a prepared folder, or a full cache."""
    data, others = config.data, held_out(config)
    ready = not data.path or is_prepared(data.path) or (text_folder(config) / MANIFEST).exists()
    return ready and (others is None or text_is_ready(others))


def prepare_text(config: RunConfig) -> None:
    """Tokenizes the run's text into its cache, with progress; does nothing for other data.

    Its workers are processes, so ranks that are daemons themselves leave it to their parent.
    """
    if others := held_out(config):
        prepare_text(others)
    data = config.data
    if not data.path or is_prepared(data.path):
        return
    with in_keys("data.path"):
        try:
            with show_progress(sys.stderr) as progress:
                summary = prepare_cache(
                    data.path,
                    _rules(config),
                    text_folder(config),
                    workers=len(os.sched_getaffinity(0)),
                    progress=progress,
                )
        except OSError as error:
            raise ValueError(error.strerror or str(error)) from None
    before = "using the tokenized data of " if summary.reused == summary.shards else ""
    sys.stderr.write(printable(f"{summary.explain(as_key, before=before)}\n"))
    with in_keys("data.path"):
        summary.rejections.check(data.max_rejected)


def _rules(config: RunConfig) -> TextRules:
    data = config.data
    return TextRules(
        tokenizer=data.tokenizer or config.model.from_hf,
        template=data.template,
        loss_on=data.loss_on,
        max_length=data.max_length,
        too_long=data.too_long,
        fields=data.fields,
        ignore=data.ignore,
        max_bytes=data.max_bytes,
    )


class Readable:
    """A source whose token ids are checked against a model's `vocab_size`. name: for people."""

    def __init__(self, source: IndexedSource, vocab_size: int, *, name: str) -> None:
        self.source = source
        self.vocab_size = vocab_size
        self.name = name
        self.lengths: Ints = source.lengths
        self.loss_tokens: Ints = source.loss_tokens
        self.fields: tuple[Field, ...] = source.fields
        self.digest = source_digest(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> TokenizedSample:
        sample = self.source[index]
        low, high = int(sample.tokens.min()), int(sample.tokens.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"{self.name}: sequence {sample.id} has the token id {low if low < 0 else high}, "
                f"but the model knows only 0 to {self.vocab_size - 1}; use the model's tokenizer, "
                "or with model.preset a larger model.vocab_size"
            )
        return sample

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        return self.source.mask_head(index, count)

    def sequence_values(self, name: str) -> Ints:
        return sequence_values(self.source, name)


def open_sequences(config: RunConfig, decoder: DecoderConfig) -> IndexedSource:
    """The run's sequences: synthetic, or from a prepared folder. Text must be prepared already."""
    data = config.data
    if data.mock:
        return MockSource(
            data.mock, count=data.count or None, vocab_size=decoder.vocab_size, seed=data.seed
        )
    folder = text_folder(config)
    store = Store(folder)
    with in_keys("data.path"):
        rejections_of(folder, store.manifest.about).check(data.max_rejected)
    if not store.loss_tokens.any():
        raise ValueError(
            f"data.path: no token of {data.path} has a loss (tokenized: {folder}); it may have no "
            "assistant turns: data.loss_on=all trains on every token"
        )
    return Readable(store, decoder.vocab_size, name=f"data.path: {folder}")


def batch_size(config: RunConfig) -> BatchSize:
    data = config.data
    if data.batch:
        return BatchSize("sequences", data.batch)
    return BatchSize("tokens", data.batch_tokens)


def step_groups(config: RunConfig, source: IndexedSource) -> Ints | None:
    """For each sequence the group of those that share its step; None if there are no groups."""
    with in_keys("data.group"):
        return groups_of(source, config.data.group)


def small_data(config: RunConfig, source: IndexedSource) -> list[str]:
    """A note if a step takes more than all data, so that each step is an epoch."""
    size = batch_size(config)
    has = len(source) if size.unit == "sequences" else int(source.lengths.sum())
    if size.amount <= has:
        return []
    key = "data.batch" if size.unit == "sequences" else "data.batch_tokens"
    return [
        f"{key} is {size.amount:,}, but the data have only {has:,} {size.unit}, so each step "
        "trains on all of them: one epoch"
    ]


def count_steps(config: RunConfig, lengths: Ints, groups: Ints | None = None) -> int:
    """Steps of the run; refuses a warmup that is longer. groups: of `step_groups`."""
    data, train = config.data, config.train
    if train.steps:
        return train.steps
    batches = Batches(
        lengths, batch_size(config), seed=data.seed, shuffle=data.shuffle, groups=groups
    )
    steps = sum(batches.steps(epoch) for epoch in range(train.epochs))
    if train.warmup > steps:
        raise ValueError(
            f"train.warmup is {train.warmup}, but the run has only {steps} "
            f"step{'s' if steps > 1 else ''} (train.epochs {train.epochs}, {len(lengths)} "
            "sequences); lower train.warmup"
        )
    return steps
