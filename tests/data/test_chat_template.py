import datetime

import pytest
from tests.data.tiny import CHATML, LLAMA3, MARKED, REWRITES, SPECIAL, TOOLS

from longshore.data.chat_template import Chat, ChatTemplate, chat_from
from longshore.data.source import SampleError

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Yo"}


def made(text, **settings):
    return ChatTemplate(
        text, special_tokens={"bos_token": "<|begin_of_text|>"}, ends=SPECIAL, **settings
    )


def chat(*messages, **more):
    return Chat(tuple(messages), **more)


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def spans_of(text, given):
    """The located spans as text."""
    rendered, spans = made(text).locate(given)
    return [rendered[start:stop] for start, stop in spans]


def test_the_example_of_the_module():
    plain = CHATML.replace("messages[0]['role'] != 'system'", "false")
    text, spans = made(plain).locate(chat(USER, ASSISTANT))
    assert len(text) == 65
    assert spans == [(52, 64)]
    assert text[52:64] == "Yo<|im_end|>"


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (TOOLS, "<|im_end|>"), (MARKED, "<|im_end|>")],
)
def test_every_assistant_turn_with_its_end(template, end):
    given = chat(
        said("system", "Short."), USER, said("assistant", "One."), USER, said("assistant", "Two.")
    )
    assert spans_of(template, given) == [f"One.{end}", f"Two.{end}"]
    assert spans_of(template, chat(USER)) == []
    assert spans_of(template, chat(USER, ASSISTANT, USER)) == [f"Yo{end}"]


def test_llama_trims_contents_and_the_span_follows():
    assert spans_of(LLAMA3, chat(USER, said("assistant", "  Yo \n"))) == ["Yo<|eot_id|>"]


def test_tool_calls_are_written_by_the_assistant_and_results_are_not():
    calls = [{"function": {"name": "add", "arguments": {"a": 1, "b": "é<"}}}] * 2
    given = chat(
        USER,
        said("assistant", "", tool_calls=calls),
        said("tool", "3"),
        said("tool", "4"),
        said("assistant", "Seven."),
    )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é<"}}\n</tool_call>'
    assert spans_of(TOOLS, given) == [f"{call}\n{call}<|im_end|>", "Seven.<|im_end|>"]


def test_two_assistant_turns_in_a_row():
    assert spans_of(CHATML, chat(USER, ASSISTANT, ASSISTANT)) == ["Yo<|im_end|>"] * 2


def test_white_space_stays_where_no_special_token_ends_a_turn():
    template = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
    assert spans_of(template, chat(USER, ASSISTANT)) == ["Yo\n\n"]


def test_turns_outside_the_loss():
    given = chat(USER, ASSISTANT, USER, said("assistant", "No"), USER, said("assistant", "Go"))
    late = Chat(given.messages, first=2)
    assert spans_of(CHATML, late) == ["No<|im_end|>", "Go<|im_end|>"]
    assert spans_of(MARKED, late) == ["No<|im_end|>", "Go<|im_end|>"]
    weighed = chat(USER, said("assistant", "No", weight=0), USER, said("assistant", "Go", weight=1))
    assert spans_of(CHATML, weighed) == ["Go<|im_end|>"]
    assert spans_of(MARKED, weighed) == ["Go<|im_end|>"]


def test_a_template_that_rewrites_turns_is_refused():
    long = said("assistant", "<think>hm</think>Yo")
    assert spans_of(REWRITES, chat(USER, long)) == ["<think>hm</think>Yo<|im_end|>"]
    with pytest.raises(SampleError, match=r"up to the end of message 2.*rewrites turns") as caught:
        made(REWRITES).locate(chat(USER, long, USER, ASSISTANT))
    assert caught.value.reason == "spans not located"
    assert "{% generation %}" in str(caught.value)


