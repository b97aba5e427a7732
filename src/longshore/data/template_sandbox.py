"""The sandbox of chat templates: Jinja without access to anything outside, with limits.

In: the text of a template and values. Out: the text that it writes, or one of the errors below.
A template is untrusted code, so it runs in Jinja's immutable sandbox, and

    {% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}

ends with TooSlowError after some 10 s of CPU time, `{{ 'a' * 10**10 }}` with TooLargeError at once.

The time is measured by a signal, which only the main thread of a process receives (each worker of
`prepare` renders in its main thread); other threads have the limits on memory and output only. The
limit on memory is the operating system's for the process, so it is set only while a template runs.
"""

import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import CallBlock
    from jinja2.parser import Parser
    from jinja2.runtime import Context

PAGE = os.sysconf("SC_PAGE_SIZE")
MARKS = "generation marks"  # with a space, so that no template can set this variable
MOST_BITS, MOST_CHARACTERS = 4096, 2**26


class TooSlowError(Exception):
    """A template has used up its time."""


class TooLargeError(Exception):
    """A template writes, or holds, more than it may."""


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
    """Stops the block at its limits on time and memory."""
    seconds = limits.seconds + limits.seconds_a_message * messages
    with _limited_memory(limits.memory), _limited_time(seconds):
        try:
            yield
        except MemoryError:
            raise TooLargeError(f"it needs more than {limits.memory:,} bytes of memory") from None


@contextlib.contextmanager
def _limited_time(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"it took more than {seconds:g} s of CPU time")

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
    """What a template writes, its {% generation %} blocks between `marks`.

    Raises TooLargeError where that is too much.
    """
    pieces, length = [], 0
    for piece in template.generate({**values, MARKS: marks}):
        pieces.append(piece)
        length += len(piece)
        if length > limits.characters:
            raise TooLargeError(f"it writes more than {limits.characters:,} characters")
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
    except (TooSlowError, TooLargeError) as error:
        raise ValueError(f"chat template: cannot be compiled: {error}") from None
    except (SyntaxError, RecursionError, ValueError) as error:  # of the Python that Jinja writes
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
                raise TooLargeError(f"it repeats {len(other)} elements {one} times")
            return
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if max(bits, right.bit_length()) > MOST_BITS:
            raise TooLargeError(f"it computes with integers of more than {MOST_BITS} bits")


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
