"""Tokenization: a raw sample becomes tokens with a loss mask.

In: a Hugging Face tokenizer folder, and samples: chats, texts, prompts with completions
(columns.py), or rows of `input_ids`, which need no tokenizer. `samples_of` takes them from a
`datasets.Dataset`, a list or any other iterable of dicts. Out: a TokenizedSample each, or a
SampleError that says why not.

A chat is rendered whole and encoded once, with no special tokens but the template's own. A token is
a target when its first character is in a span of the assistant. With one token a character, and
_ for the end-of-turn token, loss_on="assistant" gives

    text    u H i _ a Y o _
    mask    . . . . . ✓ ✓ ✓

A completion is a span too; all tokens of a text are targets. Both begin with what the tokenizer
puts before any text (the BOS token, say) and end with its EOS token.
"""

import contextlib
import datetime
import hashlib
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longshore.data.chat_template import DATE, ChatTemplate, Span
from longshore.data.chats import Chat, chat_from
from longshore.data.columns import (
    ALL,
    COLUMNS,
    LOSS_MASKS,
    TOKEN_COLUMNS,
    TOKENS,
    form_of,
    from_alpaca,
    refuse_text,
    text_of,
    without_nulls,
)
from longshore.data.source import (
    LARGEST_TOKEN,
    Field,
    SampleError,
    TokenizedSample,
    check_declared,
    collect_fields,
)
from longshore.data.training_templates import (
    AUTO,
    BY_NAME,
    check_choice,
    choose_template,
    is_file_choice,
)
from longshore.plan.cost import Ints
from longshore.settings import LossOn, TooLong, names_of

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

NO_LOSS = -100


