# ruff: noqa: E501 - a template is hard to read in pieces
"""Templates that behave as those of real families do, rebuilt by hand, and their openings by hand.

They rewrite earlier turns, drop thinking, refuse several calls, or want arguments as text, as the
real ones do. `opening(messages, tools)` is what comes before the assistant first speaks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

# Thinking is kept behind the last words of a user only; `t` and `c` are the thought and the words.
SPLIT = """
{%- set t = m.reasoning_content or '' %}{%- set c = m.content %}
{%- if not t and '</think>' in c %}
    {%- set t = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
    {%- set c = c.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}"""
CHATML_OPENING = """
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- if system is not none or tools %}
    {{- '<|im_start|>system\\n' ~ (system or '') ~ ('\\nTools: ' ~ (tools | tojson) if tools else '') }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set rest = messages if system is none else messages[1:] %}
{%- set ns = namespace(ask=-1) %}
{%- for m in rest %}{% if m.role == 'user' %}{% set ns.ask = loop.index0 %}{% endif %}{% endfor %}
{%- for m in rest %}"""
CHATML_REST = """
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem is undefined or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
"""
JSON_CALLS = """
        {%- for call in m.tool_calls or [] %}
            {%- if c or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}"""
ELEMENTS = """
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for k, v in call.function.arguments | items %}
                {{- '<parameter=' + k + '>\\n' }}
                {{- v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""

QWEN3 = (
    CHATML_OPENING
    + """
    {%- if m.role == 'assistant' %}"""
    + SPLIT
    + """
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.ask and (loop.last or t) %}
            {{- '<think>\\n' + t.strip('\\n') + '\\n</think>\\n\\n' + c.lstrip('\\n') }}
        {%- else %}{{- c }}{%- endif %}"""
    + JSON_CALLS
    + """
        {{- '<|im_end|>\\n' }}"""
    + CHATML_REST
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
)
QWEN2_5 = (
    CHATML_OPENING
    + """
    {%- if m.role == 'assistant' %}{%- set c = m.content %}
        {{- '<|im_start|>assistant\\n' + c }}"""
    + JSON_CALLS
    + """
        {{- '<|im_end|>\\n' }}"""
    + CHATML_REST
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
NEMOTRON_3 = (
    CHATML_OPENING
    + """
    {%- if m.role == 'assistant' %}
        {%- if m.reasoning_content %}{%- set c = '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n' ~ m.content %}
        {%- elif '</think>' in m.content %}{%- set c = m.content %}
        {%- else %}{%- set c = '<think></think>' ~ m.content %}{%- endif %}
        {%- if loop.index0 < ns.ask %}{%- set c = '<think></think>' ~ c.split('</think>')[-1] %}{%- endif %}
        {{- '<|im_start|>assistant\\n' ~ c | trim }}
        {%- if m.tool_calls %}{{- '\\n' }}{% endif %}
        {%- for call in m.tool_calls or [] %}"""
    + ELEMENTS
    + """{{- '\\n' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user\\n' }}{% endif %}
        {{- '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
)
QWEN3_5 = (
    CHATML_OPENING
    + """
    {%- if m.role == 'assistant' %}"""
    + SPLIT
    + """
        {%- set c = c | trim %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.ask %}{{- '<think>\\n' + t | trim + '\\n</think>\\n\\n' }}{% endif %}
        {{- c }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if not loop.first else '\\n\\n' if c else '' }}"""
    + ELEMENTS
    + """
        {%- endfor %}
        {{- '<|im_end|>\\n' }}"""
    + CHATML_REST.replace("m.content", "m.content | trim")
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first and tools %}{{- 'Functions: ' + tools | tojson + '\\n\\n' }}{% endif %}
        {%- if m.tool_calls %}
            {%- if m.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{% endif %}
            {%- set f = m.tool_calls[0].function %}
            {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
        {%- else %}{{- m.content | trim }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# It wants arguments as text, and drops thoughts even in the last turn.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{% endfor %}
{%- set ns = namespace(tool=false) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- set ns.tool = false %}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {{- '' if ns.tool else '<｜Assistant｜>' }}{{- m.content }}
        {%- for call in m.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}
    {%- elif m.role == 'assistant' %}
        {{- m.content if ns.tool else '<｜Assistant｜>' + m.content.split('</think>')[-1] }}
        {{- '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false %}
    {%- elif m.role == 'tool' %}
        {{- '\\n' if ns.tool else '<｜tool▁outputs▁begin｜>' }}{%- set ns.tool = true %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{% endif %}"""
DEEPSEEK_R1 = DEEPSEEK.replace(
    "{{- '<｜Assistant｜>' }}{% endif %}", "{{- '<｜Assistant｜><think>\\n' }}{% endif %}"
)
DEEPSEEK_3_1 = """\
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<｜Assistant｜></think>' }}{% endif %}
        {{- m.content if m.tool_calls else m.content.split('</think>', 1)[-1] }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}{{- '<｜Assistant｜></think>' }}{% endif %}"""
# The last answer follows an open <think>, or a closed one where a user asks for no thinking.
NEMOTRON_H = """\
{%- set ns = namespace(quiet=false) %}
{%- for m in messages if m.role == 'user' and '/no_think' in m.content %}{% set ns.quiet = true %}{% endfor %}
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{{- '<SPECIAL_10>System\\n' + (system or '') }}
{{- '\\nTools: ' + tools | tojson if tools }}{{- '\\n' }}
{%- for m in (messages if system is none else messages[1:]) %}
    {%- if m.role == 'user' %}
        {{- '<SPECIAL_11>User\\n' + m.content.replace('/no_think', '').strip() + '\\n' }}
    {%- elif m.role == 'tool' %}
        {{- ', ' if loop.previtem.role == 'tool' else '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' }}
        {{- m.content }}
        {{- ']</TOOL_RESPONSE>' if loop.last or loop.nextitem.role != 'tool' }}
    {%- else %}
        {{- '<SPECIAL_11>Assistant\\n' }}
        {%- if loop.last and not m.tool_calls %}{{- '<think></think>' if ns.quiet else '<think>\\n' }}{% endif %}
        {{- (m.content if loop.last else m.content.split('</think>')[-1]).strip() }}
        {%- for call in m.tool_calls or [] %}
            {{- ', ' if not loop.first else '<TOOLCALL>[' }}
            {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
            {{- ']</TOOLCALL>' if loop.last }}
        {%- endfor %}
        {{- '\\n<SPECIAL_12>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<SPECIAL_11>Assistant\\n<think>' + ('</think>' if ns.quiet else '\\n') }}{% endif %}"""
GEMMA = """\
{{- bos_token }}
{%- set first = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- first if loop.first }}{{- m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""


def chatml_opening(messages, tools, *, trim=False):
    texts = [
        m["content"].strip() if trim and m["role"] == "user" else m["content"] for m in messages
    ]
    pieces = []
    listed = f"\nTools: {json.dumps(tools, ensure_ascii=False)}" if tools else ""
    if messages[0]["role"] == "system":
        pieces.append(f"<|im_start|>system\n{texts.pop(0)}{listed}<|im_end|>\n")
    elif tools:
        pieces.append(f"<|im_start|>system\n{listed}<|im_end|>\n")
    return "".join([*pieces, *(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)])


def trimmed_opening(messages, tools):
    return chatml_opening(messages, tools, trim=True)


def llama_opening(messages, tools):
    listed = f"Functions: {json.dumps(tools, ensure_ascii=False)}\n\n" if tools else ""
    text = "<|begin_of_text|>"
    for message in messages:
        text += f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"
        text += listed if message["role"] == "user" else ""
        text += f"{message['content'].strip()}<|eot_id|>"
    return text


def deepseek_opening(messages, tools):
    *system, user = (message["content"] for message in messages)
    return f"<|begin_of_text|>{''.join(system)}<｜User｜>{user}"


def nemotron_h_opening(messages, tools):
    *system, user = (message["content"] for message in messages)
    listed = f"\nTools: {json.dumps(tools, ensure_ascii=False)}" if tools else ""
    return f"<SPECIAL_10>System\n{''.join(system)}{listed}\n<SPECIAL_11>User\n{user.strip()}\n"


def gemma_opening(messages, tools):
    *system, user = (message["content"] for message in messages)
    first = "".join(f"{text}\n\n" for text in system)
    return f"<|begin_of_text|><start_of_turn>user\n{first}{user.strip()}<end_of_turn>\n"


@dataclass(frozen=True)
class Rebuilt:
    """A family's template; the title and the reason that the user reads."""

    template: str
    opening: Callable[..., str]
    title: str
    reason: str


REWRITES, DROPS = "rewrites earlier turns", "leaves out the thinking"
REBUILT = {
    "qwen3": Rebuilt(QWEN3, chatml_opening, "Qwen3", REWRITES),
    "qwen3_5": Rebuilt(QWEN3_5, trimmed_opening, "Qwen3.5", REWRITES),
    "nemotron_3": Rebuilt(NEMOTRON_3, chatml_opening, "Nemotron 3", REWRITES),
    "chatml": Rebuilt(QWEN2_5, chatml_opening, "ChatML", DROPS),
    "llama_3": Rebuilt(LLAMA_3, llama_opening, "Llama 3", DROPS),
    "deepseek": Rebuilt(DEEPSEEK, deepseek_opening, "DeepSeek V3 and R1", DROPS),
    "deepseek_r1": Rebuilt(DEEPSEEK_R1, deepseek_opening, "DeepSeek V3 and R1", REWRITES),
    "deepseek_3_1": Rebuilt(DEEPSEEK_3_1, deepseek_opening, "DeepSeek V3.1", DROPS),
    "nemotron_h": Rebuilt(NEMOTRON_H, nemotron_h_opening, "Nemotron-H", REWRITES),
    "gemma": Rebuilt(GEMMA, gemma_opening, "Gemma", DROPS),
}
