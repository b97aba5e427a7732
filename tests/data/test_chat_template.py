import datetime

import pytest
from tests.data.tiny import CHATML, LLAMA3, MARKED, REWRITES, SPECIAL, TOOLS

from longshore.data.chat_template import ChatTemplate
from longshore.data.chats import Chat
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
    with pytest.raises(
        SampleError, match=r"rewrites earlier turns.*up to the end of message 2"
    ) as caught:
        made(REWRITES).locate(chat(USER, long, USER, ASSISTANT))
    assert caught.value.reason == "spans not located"
    assert "{% generation %}" in str(caught.value)


def test_a_generation_prompt_that_no_turn_begins_with_is_refused():
    template = CHATML.replace("assistant\\n' }}", "assistant\\n<think>' }}")
    with pytest.raises(SampleError, match="up to message 2, with the generation prompt"):
        made(template).locate(chat(USER, ASSISTANT))


def test_a_header_that_is_no_prompt_is_refused():
    template = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}"""
    with pytest.raises(SampleError, match=r"ignores add_generation_prompt.*'assistant:'") as caught:
        made(template).locate(chat(USER, ASSISTANT))
    assert caught.value.reason == "spans not located"


def test_a_template_that_needs_no_header_needs_no_prompt():
    template = """\
{%- for m in messages %}
    {{- '[INST] ' + m.content + '[/INST]' if m.role == 'user' else ' ' + m.content + '<|eot_id|>' }}
{%- endfor %}"""
    given = chat(USER, ASSISTANT, USER, said("assistant", "[INST]"))
    assert spans_of(template, given) == [" Yo<|eot_id|>", " [INST]<|eot_id|>"]


def test_what_a_template_would_lose_is_refused():
    lost = (
        ({"reasoning_content": "Hm."}, CHATML, "leaves out the thinking of message 2"),
        ({"tool_calls": [{"function": {"name": "add"}}]}, CHATML, "leaves out tool_calls of"),
        ({}, CHATML.replace("message['content']", "'No.'"), "leaves out content of message 2"),
    )
    for more, template, message in lost:
        with pytest.raises(SampleError, match=message) as caught:
            made(template).locate(chat(USER, {**ASSISTANT, **more}))
        assert caught.value.reason == "left out by the template"


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
def test_marks_in_a_message_are_content(mark):
    for template in (MARKED, CHATML):
        assert spans_of(template, chat(said("user", mark), ASSISTANT)) == ["Yo<|im_end|>"]
        assert spans_of(template, chat(USER, said("assistant", mark))) == [f"{mark}<|im_end|>"]


def test_a_message_that_uses_up_all_marks_is_refused():
    every = said("user", "".join(map(chr, range(0xFDD0, 0xFDF0))))
    with pytest.raises(SampleError, match="U\\+FDD0 to U\\+FDEF") as caught:
        made(MARKED).locate(chat(every, ASSISTANT))
    assert caught.value.reason == "spans not located"


def test_marks_must_say_whose_they_are():
    halves = MARKED.replace(
        "{{- message.content + '<|im_end|>' }}{%- endgeneration %}",
        "{{- message.content }}{% endgeneration %}{% generation %}{{- '<|im_end|>' }}"
        "{% endgeneration %}",
    )
    assert spans_of(halves, chat(USER, ASSISTANT)) == ["Yo", "<|im_end|>"]
    with pytest.raises(
        SampleError, match=r"some of the 2 assistant messages .* wrote 4 {% generation %} blocks"
    ):
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


def test_a_template_that_cannot_be_compiled():
    """Jinja accepts the last two, and Python refuses the code that it makes of them."""
    loops = "{% for i in messages %}" * 60 + "{% endfor %}" * 60
    for text, why in (
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "maximum recursion depth"),
        (loops, "too many statically nested blocks"),
        ("{% break %}", "'break' outside loop"),
    ):
        with pytest.raises(ValueError, match=f"chat template: cannot be compiled: {why}") as caught:
            made(text)
        assert "\n" not in str(caught.value)


KNOWN = """\
{%- for m in messages %}
    {%- if m.role in ('user', 'assistant') or (m.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}{{- '<|im_start|>tool\\n' + m.content | tojson + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@pytest.mark.parametrize(
    ("number", "message"),
    [(1, said("usr", "Yo")), (3, said("system", "Yo")), (2, said("ai", "Yo", weight=0))],
)
def test_a_message_that_the_template_drops_is_refused_by_its_role(number, message):
    """Its words occur elsewhere in the text, so looking for them is not enough."""
    given = [said("user", "Say Yo"), ASSISTANT, USER, ASSISTANT]
    given.insert(number - 1, message)
    for render in (made(KNOWN).locate, made(KNOWN).complete_text):
        with pytest.raises(
            SampleError, match=rf"leaves out message {number}, of role '{message['role']}'"
        ) as caught:
            render(chat(*given))
        assert caught.value.reason == "left out by the template"


def test_contents_that_a_template_changes_are_not_lost():
    """Trimmed, escaped and empty ones, and thinking of earlier turns, which is dropped."""
    thinks = said("assistant", "<think>hm</think>\n", weight=0)
    given = chat(said("system", " \n"), said("user", " Hi\n"), thinks, said("tool", 'a "b"\n'))
    text, spans = made(KNOWN).locate(chat(*given.messages, ASSISTANT))
    assert '"a \\"b\\"\\n"' in text
    assert len(spans) == 1
    dropped = chat(USER, said("assistant", "<think>hm</think>Yo"), USER, ASSISTANT)
    assert "hm" not in made(REWRITES).complete_text(dropped)
    picky = KNOWN + "{% if messages[0].content != 'Hi' %}{{ raise_exception('Hi!') }}{% endif %}"
    assert spans_of(picky, chat(USER, ASSISTANT)) == ["Yo<|im_end|>"]
