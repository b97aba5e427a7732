"""Seeded chats with all that real ones have, and what families of models make of them, by hand.

`chats(seed, count)` gives samples. An entry of ORACLES turns messages, from the first of the
assistant on, into pieces (text, whether in the loss); no template is involved.
"""

import json
import random

PLAIN_TEXTS = (
    "Hello there.",
    "Sí, ¿qué tal? 你好 🙂 naïve ﬁ",
    "two\n\nparagraphs",
    '{"json": [1, 2.5, null], "q": "\\"x\\""}',
    "  spaces at both ends \n",
    "\n\nnew lines first",
    "a\ttab and a \\n that is none",
    "{{ messages }} {% generation %} {# no #}",
)
MARKER_TEXTS = (
    "<|im_end|>\n<|im_start|>assistant\nI am you.",
    "<think> is no thought here",
    "<tool_call>\n{}\n</tool_call> and <tool_response>",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "<｜Assistant｜>x<｜end▁of▁sentence｜>",
    "assistant: no\nUser: yes",
    "<end_of_turn>\n<start_of_turn>model\n <SPECIAL_12>",
)
TEXTS = PLAIN_TEXTS + MARKER_TEXTS
ARGUMENTS = (
    {},
    {"city": "Zürich", "days": 3},
    {"path": "a/b.txt", "deep": {"list": [1, "2", None]}, "sure": True},
    {"text": "line\nline <|im_end|> é"},
)


def tool(name):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": name, "description": "It does.", "parameters": parameters}
    return {"type": "function", "function": function}


def chats(seed, count):
    """Samples of at least two turns of a user; every chat calls tools or thinks."""
    dice = random.Random(seed)
    return [_chat(dice) for _ in range(count)]


def _chat(dice):
    messages = [{"role": "system", "content": dice.choice(TEXTS)}] if dice.random() < 0.5 else []
    for turn in range(dice.randint(2, 4)):
        messages.append({"role": "user", "content": f"{turn} {dice.choice(TEXTS)}"})
        for _ in range(dice.choice((0, 1, 1, 2))):
            messages += _calls_and_results(dice)
        messages.append(
            _thinking(dice, {"role": "assistant", "content": dice.choice((*TEXTS, ""))})
        )
    sample = {"messages": messages}
    if dice.random() < 0.7:
        tools = [tool("look_up"), tool("set_alarm")]
        sample["tools"] = dice.choice((tools, json.dumps(tools)))
    return sample


def _calls_and_results(dice):
    calls = []
    for number in range(dice.randint(1, 3)):
        arguments = dice.choice(ARGUMENTS)
        given = dice.choice((arguments, json.dumps(arguments, ensure_ascii=False)))
        function = {"name": dice.choice(("look_up", "set_alarm")), "arguments": given}
        calls.append({"id": f"call{number:05}", "type": "function", "function": function})
    content = dice.choice((None, "", "I look.", *TEXTS))
    yield _thinking(dice, {"role": "assistant", "content": content, "tool_calls": calls})
    for call in calls:
        result = dice.choice((*TEXTS, "", "42"))
        yield {"role": "tool", "tool_call_id": call["id"], "content": result}


def _thinking(dice, message):
    """Gives a message a thought in its own key, in its content, or none."""
    thought = dice.choice(("I think.", "First…\nthen 思考.", "a <tool_call> or not"))
    way = dice.random()
    if way < 0.4:
        return {**message, "reasoning_content": thought}
    if way < 0.55:
        return {**message, "content": f"<think>\n{thought}\n</think>\n\n{message['content'] or ''}"}
    return message


def parts(message):
    """An assistant's thought, its words, and its calls as (name, arguments)."""
    thought, content = message.get("reasoning_content"), message["content"] or ""
    if not thought and content.startswith("<think>\n") and "\n</think>\n\n" in content:
        thought, content = content[len("<think>\n") :].split("\n</think>\n\n", 1)
        content = content.lstrip("\n")
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        calls.append((call["function"]["name"], arguments))
    return thought or "", content, calls


def dumped(arguments):
    return json.dumps(arguments, ensure_ascii=False)


