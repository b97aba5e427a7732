import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.tiny import (
    CHATML,
    LLAMA3,
    MARKED,
    REWRITES,
    TOOLS,
    byte_tokenizer,
    word_tokenizer,
)

from longshore.data.source import Field, SampleError
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer

WORDS = 'system user assistant Be kind . Hi Yo One Two name add arguments a b 1 2 : , { } " [ ] \n'


def tokenizer(folder, template, *, choice="auto", **rules):
    made = Tokenizer(word_tokenizer(folder, WORDS, template=template), template=choice)
    return SampleTokenizer(made, Rules(**rules))


def shown(made, sample):
    """Each token's text, and whether it is a target: what the tests below write by hand."""
    sequence = made(sample, 0)
    backend = made.tokenizer._backend
    texts = [backend.decode([i], skip_special_tokens=False) for i in sequence.tokens.tolist()]
    return list(zip(texts, sequence.loss_mask.astype(int).tolist(), strict=True))


def expected(text):
    """`user.↵. Yo! <|im_end|>!` by hand: a word and ! where it is a target, . where it is not."""
    unescaped = {"↵": "\n", "␣": " "}
    return [(unescaped.get(w[:-1], w[:-1]), int(w[-1] == "!")) for w in text.split()]


CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "One"},
    {"role": "user", "content": "Hi Hi"},
    {"role": "assistant", "content": "Two\n"},
]


def test_chatml_token_by_token(tmp_path):
    assert shown(tokenizer(tmp_path, CHATML), {"messages": CHAT}) == expected("""
        <|im_start|>. system. ↵. Be. ␣. kind. .. <|im_end|>. ↵.
        <|im_start|>. user. ↵. Hi. <|im_end|>. ↵.
        <|im_start|>. assistant. ↵. One! <|im_end|>! ↵.
        <|im_start|>. user. ↵. Hi. ␣. Hi. <|im_end|>. ↵.
        <|im_start|>. assistant. ↵. Two! ↵! <|im_end|>! ↵.""")


def test_llama3_token_by_token(tmp_path):
    messages = [{"role": "system", "content": "Be kind."}, *CHAT]
    assert shown(tokenizer(tmp_path, LLAMA3), {"messages": messages}) == expected("""
        <|begin_of_text|>.
        <|start_header_id|>. system. <|end_header_id|>. ↵. ↵. Be. ␣. kind. .. <|eot_id|>.
        <|start_header_id|>. user. <|end_header_id|>. ↵. ↵. Hi. <|eot_id|>.
        <|start_header_id|>. assistant. <|end_header_id|>. ↵. ↵. One! <|eot_id|>!
        <|start_header_id|>. user. <|end_header_id|>. ↵. ↵. Hi. ␣. Hi. <|eot_id|>.
        <|start_header_id|>. assistant. <|end_header_id|>. ↵. ↵. Two! <|eot_id|>!""")


def test_tools_token_by_token(tmp_path):
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ]
    sample = {"messages": messages, "tools": [{"name": "add"}]}
    assert shown(tokenizer(tmp_path, TOOLS), sample) == expected("""
        <|im_start|>. system. ↵. {. ". name. ". :. ␣. ". add. ". }. ↵. <|im_end|>. ↵.
        <|im_start|>. user. ↵. Hi. <|im_end|>. ↵.
        <|im_start|>. assistant. ↵. <tool_call>! ↵!
            {! "! name! "! :! ␣! "! add! "! ,! ␣! "! arguments! "! :! ␣! {! "! a! "! :! ␣! 1! }! }!
            ↵! </tool_call>! <|im_end|>! ↵.
        <|im_start|>. user. ↵. <tool_response>. ↵. 1. ↵. </tool_response>.
            ↵. <tool_response>. ↵. 2. ↵. </tool_response>. <|im_end|>. ↵.
        <|im_start|>. assistant. ↵. Two! .! <|im_end|>! ↵.""")


def test_generation_marks_token_by_token(tmp_path):
    assert shown(tokenizer(tmp_path, MARKED), {"messages": CHAT[:2]}) == expected("""
        <|im_start|>. user. ↵. Hi. <|im_end|>. ↵.
        <|im_start|>. assistant. ↵. One! <|im_end|>! ↵.""")


