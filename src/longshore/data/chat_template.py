"""Chats and their templates: a chat becomes text, and the assistant's part is located exactly.

In: a chat in any of the usual forms, and a Hugging Face chat template (Jinja). Out: the text, and
the spans [start, stop) of characters that the assistant wrote. A short chat in ChatML:

    <|im_start|>user↵Hi<|im_end|>↵<|im_start|>assistant↵Yo<|im_end|>↵

has 65 characters and one span, 52…64, which holds Yo<|im_end|>.

A template with {% generation %} blocks says itself where the assistant writes, and is believed. For
any other, the chat is rendered up to each assistant turn with the generation prompt (0…52 above)
and up to its end (0…65). Both must be a beginning of the whole text: what lies between them is what
the model writes at that point of the chat. A template that renders an early turn differently once
later turns follow (it drops old reasoning, say) fails this and is refused, never guessed at.

The end-of-turn token is part of a span, so that the model learns to stop; white space behind it is
not, because nothing is generated after the stop. Where a turn ends without a special token, its
trailing white space is all there is to learn the stop from, and stays.

Templates run in Jinja's immutable sandbox. `strftime_now` gives a fixed date, because the text must
be the same whenever it is made.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from longshore.data.source import SampleError

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import CallBlock
    from jinja2.parser import Parser

Message = Mapping[str, Any]
Span = tuple[int, int]

# Unicode keeps these two for a program's own use; text must not contain them.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
DATE = datetime.date(2024, 7, 26)  # what the Llama 3 templates write when they know no date
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
NOT_LOCATED = "spans not located"
WAY_OUT = "give a template with {% generation %} around what the assistant writes, or loss_on='all'"


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for a template. Those before `first` are a prompt and never in the loss."""

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    first: int = 0

    def turns(self) -> list[int]:
        """The assistant's messages that are in the loss."""
        return [
            i
            for i, message in enumerate(self.messages)
            if i >= self.first and message["role"] == "assistant" and message.get("weight") != 0
        ]


def chat_from(sample: Mapping[str, Any], form: str) -> Chat:
    """The chat in a sample: `messages`, `conversations` (ShareGPT) or `prompt` and `completion`."""
    if form == "messages":
        messages, first = _messages(sample["messages"], "messages"), 0
    elif form == "conversations":
        turns = _list_of_dicts(sample["conversations"], "conversations")
        system = [{"role": "system", "content": sample["system"]}] if sample.get("system") else []
        messages, first = _messages(system + [_from_sharegpt(t) for t in turns], form), 0
    else:
        prompt = _messages(sample["prompt"], "prompt")
        messages, first = prompt + _messages(sample["completion"], "completion"), len(prompt)
    tools, settings = _parsed(sample.get("tools")), sample.get("chat_template_kwargs") or {}
    if tools is not None and not isinstance(tools, list):
        raise SampleError("bad message", "tools must be a list, or JSON text of one")
    if not isinstance(settings, Mapping):
        raise SampleError("bad message", "chat_template_kwargs must be an object")
    return Chat(tuple(messages), tools or None, settings, first)


def _messages(value: object, name: str) -> list[Message]:
    return [
        _message(message, f"{name}[{i}]") for i, message in enumerate(_list_of_dicts(value, name))
    ]


def _message(message: Message, where: str) -> Message:
    """A message as templates expect it: text content, and tool arguments as objects.

    Keys that are null are left out (Parquet adds them); a null or missing content becomes "".
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise SampleError("bad message", f"{where}: role is {role!r}; it must be a name")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["content"] = _content(clean.get("content", ""), where)
    if clean.get("weight", 1) not in (0, 1):
        raise SampleError("bad message", f"{where}: weight is {clean['weight']!r}, not 0 or 1")
    if calls := clean.pop("tool_calls", None):
        listed = _list_of_dicts(calls, f"{where}.tool_calls")
        clean["tool_calls"] = [_tool_call(call) for call in listed]
    return clean


def _content(content: object, where: str) -> str:
    """Text, or that of a list with one text part; a template may print any other list raw."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        part = content[0]
        content = part.get("text") if part.get("type") == "text" else content
    if not isinstance(content, str):
        raise SampleError("bad message", f"{where}: content must be text or one text part")
    return content


def _tool_call(call: Message) -> Message:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _tool_call(function)}
    return {**call, "arguments": _parsed(call["arguments"])} if "arguments" in call else call


def _from_sharegpt(turn: Message) -> Message:
    name = turn.get("from")
    if name == "function_call":
        value = _parsed(turn.get("value"))
        calls = _list_of_dicts(value if isinstance(value, list) else [value], "function_call")
        return {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": c} for c in calls],
        }
    if name not in SHAREGPT_ROLES:
        raise SampleError(
            "bad message",
            f"conversations: 'from' is {name!r}; it must be one of {', '.join(SHAREGPT_ROLES)}",
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**rest, "role": SHAREGPT_ROLES[name], "content": turn.get("value")}


