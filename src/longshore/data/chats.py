"""Chats: the messages of a sample in any of the usual forms, checked and brought into one form.

In: a sample with `messages`, `conversations` (ShareGPT) or `prompt` and `completion`, and perhaps
`tools` (a list, or JSON text of one). Out: a Chat as templates expect it, or a SampleError. The
ShareGPT turn

    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}

becomes a message of the assistant with one entry in `tool_calls`, whose arguments are an object. A
message of role `tool` (ShareGPT: `observation`) is a result. ShareGPT's names of roles stand for
the usual ones in `messages` too: templates know no role `human` or `gpt`, and leave its text out.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longshore.data.source import SampleError

Message = Mapping[str, Any]

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
RENAMED = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names that are no roles of chat templates."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for a template."""

    messages: tuple[Message, ...]
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """chat_template_kwargs: values for the template."""
    first: int = 0
    """Messages before this one are a prompt and never in the loss."""

    def turns(self) -> list[int]:
        """Indices of the assistant's messages that are in the loss."""
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
        system = [{"role": "system", "content": sample["system"]}] if sample.get("system") else []
        turns = _list_of_dicts(sample["conversations"], "conversations")
        messages, first = _messages([*system, *turns], form), 0
    else:
        prompt = _messages(sample["prompt"], "prompt")
        messages, first = prompt + _messages(sample["completion"], "completion"), len(prompt)
    tools, settings = _parsed(sample.get("tools")), sample.get("chat_template_kwargs") or {}
    if tools is not None and not isinstance(tools, list):
        raise SampleError("bad message", "tools must be a list, or JSON text of one")
    if not isinstance(settings, Mapping):
        raise SampleError("bad message", "chat_template_kwargs must be an object")
    return Chat(tuple(messages), tools or None, settings, first)


def has_renamed_roles(sample: Mapping[str, Any]) -> bool:
    """Whether a message has one of ShareGPT's names as its role, so that another role is used."""
    lists = (sample.get(name) for name in ("messages", "conversations", "prompt", "completion"))
    return any(
        isinstance(message, Mapping) and str(message.get("role")) in RENAMED
        for messages in lists
        if isinstance(messages, list)
        for message in messages
    )


def _messages(value: object, name: str) -> list[Message]:
    messages = []
    for i, turn in enumerate(_list_of_dicts(value, name)):
        is_sharegpt = turn.get("role") is None and turn.get("from") is not None
        message = _from_sharegpt(turn, name) if is_sharegpt else turn
        messages.append(_message(message, f"{name}[{i}]"))
    return messages


def _message(message: Message, where: str) -> Message:
    """A message as templates expect it: text content, and tool arguments as objects.

    Keys that are null are left out (Parquet adds them). Only an assistant that calls tools or
    thinks may have no content.
    """
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise SampleError("bad message", f"{where}: role is {role!r}; it must be a name")
    clean = {key: value for key, value in message.items() if value is not None}
    clean["role"] = RENAMED.get(role, role)
    if clean.get("weight", 1) not in (0, 1):
        raise SampleError("bad message", f"{where}: weight is {clean['weight']!r}, not 0 or 1")
    if calls := _parsed(clean.pop("tool_calls", None)):
        listed = _list_of_dicts(calls, f"{where}.tool_calls")
        clean["tool_calls"] = [_tool_call(call, where) for call in listed]
    does_more = "tool_calls" in clean or clean.get("reasoning_content")
    if "content" not in clean and not (clean["role"] == "assistant" and does_more):
        raise SampleError(
            "bad message",
            f"{where}: the content of role {role!r} is null or missing; leave the message out, or "
            'give "" for an empty one (only an assistant with tool_calls needs none)',
        )
    clean["content"] = _content(clean.get("content", ""), where)
    return clean


def _content(content: object, where: str) -> str:
    """Text, or that of a list with one text part; a template may print any other list raw."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        part = content[0]
        content = part.get("text") if part.get("type") == "text" else content
    if not isinstance(content, str):
        raise SampleError("bad message", f"{where}: content must be text or one text part")
    return content


def _tool_call(call: Message, where: str) -> Message:
    """A call with its arguments as an object, whether they are one or JSON text of one."""
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _tool_call(function, where)}
    if not isinstance(call.get("name"), str):
        raise SampleError("bad message", f"{where}: a tool call has no name")
    arguments = _parsed(call.get("arguments"))
    return {**call, "arguments": {} if arguments in (None, "") else arguments}


def _from_sharegpt(turn: Message, where: str) -> Message:
    name = turn["from"]
    if name == "function_call":
        value = _parsed(turn.get("value"))
        calls = _list_of_dicts(value if isinstance(value, list) else [value], "function_call")
        tool_calls = [{"type": "function", "function": call} for call in calls]
        return {"role": "assistant", "tool_calls": tool_calls}
    if not isinstance(name, str) or name not in SHAREGPT_ROLES:
        raise SampleError(
            "bad message",
            f"{where}: 'from' is {name!r}; it must be one of {', '.join(SHAREGPT_ROLES)}",
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
    """The value of JSON text; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
