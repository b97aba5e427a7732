"""Tiny tokenizer folders and chat templates, made on the spot."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

PIECE = r"\w+|\s|[^\w\s]"

# Qwen's, in short: a system message of its own, and a new line behind every turn.
CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Headers as Llama 3 writes them: BOS from the template, contents trimmed, nothing behind a turn.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Calls between <tool_call> marks, results as a user's turn that several of them share.
TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# The same turns as CHATML, with the assistant's part marked.
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Drops what the assistant thought in all turns but the last, as reasoning models' templates do.
REWRITES = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {{- message.content if loop.last else message.content.split('</think>')[-1] }}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>")
SPECIAL += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def word_tokenizer(folder: Path, words: str, *, template: str = "", **config: object) -> Path:
    """A token a word, white space character or sign of `words`, and the special ones."""
    pieces = dict.fromkeys(["<unk>", *re.findall(PIECE, words)])
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    backend.add_tokens([AddedToken(text, special=False) for text in PLAIN])
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return save(backend, folder, template=template, **config)


def byte_tokenizer(
    folder: Path,
    *,
    merges: tuple[tuple[str, str], ...] = (),
    bos: bool = False,
    more: Sequence[str] = (),
    **config: object,
) -> Path:
    """A token a byte but for the merges, with the offsets trimmed of white space."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIAL, *more)])
    backend.decoder = decoders.ByteLevel()
    trimmed = processors.ByteLevel(trim_offsets=True)
    token = "<|begin_of_text|>"
    before = processors.TemplateProcessing(
        single=f"{token} $A" if bos else "$A",
        special_tokens=[(token, backend.token_to_id(token))],
    )
    backend.post_processor = processors.Sequence([trimmed, before])
    return save(backend, folder, **config)


def save(backend: Tokenizer, folder: Path, *, template: object = "", **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.enable_truncation(4)  # a trap that some folders hold; no sample may be cut by it
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}}
    settings |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
    return folder