def test_prompt_and_completion_as_messages(tmp_path):
    sample = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    for template in (CHATML.replace("messages[0]['role'] != 'system'", "false"), MARKED):
        assert shown(tokenizer(tmp_path, template), sample) == expected("""
            <|im_start|>. user. ↵. Hi. <|im_end|>. ↵.
            <|im_start|>. assistant. ↵. One. <|im_end|>. ↵.
            <|im_start|>. user. ↵. Hi. ␣. Hi. <|im_end|>. ↵.
            <|im_start|>. assistant. ↵. Two! ↵! <|im_end|>! ↵.""")


def test_prompt_and_completion_as_text(tmp_path):
    made = tokenizer(tmp_path, "")
    assert shown(made, {"prompt": "Hi ", "completion": "Yo."}) == expected(
        "Hi. ␣. Yo! .! <|end_of_text|>!"
    )
    with pytest.raises(SampleError, match="its completion is empty"):
        made({"prompt": "Hi", "completion": ""}, 0)


def test_loss_on_all(tmp_path):
    everything = tokenizer(tmp_path, REWRITES, loss_on="all")
    assert shown(everything, {"messages": CHAT[:2]}) == expected("""
        <|im_start|>! user! ↵! Hi! <|im_end|>! ↵!
        <|im_start|>! assistant! ↵! One! <|im_end|>! ↵!""")
    assert shown(everything, {"prompt": "Hi ", "completion": "Yo."}) == expected(
        "Hi! ␣! Yo! .! <|end_of_text|>!"
    )
    assert everything({"messages": CHAT[:1]}, 0).loss_tokens == 5


def test_plain_text_begins_and_ends_as_the_tokenizer_wants(tmp_path):
    folder = byte_tokenizer(tmp_path, bos=True)
    made = SampleTokenizer(Tokenizer(folder), Rules())
    assert shown(made, {"text": "a"}) == expected("<|begin_of_text|>. a! <|end_of_text|>!")
    assert shown(made, {"text": "a<|end_of_text|>"}) == expected(
        "<|begin_of_text|>. a! <|end_of_text|>!"
    )
    with pytest.raises(SampleError, match="it has no tokens") as caught:
        made({"text": ""}, 0)
    assert caught.value.reason == "empty"


def test_bos_is_not_doubled(tmp_path):
    made = SampleTokenizer(Tokenizer(byte_tokenizer(tmp_path, bos=True, template=LLAMA3)), Rules())
    tokens = made({"messages": CHAT}, 0).tokens.tolist()
    assert tokens.count(tokens[0]) == 1


def test_a_token_counts_by_its_first_character(tmp_path):
    """The span is 2…4 of `ab cd`: with tokens `a`, `b c`, `d` only the last begins in it."""
    merges = (("b", "Ġ"), ("bĠ", "c"), ("d", "e"))
    made = Tokenizer(byte_tokenizer(tmp_path, merges=merges))
    ids, mask = made.encode_spans("ab cde", [(3, 5)])
    assert len(ids) == 3
    assert mask.tolist() == [False, False, True]
    assert made.encode_spans("ab cde", [(1, 4)])[1].tolist() == [False, True, False]
    assert made.encode_spans("ab cde", [(2, 4)])[1].tolist() == [False, False, False]


def test_white_space_trimmed_from_offsets_still_belongs_to_its_token(tmp_path):
    """The token ` y` begins at its space, though the tokenizer says that it begins at y."""
    made = Tokenizer(byte_tokenizer(tmp_path, merges=(("Ġ", "y"),)))
    ids, starts = made.encode("a yo  é")
    assert starts.tolist() == [0, 1, 3, 4, 5, 6, 6]
    assert made.encode_spans("a yo  é", [(2, 4)])[1].tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert len(ids) == 7