def read_token_row(
    row: Mapping[str, Any], *, on_all: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Token ids and loss mask of a row as Hugging Face trainers take them.

        {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}

    becomes the tokens 5 6 7 with a loss on 6 and 7. Labels repeat their own tokens, because models
    of transformers shift them; others are refused. Padding is cut off at both ends. on_all: every
    token has a loss, whatever the row says.
    """
    ids = _whole_numbers(row, "input_ids")
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_TOKEN):
        raise SampleError("bad tokens", f"its input_ids must be from 0 to {LARGEST_TOKEN}")
    mask = np.ones(len(ids), dtype=np.bool_)
    if row.get("labels") is not None:
        labels = _column(row, "labels", len(ids))
        mask = labels != NO_LOSS
        if (differ := np.flatnonzero(mask & (labels != ids))).size:
            raise SampleError(
                "bad tokens",
                f"its labels differ from its input_ids at token {differ[0]}; each label must "
                f"repeat its own token, or be {NO_LOSS}",
            )
    for name in LOSS_MASKS:
        if row.get(name) is not None:
            mask &= _column(row, name, len(ids)) != 0
    first, stop = _content(row, len(ids))
    kept = mask[first:stop]
    return ids[first:stop].astype(np.int32), np.ones_like(kept) if on_all else kept


def without_padding(
    row: Mapping[str, Any], values: Mapping[str, Any], fields: Sequence[Field]
) -> dict[str, Any]:
    """The values of fields, without those of padding where they have some."""
    length = len(row["input_ids"])
    first, stop = _content(row, length)
    kept = dict(values)
    for field in fields:
        if field.per != "sequence" and field.name in values:
            value = values[field.name]
            with contextlib.suppress(TypeError, LookupError):  # one number, or no list
                kept[field.name] = value[first:stop] if len(value) == length else value
    return kept


def _content(row: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Where the tokens begin and end that are no padding."""
    if row.get("attention_mask") is None:
        return 0, length
    real = np.flatnonzero(_column(row, "attention_mask", length))
    if not len(real):
        return 0, 0
    first, stop = int(real[0]), int(real[-1]) + 1
    if len(real) != stop - first:
        raise SampleError("bad tokens", "its attention_mask has zeros between ones")
    return first, stop


def _column(row: Mapping[str, Any], name: str, length: int) -> NDArray[np.int64]:
    values = _whole_numbers(row, name)
    if len(values) != length:
        raise SampleError("bad tokens", f"it has {length} input_ids, but {len(values)} {name}")
    return values


def _whole_numbers(row: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    try:
        values = np.asarray(row[name])
    except ValueError:  # lists of different lengths inside
        values = np.empty((0, 0))
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "biu"):
        raise SampleError("bad tokens", f"its {name} must be a list of whole numbers")
    return values.astype(np.int64)


Encoded = tuple[NDArray[np.int32], NDArray[np.bool_]]

PROBE = f"{string.printable}é漢ﷺ😀"
"""Characters of one to four bytes, and one that Unicode's normal forms make 18 of."""
MOST_GROWTH, MOST_NORMALIZED = 100, 10**8


class Tokenizer:
    """A tokenizer folder and a chat template.

    template: "auto" (the folder's, or one of training_templates.py where that rewrites chats),
    "own" (the folder's), the name of a family, or a file. `digest` and `template_digest` identify
    both; the latter is "" without a template. `template_note` says what "auto" has chosen.
    """

    def __init__(
        self, folder: str | Path, *, template: str | Path | None = None, date: datetime.date = DATE
    ) -> None:
        choice = str(template or AUTO)
        check_choice(choice)
        self.folder = Path(folder)
        text = _read(self.folder / "tokenizer.json", "a tokenizer folder must have tokenizer.json")
        self._backend = _load_backend(text, self.folder)
        config = _read_config(self.folder)
        special = _special_tokens(config)
        content = f"{text}\n{json.dumps(special, sort_keys=True)}"
        self.digest = hashlib.sha256(content.encode()).hexdigest()
        self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)
        self._prefix, self._suffix = self._added_around_text(special.get("eos_token"))
        added = self._backend.get_added_tokens_decoder().values()
        ends = {token.content for token in added if token.special} | {special.get("eos_token", "")}
        self._end_ids = [self._backend.token_to_id(text) for text in sorted(ends - {""})]
        make = partial(ChatTemplate, special_tokens=special, ends=sorted(ends - {""}), date=date)
        file = choice if is_file_choice(choice) else None
        own = {
            name: make(text) for name, text in _template_texts(self.folder, config, file).items()
        }
        self.template_note = ""
        self._templates = own if file else self._choose(own, choice, make)
        digests = "".join(f"{n}:{t.digest} " for n, t in sorted(self._templates.items()))
        self.template_digest = hashlib.sha256(digests.encode()).hexdigest() if digests else ""

    def _choose(
        self, own: Mapping[str, ChatTemplate], choice: str, make: Callable[..., ChatTemplate]
    ) -> dict[str, ChatTemplate]:
        """For each of the folder's templates the one to train with."""
        chosen = {}
        for name in list(own) or ["default"]:
            template, note = choose_template(
                own.get(name),
                choice,
                make=make,
                knows=lambda t: self._backend.token_to_id(t) is not None,
            )
            self.template_note = self.template_note or note
            if template is not None:
                chosen[name] = template
        return chosen

    def _added_around_text(self, eos_token: str | None) -> tuple[list[int], list[int]]:
        """The ids that go before and after any text."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        content = [i for i, mask in enumerate(encoding.special_tokens_mask) if not mask]
        prefix = encoding.ids[: content[0]] if content else []
        suffix = encoding.ids[content[-1] + 1 :] if content else []
        eos = None if eos_token is None else self._backend.token_to_id(eos_token)
        return prefix, suffix if eos is None or eos in suffix else [*suffix, eos]

    @property
    def has_template(self) -> bool:
        return "default" in self._templates

    def template_for(self, chat: Chat) -> ChatTemplate:
        """The folder's template; one named tool_use, if there is one, for chats with tools."""
        name = "tool_use" if chat.tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(
                f"tokenizer {self.folder}: has no chat template, but the samples are chats; set "
                f"data.template to a file, or to the model's family: {', '.join(BY_NAME)}"
            )
        return self._templates[name]

    def is_ended(self, sequence: TokenizedSample) -> bool:
        """Whether a special token, or white space after one, ends what is learned."""
        targets = sequence.tokens[sequence.loss_mask]
        return bool(np.isin(targets[-2:], [i for i in self._end_ids if i is not None]).any())

    def encode(self, text: str) -> tuple[NDArray[np.int32], Ints]:
        """Token ids of a text, nothing added, and the offset of each token's first character."""
        encoding = self._encoding(text)
        ids = np.array(encoding.ids, dtype=np.int32)
        flat = chain.from_iterable(encoding.offsets)
        starts, stops = np.fromiter(flat, np.int64, count=2 * len(ids)).reshape(-1, 2).T
        # Offsets may leave white space out: a token begins where the one before it ended.
        return ids, np.minimum(starts, np.concatenate([[0], stops])[: len(ids)])

    def _encoding(self, text: str) -> "Encoding":
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SampleError("broken text", f"the text has a lone surrogate ({error})") from None
        return self._backend.encode(text, add_special_tokens=False)

    def encode_spans(self, text: str, spans: Iterable[Span] | None) -> Encoded:
        """Tokens and mask of a text: targets begin in a span; None makes every token a target."""
        if spans is None:
            ids = np.array(self._encoding(text).ids, dtype=np.int32)
            return ids, np.ones(len(ids), dtype=np.bool_)
        ids, starts = self.encode(text)
        mask = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            mask |= (starts >= start) & (starts < stop)
        return ids, mask

    def encode_text(self, text: str, spans: Iterable[Span] | None) -> Encoded:
        """The tokens and mask with the prefix and suffix of any text; the suffix is a target."""
        ids, mask = self.encode_spans(text, spans)
        if not len(ids):
            return ids, mask
        prefix = np.array(self._prefix, dtype=np.int32)
        suffix = np.array([] if ids[-1] in self._suffix[-1:] else self._suffix, dtype=np.int32)
        targets = np.concatenate([np.zeros(len(prefix)), mask, np.ones(len(suffix))])
        return np.concatenate([prefix, ids, suffix]), targets.astype(np.bool_)


