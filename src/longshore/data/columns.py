"""Columns: which form a raw sample has, and which of its columns are unknown.

In: the names of a sample's columns, those to ignore, and the declared fields. Out: the form, named
by its first column, or a SampleError that names all unknown columns. {"messages": …, "id": 7,
"source": "web"} has the form "messages", and `id` and `source` must be ignored or declared; "*"
ignores every column that is not used.

Pairs: a row with `chosen` and `rejected` answers, and perhaps a `prompt`, as TRL has them, becomes
two sequences that belong together. The row

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}

becomes {"prompt": "2 + 2 =", "completion": " 4", "pair": 94…, "sign": 1} and the same with " 5" and
−1; no other row has the same number `pair`.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from longshore.data.source import (
    ADVANTAGES,
    OLD_LOGPROBS,
    PAIR,
    REF_LOGPROBS,
    SIGN,
    TAKEN,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Field,
    SampleError,
)

CHOSEN, REJECTED = "chosen", "rejected"
PAIR_FIELDS = (Field(PAIR, "sequence", "int64"), Field(SIGN, "sequence", "int8"))
OTHER_FORMS = ("messages", "conversations", "instruction", "text", "completion")


def is_pair(sample: Mapping[str, Any], ignore: Sequence[str]) -> bool:
    """Whether a row has two answers, and is of no other form."""
    if any(name not in sample or name in ignore for name in (CHOSEN, REJECTED)):
        return False
    return not any(name in sample and name not in ignore for name in OTHER_FORMS)


def sides(
    sample: Mapping[str, Any], ignore: Sequence[str], place: int, *, file: str = ""
) -> list[dict[str, Any]]:
    """The two samples of a pair; a row of another form alone, as it is.

    Their number is a hash of 52 bits, which float64 holds exactly, of the row, its file's name and
    its place there: equal rows of several files have different numbers.
    """
    if not is_pair(sample, ignore):
        return [dict(sample)]
    others = {k: v for k, v in sample.items() if k not in ("prompt", CHOSEN, REJECTED)}
    prompt, answers = _split(sample)
    content = json.dumps([file, place, prompt, *answers], default=str)
    number = int(hashlib.sha256(content.encode()).hexdigest()[:13], 16)
    return [
        {**others, "prompt": prompt, "completion": answer, "pair": number, "sign": sign}
        for answer, sign in zip(answers, (1, -1), strict=True)
    ]


def _split(sample: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The prompt, and both answers without it."""
    prompt, answers = sample.get("prompt"), [sample[CHOSEN], sample[REJECTED]]
    kinds = {type(answer) for answer in answers}
    if kinds == {str}:
        if not isinstance(prompt, str):
            raise SampleError("bad message", "its answers are text, and so must its prompt be")
        return prompt, answers
    if kinds != {list}:
        raise SampleError(
            "bad message", "chosen and rejected must both be text, or both lists of messages"
        )
    if isinstance(prompt, list):
        return prompt, answers
    # Whole chats, with the prompt as text beside them or not at all: it is what they share.
    is_same = (one == other for one, other in zip(*answers, strict=False))
    shared = sum(1 for _ in takewhile(bool, is_same))
    if shared in (0, len(answers[0]), len(answers[1])):
        raise SampleError(
            "bad message", "chosen and rejected must begin with the same messages, and then differ"
        )
    return answers[0][:shared], [answer[shared:] for answer in answers]


ALL = "*"
TOKENS = "input_ids"
"""The form that needs no tokenizer."""
NO_TOKENIZER = "no tokenizer"
"""The reason why a sample of text is rejected where there is no tokenizer."""

LOSS_MASKS = ("completion_mask", "assistant_masks")
"""Masks of TRL and of transformers' chat templates: 1 at the tokens with a loss."""
TOKEN_COLUMNS = ("labels", "attention_mask", *LOSS_MASKS, "token_type_ids", "special_tokens_mask")

