"""Sequences from Python rows: what tests of sources share."""

import numpy as np

from longshore.data.source import TokenizedSample, check_declared, collect_fields


def from_rows(rows, fields=()):
    """Rows are (tokens, loss mask) or (tokens, loss mask, fields), or dicts of all."""
    fields = check_declared(fields)
    for number, row in enumerate(rows):
        given = dict(row) if isinstance(row, dict) else dict(row[2]) if len(row) > 2 else {}
        tokens = given.pop("tokens") if isinstance(row, dict) else row[0]
        mask = given.pop("loss_mask") if isinstance(row, dict) else row[1]
        ids, targets = np.array(tokens, dtype=np.int32), np.array(mask, dtype=np.bool_)
        extra = collect_fields(given, fields, length=len(ids), where=f"row {number}")
        yield TokenizedSample(number, ids, targets, extra)
