"""Sequences from Python rows: what tests of sources share."""

from longshore.data.fields import check_declared
from longshore.data.source import make_sample


def from_rows(rows, fields=()):
    """Rows are (tokens, loss mask) or (tokens, loss mask, fields), or dicts of all."""
    fields = check_declared(fields)
    for number, row in enumerate(rows):
        given = dict(row) if isinstance(row, dict) else dict(row[2]) if len(row) > 2 else {}
        tokens = given.pop("tokens") if isinstance(row, dict) else row[0]
        mask = given.pop("loss_mask") if isinstance(row, dict) else row[1]
        yield make_sample(
            tokens, mask, id=number, given=given, fields=fields, where=f"row {number}"
        )
