"""Attention over a window of rows and compressed entries, one head of keys for all queries.

In: queries (T, H, D), rows (R, D) and entries (E, D) that are keys and values at once, a logit for
each head that counts in the denominator alone (sink), and the ranges of what each query sees. Out:
(T, H, D), and if wanted the attention on each chosen entry, summed over the heads.

chosen: int32 (T, K), absolute entry indices, distinct in a row, −1 for none; None: a query sees all
entries of its range.
"""

from torch import Tensor

from longshore.ops.reference import sparse_attention as reference
from longshore.ops.row_ranges import RowRanges


def sparse_attention(
    q_THD: Tensor,
    near_RD: Tensor,
    entries_ED: Tensor,
    sinks_H: Tensor,
    *,
    ranges: RowRanges,
    scale: float,
    chosen_TK: Tensor | None = None,
    needs_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The output in the dtype of q; mass_TK in float32 at least, detached, None unless needed."""
    ranges.check(len(q_THD), len(near_RD), len(entries_ED))
    return reference.sparse_attention(
        q_THD,
        near_RD,
        entries_ED,
        sinks_H,
        ranges=ranges,
        scale=scale,
        chosen_TK=chosen_TK,
        needs_mass=needs_mass,
    )
