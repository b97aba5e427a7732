"""Rows that are tokenized already, and rows of datasets, become sequences."""

import numpy as np
import pytest
import torch
from tests.data.tiny import word_tokenizer
from tests.lazy import datasets

from longshore.data.source import Field, SampleError
from longshore.data.tokenize import (
    Rules,
    SampleTokenizer,
    Tokenizer,
    lane_rows,
    read_token_row,
    samples_of,
)

ROW = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}
ROWS = [ROW, {"input_ids": [1, 2], "labels": None, "attention_mask": None}]


@pytest.mark.parametrize(
    ("row", "tokens", "mask"),
    [
        (ROW, [5, 6, 7], [0, 1, 1]),
        ({"input_ids": [5, 6]}, [5, 6], [1, 1]),
        ({"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1]}, [5, 6], [1, 1]),
        ({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, [5, 6, 7], [0, 0, 1]),
        ({"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}, [5, 6, 7], [0, 1, 1]),
        ({"input_ids": [5], "attention_mask": [0]}, [], []),
    ],
)
def test_rows_of_token_ids(row, tokens, mask):
    ids, loss = read_token_row(row, on_all=False)
    assert (ids.tolist(), loss.tolist(), ids.dtype) == (tokens, [bool(m) for m in mask], np.int32)
    assert read_token_row(row, on_all=True)[1].all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels differ from its input_ids at token 0"),
        ({"input_ids": [5, 6], "labels": [5]}, "has 2 input_ids, but 1 labels"),
        ({"input_ids": [1.5]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [[1], [2, 3]]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [-1]}, "from 0 to 2147483647"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "zeros between ones"),
    ],
)
def test_rows_that_cannot_be_right(row, message):
    with pytest.raises(SampleError, match=message):
        read_token_row(row, on_all=False)


def iterable():
    return datasets.IterableDataset.from_generator(lambda: iter(ROWS))


@pytest.mark.parametrize(
    "make", [lambda: datasets.Dataset.from_list(ROWS), iterable, lambda: iter(ROWS)]
)
def test_datasets_of_token_ids(make):
    first, second = samples_of(make())
    assert (first.id, first.tokens.tolist(), first.loss_tokens) == (0, [5, 6, 7], 2)
    assert (second.id, second.tokens.tolist(), second.loss_tokens) == (1, [1, 2], 1)
    (alone,) = samples_of(lane_rows(make(), lane=1, lanes=2))
    assert alone.tokens.tolist() == [1, 2]


def test_datasets_of_text(tmp_path):
    tokenizer = SampleTokenizer(Tokenizer(word_tokenizer(tmp_path, "a b")), Rules())
    rows = datasets.Dataset.from_list([{"text": "a b"}, {"text": ""}, {"text": "b a"}])
    rejected = []
    found = list(samples_of(rows, tokenizer, rejected=lambda n, error: rejected.append((n, error))))
    assert [sample.id for sample in found] == [0, 2]
    assert [(n, error.reason) for n, error in rejected] == [(1, "empty")]
    with pytest.raises(SampleError, match="row 1: it has no tokens"):
        list(samples_of(rows, tokenizer))
    assert [s.tokens.tolist() for s in samples_of([{"input_ids": [1, 2]}], tokenizer)] == [[1, 2]]


def test_fields_of_rows():
    field = Field("weight", "sequence", "float32")
    (sample,) = samples_of([{"input_ids": [1, 2], "weight": 3}], fields=[field])
    assert sample.fields["weight"] == 3
    with pytest.raises(SampleError, match=r"row 0: .*weight"):
        list(samples_of([{"input_ids": [1, 2], "weight": 3}]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_padding_is_cut_off_fields_of_any_kind(kind):
    row = {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "advantages": [9.0, 1.0, 2.0]}
    fields = [Field("advantages", "target", "float32")]
    (sample,) = samples_of([{name: kind(value) for name, value in row.items()}], fields=fields)
    assert sample.fields["advantages"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [np.array(1.0), torch.ones(2, dtype=torch.bfloat16), {}])
def test_values_that_are_no_list_of_numbers(value):
    fields = [Field("advantages", "target", "float32")]
    with pytest.raises(SampleError, match="field 'advantages' holds"):
        list(samples_of([{"input_ids": [5, 6], "advantages": value}], fields=fields))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("chats.jsonl", "str has no rows"),
        (7, "int has no rows"),
        ([{"text": "a"}], "row 0: it has no input_ids, but text; text needs a tokenizer"),
        ([[1, 2]], "row 0: it is list, not a dict"),
        ([{"input_ids": []}], "row 0: it has no tokens"),
    ],
)
def test_objects_without_usable_rows(rows, message):
    with pytest.raises(ValueError, match=message):
        list(samples_of(rows))


def test_a_dict_of_splits_has_no_rows():
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    with pytest.raises(ValueError, match="the splits train has"):
        list(samples_of(splits))
