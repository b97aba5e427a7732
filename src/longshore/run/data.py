"""The data of a run: text tokenized into its cache, sequences opened, steps counted. No torch.

In: a RunConfig and the decoder. Out: an indexed source, every sequence of which the model can read,
and the number of steps. Text is tokenized once: data.path=chats.jsonl becomes the folder
runs/prepared/chats-1f3a…, and a folder that `longshore prepare` wrote is used as it is. Several
names in data.path are joined, or mixed by data.weights. 1000 sequences, data.batch 64 and
train.epochs 2 are 2 × 16 steps.

A token id past the model's vocabulary would be a device assert in the middle of a run. A prepared
folder names the row with its highest one, which is checked at the start; and each sequence is
checked on the host when it is read, and refused by its number. For train.loss=dpo all pairs are
looked at once: each has one sequence of either sign in a step.

A script's data may be in memory, a list of samples or a `datasets.Dataset`. They are saved in
data.cache under a name of their content, so that the same data are the same file again, also for a
resumed run:

    data={"path": [{"text": "a b"}], "batch": 8}     data.path=runs/prepared/samples-6e1c5ee9…
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from longshore.arch.decoder import DecoderConfig
from longshore.config.check_data import (
    DataPart,
    data_parts,
    loss_columns,
    shown_path,
    tokenizer_of,
)
from longshore.config.schema import DataConfig, HeldOutConfig, RunConfig, in_keys
from longshore.data.columns import ALL
from longshore.data.inputs import content_digest, find_inputs
from longshore.data.mock import MockSource
from longshore.data.prepare import (
    WARNINGS,
    TextRules,
    cache_folder,
    check_highest,
    prepare_cache,
    show_progress,
    unknown_token,
)
from longshore.data.prepare_job import check_first, load_tokenizer, with_known_fields
from longshore.data.rejected import rejections_of
from longshore.data.source import (
    PAIR,
    SIGN,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Batches,
    BatchSize,
    Field,
    IndexedSource,
    Joined,
    Mixture,
    TokenizedSample,
    groups_of,
    parse_field,
    sequence_values,
    source_digest,
)
from longshore.data.store import MANIFEST, Store, read_manifest
from longshore.data.stream import TextStream
from longshore.data.tokenize import Rules, SampleTokenizer
from longshore.files import new_folder, printable
from longshore.plan.cost import Ints
from longshore.plan.planner import PlaceError
from longshore.plan.types import Plan, policy_named
from longshore.plan.types import Sequence as PlanSequence

PACK, CP_SIZE = "pack", "cp_size"
"""Integer fields of a sequence, for plan.policy=given: its pack, and this pack's CP size."""


def text_folders(config: RunConfig) -> list[list[Path]]:
    """For each name in data.path the folders of its sequences; those of text may not exist yet."""
    return [
        [*part.prepared, *([_cached(part, config)] if part.texts else ())]
        for part in data_parts(config.data)
    ]


def _cached(part: DataPart, config: RunConfig) -> Path:
    return cache_folder(part.texts, _rules(config), config.data.cache)


def held_out(config: RunConfig, *, on_demand: bool = False) -> RunConfig | None:
    """The same run with its held-out data as its data; None if there is none to evaluate.

    on_demand: also without train.eval_every.
    """
    data = config.data
    if not config.train.eval_every and not (on_demand and (data.eval_path or data.eval_mock)):
        return None
    values = {field.name: getattr(data, field.name) for field in fields(data)}
    values |= {"path": data.eval_path, "mock": data.eval_mock, "count": data.eval_count}
    values |= {"weights": (), "stream": False}
    values["seed"] += 1  # other synthetic sequences than in training
    return replace(config, data=HeldOutConfig(**values), train=replace(config.train, eval_every=0))


def text_is_ready(config: RunConfig) -> bool:
    """Whether no text is left to tokenize: synthetic data, a prepared folder, or a full cache."""
    others = held_out(config)
    if config.data.stream:
        ready = True
    else:
        with in_keys(f"{config.data.prefix}path"):
            folders = [folder for folders in text_folders(config) for folder in folders]
        ready = all((folder / MANIFEST).exists() for folder in folders)
    if not ready or others is None:
        return ready
    return text_is_ready(others)


def prepare_text(config: RunConfig, *, display: str = "auto") -> None:
    """Tokenizes the run's text into its cache, with progress; does nothing for other data.

    display: "none" shows nothing.
    Its workers are processes, so ranks that are daemons themselves leave it to their parent.
    """
    if others := held_out(config):
        prepare_text(others, display=display)
    if not config.data.stream:
        with in_keys(f"{config.data.prefix}path"):
            parts = data_parts(config.data)
        for part in parts:
            if part.texts:
                _prepare_part(part, config, StringIO() if display == "none" else sys.stderr)


