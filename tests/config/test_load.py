import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.config.load import load_config, with_defaults
from longshore.config.other_systems import (
    FOREIGN_KEYS,
    FOREIGN_SECTIONS,
    FOREIGN_VALUES,
    all_keys,
    answer_key,
    answer_section,
)
from longshore.config.schema import (
    SECTIONS,
    DataConfig,
    Kind,
    ModelConfig,
    RunConfig,
    TrainConfig,
    toml_value,
)

RECIPE = """\
[data]
path = "prepared"
batch = 8
[model]
from_hf = "checkpoint"
[train]
steps = 10
betas = [0.8, 0.9]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(RECIPE)


def test_a_recipe_and_the_defaults_that_hang_on_it():
    config = load_config("mine.toml")
    assert (config.data.path, config.data.batch, config.train.steps) == ("prepared", 8, 10)
    assert config.train.betas == (0.8, 0.9)
    assert (config.train.lr, config.train.epochs) == (2e-5, 0)
    assert config.data.tokenizer == "", "not filled in: it stays that of the model"
    assert config.output.folder == "runs/mine-{n}"
    assert config.plan.capacity == "auto"


def test_defaults_without_a_checkpoint():
    config = with_defaults(RunConfig(model=ModelConfig(preset="tiny-llama")))
    assert (config.train.lr, config.train.epochs, config.data.tokenizer) == (3e-4, 1, "")
    assert config.output.folder == "runs/train-{n}"
    given = with_defaults(RunConfig(train=TrainConfig(lr=1.0, epochs=3)), "x")
    assert (given.train.lr, given.train.epochs) == (1.0, 3)


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("train.lr=3e-4", "train", "lr", 3e-4),
        ("train.lr = 1", "train", "lr", 1.0),
        ("train.steps=1_000", "train", "steps", 1000),
        ("train.compile=true", "train", "compile", True),
        ("train.betas=[0, 0.5]", "train", "betas", (0.0, 0.5)),
        ("plan.capacity=auto", "plan", "capacity", "auto"),
        ('plan.capacity="auto"', "plan", "capacity", "auto"),
        ("plan.capacity=4096", "plan", "capacity", 4096),
        ("data.path=chats.jsonl", "data", "path", "chats.jsonl"),
        ("data.path='a b=c.jsonl'", "data", "path", "a b=c.jsonl"),
        ("data.path=a=b.jsonl", "data", "path", "a=b.jsonl"),
        ("data.path=2024", "data", "path", "2024"),
        ("data.path=a.jsonl,b/*.parquet", "data", "path", ("a.jsonl", "b/*.parquet")),
        ("data.eval_path=a, b", "data", "eval_path", ("a", "b")),
        ("data.weights=3,1", "data", "weights", (3.0, 1.0)),
        ("train.warmup=0.03", "train", "warmup", 0.03),
        ("train.warmup=1", "train", "warmup", 1),
        ("data.path=true", "data", "path", "true"),
        ("data.path=1\ny=2", "data", "path", "1\ny=2"),
        ("data.template=", "data", "template", ""),
        ("data.ignore=['a', \"b\"]", "data", "ignore", ("a", "b")),
        ("data.mock={mode='a', path='l'}", "data", "mock", {"mode": "a", "path": "l"}),
        ("data.mock.mode=file", "data", "mock", {"mode": "file"}),
        ("train.loss=my.losses:dpo", "train", "loss", "my.losses:dpo"),
    ],
)
def test_words_change_keys(word, section, key, value):
    config = load_config("mine.toml", [word])
    found = getattr(getattr(config, section), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("word", "gone", "left"),
    [
        ("train.epochs=2", "train.steps", 0),
        ("data.batch_tokens=9", "data.batch", 0),
        ("data.mock.mode=file", "data.path", ""),
        ("model.preset=tiny-llama", "model.from_hf", ""),
    ],
)
def test_a_word_displaces_the_key_it_excludes(word, gone, left):
    section, key = gone.split(".")
    before, after = load_config("mine.toml"), load_config("mine.toml", [word])
    assert getattr(getattr(before, section), key) != left
    assert getattr(getattr(after, section), key) == left


def test_the_demo_gives_way_to_other_data_or_another_model():
    assert load_config(None).data.mock["type"] == "lognormal"
    assert load_config(None, ["data.mock.max_seq_len=99"]).data.mock["max_seq_len"] == 99
    assert load_config(None, ["data.mock.max_seq_len=99"]).model.preset == "tiny-hybrid"
    for word in ("data.path=x", "model.preset=qwen3-8b", "model.from_hf=x"):
        config = load_config(None, [word])
        assert config.parallel.ranks == 0
        assert not config.data.mock
        assert config.output.folder == "runs/train-{n}"


def test_every_default_is_of_its_kind():
    for name, section in SECTIONS.items():
        for field in fields(section):
            kind = field.metadata["kind"]
            assert isinstance(kind, Kind)
            default = getattr(section(), field.name)
            if f"{name}.{field.name}" != "train.lr":  # always filled in
                assert kind.read(default) == default, field.name
            assert "\n" not in field.metadata["about"]


def test_a_config_reads_back_from_its_own_text():
    for config in (load_config(None), load_config("mine.toml", ['data.path=ö "\\\t\x7f\x01'])):
        Path("again.toml").write_text(config.to_toml(), encoding="utf-8")
        assert load_config("again.toml") == config


@pytest.mark.property
@given(
    path=st.text(st.characters(exclude_categories=["Cs"])),
    ignore=st.lists(st.text(st.characters(exclude_categories=["Cs"]))),
    mock=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.one_of(st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False)),
    ),
    lr=st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_values_read_back(path, ignore, mock, lr, seed):
    config = RunConfig(
        data=DataConfig(path=path, ignore=tuple(ignore), mock=mock, seed=seed),
        train=TrainConfig(lr=lr),
    )
    tables = tomllib.loads(config.to_toml())
    assert tables["data"]["path"] == path
    assert tables["data"]["ignore"] == ignore
    assert tables["data"]["mock"] == mock
    assert (tables["data"]["seed"], tables["train"]["lr"]) == (seed, lr)


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="None cannot be written as TOML"):
        toml_value(None)


def test_foreign_answers_name_real_keys():
    known = set(all_keys())
    for word, ours in FOREIGN_KEYS.items():
        named = re.split("[, =]", ours)[0]
        assert ours.startswith(": ") or named in known, word
        assert not any(key.endswith(f".{word}") for key in known), word
    assert set(FOREIGN_SECTIONS.values()) <= set(SECTIONS)
    assert not set(FOREIGN_SECTIONS) & set(SECTIONS)
    names = {n for s in SECTIONS.values() for f in fields(s) for n in f.metadata["kind"].names}
    assert set(FOREIGN_VALUES.values()) <= names
    assert not set(FOREIGN_VALUES) & names


@pytest.mark.parametrize("section", ["train", "data", "training", "actor"])
def test_foreign_keys_are_answered_in_any_section(section):
    for word, ours in FOREIGN_KEYS.items():
        told = answer_key(f"{section}.{word}")
        assert told.startswith(f"there is no {section}.{word}")
        assert told.endswith(ours)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train.seeds", "train.seed"),
        ("data.seeds", "data.seed"),
        ("training.seed", "train.seed"),
        ("data.bach", "data.batch"),
        ("train.bacth", "data.batch"),
        ("plan.capcity", "plan.capacity"),
        ("model.capacity", "plan.capacity"),
        ("train.Learning-Rate", "train.lr"),
    ],
)
def test_near_misses(typed, meant):
    assert meant in answer_key(typed)


def test_sections():
    assert answer_section("trian") == "there is no section [trian]; did you mean [train]?"
    assert answer_section("training") == "there is no section [training]; did you mean [train]?"
    assert answer_section("zzz").endswith("; the sections are " + ", ".join(SECTIONS))
    Path("empty.toml").write_text("[trainer]\n")
    with pytest.raises(ValueError, match=r"no section \[trainer\]; did you mean \[train\]"):
        load_config("empty.toml")
    Path("latin.toml").write_bytes(b"[train]\n# \xff\n")
    with pytest.raises(ValueError, match=r"latin.toml: is not UTF-8"):
        load_config("latin.toml")