def _list_of_dicts(value: object, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise SampleError("no messages", f"{name} must be a list with at least one message")
    for i, item in enumerate(value):
        if not isinstance(item, Mapping):
            raise SampleError("bad message", f"{name}[{i}] is not an object")
    return value


def _parsed(value: object) -> object:
    """What JSON text says, where the value is such text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Mapping[str, Any],
        ends: Sequence[str],
        date: datetime.date = DATE,
    ) -> None:
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._special_tokens = dict(special_tokens)
        self._ends = tuple(ends)
        self._plain = _compile(text, date, ("", ""))
        has_marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
        self._marked = _compile(text, date, (OPEN, CLOSE)) if has_marks else None

    def render(self, chat: Chat) -> str:
        """The text of a whole chat."""
        return self._render(self._plain, chat, chat.messages)

    def locate(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text of a whole chat and the spans of `chat.turns()` in it, rising."""
        text = self.render(chat)
        if self._marked is None:
            return text, [self._turn_span(chat, turn, text) for turn in chat.turns()]
        marked = self._render(self._marked, chat, chat.messages)
        unmarked, spans = _unmark(marked)
        if unmarked != text:
            raise SampleError(
                NOT_LOCATED,
                "the template changes what stands between its {% generation %} marks, or a message "
                f"contains the character U+{ord(OPEN):X} or U+{ord(CLOSE):X}",
            )
        return text, _chosen(spans, chat)

    def _turn_span(self, chat: Chat, turn: int, text: str) -> Span:
        before = self._render(self._plain, chat, chat.messages[:turn], add_generation_prompt=True)
        through = self._render(self._plain, chat, chat.messages[: turn + 1])
        _check_beginning(before, text, f"up to message {turn + 1}, with the generation prompt")
        _check_beginning(through, text, f"up to the end of message {turn + 1}")
        start, stop = len(before), len(through)
        if stop <= start:
            raise SampleError(
                NOT_LOCATED, f"message {turn + 1} (assistant) adds no text to the chat; {WAY_OUT}"
            )
        written = text[start:stop].rstrip()
        return (start, start + len(written)) if written.endswith(self._ends) else (start, stop)

    def _render(
        self,
        template: "Template",
        chat: Chat,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        given = {**self._special_tokens, **chat.settings}
        try:
            return template.render(
                **given,
                messages=list(messages),
                tools=chat.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program of somebody else's
            part = "" if len(messages) == len(chat.messages) else f" on messages[:{len(messages)}]"
            raise SampleError(
                "template failed",
                f"the chat template failed{part}: {error or type(error).__name__}",
            ) from None


def _chosen(spans: list[Span], chat: Chat) -> list[Span]:
    """Of the marked spans those of `chat.turns()`, when these are not all turns."""
    every = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if chat.turns() == every:
        return spans
    if len(spans) != len(every):
        raise SampleError(
            NOT_LOCATED,
            f"some of the {len(every)} assistant messages are not in the loss, but the template "
            f"marks {len(spans)} spans, so which is whose cannot be told; mark one span a message",
        )
    return [span for turn, span in zip(every, spans, strict=True) if turn in chat.turns()]


def _unmark(marked: str) -> tuple[str, list[Span]]:
    """Takes the marks out of a text and says where they stood."""
    pieces, spans, length, start = [], [], 0, -1
    for piece in re.split(f"([{OPEN}{CLOSE}])", marked):
        if piece in (OPEN, CLOSE):
            if (piece == OPEN) != (start < 0):
                raise SampleError(NOT_LOCATED, "the template nests {% generation %} blocks")
            if piece == CLOSE and length > start:
                spans.append((start, length))
            start = length if piece == OPEN else -1
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans


def _check_beginning(part: str, text: str, what: str) -> None:
    if text.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
    raise SampleError(
        NOT_LOCATED,
        f"rendered {what}, the chat is not a beginning of the whole chat (from character {at}: "
        f"{part[at : at + 20]!r} against {text[at : at + 20]!r}), so the template rewrites turns "
        f"and the assistant's part cannot be located; {WAY_OUT}",
    )


def _compile(text: str, date: datetime.date, marks: tuple[str, str]) -> "Template":
    environment = _environment(date, marks)
    from jinja2 import TemplateError

    try:
        return environment.from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ValueError(f"chat template: line {line} is not valid Jinja ({error})") from None


def _environment(date: datetime.date, marks: tuple[str, str]) -> "Environment":
    """What Hugging Face templates expect to find, the `generation` tag included."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError(
            "chat templates need jinja2, which is missing: pip install 'longshore[hf]'"
        ) from None

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: "Parser") -> "CallBlock":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("mark", lineno=line)
            return nodes.CallBlock(call, [], [], body, lineno=line)

        def mark(self, caller: Any) -> str:  # noqa: ANN401
            return f"{marks[0]}{caller()}{marks[1]}"

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    midnight = datetime.datetime.combine(date, datetime.time())
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = midnight.strftime
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As json.dumps writes it; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
