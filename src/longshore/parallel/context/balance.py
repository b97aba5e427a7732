"""Counts of the balance loss over the lanes of a CP group: the core that parallel/apply.py puts in.

In: how many of this lane's tokens of each sequence chose each expert. Out: the same of all lanes
that share the sequence. For each pack that is shared, in the order of the packs, one sum of
(sequences, experts) integers; nothing else is exchanged, and nothing in backward.

A sequence of 8 tokens at CP size 2, 3 experts: lanes with counts [3 1 0] and [0 2 2] both get
[3 3 2].
"""

from torch import Tensor

from longshore.batch import SeqContext
from longshore.distributed.collectives import sum_over
from longshore.distributed.cp_groups import CPGroups


class ContextCounts:
    """The core of a layer of experts for packs of any CP size."""

    def __init__(self, groups: CPGroups) -> None:
        self.groups = groups

    def __call__(self, counts_SE: Tensor, ctx: SeqContext, /) -> Tensor:
        """Overwrites the rows of shared sequences."""
        for pack in ctx.packs:
            rows_SE = counts_SE[pack.sequences]
            if pack.group.cp_size > 1 and len(rows_SE):
                group = self.groups.group(pack.group.first_lane, pack.group.cp_size)
                sum_over(rows_SE, group)
        return counts_SE