def text_rules(config: RunConfig) -> Rules | None:
    """How the run's text becomes sequences, with their fields; None where there is no text."""
    given = _rules(config)
    with in_keys("data.path"):
        texts = [name for part in data_parts(config.data) for name in part.texts]
        if not texts:
            return None
        rules = Rules(fields=tuple(map(parse_field, given.fields)), ignore=tuple(given.ignore))
        return with_known_fields(find_inputs(texts), rules, given.max_bytes)


def _prepare_part(part: DataPart, config: RunConfig, shown: TextIO) -> None:
    key = f"{config.data.prefix}path"
    with in_keys(key):
        try:
            with show_progress(shown) as progress:
                summary = prepare_cache(
                    part.texts,
                    _rules(config),
                    _cached(part, config),
                    workers=len(os.sched_getaffinity(0)),
                    progress=progress,
                )
        except OSError as error:
            raise ValueError(error.strerror or str(error)) from None
    before = (
        "using the tokenized data of " if summary.reused == len(summary.manifest.shards) else ""
    )
    summary = replace(summary, warnings=())  # the run gives them, also where all is tokenized
    shown.write(printable(f"{summary.explain(before)}\n"))
    with in_keys(key):
        summary.rejections.check(config.data.max_rejected)


def _rules(config: RunConfig) -> TextRules:
    data = config.data
    declared = data.fields
    if ALL in data.ignore and (reads := loss_columns(config)):
        inputs = find_inputs([name for part in data_parts(data) for name in part.texts])
        rules = Rules(fields=tuple(map(parse_field, data.fields)), ignore=tuple(data.ignore))
        rules = with_known_fields(inputs, rules, data.max_bytes, reads=reads)
        declared = tuple(map(str, rules.fields))
    return TextRules(
        tokenizer=tokenizer_of(config),
        template=data.template,
        loss_on=data.loss_on,
        max_length=data.max_length,
        too_long=data.too_long,
        fields=declared,
        ignore=data.ignore,
        max_bytes=data.max_bytes,
    )


class Readable:
    """A source whose token ids are checked against a model's `vocab_size`. name: for people.

    has_teacher: whether the ids of a teacher's tokens are checked too.
    """

    def __init__(
        self, source: IndexedSource, vocab_size: int, *, name: str, has_teacher: bool = False
    ) -> None:
        self.source = source
        self.has_teacher = has_teacher
        self.vocab_size = vocab_size
        self.name = name
        self.lengths: Ints = source.lengths
        self.loss_tokens: Ints = source.loss_tokens
        self.fields: tuple[Field, ...] = source.fields
        self.digest = source_digest(source)
        self.tokenizer_digest: str = getattr(source, "tokenizer_digest", "")

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> TokenizedSample:
        sample = self.source[index]
        check_ids(sample, self.vocab_size, self.name, has_teacher=self.has_teacher)
        return sample

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        return self.source.mask_head(index, count)

    def sequence_values(self, name: str) -> Ints:
        return sequence_values(self.source, name)


def check_ids(
    sample: TokenizedSample, vocab_size: int, name: str, *, has_teacher: bool = False
) -> None:
    """Refuses a sequence with a token id that the model does not have."""
    low, high = int(sample.tokens.min()), int(sample.tokens.max())
    if low < 0 or high >= vocab_size:
        where = f"{name}: sequence {sample.id}"
        raise unknown_token(where, low if low < 0 else high, vocab_size)
    if has_teacher:
        _check_teacher(sample, vocab_size, name)


def _check_teacher(sample: TokenizedSample, vocab_size: int, name: str) -> None:
    """Refuses ids of a teacher that the student does not have, where they count."""
    ids_LK = sample.fields[TEACHER_IDS]
    counts_L = sample.loss_mask & (np.arange(sample.length) > 0)
    counts_LK = counts_L[:, None] & (sample.fields[TEACHER_LOGPROBS] > -np.inf)
    wrong = ids_LK[counts_LK & ((ids_LK < 0) | (ids_LK >= vocab_size))]
    if wrong.size:
        raise ValueError(
            f"{name}: sequence {sample.id} has {int(wrong[0])} among its {TEACHER_IDS}, but the "
            f"model knows only 0 to {vocab_size - 1}; use a teacher with the model's tokenizer, "
            f"and fill rows of fewer tokens with −inf in {TEACHER_LOGPROBS}"
        )


def _has_teacher(config: RunConfig, fields: Sequence[Field]) -> bool:
    names = {spec.name for spec in fields}
    return config.train.loss == "distill" and {TEACHER_IDS, TEACHER_LOGPROBS} <= names