def json_calls(calls):
    return [
        f'<tool_call>\n{{"name": "{n}", "arguments": {dumped(a)}}}\n</tool_call>' for n, a in calls
    ]


def element_calls(calls):
    texts = []
    for name, arguments in calls:
        inner = ""
        for key, value in arguments.items():
            shown = dumped(value) if isinstance(value, dict | list) else str(value)
            inner += f"<parameter={key}>\n{shown}\n</parameter>\n"
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return texts


def runs(messages):
    """Messages, with neighbouring results in one list."""
    grouped = []
    for message in messages:
        if message["role"] == "tool" and grouped and isinstance(grouped[-1], list):
            grouped[-1].append(message["content"])
        else:
            grouped.append([message["content"]] if message["role"] == "tool" else message)
    return grouped


def untaken(message):
    """The same for a family without thinking: what stands in the content stays there."""
    _, _, calls = parts(message)
    thought = message.get("reasoning_content")
    return f"<think>\n{thought}\n</think>\n\n" if thought else "", message["content"] or "", calls


def chatml(messages):
    for item in runs(messages):
        if isinstance(item, list):
            inner = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in item)
            yield f"<|im_start|>user{inner}<|im_end|>\n", False
        elif item["role"] == "assistant":
            thought, content, calls = untaken(item)
            yield "<|im_start|>assistant\n", False
            said = "\n".join(([content] if content else []) + json_calls(calls))
            yield f"{thought}{said}<|im_end|>", True
            yield "\n", False
        else:
            yield f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n", False


def qwen3(messages):
    for item in runs(messages):
        if isinstance(item, dict) and item["role"] == "assistant":
            thought, content, calls = parts(item)
            content = content.lstrip("\n")
            yield "<|im_start|>assistant\n", False
            said = "\n".join(([content] if content else []) + json_calls(calls))
            yield f"<think>\n{thought}\n</think>\n\n{said}<|im_end|>", True
            yield "\n", False
        else:
            yield from chatml([item] if isinstance(item, dict) else results(item))


def results(texts):
    return [{"role": "tool", "content": text} for text in texts]


def qwen3_5(messages, *, silent=False):
    for item in runs(messages):
        if isinstance(item, list):
            yield from chatml(results([text.strip() for text in item]))
        elif item["role"] == "assistant":
            thought, content, calls = parts(item)
            content = content.strip()
            yield "<|im_start|>assistant\n<think>\n", False
            yield f"{thought}\n</think>\n\n", not silent or bool(thought)
            said = content + ("\n\n" if content and calls else "") + "\n".join(element_calls(calls))
            yield f"{said}<|im_end|>", True
            yield "\n", False
        else:
            yield from chatml([{**item, "content": item["content"].strip()}])


def nemotron_3(messages, *, gap="\n"):
    for item in runs(messages):
        if isinstance(item, list):
            inner = "".join(f"<tool_response>\n{text}\n</tool_response>\n" for text in item)
            yield f"<|im_start|>user\n{inner}<|im_end|>\n", False
        elif item["role"] == "assistant":
            thought, content, calls = parts(item)
            after = "".join(f"{call}\n" for call in element_calls(calls))
            after = f"\n{after}" if calls else ""
            if thought:
                yield "<|im_start|>assistant\n<think>\n", False
                said = f"{thought}{gap}</think>{gap}{content}".rstrip()
            else:
                yield "<|im_start|>assistant\n<think></think>", False
                said = content.rstrip()
            yield f"{said}{after}<|im_end|>", True
            yield "\n", False
        else:
            yield from chatml([item])


def llama_3(messages):
    for message in messages:
        name = {"tool": "ipython"}.get(message["role"], message["role"])
        yield f"<|start_header_id|>{name}<|end_header_id|>\n\n", False
        if message["role"] == "tool":
            yield f"{dumped(message['content'])}<|eot_id|>", False
        elif message["role"] == "assistant":
            thought, content, calls = untaken(message)
            joined = "; ".join(f'{{"name": "{n}", "parameters": {dumped(a)}}}' for n, a in calls)
            content = content.strip()
            between = "\n\n" if content and calls else ""
            yield f"{thought}{content}{between}{joined}<|eot_id|>", True
        else:
            yield f"{message['content'].strip()}<|eot_id|>", False


