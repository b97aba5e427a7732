"""Training templates of Longshore's own, for families of models whose templates rewrite chats.

In: the chat template of a tokenizer, and which one the user wants. Out: the template to use, and a
line that says so. Qwen3's own drops the thinking of all turns but the last, so that the chat up to
its second turn is not a prefix of the full chat; "auto" detects this by rendering short chats and
chooses templates/qwen3.jinja, in which every turn stays as the model wrote it.

A family is recognised by what the tokenizer's template writes, not by a name: its special tokens
are in the vocabulary, and wherever the tokenizer's template can render a chat whose last turn is
the assistant's (with thinking, with tool calls), ours renders the same text, also with a user's
message or tool results after it. Only earlier turns differ. What comes before the assistant's first
turn (system message, tools, default texts) is rendered by the tokenizer's own template.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from longshore.data.chat_template import LEFT_OUT, NOT_LOCATED, TOO_SLOW, ChatTemplate
from longshore.data.chats import Chat, Message
from longshore.data.source import SampleError

AUTO, OWN = "auto", "own"
Make = Callable[..., ChatTemplate]


@dataclass(frozen=True, slots=True)
class Family:
    """Models that lay chats out alike."""

    name: str
    """The name of its file, and of the choice in a recipe."""
    title: str
    """The name in messages."""
    tokens: tuple[str, ...]
    """Special tokens that the template needs."""
    variants: tuple[Mapping[str, Any], ...] = field(default=({},))
    """Settings of the file, tried one after the other."""
    no_think: str = ""
    """What a user writes so that a model of this family does not think."""

    def text(self) -> str:
        return (files("longshore.data") / "templates" / f"{self.name}.jinja").read_text("utf-8")


CHATML = ("<|im_start|>", "<|im_end|>")
DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
FAMILIES = (
    Family("qwen3", "Qwen3", CHATML),
    Family("qwen3_5", "Qwen3.5", CHATML, ({"silent": False}, {"silent": True})),
    Family("nemotron_3", "Nemotron 3", CHATML, ({"gap": "\n"}, {"gap": ""})),
    Family("chatml", "ChatML", CHATML),
    Family(
        "llama_3",
        "Llama 3",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ({"plain_results": False}, {"plain_results": True}),
    ),
    Family(
        "deepseek",
        "DeepSeek V3 and R1",
        DEEPSEEK,
        tuple(
            {"think_prompt": prompt, "result_gap": gap}
            for prompt in (False, True)
            for gap in ("\n", "")
        ),
    ),
    Family(
        "deepseek_3_1",
        "DeepSeek V3.1",
        DEEPSEEK,
        ({"closed": "</think>"}, {"closed": "<think></think>"}),
    ),
    Family(
        "nemotron_h",
        "Nemotron-H",
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        (
            {"gap": "\n", "result_gap": "", "thinks": "\n"},
            {"gap": "\n\n", "result_gap": "\n\n", "thinks": "\n\n"},
        ),
        no_think="/no_think",
    ),
    Family("gemma", "Gemma", ("<start_of_turn>", "<end_of_turn>")),
)
BY_NAME = {family.name: family for family in FAMILIES}

THOUGHT, WORDS = "Sum first.", "Let me see."
CALL = {"type": "function", "function": {"name": "add_up", "arguments": {"first": 31, "to": "x"}}}


def check_choice(choice: str) -> None:
    """Refuses a choice that is not "auto", "own", a family or a file."""
    if choice and choice not in (AUTO, OWN, *BY_NAME) and not Path(choice).is_file():
        raise ValueError(
            f"data.template: there is no file {choice}; give a file, {AUTO}, {OWN} (the "
            f"tokenizer's), or one of Longshore's training templates: {', '.join(BY_NAME)}"
        )


def is_file_choice(choice: str) -> bool:
    """Whether a choice of template names a file of the user's."""
    return bool(choice) and choice not in (AUTO, OWN, *BY_NAME)


def templates_digest() -> str:
    """Identifies the content of all training templates."""
    return hashlib.sha256("\n".join(family.text() for family in FAMILIES).encode()).hexdigest()


def choose_template(
    own: ChatTemplate | None, choice: str, *, make: Make, knows: Callable[[str], bool]
) -> tuple[ChatTemplate | None, str]:
    """The template to use, and why where it is not the tokenizer's own.

    `make` compiles the text of a template, and `knows` says whether a token is in the vocabulary.
    """
    if choice in BY_NAME:
        named = BY_NAME[choice]
        template = own and _agreeing(named, own, make)
        note = f"chat template: Longshore's training template for {named.title}, as asked for"
        return template or make(named.text(), settings=named.variants[0]), note
    if own is None or choice == OWN or own.has_marks:
        return own, ""
    fault = _fault(own)
    if not fault:
        return own, ""
    for family in FAMILIES:
        if all(knows(token) for token in family.tokens):
            template = _agreeing(family, own, make)
            if template is not None:
                return template, (
                    f"chat template: Longshore's training template for {family.title}, because the "
                    f"tokenizer's own {fault}"
                )
    return own, ""


