"""Chat templates: a chat becomes text, and the assistant's part is located exactly.

In: a chat, and a Hugging Face chat template (Jinja). Out: the text, and the spans [start, stop) of
characters that the assistant wrote. A short chat in ChatML:

    <|im_start|>user↵Hi<|im_end|>↵<|im_start|>assistant↵Yo<|im_end|>↵

has 65 characters and one span, 52…64, which holds Yo<|im_end|>: the end-of-turn token is learned,
white space after it is not. A template with {% generation %} blocks marks what the assistant
writes. With any other template the chat is rendered up to each assistant turn with the generation
prompt (0…52 above) and up to the turn's end (0…65). Both must be prefixes of the full text, and the
text between their ends is what the model writes in that turn. A template that renders an early turn
differently once later turns follow is refused; training_templates.py has some for such families.

A template is untrusted code, so it runs in Jinja's immutable sandbox with limits on time, memory
and output. `strftime_now` gives a fixed date: the text must be the same whenever it is rendered.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from longshore.data.chats import Chat, Message
from longshore.data.source import SampleError

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import CallBlock
    from jinja2.parser import Parser
    from jinja2.runtime import Context

PAGE = os.sysconf("SC_PAGE_SIZE")
MARKS = "generation marks"  # with a space, so that no template can set this variable
MOST_BITS, MOST_CHARACTERS = 4096, 2**26
TOO_SLOW, TOO_LARGE = "template too slow", "template too large"


class TemplateLimitError(Exception):
    """A template exceeds one of its limits. reason: TOO_SLOW or TOO_LARGE."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What a template may use for one sample.

    seconds: CPU time of all its renderings together
    seconds_a_message: more of it for each message, because long chats are rendered more often
    characters: output of one rendering
    memory: bytes beyond what the process has at the start
    """

    seconds: float = 10.0
    seconds_a_message: float = 0.05
    characters: int = MOST_CHARACTERS
    memory: int = 2**30


@contextlib.contextmanager
def limited(limits: TemplateLimits, messages: int = 0) -> Iterator[None]:
    """Stops the block at its limits on time and memory.

    The time is measured by a signal, which only the main thread of a process receives (each worker
    of `prepare` renders in its main thread). The limit on memory is the operating system's for the
    process, so it is set only while a template runs.
    """
    seconds = limits.seconds + limits.seconds_a_message * messages
    with _limited_memory(limits.memory), _limited_time(seconds):
        try:
            yield
        except MemoryError:
            detail = f"it needs more than {limits.memory:,} bytes of memory"
            raise TemplateLimitError(TOO_LARGE, detail) from None


@contextlib.contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TemplateLimitError(TOO_SLOW, f"it took more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    # Again every second: an error raised inside a callback of the interpreter would be lost.
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    try:
        with open("/proc/self/statm", "rb") as file:
            used = int(file.read().split()[0]) * PAGE
    except OSError:  # only Linux counts address space in a way that can be limited
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lowest = min(limit for limit in (used + more, soft, hard) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def write(
    template: "Template",
    values: Mapping[str, Any],
    limits: TemplateLimits,
    *,
    marks: tuple[str, str] = ("", ""),
) -> str:
    """What a template writes, its {% generation %} blocks between `marks`."""
    pieces, length = [], 0
    for piece in template.generate({**values, MARKS: marks}):
        pieces.append(piece)
        length += len(piece)
        if length > limits.characters:
            detail = f"it writes more than {limits.characters:,} characters"
            raise TemplateLimitError(TOO_LARGE, detail)
    return "".join(pieces)


@functools.lru_cache(maxsize=64)
def compile_template(text: str, date: datetime.date) -> "Template":
    """A template for `write`; raises ValueError where it cannot be compiled."""
    environment = _environment(date)
    from jinja2 import TemplateError

    try:
        with limited(TemplateLimits()):  # constant expressions are computed here
            return environment.from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ValueError(f"chat template: line {line} is not valid Jinja ({error})") from None
    except (TemplateLimitError, SyntaxError, RecursionError, ValueError) as error:
        # All but the first are errors in the Python that Jinja writes.
        why = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"chat template: cannot be compiled: {why}") from None


def _environment(date: datetime.date) -> "Environment":
    """The filters, functions and tags that Hugging Face templates use, `generation` included."""
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
            call = self.call_method("mark", [nodes.ContextReference()], lineno=line)
            return nodes.CallBlock(call, [], [], body, lineno=line)

        def mark(self, context: "Context", caller: Any) -> str:  # noqa: ANN401
            opened, closed = context[MARKS]
            return f"{opened}{caller()}{closed}"

    class Bounded(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Bounded(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    midnight = datetime.datetime.combine(date, datetime.time())
    environment.filters["tojson"] = _to_json
    environment.filters["thought_and_content"] = thought_and_content
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = midnight.strftime
    return environment


def _check_product(operator: str, left: object, right: object) -> None:
    """Refuses operands of * and ** whose result is huge: no signal interrupts the operator."""
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and isinstance(other, str | list | tuple):
            if one * len(other) > MOST_CHARACTERS:
                detail = f"it repeats {len(other)} elements {one} times"
                raise TemplateLimitError(TOO_LARGE, detail)
            return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if max(bits, right.bit_length()) > MOST_BITS:
            detail = f"it computes with integers of more than {MOST_BITS} bits"
            raise TemplateLimitError(TOO_LARGE, detail)


def thought_and_content(message: Mapping[str, Any]) -> tuple[str, str]:
    """The assistant's thinking and its content; both may be in the content, with </think> between.

    With text before <think> the content is not split, so that nothing is lost.
    """
    thought, content = message.get("reasoning_content"), message["content"]
    if isinstance(thought, str) and thought:
        return thought, content
    before, mark, after = content.partition("</think>")
    opened = before.lstrip().removeprefix("<think>")
    if not mark or "<think>" in opened:
        return "", content
    return opened.strip("\n"), after.lstrip("\n")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Same as json.dumps; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


Span = tuple[int, int]
Marks = tuple[str, str]

# Unicode reserves these for a program's own use. A text may contain some all the same, so the marks
# around what the assistant writes are two that it does not contain.
NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
DATE = datetime.date(2024, 7, 26)  # the default of the Llama 3 templates
NOT_LOCATED, LEFT_OUT = "spans not located", "left out by the template"
WAY_OUT = (
    "use a template with {% generation %} around what the assistant writes, one of Longshore's "
    "training templates by its name, or data.loss_on=all"
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
        """Every message that has content must be in the text. Thinking may be left out.

        A template may leave messages out without a word, such as those of a role that it does not
        know. So the chat is rendered with a probe in place of each content: a word that is neither
        trimmed nor escaped nor taken for thinking, and that no other message contains by chance.
        """
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
        # Nothing is generated after the stop token. Without one, trailing white space is the end.
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
            if len(self._render(chat, chat.messages[:turn])) != start:
                continue
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
        messages, values = chat.messages, {}
        roles = [message["role"] for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
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
        except (TemplateLimitError, MemoryError):
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
    except TemplateLimitError as error:
        raise SampleError(error.reason, f"the chat template was stopped: {error}") from None


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