def deepseek(messages, *, think_prompt=False, gap="\n"):
    continued = False
    for item in runs(messages):
        if isinstance(item, list):
            inner = gap.join(f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>" for text in item)
            yield f"<｜tool▁outputs▁begin｜>{inner}<｜tool▁outputs▁end｜>", False
        elif item["role"] == "assistant":
            thought, content, calls = parts(item)
            yield "" if continued else "<｜Assistant｜>", False
            if thought:
                yield "<think>\n", not think_prompt
                content = f"{thought}\n</think>\n\n{content.lstrip(chr(10))}"
            fenced = [
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumped(a)}\n```<｜tool▁call▁end｜>"
                for n, a in calls
            ]
            after = "\n".join(fenced)
            after = f"<｜tool▁calls▁begin｜>{after}<｜tool▁calls▁end｜>" if calls else ""
            yield f"{content}{after}<｜end▁of▁sentence｜>", True
        else:
            yield f"<｜User｜>{item['content']}", False
        continued = isinstance(item, list)


def deepseek_r1(messages):
    return deepseek(messages, think_prompt=True)


def deepseek_3_1(messages, *, closed="</think>"):
    continued = False
    for message in messages:
        if message["role"] == "tool":
            yield f"<｜tool▁output▁begin｜>{message['content']}<｜tool▁output▁end｜>", False
        elif message["role"] == "assistant":
            thought, content, calls = parts(message)
            if not continued:
                yield "<｜Assistant｜>" + ("<think>" if thought else closed), False
            elif thought:
                yield "<think>", True
            after = "".join(
                f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumped(a)}<｜tool▁call▁end｜>"
                for n, a in calls
            )
            after = f"<｜tool▁calls▁begin｜>{after}<｜tool▁calls▁end｜>" if calls else ""
            said = f"{thought}</think>{content}" if thought else content
            yield f"{said}{after}<｜end▁of▁sentence｜>", True
        else:
            yield f"<｜User｜>{message['content']}", False
        continued = message["role"] == "tool"


def nemotron_h(messages, *, gap="\n", result_gap="", thinks="\n"):
    for item in runs(messages):
        if isinstance(item, list):
            inner = ", ".join(item)
            yield f"<SPECIAL_11>User\n<TOOL_RESPONSE>[{inner}]</TOOL_RESPONSE>{result_gap}", False
        elif item["role"] == "assistant":
            thought, content, calls = parts(item)
            content = content.strip()
            yield "<SPECIAL_11>Assistant\n<think>" + (thinks if thought else "</think>"), False
            said = f"{thought}\n</think>\n\n{content}" if thought else content
            listed = ", ".join(f'{{"name": "{n}", "arguments": {dumped(a)}}}' for n, a in calls)
            after = ("\n\n" if content else "") + f"<TOOLCALL>[{listed}]</TOOLCALL>"
            yield f"{said}{after if calls else ''}\n<SPECIAL_12>", True
            yield gap, False
        else:
            yield f"<SPECIAL_11>User\n{item['content'].strip()}\n", False


def gemma(messages):
    for item in runs(messages):
        if isinstance(item, list):
            inner = "".join(f"\n<tool_response>\n{text.strip()}\n</tool_response>" for text in item)
            yield f"<start_of_turn>user{inner}<end_of_turn>\n", False
        elif item["role"] == "assistant":
            thought, content, calls = untaken(item)
            content = content.strip()
            yield "<start_of_turn>model\n", False
            said = "\n".join(([content] if content else []) + json_calls(calls))
            yield f"{thought}{said}<end_of_turn>", True
            yield "\n", False
        else:
            yield f"<start_of_turn>user\n{item['content'].strip()}<end_of_turn>\n", False


ORACLES = {
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "nemotron_3": nemotron_3,
    "chatml": chatml,
    "llama_3": llama_3,
    "deepseek": deepseek,
    "deepseek_r1": deepseek_r1,
    "deepseek_3_1": deepseek_3_1,
    "nemotron_h": nemotron_h,
    "gemma": gemma,
}
