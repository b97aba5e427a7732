"""The sequences of a run: what is refused once they are open, and how many steps they make."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.data.rows import from_rows
from tests.data.tiny import CHATML, byte_tokenizer, word_tokenizer

from longshore.config.check import check_config, decoder_config
from longshore.config.load import load_config
from longshore.data.prepare import prepare
from longshore.data.source import MemorySource, TokenizedSample, parse_field
from longshore.data.store import write_store
from longshore.run.data import (
    Readable,
    count_steps,
    open_sequences,
    open_stream,
    prepare_text,
    small_data,
    text_folders,
    text_is_ready,
    tokenizer_warnings,
)

WORDS = ("data.path=made", "model.preset=tiny-llama", "data.batch=2", "plan.capacity=64")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(path, *tokens, learn=True):
    mask = np.full(len(tokens[0]), learn)
    write_store(path, [TokenizedSample(i, np.int32(ids), mask) for i, ids in enumerate(tokens)])


def opened(*words):
    config = load_config(None, [*WORDS, *words])
    return open_sequences(config, decoder_config(config.model))


def test_every_id_of_the_model_passes_and_no_other():
    make("made", [0, 255, 3], [1, 256, 3], [7, 7, 9])
    source = opened()
    assert source[0].tokens.tolist() == [0, 255, 3]
    assert source[-1].tokens.tolist() == [7, 7, 9]
    assert (len(source), source.lengths.tolist()) == (3, [3, 3, 3])
    assert source.mask_head(1, 2).tolist() == [True, True]
    with pytest.raises(ValueError, match=r"data.path: made: sequence 1 has the token id 256, but"):
        source[1]
    assert opened("model.vocab_size=257")[1].tokens.tolist() == [1, 256, 3]


def test_data_without_a_loss_are_refused():
    make("made", [1, 2], [3, 4], learn=False)
    with pytest.raises(ValueError, match="no token of made has a loss"):
        opened()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.batch=5"], ""),
        (["data.batch=6"], "data.batch is 6, but the data have only 5 sequences"),
        (["data.batch=0", "data.batch_tokens=15"], ""),
        (
            ["data.batch=0", "data.batch_tokens=4096"],
            "data.batch_tokens is 4,096, but the data have only 15 tokens",
        ),
    ],
)
def test_a_step_larger_than_the_data_is_told(words, told):
    make("made", *([[1, 2, 3]] * 5))
    lines = small_data(load_config(None, [*WORDS, *words]), opened())
    assert lines == ([f"{told}, so each step trains on all of them: one epoch"] if told else [])


def test_steps_and_a_warmup_that_fits():
    make("made", *([[1, 2, 3]] * 5))
    lengths = opened().lengths
    for words, steps in (([], 3), (["train.epochs=4"], 12), (["train.steps=7"], 7)):
        assert count_steps(load_config(None, [*WORDS, *words]), lengths) == steps
    tokens = ["data.batch_tokens=6", "train.epochs=2", "train.warmup=6"]
    assert count_steps(load_config(None, [*WORDS, *tokens]), lengths) == 6
    with pytest.raises(ValueError, match=r"warmup is 4, but the run has only 3 steps \("):
        count_steps(load_config(None, [*WORDS, "train.warmup=4"]), lengths)


def test_text_is_prepared_once(capsys):
    word_tokenizer(Path("tok"), "user assistant system Be kind. a b \n", template=CHATML)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    Path("chats.jsonl").write_text(json.dumps(chat))
    config = load_config(None, [*WORDS, "data.path=chats.jsonl", "data.tokenizer=tok"])
    check_config(config, 1)
    assert not text_is_ready(config)
    prepare_text(config)
    assert text_is_ready(config)
    assert "1 sequences of 1 samples" in capsys.readouterr().err
    ((folder,),) = text_folders(config)
    assert folder.parent == Path("runs/prepared")
    assert len(open_sequences(config, decoder_config(config.model))) == 1
    prepare_text(config)
    said = capsys.readouterr().err
    assert f"\nusing the tokenized data of {folder}: 1 sequences of 1" in said


def test_text_without_an_end_token_is_warned_about(capsys):
    """By prepare's store, so that a run on a full cache says it too, and by a stream."""
    vocabulary = "user assistant system Be kind. a b \n"
    word_tokenizer(Path("none"), vocabulary, template=CHATML, eos_token=None)
    word_tokenizer(Path("eos"), vocabulary, template=CHATML)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("chats.jsonl").write_text(json.dumps({"messages": turns}))
    Path("texts.jsonl").write_text(json.dumps({"text": "a b"}))
    Path("rows.jsonl").write_text(json.dumps({"input_ids": [1, 2]}))
    limits = ("data.max_length=64", "train.steps=1")

    def warnings(tokenizer, path, *words):
        words = (f"data.path={path}.jsonl", f"data.tokenizer={tokenizer}", *words)
        config = load_config(None, [*WORDS, *words])
        decoder = decoder_config(config.model)
        if config.data.stream:
            return tokenizer_warnings(config, open_stream(config, decoder))
        prepare_text(config)
        return tokenizer_warnings(config, open_sequences(config, decoder))

    for words in ((), (), ("data.stream=true", *limits)):
        (warning,) = warnings("none", "texts", *words)
        assert warning.startswith("warning: texts.jsonl line 1: has no end token after its last")
        assert "name eos_token in none/tokenizer_config.json" in warning
    assert "warning" not in capsys.readouterr().err, "the run gives it, once"
    for path in ("chats", "rows"):
        assert warnings("none", path) == []
    assert warnings("none", "chats", "data.loss_on=all") == []
    assert warnings("eos", "texts") == []
    assert "no end token" in str(prepare("texts.jsonl", "none", "out"))


