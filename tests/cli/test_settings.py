"""One mistake, three front ends: each names the key of a recipe."""

import json
from pathlib import Path

import pytest
from tests.data.tiny import CHATML, word_tokenizer

from longshore.cli.main import main
from longshore.config.check import check_config
from longshore.config.load import load_config
from longshore.data.prepare import prepare
from longshore.run.data import prepare_text

TEXT = {"text": "a b"}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
RECIPE = ("data.path=rows.jsonl", "data.tokenizer=tok", "model.preset=tiny-llama", "data.batch=2")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    word_tokenizer(Path("tok"), "user assistant a b \n", template=CHATML)
    word_tokenizer(Path("plain"), "user assistant a b \n")


def in_python(settings):
    options = {"tokenizer": "tok", **settings}
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at its text
        prepare("rows.jsonl", out="out", **options).rejections.check(0.05)
    return str(caught.value)


def check_and_prepare(config):
    check_config(config, 1)
    prepare_text(config)


def in_a_recipe(settings):
    words = [*RECIPE, "plan.capacity=64", *(f"data.{key}={settings[key]}" for key in settings)]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller looks at its text
        check_and_prepare(load_config(None, words))
    return str(caught.value)


def on_the_command_line(settings, capsys):
    options = {"tokenizer": "tok", **settings}
    pairs = [(f"--{key.replace('_', '-')}", str(options[key])) for key in options]
    words = ["rows.jsonl", "--out", "out", "--workers", "1", *(w for pair in pairs for w in pair)]
    assert main(["prepare", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{**TEXT, "score": 1}],
            {},
            "with data.ignore=score (or * for all unused columns), or declare it with data.fields=",
        ),
        ([TEXT], {"max_length": 1}, "data.max_length is 1; it must be at least 2"),
        (
            [TEXT],
            {"template": "none.jinja"},
            "data.template: there is no file none.jinja; give a file, auto, own",
        ),
        ([CHAT], {"tokenizer": "plain"}, "; set data.template to a file, or"),
        (
            [TEXT, {}],
            {},
            "50 %): 1 no messages; data.max_rejected=0.05 allows at most 5 %. The",
        ),
    ],
)
def test_each_front_end_names_the_key(rows, settings, message, capsys):
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert message in in_python(settings)
    assert message in in_a_recipe(settings)
    assert message in on_the_command_line(settings, capsys)
