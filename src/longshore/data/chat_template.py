"""Chat templates: a chat becomes text, and the assistant's part is located exactly.

In: a chat, and a Hugging Face chat template (Jinja). Out: the text, and the spans [start, stop) of
characters that the assistant wrote. A short chat in ChatML:

    <|im_start|>user↵Hi<|im_end|>↵<|im_start|>assistant↵Yo<|im_end|>↵

has 65 characters and one span, 52…64, which holds Yo<|im_end|>.

A template with {% generation %} blocks marks what the assistant writes. With any other template the
chat is rendered up to each assistant turn with the generation prompt (0…52 above) and up to the
turn's end (0…65). Both must be prefixes of the full text: the text between their ends is what the
model writes in that turn. A template that renders an early turn differently once later turns follow
(it drops old reasoning, say) fails this and is refused; so is one that has a header for the
assistant but leaves it out of the generation prompt. Longshore's own templates for such families
(training_templates.py) have {% generation %} blocks.

A template may leave messages out without a word, such as those of a role that it does not know. So
the chat is rendered once more with a probe in place of each content, and a sample whose template
leaves one out is refused. A probe is neither trimmed nor escaped nor taken for thinking, and no
other message contains it by chance.

The end-of-turn token is part of a span, so that the model learns to stop; white space after it is
not, because nothing is generated after the stop. Where a turn ends without a special token, its
trailing white space is the only sign of the end, and stays in the span.

Templates run in a sandbox with limits (template_sandbox.py). `strftime_now` gives a fixed date,
because the text must be the same whenever it is rendered.
"""

import contextlib
import datetime
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from longshore.data.chats import Chat, Message
from longshore.data.source import SampleError
from longshore.data.template_sandbox import (
    TemplateLimits,
    TooLargeError,
    TooSlowError,
    compile_template,
    limited,
    thought_and_content,
    write,
)

Span = tuple[int, int]
Marks = tuple[str, str]

# Unicode reserves these for a program's own use. A text may contain some all the same, so the marks
# around what the assistant writes are two that it does not contain.
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
DATE = datetime.date(2024, 7, 26)  # the default of the Llama 3 templates
NOT_LOCATED, LEFT_OUT = "spans not located", "left out by the template"
TOO_SLOW = "template too slow"
WAY_OUT = (
    "use a template with {% generation %} around what the assistant writes, one of Longshore's "
    "training templates by its name, or loss_on='all'"
)
PROBE = "Longshore\ufdd2probe"


