"""Several names in data.path: joined, or mixed by their weights."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.data.tiny import word_tokenizer
from tests.run.sequences import open_config

from longshore.config.check import check_config
from longshore.config.load import load_config
from longshore.data.source import Field, TokenizedSample
from longshore.data.store import write_store
from longshore.run.data import prepare_text, text_folders, text_is_ready

WORDS = ("model.preset=tiny-llama", "data.batch=2", "plan.capacity=64", "data.tokenizer=tok")
NAMES = 'data.path=["a.jsonl", "b/*.jsonl"]'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """a.jsonl has 2 texts, b/ 1 + 3; the token ids are 1, 3, 4 for x, y, z."""
    monkeypatch.chdir(tmp_path)
    word_tokenizer(Path("tok"), "x y z")
    Path("b").mkdir()
    for name, word, count in (("a", "x", 2), ("b/0", "y", 1), ("b/1", "z", 3)):
        lines = [json.dumps({"text": " ".join([word] * (i + 2))}) for i in range(count)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def config_of(*words):
    config = load_config(None, [*WORDS, *words])
    check_config(config, 1)
    return config


def opened(*words):
    return open_config(config_of(*words))


def first_tokens(source):
    return [int(source[i].tokens[0]) for i in range(len(source))]


@pytest.mark.slow
def test_without_weights_every_sequence_comes_once(capsys):
    source = opened(NAMES)
    assert first_tokens(source) == [1, 1, 3, 4, 4, 4]
    assert [source[i].id for i in range(6)] == [0, 1, 2, 3, 4, 5]
    assert source.lengths.tolist() == [source[i].length for i in range(6)]
    assert source[-1] == source[5]
    assert source.mask_head(5, 3).tolist() == source[5].loss_mask[:3].tolist()
    capsys.readouterr()
    other = opened('data.path=["a.jsonl", "b"]')
    assert capsys.readouterr().err.count("using the tokenized data of") == 1  # that of a.jsonl
    assert other.digest == source.digest
    assert opened("data.path=a.jsonl").digest != source.digest


def test_weights_say_how_often_each_is_drawn():
    source = opened(NAMES, "data.weights=[1, 3]")
    drawn = Counter(first_tokens(source))
    assert drawn[1] == 2
    assert drawn[3] + drawn[4] in (5, 6)  # three times as often, up to one draw at the end
    assert {source[i].tokens.tobytes() for i in range(len(source))} == {
        each.tokens.tobytes() for each in map(opened(NAMES).__getitem__, range(6))
    }
    assert opened(NAMES, "data.weights=[3, 1]").digest != source.digest
    assert opened(NAMES, "data.weights=[1, 3]").digest == source.digest


def test_prepared_folders_and_text_together():
    write_store("made", [TokenizedSample(0, np.int32([7, 8]), np.array([True, True]))])
    source = opened('data.path=["made", "a.jsonl"]')
    assert first_tokens(source) == [7, 1, 1]
    assert text_folders(config_of('data.path=["made", "a.jsonl"]'))[0] == [Path("made")]


def test_a_folder_of_datasets_needs_no_package():
    """As save_to_disk writes it: an Arrow stream, and a list of files."""
    Path("saved/train").mkdir(parents=True)
    table = pa.table({"text": ["z z", "x x"]})
    path = "saved/train/data-0.arrow"
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-0.arrow"}]}
    Path("saved/train/state.json").write_text(json.dumps(state))
    Path("saved/train/dataset_info.json").write_text("{}")
    assert first_tokens(opened("data.path=saved/train")) == [4, 1]
    Path("saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"^data.path: saved: is a DatasetDict .* saved/train$"):
        config_of("data.path=saved")


def test_the_recipe_of_a_run_keeps_them():
    config = config_of(NAMES, "data.weights=[3, 0.5]")
    Path("again.toml").write_text(config.to_toml())
    assert load_config("again.toml").data == config.data
    assert config.data.path == ("a.jsonl", "b/*.jsonl")
    assert load_config(None, ["data.path=['a,b.jsonl']"]).data.path == ("a,b.jsonl",)
    assert load_config(None, ["data.path=[a, b]"]).data.path == ("a", "b")
    assert load_config(None, ["data.path=a,b.jsonl"]).data.path == ("a", "b.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([NAMES, "data.weights=[1]"], "data.weights has 1 numbers, but data.path has 2 names"),
        (["data.path=a.jsonl", "data.weights=[1, 2]"], "data.path has 1 name; give one weight"),
        ([NAMES, "data.weights=[1, 0]"], "it must be a list of numbers above 0"),
        (["data.path=c*.jsonl"], r"^data.path: c\*.jsonl: nothing matches"),
        (
            ['data.path=["a.jsonl", "*.jsonl"]'],
            r"data.path: a.jsonl is in both a.jsonl and \*.json",
        ),
        (['data.path=["b", "b"]'], "data.path: b is named more than once; name it once, and use"),
        (["data.path=b/[01].jsonl", "data.stream=true"], "give train.steps"),
        (["data.path=a.jsonl", "data.stream=true", "train.steps=1"], "give data.max_length"),
        (["data.path=[1]"], "it must be a string, or a list of strings"),
    ],
)
def test_what_does_not_fit_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        config_of(*words)


@pytest.mark.parametrize("path", ["none.jsonl", "tok/*.jsonl", "bad.jsonl"])
def test_errors_of_held_out_data_name_their_key(path):
    """They named data.path."""
    Path("bad.jsonl").write_text('{"text": 5}\n')
    config = config_of("data.path=a.jsonl", f"data.eval_path={path}", "train.eval_every=1")
    with pytest.raises(ValueError, match=r"^data\.eval_path: "):
        prepare_text(config)
    if path != "bad.jsonl":
        prepare_text(config_of("data.path=a.jsonl"))
        with pytest.raises(ValueError, match=r"^data\.eval_path: "):
            text_is_ready(config)


def test_sources_with_other_fields_name_their_key_once():
    """It was "data.path: data.path: mixture: …"."""
    field = Field("reward", "sequence", "float32")
    sample = TokenizedSample(0, np.int32([7, 8]), np.array([True, True]))
    with_field = replace(sample, fields={"reward": np.float32(1)})
    write_store("plain", [sample])
    write_store("more", [with_field], fields=[field])
    with pytest.raises(ValueError, match=r"^data\.path: mixture: the extra fields"):
        opened('data.path=["plain", "more"]')
