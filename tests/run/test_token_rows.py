"""Rows of input_ids need no tokenizer and no package that reads one; text among them does."""

import gzip
import json
import sys
from pathlib import Path

import jinja2
import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet
from tests.cli.test_train import LLAMA
from tests.data.samples import rejected
from tests.data.tiny import word_tokenizer
from tests.lazy import datasets
from tests.metrics_file import read_metrics
from tests.run.sequences import open_config

from longshore.cli.main import main
from longshore.config.check import check_config, decoder_config
from longshore.config.load import load_config
from longshore.data.source import Field
from longshore.data.store import Store, read_manifest
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer
from longshore.run.data import open_stream
from longshore.train.loss_fields import check_needed
from longshore.train.losses import make_loss

WORDS = ("model.preset=tiny-llama", "data.batch=4", "plan.capacity=64")
FIELDS = 'data.fields=["advantages:per_target:float32", "old_logprobs:per_target:float32"]'
TEXT = {"text": "a b"}
PACKAGES = {"tokenizers": tokenizers, "jinja2": jinja2}


def row(i):
    ids = [(7 * i + j) % 200 for j in range(4 + i % 3)]
    labels = [-100, *ids[1:]]
    return {
        "input_ids": ids,
        "labels": labels,
        "advantages": [0.5 * i + j for j in range(len(ids))],
        "old_logprobs": [-5.0] * len(ids),
    }


ROWS = [row(i) for i in range(24)]