@dataclass(frozen=True, slots=True)
class Rules:
    """How samples become sequences."""

    loss_on: LossOn = "assistant"
    """Which tokens are targets."""
    max_length: int | None = None
    """The most tokens of a sequence; None for no limit."""
    too_long: TooLong = "reject"
    """What happens to longer ones."""
    fields: tuple[Field, ...] = ()
    """Columns besides those of a sample's form that go with the sequence."""
    ignore: tuple[str, ...] = ()
    """Columns to leave out; "*" for all that are not used."""

    def __post_init__(self) -> None:
        if self.loss_on not in names_of(LossOn):
            raise ValueError(f"data.loss_on is {self.loss_on!r}; it must be 'assistant' or 'all'")
        if self.too_long not in names_of(TooLong):
            raise ValueError(
                f"data.too_long is {self.too_long!r}; it must be 'reject' or 'truncate'"
            )
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"data.max_length is {self.max_length}; it must be at least 2: the first token has "
                "no loss"
            )
        for field in check_declared(self.fields):
            if field.name in COLUMNS:
                raise ValueError(
                    f"field {field.name}: is the name of a column of samples; rename it"
                )

    def leaves_out(self, name: str) -> bool:
        """Whether a column can be dropped before its sample is read."""
        is_used = name in COLUMNS or name in {field.name for field in self.fields}
        return name in self.ignore or (ALL in self.ignore and not is_used)


