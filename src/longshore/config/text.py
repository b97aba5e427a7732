"""Text of a run: which rules its configuration gives, and where it lies once it is tokenized.

In: a RunConfig. Out: the prepared folder, made if need be. data.path=chats.jsonl becomes
runs/prepared/chats-1f3a…; a folder that `longshore prepare` made is itself.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from longshore.config.check_data import MANIFEST, is_prepared
from longshore.config.sections import RunConfig
from longshore.config.told import told_as
from longshore.data.cache import TextRules, cache_folder, prepare_cache
from longshore.data.prepare import show_progress
from longshore.data.rejected import as_key
from longshore.printable import printable


def text_folder(config: RunConfig) -> Path:
    """Where the run's sequences lie, or will lie."""
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
        seed=data.seed + 1,  # made-up sequences that training has not seen
    )
    return replace(config, data=other, train=replace(config.train, eval_every=0))


def text_is_ready(config: RunConfig) -> bool:
    """Whether nothing is left to prepare: made-up data, a prepared folder, or a cache that is."""
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
        raise ValueError(f"data.path: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"data.path: {_in_keys(str(error))}") from None
    before = "using the tokenized data of " if summary.reused == summary.shards else ""
    sys.stderr.write(printable(f"{summary.explain(as_key, before=before)}\n"))
    with told_as("data.path: "):
        summary.rejections.check(data.max_rejected, as_key)


def _in_keys(message: str) -> str:
    """What `prepare` says, in the words of a recipe."""
    said = message.replace("in ignore (", "in data.ignore (")
    for start in ("or declare it (", "or declare each ("):
        said = said.replace(start, start.replace("(", "in data.fields ("))
    return said


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