class ChatTemplate:
    """A compiled template with the special tokens that it may name.

    settings: values for the template.
    opening: the tokenizer's template, for one of Longshore's own. It renders what comes before the
    assistant's first turn (system message, tools, a user's words); the result reaches this template
    as `head`, with the messages that follow.
    """

    def __init__(
        self,
        text: str,
        *,
        special_tokens: Mapping[str, Any],
        ends: Sequence[str],
        date: datetime.date = DATE,
        settings: Mapping[str, Any] = MappingProxyType({}),
        opening: "ChatTemplate | None" = None,
        limits: TemplateLimits = TemplateLimits(),  # noqa: B008 - frozen
    ) -> None:
        content = f"{text}{dict(settings)}" if settings else text
        content = content if opening is None else f"{content}\n{opening.digest}"
        self.digest: str = hashlib.sha256(content.encode()).hexdigest()
        self._values = {**special_tokens, **settings}
        self._ends = tuple(ends)
        self._opening = opening
        self._limits = limits
        self._template = compile_template(text, date)
        self.has_marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None

    def render(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        """The text of a chat."""
        with _limits_as_sample_errors(self._limits, chat):
            return self._full_text(chat, prompt=add_generation_prompt)

    def complete_text(self, chat: Chat) -> str:
        """The text of a chat; SampleError where the template leaves a message out."""
        with _limits_as_sample_errors(self._limits, chat):
            text = self._full_text(chat)
            self._check_all_written(chat)
        return text

    def locate(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text of a chat and the spans of `chat.turns()` in it, in order."""
        with _limits_as_sample_errors(self._limits, chat):
            text = self._full_text(chat)
            if not self.has_marks:
                spans = [self._turn_span(chat, turn, text) for turn in chat.turns()]
                self._check_headers(chat, spans)
            else:
                spans = _spans_in_loss(self._marked_spans(chat, text), chat)
            _check_complete(chat, text)
            self._check_all_written(chat)
        return text, spans

    def _check_all_written(self, chat: Chat) -> None:
        """Every message that has content must be in the text. Thinking may be left out."""
        probes = {
            i: f"Longshore{i}probe"
            for i, message in enumerate(chat.messages)
            if thought_and_content(message)[1].strip()
        }
        probed = tuple(
            {**message, "content": probes.get(i, message["content"])}
            for i, message in enumerate(chat.messages)
        )
        try:
            text = self._full_text(replace(chat, messages=probed))
        except SampleError:
            return  # it refuses these contents, so it reads contents; nothing can be concluded
        for i, probe in probes.items():
            if probe not in text:
                raise SampleError(
                    LEFT_OUT,
                    f"the template leaves out message {i + 1}, of role "
                    f"{chat.messages[i]['role']!r}, whose content would be lost; give it a role "
                    "that the template writes (such as system, user, assistant or tool), or "
                    "remove it from the sample",
                )

    def _marked_spans(self, chat: Chat, text: str) -> list[Span]:
        marks = [mark for mark in NONCHARACTERS if mark not in text][:2]
        if len(marks) < 2:
            raise SampleError(NOT_LOCATED, "the chat contains the characters U+FDD0 to U+FDEF")
        unmarked, spans = _unmark(self._full_text(chat, marks=(marks[0], marks[1])), *marks)
        if unmarked == text:
            return spans
        raise SampleError(
            NOT_LOCATED, "the template changes the text between its {% generation %} marks"
        )

    def _turn_span(self, chat: Chat, turn: int, text: str) -> Span:
        before = self._render(chat, chat.messages[:turn], add_generation_prompt=True)
        through = self._render(chat, chat.messages[: turn + 1])
        _check_prefix(before, text, f"up to message {turn + 1}, with the generation prompt")
        _check_prefix(through, text, f"up to the end of message {turn + 1}")
        start, stop = len(before), len(through)
        if stop <= start:
            raise SampleError(
                NOT_LOCATED, f"message {turn + 1} (assistant) adds no text to the chat; {WAY_OUT}"
            )
        written = text[start:stop].rstrip()
        return (start, start + len(written)) if written.endswith(self._ends) else (start, stop)

    def _check_headers(self, chat: Chat, spans: Sequence[Span]) -> None:
        """Where the generation prompt is empty, a turn must have no header: it would be a target.

        One turn is checked for each role that comes before the assistant.
        """
        after: dict[str, tuple[int, int]] = {}
        for turn, (start, _) in zip(chat.turns(), spans, strict=True):
            after.setdefault(chat.messages[turn - 1]["role"] if turn else "", (turn, start))
        for turn, start in after.values():
            if len(self._render(chat, chat.messages[:turn])) == start:
                self._check_no_header(chat, turn, start)

    def _check_no_header(self, chat: Chat, turn: int, start: int) -> None:
        other = {"role": "assistant", "content": PROBE}
        probed = self._render(chat, (*chat.messages[:turn], other))
        header, probe, _ = probed[start:].partition(PROBE)
        if header.strip() or not probe:
            raise SampleError(
                NOT_LOCATED,
                "the template ignores add_generation_prompt, so the assistant's header "
                f"({header.strip()[:40]!r}) cannot be separated from its content; {WAY_OUT}",
            )

    def _full_text(self, chat: Chat, *, prompt: bool = False, marks: Marks = ("", "")) -> str:
        first, messages, values = chat.first_answer(), chat.messages, {}
        if self._opening is not None and first:
            values["head"] = self._opening._render(chat, messages[:first])
            messages = messages[first:]
        return self._render(
            chat, messages, add_generation_prompt=prompt, marks=marks, values=values
        )

    def _render(
        self,
        chat: Chat,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        marks: Marks = ("", ""),
        values: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        variables = {
            **self._values,
            **chat.settings,
            "messages": list(messages),
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **values,
        }
        try:
            return write(self._template, variables, self._limits, marks=marks)
        except (TooSlowError, TooLargeError, MemoryError):
            raise
        except Exception as error:  # a template is untrusted code and may raise anything
            part = "" if len(messages) == len(chat.messages) else f" on messages[:{len(messages)}]"
            raise SampleError(
                "template failed",
                f"the chat template failed{part}: {error or type(error).__name__}",
            ) from None


@contextlib.contextmanager
def _limits_as_sample_errors(limits: TemplateLimits, chat: Chat) -> Iterator[None]:
    """A template that exceeds its limits raises a SampleError."""
    try:
        with limited(limits, len(chat.messages)):
            yield
    except TooSlowError as error:
        raise SampleError(TOO_SLOW, f"the chat template was stopped: {error}") from None
    except TooLargeError as error:
        raise SampleError("template too large", f"the chat template was stopped: {error}") from None


def _check_complete(chat: Chat, text: str) -> None:
    """The assistant's thinking, tool calls and content must be in the text."""
    for turn in chat.turns():
        message = chat.messages[turn]
        thought, content = thought_and_content(message)
        calls = [call.get("function", call)["name"] for call in message.get("tool_calls", ())]
        if thought.strip() not in text:
            missing = "the thinking"
        elif any(name not in text for name in calls):
            missing = "tool_calls"
        elif content.strip() not in text:
            missing = "content"
        else:
            continue
        raise SampleError(
            LEFT_OUT,
            f"the template leaves out {missing} of message {turn + 1}, which would be lost; "
            f"remove it from the sample, or {WAY_OUT}",
        )


def _spans_in_loss(spans: list[Span], chat: Chat) -> list[Span]:
    """The marked spans that belong to `chat.turns()`."""
    every = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if chat.turns() == every:
        return spans
    if len(spans) != len(every):
        raise SampleError(
            NOT_LOCATED,
            f"only some of the {len(every)} assistant messages are trained on, and the template "
            f"wrote {len(spans)} {{% generation %}} blocks; it must write one for each of them",
        )
    return [span for turn, span in zip(every, spans, strict=True) if turn in chat.turns()]


def _unmark(marked: str, opening: str, closing: str) -> tuple[str, list[Span]]:
    """The text without its marks, and the spans that were marked."""
    pieces, spans, length, start = [], [], 0, -1
    for piece in re.split(f"([{opening}{closing}])", marked):
        if piece in (opening, closing):
            if (piece == opening) != (start < 0):
                raise SampleError(NOT_LOCATED, "the template nests {% generation %} blocks")
            if piece == closing and length > start:
                spans.append((start, length))
            start = length if piece == opening else -1
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans


def _check_prefix(part: str, text: str, what: str) -> None:
    if text.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
    raise SampleError(
        NOT_LOCATED,
        "the template rewrites earlier turns, so the assistant's tokens cannot be located: the "
        f"chat rendered {what} is not a prefix of the full chat (at character {at}: "
        f"{part[at : at + 20]!r} against {text[at : at + 20]!r}); {WAY_OUT}",
    )