@dataclass(frozen=True, slots=True)
class SampleTokenizer:
    """Tokenizes raw samples by fixed rules. tokenizer: None where every sample has input_ids."""

    tokenizer: Tokenizer | None
    rules: Rules

    @property
    def digest(self) -> str:
        """Identifies the tokenizer and its chat template; "" without one."""
        return self.tokenizer.digest + self.tokenizer.template_digest if self.tokenizer else ""

    def __call__(self, sample: Mapping[str, Any], id: int) -> TokenizedSample:
        """The sequence of a sample, within max_length; raises SampleError where there is none."""
        return self.fitted(self.untruncated(sample, id))

    def untruncated(self, sample: Mapping[str, Any], id: int) -> TokenizedSample:
        """The sequence of a sample, however long, and whether or not it has loss tokens."""
        sample = {name: value for name, value in sample.items() if name not in self.rules.ignore}
        if self.tokenizer is None:
            refuse_text(sample)
        form = form_of(sample, self.rules.ignore, self.rules.fields)
        tokens, mask = self._encoded(sample, form)
        if not len(tokens):
            raise SampleError("empty", "it has no tokens")
        declared = self.rules.fields
        values = {field.name: sample[field.name] for field in declared if field.name in sample}
        if form == TOKENS:
            values = without_padding(sample, values, declared)
        try:
            fields = collect_fields(values, declared, length=len(tokens), where="its fields")
        except ValueError as error:
            raise SampleError("bad field", str(error)) from None
        return TokenizedSample(id, tokens, mask, fields)

    def fitted(self, sequence: TokenizedSample) -> TokenizedSample:
        """The sequence, truncated if the rules say so; SampleError if too long or without loss."""
        limit = self.rules.max_length
        if limit is not None and sequence.length > limit:
            if self.rules.too_long == "reject":
                raise SampleError("too long", f"it has {sequence.length} tokens, more than {limit}")
            fields = dict(sequence.fields)
            for field in self.rules.fields:
                if field.per != "sequence":
                    fields[field.name] = fields[field.name][:limit]
            tokens, mask = sequence.tokens[:limit], sequence.loss_mask[:limit]
            sequence = TokenizedSample(sequence.id, tokens, mask, fields)
        if not sequence.loss_tokens:
            raise SampleError(
                "no loss tokens", f"none of its {sequence.length} tokens is a target of the loss"
            )
        return sequence

    def _encoded(self, sample: Mapping[str, Any], form: str) -> Encoded:
        on_all = self.rules.loss_on == "all"
        if form == TOKENS:
            return read_token_row(sample, on_all=on_all)
        tokenizer = self.tokenizer
        assert tokenizer is not None
        if form == "instruction":
            sample, form = from_alpaca(sample, as_chat=tokenizer.has_template)
        if form == "text":
            return tokenizer.encode_text(text_of(sample, "text"), None)
        if form == "prompt" and isinstance(sample["prompt"], str):
            prompt, completion = text_of(sample, "prompt"), text_of(sample, "completion")
            if not completion:
                raise SampleError("no loss tokens", "its completion is empty")
            span = (len(prompt), len(prompt) + len(completion))
            return tokenizer.encode_text(prompt + completion, None if on_all else [span])
        chat = chat_from(sample, form)
        template = tokenizer.template_for(chat)
        if on_all:
            return tokenizer.encode_spans(template.complete_text(chat), None)
        return tokenizer.encode_spans(*template.locate(chat))


def is_chat(sample: Mapping[str, Any]) -> bool:
    """Whether a sample holds messages, for a chat template."""
    return not isinstance(sample.get("prompt", sample.get("text")), str) and TOKENS not in sample


def _load_backend(text: str, folder: Path) -> "Backend":
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError:
        raise ValueError(
            "a tokenizer folder needs the package tokenizers, which is missing: "
            "pip install 'longshore[hf]'"
        ) from None
    _check_normalizers(text, folder)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"tokenizer {folder}: tokenizer.json cannot be used ({error})") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_normalizers(text: str, folder: Path) -> None:
    """Refuses normalizers that together make text far longer.

    "aa" for "a" 40 times makes 10¹² bytes of one letter, and the package ends the process where it
    gets no memory. So each normalizer is tried on what those before it made of a short text.
    """
    from tokenizers import normalizers

    steps = list(_normalizers(text))
    parts = []
    for step in steps:  # what each replaces, and by what
        pattern = step.get("pattern")
        parts += [
            *(pattern.values() if isinstance(pattern, Mapping) else ()),
            step.get("content", ""),
        ]
    written = probe = PROBE + "".join(str(part)[:100] for part in parts)
    for step in steps:
        longest = len(written) * len(str(step.get("content", "")))
        one: Any = normalizers.Sequence([])
        try:
            one.__setstate__(json.dumps({"type": "Sequence", "normalizers": [step]}).encode())
            written = one.normalize_str(written) if longest < MOST_NORMALIZED else ""
        except Exception:  # the package raises bare Exception, and does so again when it loads all
            return
        if longest >= MOST_NORMALIZED or len(written) > MOST_GROWTH * len(probe):
            raise ValueError(
                f"{folder / 'tokenizer.json'}: its normalizers make text more than {MOST_GROWTH} "
                "times longer; remove those that repeat one another"
            )


def _normalizers(text: str) -> Iterator[dict[str, Any]]:
    """The normalizers of a tokenizer.json in order, without reading its vocabulary."""
    for key in re.finditer(r'"normalizer"\s*:\s*(?=\{)', text):
        try:
            waiting = [json.JSONDecoder().raw_decode(text, key.end())[0]]
        except (ValueError, RecursionError):
            continue
        while waiting:
            step = waiting.pop(0)
            inner = step.get("normalizers") if isinstance(step, dict) else ()
            if isinstance(inner, list):
                waiting[:0] = inner
            elif isinstance(step, dict):
                yield step