def write(name, rows):
    content = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """24 rows of tokens in rows.jsonl, and no package for text."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # workers would have the packages
    write("rows.jsonl", ROWS)


def config_of(*words):
    config = load_config(None, [*WORDS, FIELDS, *words])
    check_config(config, 1)
    return config


def opened(*words):
    return open_config(config_of(*words))


def check_same(sample, expected):
    assert sample.tokens.tolist() == expected["input_ids"]
    assert sample.loss_mask.tolist() == [label != -100 for label in expected["labels"]]
    np.testing.assert_array_equal(sample.fields["advantages"], expected["advantages"])


def test_train_with_values_for_each_token(capsys):
    words = [*WORDS, "data.path=rows.jsonl", "train.loss=grpo", "train.steps=2"]
    words += ["parallel.ranks=1", "train.device=cpu", "output.folder=out", "output.display=none"]
    assert main(["train", *words]) == 0, capsys.readouterr().err
    metrics = read_metrics(Path("out/metrics.jsonl"))
    assert len(metrics) == 2
    assert all(np.isfinite(step["loss"]) and step["loss"] for step in metrics)
    names = ["advantage", "ratio", "clipped", "old_kl", "entropy"]
    assert all([*step["loss_metrics"]] == names for step in metrics)


def test_what_a_loss_reads_need_not_be_declared():
    """One value for a sequence or for a token, as the rows have it."""
    loose = [{**row, "advantages": 2, "note": "x"} for row in ROWS]
    write("loose.jsonl", loose)
    words = ("data.path=loose.jsonl", "data.ignore=*", "train.loss=grpo", "data.batch=4")
    config = load_config(None, [*WORDS, *words])
    check_config(config, 1)
    source = open_config(config)
    kinds = ["advantages:per_sequence:float32", "old_logprobs:per_target:float32"]
    assert [*map(str, source.fields)] == kinds
    assert source[3].fields["advantages"] == 2
    check_needed("grpo", make_loss("grpo").fields, source.fields)
    plain = open_config(load_config(None, [*WORDS, "data.path=loose.jsonl", "data.ignore=*"]))
    assert plain.fields == ()
    more = ("data.stream=true", "data.max_length=9", "train.steps=2")
    config = load_config(None, [*WORDS, *words, *more])
    assert [*map(str, open_stream(config, decoder_config(config.model)).fields)] == kinds


def test_every_kind_of_file(capsys):
    names = ["rows.jsonl", "more.jsonl.gz", "table.parquet", "saved"]
    write("more.jsonl.gz", ROWS)
    parquet.write_table(pa.Table.from_pylist(ROWS), "table.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk("saved")
    source = opened(f"data.path={json.dumps(names)}")
    assert len(source) == 4 * len(ROWS)
    for i in range(len(source)):
        check_same(source[i], ROWS[i % len(ROWS)])
    assert source.fields == (
        Field("advantages", "target", "float32"),
        Field("old_logprobs", "target", "float32"),
    )


def test_prepare_and_the_same_job_again(capsys):
    words = ["prepare", "rows.jsonl", "--out", "made", "--workers", "1", "--ignore", "old_logprobs"]
    words += ["--field", "advantages:per_target:float32"]
    for again in ("", "1 shards (1 from an earlier run)"):
        assert main(words) == 0
        assert again in capsys.readouterr().out
    store = Store("made")
    check_same(store[5], ROWS[5])
    assert (len(store), store.tokenizer_digest) == (24, "")
    assert read_manifest(Path("made")).about["settings"]["template"] == ""


def test_a_text_in_the_middle_is_rejected(capsys):
    write("rows.jsonl", [*ROWS[:11], TEXT, *ROWS[12:]])
    assert main(["prepare", "rows.jsonl", "--out", "made", "--workers", "1", "--ignore", "*"]) == 0
    said = capsys.readouterr().out
    assert "1 no tokenizer, such as rows.jsonl line 12: it is text, which needs a tokenizer" in said
    assert "give it input_ids, or a tokenizer, data.tokenizer=DIR" in said
    (entry,) = rejected("made")
    assert (entry["line"], entry["reason"]) == (12, "no tokenizer")
    assert len(Store("made")) == 23
    with pytest.raises(ValueError, match=r"rejected 1 of 24 .*1 no tokenizer; data.max_rejected=0"):
        opened("data.path=rows.jsonl", "data.max_rejected=0")


FIRST = (
    "one.jsonl is text, which needs a tokenizer; set {} to a folder with tokenizer.json. Rows of "
    "input_ids need none, but line 2 has the columns text, id\n"
)


def test_a_file_of_text_is_refused_at_the_start(capsys):
    Path("one.jsonl").write_text("{\n" + json.dumps({**TEXT, "id": 3}))
    assert main(["prepare", "one.jsonl", "--out", "made"]) == 2
    assert capsys.readouterr().err == f"longshore: {FIRST.format('data.tokenizer')}"
    assert not Path("made").exists()
    words = [*WORDS, FIELDS, 'data.path=["rows.jsonl", "one.jsonl"]', "output.folder=out"]
    for more in ([], ["data.stream=true", "train.steps=2", "data.max_length=9"]):
        assert main(["train", *words, *more]) == 2
        assert capsys.readouterr().err == f"longshore: data.path: {FIRST.format('data.tokenizer')}"
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            {**ROWS[0], "prompt": "a", "completion": "b"},
            r"line 1 has text \(prompt, completion\) beside its input_ids; leave it out with "
            "data.ignore=prompt,completion, or set data.tokenizer",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "line 1 has the columns prompt, chosen,"),
        ({**ROWS[0], "source": "web"}, "line 1: unknown column 'source' in a sample with 'input_i"),
    ],
)
def test_first_rows_that_are_refused(sample, message):
    write("rows.jsonl", [sample])
    with pytest.raises(ValueError, match=rf"^data.path: rows.jsonl .*{message}"):
        config_of("data.path=rows.jsonl")


def test_text_beside_tokens_can_be_ignored():
    write("rows.jsonl", [{**ROWS[0], "prompt": "a", "completion": "b"}])
    check_same(opened("data.path=rows.jsonl", "data.ignore=prompt,completion")[0], ROWS[0])


def test_a_template_without_a_tokenizer_is_refused(capsys):
    told = "is for chats, which need a tokenizer; set {} too, or leave {} out"
    with pytest.raises(ValueError, match="^data.template " + told.format(*["data.t.*"] * 2)):
        config_of("data.path=rows.jsonl", "data.template=chatml")
    assert main(["prepare", "rows.jsonl", "--out", "made", "--template", "chatml"]) == 2
    assert (
        f"data.template {told.format('data.tokenizer', 'data.template')}" in capsys.readouterr().err
    )


def stream(*words):
    config = config_of("data.stream=true", "data.max_length=9", "train.steps=2", *words)
    return open_stream(config, decoder_config(config.model))


def test_a_stream():
    source = stream("data.path=rows.jsonl", "data.shuffle=false")
    assert source.tokenizer.digest == ""
    lane = source.lane(0, 1)
    for expected in ROWS:
        check_same(next(lane), expected)


def test_ids_that_the_model_does_not_have_are_refused_by_file_and_row():
    high = {**ROWS[3], "input_ids": [1, 256, 2, 256], "labels": [1, 256, 2, -100]}
    write("rows.jsonl.gz", [*ROWS[:3], {}, high, high, *ROWS[6:]])
    words = ("data.path=rows.jsonl.gz", "data.shuffle=false")
    message = "has the token id 256, but the model knows only 0 to 255; "
    with pytest.raises(ValueError, match=f"^data.path: rows.jsonl.gz line 5 {message}"):
        opened(*words)
    assert len(opened(*words, "model.vocab_size=257")) == 23
    lane = stream(*words).lane(0, 1)
    assert [next(lane).id for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match=f"^data.path: rows.jsonl.gz line 5: sequence 3 {message}"):
        next(lane)


def test_a_model_folder_with_and_without_a_tokenizer(monkeypatch):
    Path("hf").mkdir()
    Path("hf/config.json").write_text(json.dumps({**LLAMA, "vocab_size": 256}))
    write("texts.jsonl", [TEXT])
    words = ("model.preset=", "model.from_hf=hf")
    assert len(opened("data.path=rows.jsonl", *words)) == 24
    with pytest.raises(ValueError, match=r"texts.jsonl is text, which needs a tokenizer; set data"):
        config_of("data.path=texts.jsonl", *words)
    with monkeypatch.context() as context:
        for name in PACKAGES:
            context.setitem(sys.modules, name, PACKAGES[name])
        word_tokenizer(Path("hf"), "a b")
        before = {path: path.read_bytes() for path in Path("runs/prepared").rglob("*.arrow")}
        own = opened("data.path=rows.jsonl", *words)
        assert own.tokenizer_digest == Tokenizer("hf").digest
        assert len(list(Path("runs/prepared").iterdir())) == 2
        assert {path: path.read_bytes() for path in before} == before
        config_of("data.path=texts.jsonl", *words)
    assert len(opened("data.path=rows.jsonl", *words)) == 24  # the packages are missing again
    with pytest.raises(ValueError, match=r"texts.jsonl is text, and the package tokenizers, which"):
        config_of("data.path=texts.jsonl", *words)


def test_padding_is_cut_off_fields_too():
    fields = (Field("advantages", "target", "float32"), Field("group", "sequence", "int64"))
    padded = {"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0], "group": 3}
    tokenizer = SampleTokenizer(None, Rules(fields=fields))
    for values in ([9, 1, 2, 3, 9], [1, 2, 3]):
        sample = tokenizer({**padded, "advantages": values}, 0)
        assert sample.fields["advantages"].tolist() == [1, 2, 3]
        assert sample.fields["group"] == 3
