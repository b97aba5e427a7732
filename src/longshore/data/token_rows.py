"""Rows that are tokenized already, as Hugging Face trainers take them.

In: a row with input_ids and, where it has them, labels and masks. Out: token ids and the loss mask.

    {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}

becomes the tokens 5 6 7 with a loss on 6 and 7. Labels stand at the tokens that they repeat, with
-100 for those without a loss: models of transformers shift them. Labels that differ from their
tokens, such as shifted ones, are refused. Padding, 0 in attention_mask, is cut off at both ends,
also of fields with a value for each of the padded tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.data.fields import Field
from longshore.data.source import LARGEST_TOKEN, SampleError

NO_LOSS = -100
LOSS_MASKS = ("completion_mask", "assistant_masks")
"""Masks of TRL and of transformers' chat templates: 1 at the tokens with a loss."""


def read_token_row(
    row: Mapping[str, Any], *, on_all: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Token ids and loss mask; on_all: every token has a loss, whatever the row says."""
    ids = _whole_numbers(row, "input_ids")
    if len(ids) and (ids.min() < 0 or ids.max() > LARGEST_TOKEN):
        raise SampleError("bad tokens", f"its input_ids must be from 0 to {LARGEST_TOKEN}")
    mask = np.ones(len(ids), dtype=np.bool_)
    if row.get("labels") is not None:
        labels = _column(row, "labels", len(ids))
        mask = labels != NO_LOSS
        if (differ := np.flatnonzero(mask & (labels != ids))).size:
            raise SampleError(
                "bad tokens",
                f"its labels differ from its input_ids at token {differ[0]}; each label must "
                f"repeat its own token, or be {NO_LOSS}",
            )
    for name in LOSS_MASKS:
        if row.get(name) is not None:
            mask &= _column(row, name, len(ids)) != 0
    first, stop = _content(row, len(ids))
    kept = mask[first:stop]
    return ids[first:stop].astype(np.int32), np.ones_like(kept) if on_all else kept


def without_padding(
    row: Mapping[str, Any], values: Mapping[str, Any], fields: Sequence[Field]
) -> dict[str, Any]:
    """The values of fields, without those of padding where they have some."""
    length = len(row["input_ids"])
    first, stop = _content(row, length)
    kept = dict(values)
    for field in fields:
        if field.per != "sequence" and field.name in values:
            kept[field.name] = _cut(values[field.name], first, stop, length)
    return kept


def _cut(value: Any, first: int, stop: int, length: int) -> Any:  # noqa: ANN401 - any value
    """A part of a list, an array or a tensor with a value for each token; others as they are."""
    try:
        return value[first:stop] if len(value) == length else value
    except (TypeError, LookupError):  # one number, or no list
        return value


def _content(row: Mapping[str, Any], length: int) -> tuple[int, int]:
    """Where the tokens begin and end that are no padding."""
    if row.get("attention_mask") is None:
        return 0, length
    real = np.flatnonzero(_column(row, "attention_mask", length))
    if not len(real):
        return 0, 0
    first, stop = int(real[0]), int(real[-1]) + 1
    if len(real) != stop - first:
        raise SampleError("bad tokens", "its attention_mask has zeros between ones")
    return first, stop


def _column(row: Mapping[str, Any], name: str, length: int) -> NDArray[np.int64]:
    values = _whole_numbers(row, name)
    if len(values) != length:
        raise SampleError("bad tokens", f"it has {length} input_ids, but {len(values)} {name}")
    return values


def _whole_numbers(row: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    try:
        values = np.asarray(row[name])
    except ValueError:  # lists of different lengths inside
        values = np.empty((0, 0))
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "biu"):
        raise SampleError("bad tokens", f"its {name} must be a list of whole numbers")
    return values.astype(np.int64)