TEXT = st.text(
    st.sampled_from("ab yé😀\n.") | st.characters(exclude_categories=["Cs"]), max_size=12
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = byte_tokenizer(
        tmp_path_factory.mktemp("byte"), template=CHATML, merges=(("Ġ", "y"), ("a", "b"))
    )
    return SampleTokenizer(Tokenizer(folder), Rules())


@pytest.mark.property
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_targets_are_what_the_assistant_said(byte_level, turns):
    """Whatever is said: the targets are its bytes and the end-of-turn tokens, all in order."""
    messages = []
    for question, answer in turns:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    sequence = byte_level({"messages": messages}, 0)
    backend = byte_level.tokenizer._backend
    targets = sequence.tokens[sequence.loss_mask].tolist()
    parts = backend.decode(targets, skip_special_tokens=False)
    assert parts == "".join(f"{answer}<|im_end|>" for _, answer in turns)


def test_too_long_is_rejected_or_cut(tmp_path):
    fields = (Field("advantage", "token", "float32"), Field("sample_id", "sequence", "int64"))
    sample = {"text": "Hi Yo One", "advantage": [1, 2, 3, 4, 5, 6], "sample_id": 7}
    made = tokenizer(tmp_path, "", max_length=6, fields=fields)
    assert made(sample, 3).length == 6
    with pytest.raises(SampleError, match="it has 6 tokens, more than 5") as caught:
        tokenizer(tmp_path, "", max_length=5, fields=fields)(sample, 3)
    assert caught.value.reason == "too long"
    cut = tokenizer(tmp_path, "", max_length=4, too_long="truncate", fields=fields)(sample, 3)
    assert cut.tokens.tolist() == made(sample, 3).tokens[:4].tolist()
    assert cut.loss_mask.tolist() == [True] * 4
    assert cut.fields["advantage"].tolist() == [1, 2, 3, 4]
    assert cut.fields["sample_id"] == 7
    assert cut.id == 3


def test_nothing_to_learn_is_refused(tmp_path):
    for rules in ({}, {"max_length": 6, "too_long": "truncate"}):
        made = tokenizer(tmp_path, MARKED, **rules)
        with pytest.raises(SampleError, match="none of its 6 tokens is a target") as caught:
            made({"messages": CHAT[: 2 if rules else 1]}, 0)
        assert caught.value.reason == "no loss tokens"
    empty = [{"role": "user", "content": ""}]
    with pytest.raises(SampleError, match="none of its 1 tokens"):
        shown(tokenizer(tmp_path, "{{ 'Hi' }}", loss_on="all"), {"messages": empty})
    with pytest.raises(SampleError, match="leaves out message 1, of role 'user'"):
        shown(tokenizer(tmp_path, "{{ 'Hi' }}", loss_on="all"), {"messages": CHAT})


@pytest.mark.parametrize(
    ("sample", "reason", "message"),
    [
        (
            {},
            "no messages",
            "its columns are no known form; known are: messages; conversations; prompt",
        ),
        ({"prompt": "Hi"}, "no messages", "it has a prompt but no completion"),
        ({"text": 5}, "bad message", "text is int; it must be text"),
        ({"prompt": "Hi", "completion": 5}, "bad message", "completion is int"),
        ({"prompt": "Hi", "completion": CHAT}, "bad message", "completion is list"),
        ({"prompt": CHAT, "completion": "Hi"}, "no messages", "completion must be a list"),
        ({"text": "Hi", "source": 1}, "undeclared field", "unknown column 'source'"),
        ({"text": "Hi", "tools": []}, "undeclared field", "unknown column 'tools'"),
        ({"messages": CHAT, "prompt": "Hi"}, "undeclared field", "unknown column 'prompt'"),
        ({"text": "\ud800"}, "broken text", "lone surrogate"),
    ],
)
def test_bad_samples(tmp_path, sample, reason, message):
    with pytest.raises(SampleError, match=message) as caught:
        tokenizer(tmp_path, CHATML)(sample, 0)
    assert caught.value.reason == reason


def test_extra_fields_of_samples(tmp_path):
    made = tokenizer(tmp_path, "", fields=(Field("reward", "sequence", "float32"),), ignore=("x",))
    assert made({"text": "Hi", "reward": 0.5, "x": "?"}, 0).fields["reward"] == np.float32(0.5)
    with pytest.raises(SampleError, match="field 'reward' is missing") as caught:
        made({"text": "Hi"}, 0)
    assert caught.value.reason == "bad field"


def test_ignored_columns_do_not_decide_the_form(tmp_path):
    made = tokenizer(tmp_path, CHATML, ignore=("messages",))
    assert made({"messages": CHAT, "text": "Hi"}, 0).length == 2


def test_bad_rules():
    with pytest.raises(ValueError, match="loss_on is 'user'"):
        Rules(loss_on="user")
    with pytest.raises(ValueError, match="too_long is 'drop'"):
        Rules(too_long="drop")
    with pytest.raises(ValueError, match="max_length is 1; it must be at least 2"):
        Rules(max_length=1)
    with pytest.raises(ValueError, match="field tools: is the name of a column"):
        Rules(fields=(Field("tools", "sequence", "int8"),))


def test_where_a_template_comes_from(tmp_path):
    chat = {"messages": CHAT[:2]}
    folder = word_tokenizer(tmp_path / "t", WORDS, template="")
    with pytest.raises(ValueError, match="has no chat template, but the samples are chats") as none:
        SampleTokenizer(Tokenizer(folder), Rules())(chat, 0)
    assert not isinstance(none.value, SampleError)
    assert Tokenizer(folder).template_digest == ""

    def first_word(given=None):
        made = Tokenizer(folder, template=given)
        return made.template_for(chat_of([])).render(chat_of([])), made.template_digest

    def chat_of(tools):
        from longshore.data.chats import Chat

        return Chat(({"role": "user", "content": "Hi"},), tools)

    word_tokenizer(folder, WORDS, template="config")
    digests = {first_word()[1]}
    assert first_word()[0] == "config"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    word_tokenizer(folder, WORDS, template=named)
    assert first_word()[0] == "one"
    both = Tokenizer(folder)
    assert both.template_for(chat_of([{"name": "add"}])).render(chat_of([])) == "two"
    digests.add(first_word()[1])
    (folder / "chat_template.jinja").write_text("file")
    assert first_word()[0] == "file"
    digests.add(first_word()[1])
    (tmp_path / "mine.jinja").write_text("mine")
    assert first_word(tmp_path / "mine.jinja")[0] == "mine"
    digests.add(first_word(tmp_path / "mine.jinja")[1])
    assert len(digests) == 4


def test_tokenizer_digest_names_the_content(tmp_path):
    one = Tokenizer(word_tokenizer(tmp_path / "1", WORDS))
    same = Tokenizer(word_tokenizer(tmp_path / "2", WORDS, template=CHATML))
    assert one.digest == same.digest
    assert one.digest != Tokenizer(word_tokenizer(tmp_path / "3", WORDS + " more")).digest
    other_eos = word_tokenizer(tmp_path / "4", WORDS, eos_token="<|eot_id|>")
    assert one.digest != Tokenizer(other_eos).digest


@pytest.mark.parametrize(
    ("step", "times", "is_refused"),
    [
        ({"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}, 20, True),
        ({"type": "Replace", "pattern": {"Regex": "q"}, "content": "qq"}, 20, True),
        ({"type": "Replace", "pattern": {"String": "Hi"}, "content": "x" * 10**6}, 1, True),
        ({"type": "ByteLevel"}, 20, True),
        ({"type": "Replace", "pattern": {"String": "&"}, "content": "#amp;"}, 20, False),
        ({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}, 20, False),
        ({"type": "Prepend", "prepend": "▁"}, 20, False),
        ({"type": "NFKD"}, 20, False),
    ],
)
def test_normalizers_that_make_text_ever_longer_are_refused(tmp_path, step, times, is_refused):
    """With 40 of the first, one letter becomes 10¹² bytes, and the package ends the process."""
    folder = word_tokenizer(tmp_path, WORDS)
    content = json.loads((folder / "tokenizer.json").read_text())
    nested = {"type": "Sequence", "normalizers": [step] * (times // 2)}
    content["normalizer"] = {"type": "Sequence", "normalizers": [*[step] * -(-times // 2), nested]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    if not is_refused:
        assert len(Tokenizer(folder).encode("Hi")[0])
        return
    with pytest.raises(ValueError, match=r"json: its normalizers make text more than 100 times"):
        Tokenizer(folder)


def test_bad_tokenizer_folders(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read .*No such file"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used"):
        Tokenizer(tmp_path)
    folder = word_tokenizer(tmp_path, WORDS, template=[{"name": "default"}])
    with pytest.raises(ValueError, match="its list of chat templates has a bad entry"):
        Tokenizer(folder)
    for template in (5, [5], [{"name": "default", "template": 5}], {"default": ["{{ 1 }}"]}):
        word_tokenizer(tmp_path, WORDS, template=template)
        with pytest.raises(ValueError, match=r"its chat_template must be text|has a bad entry"):
            Tokenizer(folder)
    for text in ("[1", "[1]", '["abc"]', "5", "[" * 100_000, '{"a":' * 100_000):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=r"tokenizer_config.json: is not a JSON object"):
            Tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ValueError, match="chat template: line 1 is not valid Jinja"):
        Tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"there is no file .*none.jinja; give a file, auto, own"):
        Tokenizer(folder, template=tmp_path / "none.jinja")


def test_missing_packages_say_what_to_install(tmp_path, monkeypatch):
    folder = word_tokenizer(tmp_path, WORDS, template=f"{CHATML}{{# not compiled before #}}")
    for package in ("jinja2", "tokenizers"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ValueError, match=rf"{package}, which is missing: pip install"):
            Tokenizer(folder)