# The columns of each form: the first names the form, the second tuple may be missing.
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("tools", "chat_template_kwargs")),
    "conversations": (("conversations",), ("system", "tools", "chat_template_kwargs")),
    "prompt": (("prompt", "completion"), ("tools", "chat_template_kwargs")),
    "instruction": (("instruction", "output"), ("input", "system")),
    "text": (("text",), ()),
    TOKENS: ((TOKENS,), TOKEN_COLUMNS),
}
COLUMNS = {name for needed, optional in FORMS.values() for name in (*needed, *optional)}
COLUMNS |= {CHOSEN, REJECTED}
KNOWN_FIELDS = {
    ADVANTAGES: "float32",
    OLD_LOGPROBS: "float32",
    REF_LOGPROBS: "float32",
    TEACHER_IDS: "int32",
    TEACHER_LOGPROBS: "float32",
    PAIR: "int64",
    SIGN: "int8",
}
"""Columns that ready losses read, which need no declaration, and their dtypes."""

ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def present_columns(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample without columns of forms that are null: in a table all rows have all columns."""
    return {n: value for n, value in sample.items() if value is not None or n not in COLUMNS}


def without_nulls(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    """Removes the nulls that tables add: all objects of a column have the same keys there."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def form_of(columns: Iterable[str], ignore: Sequence[str], fields: Sequence[Field]) -> str:
    """The form of a sample from the names of its columns; raises SampleError for unknown ones."""
    columns = [name for name in columns if name not in ignore]
    form = next((name for name in FORMS if name in columns), None)
    if form is None:
        forms = "; ".join(" and ".join(needed) for needed, _ in FORMS.values())
        forms += f"; {CHOSEN} and {REJECTED}"
        raise SampleError("no messages", f"its columns are no known form; known are: {forms}")
    for name in FORMS[form][0]:
        if name not in columns:
            raise SampleError("no messages", f"it has a {form} but no {name}")
    if others := unused_columns(columns, form, ignore, fields):
        raise SampleError("undeclared field", unknown_columns(others, form))
    return form


def refuse_text(columns: Collection[str]) -> None:
    """Raises SampleError for a sample of text, where there is no tokenizer for it."""
    if next((name for name in FORMS if name in columns), TOKENS) == TOKENS:
        return
    detail = "it is text, which needs a tokenizer; rows of input_ids need none"
    if TOKENS in columns:
        texts = ", ".join(text_columns(columns))
        detail = f"it has text ({texts}) beside its input_ids; leave the text out"
    raise SampleError(NO_TOKENIZER, detail)


def text_columns(columns: Iterable[str]) -> list[str]:
    """The columns that samples of text have, and rows of tokens do not."""
    needed, optional = FORMS[TOKENS]
    return [name for name in columns if name in COLUMNS and name not in (*needed, *optional)]


def refuse_file(file: str, row: str, columns: Sequence[str]) -> ValueError:
    """The error for a file of text without a tokenizer. row: the first, as "line 1"."""
    if TOKENS in columns:
        texts = text_columns(columns)
        return ValueError(
            f"{file} {row} has text ({', '.join(texts)}) beside its input_ids; leave it out with "
            f"data.ignore={','.join(texts)}, or set data.tokenizer to a folder with tokenizer.json"
        )
    return ValueError(
        f"{file} is text, which needs a tokenizer; set data.tokenizer to a folder with "
        f"tokenizer.json. Rows of input_ids need none, but {row} has the columns "
        f"{', '.join(columns)}"
    )


def unused_columns(
    columns: Iterable[str], form: str, ignore: Sequence[str], fields: Sequence[Field]
) -> list[str]:
    """The columns that are neither part of the form nor declared nor ignored."""
    if ALL in ignore:
        return []
    needed, optional = FORMS[form]
    known = {*needed, *optional, *ignore, *(field.name for field in fields)}
    return [name for name in columns if name not in known]


def field_for(name: str, value: object) -> Field | None:
    """The field that a column's value fits: a list has a value for each target; None for others.

    Numbers of a list may be lists themselves, all of the same shape.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        return None
    is_name = name.isidentifier() and name not in TAKEN
    if not is_name or array.dtype.kind not in "biuf" or not array.size:
        return None
    dtype = KNOWN_FIELDS.get(name, "float32" if array.dtype.kind == "f" else "int64")
    if not array.ndim:
        return Field(name, "sequence", dtype)
    return Field(name, "target", dtype, array.shape[1:])


def known_fields(
    sample: Mapping[str, Any], names: Collection[str], declared: Sequence[Field]
) -> list[Field]:
    """Fields for the columns of a sample that ready losses read. names: of those to look at."""
    taken = {field.name for field in declared}
    specs = [field_for(n, sample[n]) for n in KNOWN_FIELDS if n in names and n in sample]
    fields = [spec for spec in specs if spec is not None and spec.name not in taken]
    # Alone, a column of one of these two names is another thing.
    is_paired = {PAIR, SIGN} <= {*taken, *(field.name for field in fields)}
    return [field for field in fields if is_paired or field.name not in (PAIR, SIGN)]


def unknown_columns(
    names: Sequence[str], form: str, sample: Mapping[str, Any] | None = None
) -> str:
    """What is wrong with unknown columns, all in one message, with what to do about them.

    sample: one that has the first of them, whose value says how to declare it.
    """
    spec = field_for(names[0], (sample or {}).get(names[0]))
    first = f"{names[0]}:per_sequence:DTYPE" if spec is None else spec
    listed, ignore = ", ".join(map(repr, names)), f"data.ignore={','.join(names)}"
    if len(names) == 1:
        return (
            f"unknown column {listed} in a sample with {form!r}; leave it out with {ignore} (or * "
            f"for all unused columns), or declare it with data.fields={first}"
        )
    return (
        f"unknown columns {listed} in samples with {form!r}; leave them out with {ignore} (or * "
        f"for all unused columns), or declare each as in data.fields={first}"
    )


def from_alpaca(sample: Mapping[str, Any], *, as_chat: bool) -> tuple[dict[str, Any], str]:
    """A sample with an instruction as a sample of another form, and that form.

    as_chat: where the tokenizer has a template, the user says the instruction and, a blank line
    below, the input. Otherwise they become a prompt with the headings of the Alpaca paper's.
    """
    instruction, output = text_of(sample, "instruction"), text_of(sample, "output")
    given, system = text_of(sample, "input"), text_of(sample, "system")
    if not instruction:
        raise SampleError("bad message", "its instruction is empty")
    if not output:
        raise SampleError("no loss tokens", "its output is empty")
    if as_chat:
        asked = f"{instruction}\n\n{given}" if given else instruction
        turns = [("system", system)] if system else []
        turns += [("user", asked), ("assistant", output)]
        return {"messages": [{"role": role, "content": text} for role, text in turns]}, "messages"
    if system:
        raise SampleError("bad message", "it has a system text, but there is no chat template")
    form = ALPACA_WITH_INPUT if given else ALPACA
    prompt = form.format(instruction=instruction, input=given)
    return {"prompt": prompt, "completion": output}, "prompt"


def text_of(sample: Mapping[str, Any], name: str) -> str:
    """A column that must be text; "" for Alpaca's optional ones where they are missing."""
    value = sample.get(name)
    if value is None and name in FORMS["instruction"][1]:
        return ""
    if not isinstance(value, str):
        raise SampleError("bad message", f"{name} is {type(value).__name__}; it must be text")
    return value
