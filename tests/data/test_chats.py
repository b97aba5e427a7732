import json

import pytest

from longshore.data.chats import chat_from, has_renamed_roles
from longshore.data.source import SampleError

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Yo"}


@pytest.mark.parametrize(
    ("sample", "form", "roles", "first"),
    [
        ({"messages": [USER, ASSISTANT]}, "messages", "user assistant", 0),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
            "conversations",
            "user assistant",
            0,
        ),
        (
            {"conversations": [{"from": "user", "value": "Hi"}], "system": "Be kind."},
            "conversations",
            "system user",
            0,
        ),
        ({"prompt": [USER], "completion": [ASSISTANT, USER]}, "prompt", "user assistant user", 1),
    ],
)
def test_forms_of_a_chat(sample, form, roles, first):
    got = chat_from(sample, form)
    assert " ".join(message["role"] for message in got.messages) == roles
    assert got.first == first


def test_sharegpt_calls_and_results():
    turns = [
        {"from": "human", "value": "Add."},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "1"},
    ]
    got = chat_from({"conversations": turns, "tools": '[{"name": "add"}]'}, "conversations")
    assert got.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert got.messages[2] == {"role": "tool", "content": "1"}
    assert got.tools == [{"name": "add"}]


def test_messages_as_templates_expect_them():
    message = {
        "role": "assistant",
        "content": None,
        "name": None,
        "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}], "tool_calls": []}
    first, second = chat_from({"messages": [parts, message]}, "messages").messages
    assert first == USER
    assert second == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    }


@pytest.mark.parametrize(
    ("messages", "reason", "message"),
    [
        ([], "no messages", "messages must be a list with at least one"),
        (None, "no messages", "messages must be a list"),
        ("Hi", "no messages", "messages must be a list"),
        (["Hi"], "bad message", r"messages\[0\] is not an object"),
        ([{"content": "Hi"}], "bad message", r"messages\[0\]: role is None"),
        ([USER, {"role": "user", "content": 5}], "bad message", r"messages\[1\]: content must be"),
        ([{**USER, "content": [{"type": "image"}]}], "bad message", "content must be text"),
        ([{**USER, "weight": 0.5}], "bad message", "weight is 0.5, not 0 or 1"),
        ([{**USER, "tool_calls": ["f"]}], "bad message", r"tool_calls\[0\] is not an object"),
        ([{**USER, "tool_calls": [{"function": {}}]}], "bad message", "a tool call has no name"),
        ([{**USER, "content": None}], "bad message", r"\[0\]: the content of role 'user' is null"),
        ([{"role": "user"}], "bad message", "the content of role 'user' is null or missing"),
        ([{"role": "tool", "content": None}], "bad message", "of role 'tool' is null"),
        ([{"role": "system"}], "bad message", "of role 'system' is null"),
        ([USER, {"role": "assistant", "content": None}], "bad message", "of role 'assistant' is"),
        ([{**ASSISTANT, "content": None, "tool_calls": []}], "bad message", "'assistant' is null"),
    ],
)
def test_bad_messages_are_named(messages, reason, message):
    with pytest.raises(SampleError, match=message) as caught:
        chat_from({"messages": messages}, "messages")
    assert caught.value.reason == reason


def test_an_assistant_that_calls_or_thinks_needs_no_content():
    call = {"function": {"name": "add", "arguments": None}}
    for given in ({"tool_calls": [call]}, {"tool_calls": [call], "content": None}):
        message = chat_from({"messages": [{"role": "assistant", **given}]}, "messages").messages[0]
        assert message["content"] == ""
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    thinks = {"role": "assistant", "reasoning_content": "Hm."}
    assert chat_from({"messages": [thinks]}, "messages").messages[0]["content"] == ""
    empty = [{"role": "user", "content": ""}, {"role": "tool", "content": ""}]
    assert list(chat_from({"messages": empty}, "messages").messages) == empty


def test_tools_and_calls_may_be_json_text():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    message = {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)}
    tools = [{"type": "function", "function": {"name": "add"}}]
    for given in (tools, json.dumps(tools)):
        got = chat_from({"messages": [USER, message], "tools": given}, "messages")
        assert got.messages[1]["tool_calls"] == calls
        assert got.tools == tools


def test_bad_chats_are_named():
    with pytest.raises(SampleError, match="'from' is 'alien'; it must be one of system, human"):
        chat_from({"conversations": [{"from": "alien", "value": ""}]}, "conversations")
    with pytest.raises(SampleError, match=r"function_call\[0\] is not an object"):
        chat_from({"conversations": [{"from": "function_call", "value": "f"}]}, "conversations")
    with pytest.raises(SampleError, match="tools must be a list"):
        chat_from({"messages": [USER], "tools": "add"}, "messages")
    with pytest.raises(SampleError, match="chat_template_kwargs must be an object"):
        chat_from({"messages": [USER], "chat_template_kwargs": [1]}, "messages")


def test_sharegpt_names_of_roles_in_any_form():
    named = [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Yo"}]
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
    for messages in (named, turns, [USER, ASSISTANT]):
        for form in ("messages", "conversations"):
            assert chat_from({form: messages}, form).messages == (USER, ASSISTANT)
    assert has_renamed_roles({"messages": named})
    assert has_renamed_roles({"prompt": [USER], "completion": named[1:]})
    assert not has_renamed_roles({"messages": [USER, ASSISTANT], "prompt": "Hi"})
    assert not has_renamed_roles({"conversations": turns})
