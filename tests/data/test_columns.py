import pytest
from tests.data.tiny import CHATML, word_tokenizer

from longshore.data.columns import (
    ALPACA,
    ALPACA_WITH_INPUT,
    form_of,
    from_alpaca,
    unknown_columns,
)
from longshore.data.source import Field, SampleError
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer

SAMPLE = {"instruction": "Be kind", "input": "Hi", "output": "Yo"}
WORDS = f"{ALPACA_WITH_INPUT} {ALPACA} system user assistant Be kind . Hi Yo"


def test_all_columns_without_a_meaning_are_named():
    with pytest.raises(SampleError, match=r"unknown columns 'id', 'source' in .*ignore=id,source"):
        form_of(["id", "text", "source"], (), ())
    assert form_of(["id", "text", "source"], ("*",), ()) == "text"
    assert form_of(["score", "text"], (), (Field("score", "sequence", "int64"),)) == "text"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([0.5, 1.0], "fields=reward:per_target:float32"),
        ([[1, 2], [3, 4]], "fields=reward:per_target:int64:2"),
        (0.5, "fields=reward:per_sequence:float32"),
        ("good", "fields=reward:per_sequence:DTYPE"),
    ],
)
def test_how_to_declare_a_column_follows_from_its_value(value, said):
    assert unknown_columns(["reward"], "text", {"reward": value}).endswith(said)


def test_all_but_what_is_used_is_left_out():
    fields = (Field("score", "sequence", "int64"),)
    rules = Rules(fields=fields, ignore=("*",))
    assert [n for n in ("score", "text", "source") if rules.leaves_out(n)] == ["source"]
    assert Rules(ignore=("text",)).leaves_out("text")


def test_alpaca_is_a_chat_where_there_is_a_template(tmp_path):
    tokenizer = Tokenizer(word_tokenizer(tmp_path / "tok", WORDS, template=CHATML))
    made = SampleTokenizer(tokenizer, Rules())
    turns = [("user", "Be kind\n\nHi"), ("assistant", "Yo")]
    same = {"messages": [{"role": role, "content": text} for role, text in turns]}
    assert made(SAMPLE, 0) == made(same, 0)
    turns = [("system", "Yo"), ("user", "Be kind"), ("assistant", "Yo")]
    same = {"messages": [{"role": role, "content": text} for role, text in turns]}
    for empty in ("", None):
        assert made({**SAMPLE, "input": empty, "system": "Yo"}, 0) == made(same, 0)
    ignored = SampleTokenizer(tokenizer, Rules(ignore=("input",)))
    assert ignored(SAMPLE, 0) == made({"instruction": "Be kind", "output": "Yo"}, 0)


def test_alpaca_is_a_prompt_and_completion_where_there_is_none(tmp_path):
    made = SampleTokenizer(Tokenizer(word_tokenizer(tmp_path / "tok", WORDS)), Rules())
    prompt = ALPACA_WITH_INPUT.format(instruction="Be kind", input="Hi")
    assert made(SAMPLE, 0) == made({"prompt": prompt, "completion": "Yo"}, 0)
    prompt = ALPACA.format(instruction="Be kind")
    assert made({**SAMPLE, "input": ""}, 0) == made({"prompt": prompt, "completion": "Yo"}, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"output": ""}, "its output is empty"),
        ({"instruction": ""}, "its instruction is empty"),
        ({"input": 5}, "input is int; it must be text"),
        ({"output": None}, "output is NoneType"),
        ({"system": "Hi"}, "there is no chat template"),
    ],
)
def test_bad_alpaca_samples(changed, message):
    with pytest.raises(SampleError, match=message):
        from_alpaca({**SAMPLE, **changed}, as_chat=False)
