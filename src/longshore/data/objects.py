"""Objects with rows: `datasets.Dataset`, `datasets.IterableDataset`, lists and other iterables.

In: an object whose items are dicts, and a tokenizer where they are text. Out: sequences. The
package datasets is not imported; any object that gives dicts will do.

    rows = datasets.load_dataset("json", data_files="chats.jsonl", split="train", streaming=True)
    tokenizer = SampleTokenizer(Tokenizer("Qwen3-0.6B"), Rules())
    samples_of(rows, tokenizer)                           chats, texts, or rows of input_ids
    samples_of(lane_rows(rows, lane=1, lanes=4))          rows 1, 5, 9, … for StreamedSteps
    MemorySource(samples_of(rows, tokenizer))             for IndexedSteps
    write_store("prepared", samples_of(rows, tokenizer))  the same on disk, for data.path
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from longshore.data.fields import Field, check_declared
from longshore.data.source import SampleError, TokenizedSample, make_sample
from longshore.data.tables import without_nulls
from longshore.data.tokenize import LOSS_MASKS, SampleTokenizer, read_token_row, without_padding

Rows = Iterable[Mapping[str, Any]]
OnRejected = Callable[[int, SampleError], None]

UNUSED = ("labels", "attention_mask", "token_type_ids", "special_tokens_mask", *LOSS_MASKS)


def samples_of(
    rows: Rows,
    tokenizer: SampleTokenizer | None = None,
    *,
    fields: Sequence[Field] = (),
    rejected: OnRejected | None = None,
) -> Iterator[TokenizedSample]:
    """The sequences of all rows.

    tokenizer: None where every row has input_ids. fields: extra columns of such rows; with a
    tokenizer its rules declare them. rejected: gets the number and the error of each row that can
    be no sequence; without it the first one raises.
    """
    check_rows(rows)
    if tokenizer is not None and fields:
        raise ValueError("fields are declared in the rules of the tokenizer; leave them out here")
    declared = check_declared(fields)
    for number, row in enumerate(rows):
        try:
            content = without_nulls(_columns(row))
            if tokenizer is not None:
                yield tokenizer(content, number)
            else:
                yield _token_sample(content, number, declared)
        except SampleError as error:
            if rejected is None:
                raise SampleError(error.reason, f"row {number}: {error.detail}") from None
            rejected(number, error)


def lane_rows(rows: Rows, *, lane: int, lanes: int) -> Rows:
    """A lane's share: every row whose number is `lane` modulo `lanes`. All lanes read all rows."""
    if not 0 <= lane < lanes:
        raise ValueError(f"lane is {lane}; of {lanes} lanes it must be from 0 to {lanes - 1}")
    check_rows(rows)
    return islice(rows, lane, None, lanes)


def check_rows(rows: object) -> None:
    """Refuses what has splits instead of rows, and what has neither."""
    if isinstance(rows, Mapping):
        names = ", ".join(map(str, rows))
        raise ValueError(
            f"a {type(rows).__name__} with the splits {names} has no rows of its own; give one of "
            f"them, such as dataset[{next(iter(rows), 'train')!r}]"
        )
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise ValueError(
            f"{type(rows).__name__} has no rows; give a Dataset, or another iterable of dicts"
        )


def _columns(row: object) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise SampleError("no messages", f"it is {type(row).__name__}, not a dict of columns")
    return dict(row)


def _token_sample(row: Mapping[str, Any], number: int, fields: Sequence[Field]) -> TokenizedSample:
    if "input_ids" not in row:
        columns = ", ".join(map(str, row))
        raise SampleError(
            "no messages", f"it has no input_ids, but {columns}; text needs a tokenizer"
        )
    tokens, mask = read_token_row(row, on_all=False)
    if not len(tokens):
        raise SampleError("empty", "it has no tokens")
    given = {name: row[name] for name in row if name not in ("input_ids", *UNUSED)}
    given = without_padding(row, given, fields)
    try:
        return make_sample(tokens, mask, id=number, given=given, fields=fields, where="the row")
    except ValueError as error:
        raise SampleError("bad field", str(error)) from None