def test_held_out_data_that_are_not_there():
    make("made", [1, 2])
    words = ["data.eval_path=absent", "train.eval_every=1"]
    config = load_config(None, [*WORDS, *words])
    for look in (text_is_ready, prepare_text):
        with pytest.raises(ValueError, match=r"^data.eval_path: absent"):
            look(config)


def test_a_run_stops_if_many_samples_were_rejected(capsys):
    word_tokenizer(Path("tok"), "a b", template=CHATML)
    lines = ['{"text": "a b"}\n'] * 9 + ['{"text": ""}\n', "{\n", "{\n"]
    Path("texts.jsonl").write_text("".join(lines))
    words = [*WORDS, "data.path=texts.jsonl", "data.tokenizer=tok"]
    config = load_config(None, words)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"rejected 3 of 12 .* train on the rest with data.max_rejected=0.25$"
        ):
            prepare_text(config)
        said = capsys.readouterr().err
        assert "  2 broken JSON, such as texts.jsonl line 11: " in said
        assert "  1 empty, such as texts.jsonl line 10: " in said
    with pytest.raises(ValueError, match=r"data.path: .* rejected 3 of 12"):
        open_sequences(config, decoder_config(config.model))  # torchrun comes only here
    config = load_config(None, [*words, "data.max_rejected=0.25"])
    prepare_text(config)
    assert len(open_sequences(config, decoder_config(config.model))) == 9


@pytest.mark.parametrize(
    ("text", "why"), [("{}\n[]\n", "rejected 2"), ("\n", "the inputs have no samples")]
)
def test_text_without_a_usable_chat(text, why):
    word_tokenizer(Path("tok"), "a", template=CHATML)
    Path("chats.jsonl").write_text(text)
    config = load_config(None, [*WORDS, "data.path=chats.jsonl", "data.tokenizer=tok"])
    with pytest.raises(ValueError, match=rf"data.path: .*no sample became a sequence; {why}"):
        prepare_text(config)
    assert not text_is_ready(config)


def test_a_column_that_nobody_declared():
    word_tokenizer(Path("tok"), "a", template=CHATML)
    Path("chats.jsonl").write_text('{"text": "a", "score": 1}')
    config = load_config(None, [*WORDS, "data.path=chats.jsonl", "data.tokenizer=tok"])
    with pytest.raises(ValueError, match=r"with data.ignore=score .* with data.fields=score:"):
        prepare_text(config)


def test_a_tokenizer_larger_than_the_preset():
    byte_tokenizer(Path("tok"), template=CHATML)
    Path("chats.jsonl").write_text('{"text": "a"}\n')
    words = [*WORDS, "data.path=chats.jsonl", "data.tokenizer=tok"]
    with pytest.raises(
        ValueError, match=r"tok has token ids up to 262, but .* model.vocab_size=263, or"
    ):
        check_config(load_config(None, words), 1)
    check_config(load_config(None, [*words, "model.vocab_size=263"]), 1)


def test_a_teachers_ids_are_checked_where_they_count():
    fields = [parse_field("teacher_ids:per_target:int32:2")]
    fields += [parse_field("teacher_logprobs:per_target:float32:2")]
    rows = {"tokens": [1, 2, 3], "loss_mask": [1, 0, 1]}
    fine = {"teacher_ids": [[-1, 9], [-1, 9], [7, -1]]}
    logprobs = {"teacher_logprobs": [[0, 0], [0, 0], [-1, -np.inf]]}
    for ids, is_fine in ((fine, True), ({"teacher_ids": [[0, 0], [0, 0], [8, 0]]}, False)):
        source = MemorySource(from_rows([{**rows, **ids, **logprobs}], fields), fields)
        data = Readable(source, 8, name="here", has_teacher=True)
        if is_fine:
            assert data[0].length == 3
        else:
            with pytest.raises(ValueError, match="here: sequence 0 has 8 among its teacher_ids"):
                data[0]
        assert Readable(source, 8, name="here")[0].length == 3