def open_stream(config: RunConfig, decoder: DecoderConfig) -> TextStream:
    """The run's files as a stream, after checking the first sample of each."""
    data, rules = config.data, _rules(config)
    folder = Path(rules.tokenizer) if rules.tokenizer else None
    fields = tuple(parse_field(text) for text in rules.fields)
    limits = Rules(data.loss_on, data.max_length, data.too_long, fields, tuple(data.ignore))
    with in_keys("data.path"):
        parts = [find_inputs(part.texts) for part in data_parts(data)]
        inputs = [file for part in parts for file in part]
        limits = with_known_fields(inputs, limits, data.max_bytes)
        if PAIR in {spec.name for spec in limits.fields} - {spec.name for spec in fields}:
            raise ValueError(
                "its rows are pairs of chosen and rejected answers, which a stream would tear "
                "apart; leave data.stream out"
            )
        fields = limits.fields
        tokenizer = SampleTokenizer(load_tokenizer(folder, rules.template or None), limits)
        _, warnings = check_first(inputs, tokenizer, data.max_bytes)
    has_teacher = _has_teacher(config, fields)

    def check(sample: TokenizedSample, row: str) -> None:
        check_ids(sample, decoder.vocab_size, f"data.path: {row}", has_teacher=has_teacher)

    if not data.weights:
        parts = [tuple(inputs)]
    return TextStream(
        parts=tuple(parts),
        content=content_digest(inputs),
        weights=data.weights or (1.0,),
        tokenizer=tokenizer,
        check=check,
        max_bytes=data.max_bytes,
        max_rejected=data.max_rejected,
        shuffle=data.shuffle,
        seed=data.seed,
        warnings=warnings,
    )


def open_sequences(config: RunConfig, decoder: DecoderConfig) -> IndexedSource:
    """The run's sequences: synthetic, or from a prepared folder. Text must be prepared already."""
    data = config.data
    if data.mock:
        count, vocab_size = data.count or None, decoder.vocab_size
        with in_keys(f"{data.prefix}mock"):
            return MockSource(data.mock, count=count, vocab_size=vocab_size, seed=data.seed)
    parts = [
        _joined([_open_folder(folder, config, decoder) for folder in folders], data)
        for folders in text_folders(config)
    ]
    source = _mixed(parts, config) if data.weights else _joined(parts, data)
    if not source.loss_tokens.any():
        folders = ", ".join(str(folder) for each in text_folders(config) for folder in each)
        raise ValueError(
            f"{data.prefix}path: no token of {shown_path(data)} has a loss (tokenized: {folders}); "
            "it may have no assistant turns: data.loss_on=all trains on every token"
        )
    return source


def _mixed(parts: Sequence[IndexedSource], config: RunConfig) -> Mixture:
    with in_keys("data.path"):
        return Mixture(parts, config.data.weights, seed=config.data.seed)


def _joined(sources: Sequence[IndexedSource], data: DataConfig) -> IndexedSource:
    with in_keys(f"{data.prefix}path"):
        return sources[0] if len(sources) == 1 else Joined(sources)


def _open_folder(folder: Path, config: RunConfig, decoder: DecoderConfig) -> IndexedSource:
    store, key = Store(folder), f"{config.data.prefix}path"
    with in_keys(key):
        rejections_of(folder, store.manifest.about).check(config.data.max_rejected)
        check_highest(store.manifest.about, decoder.vocab_size)
    return Readable(
        store,
        decoder.vocab_size,
        name=f"{key}: {folder}",
        has_teacher=_has_teacher(config, store.fields),
    )


def batch_size(config: RunConfig) -> BatchSize:
    data = config.data
    if data.batch:
        return BatchSize("sequences", data.batch)
    return BatchSize("tokens", data.batch_tokens)


def step_groups(config: RunConfig, source: IndexedSource) -> Ints | None:
    """For each sequence the group of those that share its step; None if there are no groups."""
    with in_keys("data.group"):
        groups = groups_of(source, config.data.group or (PACK if has_given_packs(config) else ""))
    if groups is not None and config.data.weights:
        raise ValueError(
            "data.weights draws sequences one by one, so those that belong together (data.group, "
            "or the fields pair and pack) would be torn apart; leave data.weights out"
        )
    return groups


def tokenizer_warnings(config: RunConfig, source: IndexedSource | TextStream) -> list[str]:
    """What `prepare`, or the start of a stream, found to be probably wrong; each once."""
    if isinstance(source, TextStream):
        return list(source.warnings)
    folders = [] if config.data.mock else [f for each in text_folders(config) for f in each]
    abouts = [read_manifest(folder).about for folder in folders]
    return list(dict.fromkeys(warning for about in abouts for warning in about.get(WARNINGS, ())))


