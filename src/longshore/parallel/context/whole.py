"""Any mixer over the lanes of a CP group: every lane gathers the pack and mixes all of it.

In: a mixer's function over joined sequences, a lane's rows and the context. Out: its rows of the
result. Exact for every function that keeps sequences apart, at the price of gathering the input and
of doing the mixing on each lane; a mixer that matters gets a core of its own.

With CP size 2 lane 0 holds rows 0 1 6 7 of 8: it gathers all, puts them in order, mixes them, and
keeps rows 0 1 6 7 of what comes out.
"""

import torch
from torch import Tensor

from longshore.batch import SeqContext
from longshore.distributed.collectives import gather
from longshore.distributed.cp_groups import CPGroups
from longshore.model.whole import Mix


class WholePacks:
    """The core of a mixer for packs of any CP size."""

    def __init__(self, groups: CPGroups) -> None:
        self.groups = groups

    def __call__(self, mix: Mix, x_TC: Tensor, ctx: SeqContext) -> Tensor:
        made = []
        for pack in ctx.packs:
            mine = x_TC[pack.rows]
            if pack.zigzag is None:
                made.append(mix(mine, pack.padded))
                continue
            group = self.groups.group(pack.group.first_lane, pack.group.cp_size)
            natural = gather(mine, group).index_select(0, pack.zigzag.to_natural)
            rows = pack.zigzag.to_shards.view(group.size(), -1)[pack.group.cp_rank]
            made.append(mix(natural, pack.padded).index_select(0, rows))
        return torch.cat(made)
