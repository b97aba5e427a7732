"""Rows read and added to by index, where −1 stands for no row.

In: rows (R, D), an index of any shape. Out: (…, D), 0 for −1. Of the rows 5, 7 the index [1, −1, 0]
reads 7, 0, 5; adding 1, 2, 3 there to zeros gives 3, 1.

What belongs to −1 touches no row, not even if it is NaN.
"""

import torch
from torch import Tensor


def take_rows(x_RD: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """(…, D): a copy of the rows in this dtype."""
    if not len(x_RD):
        return x_RD.new_zeros(*index.shape, x_RD.shape[1], dtype=dtype)
    rows = x_RD.index_select(0, index.clamp(min=0).flatten()).to(dtype)
    return rows.view(*index.shape, x_RD.shape[1]).masked_fill_((index < 0)[..., None], 0.0)


def sums_for(x_RD: Tensor, dtype: torch.dtype) -> Tensor:
    """(R + 1, D) zeros for `add_rows_`: a row for each of x, and a last one that −1 adds to."""
    return x_RD.new_zeros(len(x_RD) + 1, x_RD.shape[1], dtype=dtype)


def add_rows_(sums: Tensor, index: Tensor, rows: Tensor) -> None:
    """Adds rows (…, D) to those of `sums_for` that the index names, in a fixed order."""
    flat = torch.where(index < 0, len(sums) - 1, index).flatten()
    rows = rows.reshape(len(flat), -1)
    if sums.device.type == "cpu":
        sums.index_add_(0, flat, rows)
    else:
        # Of the two only this one sorts on a GPU, so that sums are the same in every run.
        sums.index_put_((flat.long(),), rows, accumulate=True)