def has_given_packs(config: RunConfig) -> bool:
    """Whether the data say which sequences share a pack."""
    return policy_named(config.plan.policy).needs_packs


def given_planner(
    plan: Callable[..., Plan], source: IndexedSource, groups: Ints | None
) -> Callable[[Sequence[PlanSequence]], Plan]:
    """A planner of steps whose packs, and their CP sizes if there are any, the data have as fields.

    plan: takes a step's sequences and packs. groups: of `step_groups`. Packs that no step could
    train are refused here, before the first one.
    """
    with in_keys("plan.policy"):
        labels = sequence_values(source, PACK)
        has_sizes = any(spec.name == CP_SIZE for spec in source.fields)
        sizes = sequence_values(source, CP_SIZE) if has_sizes else np.zeros_like(labels)
        _check_alike(labels, sizes, "different values of the field cp_size; give them the same")
        if groups is not None:
            _check_alike(labels, groups, "different values of data.group; set data.group=pack")

    def planner(sequences: Sequence[PlanSequence]) -> Plan:
        members: dict[int, list[int]] = {}
        for place, sequence in enumerate(sequences):
            members.setdefault(int(labels[sequence.id]), []).append(place)
        asked = [int(sizes[sequences[places[0]].id]) for places in members.values()]
        packs = [
            (size, places) if size else places
            for size, places in zip(asked, members.values(), strict=True)
        ]
        try:
            return plan(sequences, packs=packs)
        except PlaceError as error:
            if error.kind != "pack":
                raise
            pack = list(members)[error.number]
            raise ValueError(f"the data's pack {pack}{error.problem}") from None

    for places in _largest_packs(labels, sizes, source.lengths):
        planner([PlanSequence(i, int(source.lengths[i]), 0) for i in places.tolist()])
    return planner


def _largest_packs(labels: Ints, sizes: Ints, lengths: Ints) -> Iterator[Ints]:
    """For each CP size the places of the pack with the most tokens, and with the most sequences."""
    for size in np.unique(sizes).tolist():
        places = np.flatnonzero(sizes == size)
        step = 2 * size if size > 1 else 1
        _, pack = np.unique(labels[places], return_inverse=True)
        tokens = np.bincount(pack, weights=-(-lengths[places] // step) * step)
        for largest in sorted({int(tokens.argmax()), int(np.bincount(pack).argmax())}):
            yield places[pack == largest]


def _check_alike(labels: Ints, values: Ints, problem: str) -> None:
    """All sequences of a pack must have one value."""
    order = np.argsort(labels, kind="stable")
    same = labels[order[1:]] == labels[order[:-1]]
    wrong = np.flatnonzero(same & (values[order[1:]] != values[order[:-1]]))
    if len(wrong):
        raise ValueError(f"sequences of pack {labels[order[wrong[0]]]} have {problem}")


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


def check_pairs(config: RunConfig, source: IndexedSource) -> None:
    """Refuses data of DPO that some step would fail on; nothing for other losses."""
    if config.train.loss != "dpo":
        return
    if not source.loss_tokens.all():
        place = int(np.argmin(source.loss_tokens))
        raise _refused(f"sequence {place} has no loss token", "leave its pair out")
    pairs, signs = (sequence_values(source, name) for name in (PAIR, SIGN))
    order = np.lexsort((signs, pairs))
    _check_signs(pairs[order], signs[order])
    groups = step_groups(config, source)
    if groups is not None:
        first, second = groups[order].reshape(-1, 2).T
        if (torn := first != second).any():
            pair = int(pairs[order][::2][torn.argmax()])
            raise _refused(
                f"the two sequences of pair {pair} have different values of data.group",
                "set data.group=pair",
            )


def _check_signs(pairs: Ints, signs: Ints) -> None:
    """Sorted by pair, then by sign: −1 and 1 of the same pair in turn."""
    numbers, sizes = np.unique(pairs, return_counts=True)
    is_wrong: NDArray[np.bool_] = sizes != 2
    if not is_wrong.any():
        is_wrong = (signs.reshape(-1, 2) != (-1, 1)).any(1)
    if is_wrong.any():
        pair = int(numbers[is_wrong.argmax()])
        theirs = signs[pairs == pair].tolist()
        shown = ", ".join(map(str, theirs[:4])) + (", …" if len(theirs) > 4 else "")
        raise _refused(
            f"pair {pair} has {len(theirs)} sequence{'s' if len(theirs) > 1 else ''}, of sign "
            f"{shown}",
            "give each pair one of sign 1 and one of sign -1, and its number to no other row; a "
            "file that is named twice has all its pairs twice",
        )


def _refused(problem: str, way_out: str) -> ValueError:
    return ValueError(f"data.path: train.loss=dpo compares two answers, but {problem}; {way_out}")


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