def _read(path: Path, expected: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {expected}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is not UTF-8 text; {expected}") from None


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            text = _read(folder / name, "it must be JSON")
            try:
                content = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{folder / name}: is not a JSON object ({error})") from None
            if not isinstance(content, dict):
                what = type(content).__name__
                raise ValueError(f"{folder / name}: is not a JSON object, but {what}")
            config.update(content)
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on as text."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _template_texts(folder: Path, config: Mapping[str, Any], file: str | None) -> dict[str, str]:
    """Templates by name: the user's file alone, else chat_template.jinja, else the config's."""
    if file is not None:
        return {"default": _read(Path(file), "it must be a chat template")}
    texts = config.get("chat_template") or {}
    if isinstance(texts, str):
        texts = {"default": texts}
    elif isinstance(texts, list):
        try:
            texts = {entry["name"]: entry["template"] for entry in texts}
        except (KeyError, TypeError):
            raise ValueError(
                f"tokenizer {folder}: its list of chat templates has a bad entry"
            ) from None
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(
            f"tokenizer {folder}: its chat_template must be text, or a list of names with texts"
        )
    if (folder / "chat_template.jinja").exists():
        text = _read(folder / "chat_template.jinja", "it must be a chat template")
        texts = {**texts, "default": text}
    return texts


Rows = Iterable[Mapping[str, Any]]
OnRejected = Callable[[int, SampleError], None]


def samples_of(
    rows: Rows,
    tokenizer: SampleTokenizer | None = None,
    *,
    fields: Sequence[Field] = (),
    rejected: OnRejected | None = None,
) -> Iterator[TokenizedSample]:
    """The sequences of all rows, which are dicts; for one lane, give it `lane_rows(…)`.

    tokenizer: None where every row has input_ids. fields: extra columns of such rows; with a
    tokenizer its rules declare them. rejected: gets the number and the error of each row that can
    be no sequence; without it the first one raises.
    """
    check_rows(rows)
    if tokenizer is not None and fields:
        raise ValueError("fields are declared in the rules of the tokenizer; leave them out here")
    declared = check_declared(fields)
    items: Iterable[object] = rows  # of a user's own making
    for number, row in enumerate(items):
        try:
            if not isinstance(row, Mapping):
                detail = f"it is {type(row).__name__}, not a dict of columns"
                raise SampleError("no messages", detail)
            content = without_nulls(dict(row))
            if tokenizer is not None:
                yield tokenizer(content, number)
            else:
                yield _token_sample(content, number, declared)
        except SampleError as error:
            if rejected is None:
                raise SampleError(error.reason, f"row {number}: {error.detail}") from None
            rejected(number, error)


def lane_rows(rows: Rows, *, lane: int, lanes: int) -> Rows:
    """A lane's share: every row whose number is `lane` modulo `lanes`. All lanes read all rows."""
    if not 0 <= lane < lanes:
        raise ValueError(f"lane is {lane}; of {lanes} lanes it must be from 0 to {lanes - 1}")
    check_rows(rows)
    return islice(rows, lane, None, lanes)


def check_rows(rows: object) -> None:
    """Refuses what has splits instead of rows, and what has neither."""
    if isinstance(rows, Mapping):
        names = ", ".join(map(str, rows))
        raise ValueError(
            f"a {type(rows).__name__} with the splits {names} has no rows of its own; give one of "
            f"them, such as dataset[{next(iter(rows), 'train')!r}]"
        )
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise ValueError(
            f"{type(rows).__name__} has no rows; give a Dataset, or another iterable of dicts"
        )


def _token_sample(row: Mapping[str, Any], number: int, fields: Sequence[Field]) -> TokenizedSample:
    if TOKENS not in row:
        columns = ", ".join(map(str, row))
        raise SampleError(
            "no messages", f"it has no input_ids, but {columns}; text needs a tokenizer"
        )
    tokens, mask = read_token_row(row, on_all=False)
    if not len(tokens):
        raise SampleError("empty", "it has no tokens")
    given = {name: row[name] for name in row if name not in (TOKENS, *TOKEN_COLUMNS)}
    given = without_padding(row, given, fields)
    try:
        extra = collect_fields(given, fields, length=len(tokens), where="the row")
    except ValueError as error:
        raise SampleError("bad field", str(error)) from None
    return TokenizedSample(number, tokens, mask, extra)