def _fault(own: ChatTemplate) -> str:
    """Why a template cannot be used for training, or ""; rewriting is named before the rest."""
    faults = []
    for what, chat in _trials():
        try:
            own.locate(chat)
        except SampleError as error:
            if error.reason == TOO_SLOW:
                raise ValueError(f"the tokenizer's chat template: {error}") from None
            if error.reason == NOT_LOCATED:
                return "rewrites earlier turns"
            faults.append(f"leaves out {what}" if error.reason == LEFT_OUT else f"fails on {what}")
    return faults[0] if faults else ""


def _trials() -> Iterator[tuple[str, Chat]]:
    """Chats that a template for training must be able to render, and what is special in each."""
    ask, answer = _message("user", "Hi"), _message("assistant", "Yo.")
    thinks = {**answer, "reasoning_content": THOUGHT}
    result = {**_message("tool", "31"), "name": "add_up"}
    calls = {**_message("assistant", WORDS), "tool_calls": [CALL, CALL]}
    yield "a second turn", Chat((ask, answer, ask, answer))
    yield "the thinking", Chat((ask, thinks, ask, thinks))
    one = {**calls, "content": "", "tool_calls": [CALL]}
    yield "tool calls", Chat((ask, one, result, answer, ask, answer))
    yield "several tool calls with text", Chat((ask, calls, result, result, answer))


def _agreeing(family: Family, own: ChatTemplate, make: Make) -> ChatTemplate | None:
    """The family's template in the variant that writes what the tokenizer's own does, if any."""
    for settings in family.variants:
        template = make(family.text(), settings=settings, opening=own)
        if all(_comparisons(template, own, family.no_think)):
            return template
    return None


def _comparisons(ours: ChatTemplate, own: ChatTemplate, no_think: str) -> Iterator[bool]:
    """Whether two templates agree on each of some chats that the tokenizer's own can render."""
    agree = partial(_agree, ours, own)
    ask = _message("user", f"Hi {no_think}".rstrip())
    answer = _message("assistant", "Yo.")
    call = {**_message("assistant", ""), "tool_calls": [CALL]}
    result = _message("tool", "31\n")
    yield agree(ask, answer, needed=True)
    yield agree(_message("user", "Hi"), prompt=True)
    yield agree(_message("system", "Be kind."), ask, answer)
    yield agree(ask, _message("assistant", " \n\n Yo.\n "))
    yield agree(ask, answer, _message("user", " So?\n"), last=1)
    if not no_think:
        yield agree(ask, {**answer, "reasoning_content": THOUGHT}, shown=(THOUGHT,))
        yield agree(ask, call, shown=("add_up",))
        yield agree(ask, {**call, "content": WORDS}, shown=("add_up", WORDS))
        calls = {**_message("assistant", WORDS), "tool_calls": [CALL, CALL]}
        yield agree(ask, calls, shown=("add_up", WORDS))
    yield agree(ask, call, result, result, shown=("add_up",), last=2)


def _agree(
    ours: ChatTemplate,
    own: ChatTemplate,
    *messages: Message,
    shown: tuple[str, ...] = (),
    last: int = 0,
    needed: bool = False,
    prompt: bool = False,
) -> bool:
    """Whether two templates write the same text for a chat.

    shown: texts that the tokenizer's template must write; otherwise it does not support this chat,
    which is a difference only if the chat is `needed`
    last: how many of the last messages to compare; 0 compares the full chat
    prompt: whether to compare with the generation prompt at the end
    """
    expected = _text(own, messages, prompt=prompt)
    if expected is None or any(text not in expected for text in shown):
        return not needed
    written = _text(ours, messages, prompt=prompt)
    if written is None or not last:
        return written == expected
    earlier = _text(ours, messages[:-last])
    return earlier is not None and expected.endswith(written.removeprefix(earlier))


def _text(
    template: ChatTemplate, messages: tuple[Message, ...], *, prompt: bool = False
) -> str | None:
    """What a template writes; some expect the arguments of calls as JSON text."""
    for variant in (messages, tuple(map(_with_json_text, messages))):
        try:
            return template.render(Chat(variant), add_generation_prompt=prompt)
        except SampleError:
            continue
    return None


def _with_json_text(message: Message) -> Message:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    texts = [{**f, "arguments": json.dumps(f["arguments"])} for f in functions]
    calls = [{**CALL, "function": function} for function in texts]
    return {**message, "tool_calls": calls} if calls else message


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
