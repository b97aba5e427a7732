"""Pairs: a row with a chosen and a rejected answer becomes two sequences that belong together.

In: a row with `chosen` and `rejected`, and perhaps `prompt`, as TRL has them: texts, or lists of
messages. Out: two samples with `prompt` and `completion`, and the fields `pair`, a number that no
other row has, and `sign`, 1 for the chosen and −1 for the rejected one. The row

    {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}

becomes {"prompt": "2 + 2 =", "completion": " 4", "pair": 94…, "sign": 1} and the same with " 5" and
−1. Where both answers are whole chats, the prompt is what they have in common. Other rows stay as
they are. The number is a hash of the row, its file's name and its place there, of 52 bits: equal
rows of several files that are joined have different ones too, and float64 holds it exactly.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from longshore.data.fields import Field
from longshore.data.source import PAIR, SIGN, SampleError

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
    """The two samples of a pair; a row of another form alone, as it is. place: of the row."""
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
    # Whole chats, with the prompt as text beside them or not at all.
    shared = 0
    for one, other in zip(*answers, strict=False):
        if one != other:
            break
        shared += 1
    if shared in (0, len(answers[0]), len(answers[1])):
        raise SampleError(
            "bad message", "chosen and rejected must begin with the same messages, and then differ"
        )
    return answers[0][:shared], [answer[shared:] for answer in answers]