def test_a_generation_prompt_that_no_turn_begins_with_is_refused():
    template = CHATML.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    with pytest.raises(SampleError, match="up to message 2, with the generation prompt"):
        made(template).locate(chat(USER, ASSISTANT))


def test_a_turn_without_text_is_refused():
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(SampleError, match=r"message 2 \(assistant\) adds no text"):
        made(template).locate(chat(USER, ASSISTANT))


def test_an_assistant_that_begins_is_refused_if_the_template_cannot_render_nothing():
    with pytest.raises(SampleError, match=r"failed on messages\[:0\]") as caught:
        made(CHATML).locate(chat(ASSISTANT, USER))
    assert caught.value.reason == "template failed"
    assert spans_of(TOOLS, chat(ASSISTANT, USER)) == ["Yo<|im_end|>"]


@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1", "\ufdd0x\ufdd1"])
def test_marks_in_a_message_are_refused_not_taken_for_a_span(mark):
    for message in (said("user", mark), said("assistant", mark)):
        with pytest.raises(SampleError) as caught:
            made(MARKED).locate(chat(message, ASSISTANT))
        assert caught.value.reason == "spans not located"
    assert spans_of(CHATML, chat(said("user", mark), ASSISTANT)) == ["Yo<|im_end|>"]


def test_marks_must_say_whose_they_are():
    halves = MARKED.replace(
        "{{- message.content + '<|im_end|>' }}{%- endgeneration %}",
        "{{- message.content }}{% endgeneration %}{% generation %}{{- '<|im_end|>' }}"
        "{% endgeneration %}",
    )
    assert spans_of(halves, chat(USER, ASSISTANT)) == ["Yo", "<|im_end|>"]
    with pytest.raises(SampleError, match=r"some of the 2 assistant messages .* marks 4 spans"):
        made(halves).locate(Chat((USER, ASSISTANT, USER, ASSISTANT), first=2))


def test_what_hugging_face_templates_use():
    template = """\
{{- strftime_now('%d %b %Y') }}
{%- for m in messages %}
    {%- if m.content == 'stop' %}{% break %}{% endif %}
    {{- {'b': '<é>', 'a': none} | tojson }}
    {{- [1] | tojson(indent=2) }}
{%- endfor %}
    {%- if documents is none and tools is none and flag %}!{% endif %}
"""
    given = Chat((USER, said("user", "stop"), USER), settings={"flag": True})
    date = datetime.date(2031, 2, 3)
    expected = '03 Feb 2031{"b": "<é>", "a": null}[\n  1\n]!'
    assert made(template, date=date).render(given) == expected


def test_templates_run_in_a_sandbox():
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(SampleError, match="the chat template failed") as caught:
            made(attack).render(chat(USER))
        assert caught.value.reason == "template failed"


def test_a_template_may_refuse_a_chat():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SampleError, match="the chat template failed: roles must alternate"):
        made(template).render(chat(USER))


def test_a_template_that_is_no_jinja():
    with pytest.raises(ValueError, match="chat template: line 2 is not valid Jinja"):
        made("\n{% for %}")


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
    ],
)
def test_bad_messages_are_named(messages, reason, message):
    with pytest.raises(SampleError, match=message) as caught:
        chat_from({"messages": messages}, "messages")
    assert caught.value.reason == reason


def test_bad_chats_are_named():
    with pytest.raises(SampleError, match="'from' is 'alien'; it must be one of system, human"):
        chat_from({"conversations": [{"from": "alien", "value": ""}]}, "conversations")
    with pytest.raises(SampleError, match=r"function_call\[0\] is not an object"):
        chat_from({"conversations": [{"from": "function_call", "value": "f"}]}, "conversations")
    with pytest.raises(SampleError, match="tools must be a list"):
        chat_from({"messages": [USER], "tools": "add"}, "messages")
    with pytest.raises(SampleError, match="chat_template_kwargs must be an object"):
        chat_from({"messages": [USER], "chat_template_kwargs": [1]}, "messages")
