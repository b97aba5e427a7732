"""From tokens to heads and back over a CP group, each way in one exchange.

In: a lane's shard of a pack with all heads. Out: the whole pack in natural order with the lane's
share of the heads, and the reverse. Attention, Mamba2 and the delta rule use it alike.

With CP size 2 and heads a b, lane 0 holds rows 0 1 6 7 and lane 1 rows 2 3 4 5; lane 0 sends its
rows of b and gets lane 1's rows of a, and orders them 0 1 2 3 4 5 6 7.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.batch import PackContext
from longshore.distributed.collectives import all_to_all


def to_heads(
    parts: tuple[Tensor, ...], pack: PackContext, group: ProcessGroup
) -> tuple[Tensor, ...]:
    """Parts (T, heads, …) of a shard as (N, heads / cp_size, …); heads may differ between parts."""
    assert pack.zigzag is not None
    size, rows = group.size(), len(parts[0])
    shares = [part.unflatten(1, (size, -1)) for part in parts]
    sent = torch.cat([share.flatten(2) for share in shares], dim=2).transpose(0, 1).flatten(0, 1)
    even = [rows] * size
    got = all_to_all(sent, group, sends=even, receives=even)
    natural = got.index_select(0, pack.zigzag.to_natural)
    found = natural.split([share[0, 0].numel() for share in shares], dim=1)
    return tuple(
        part.unflatten(1, share.shape[2:]) for part, share in zip(found, shares, strict=True)
    )


def from_heads(natural: Tensor, pack: PackContext, group: ProcessGroup) -> Tensor:
    """(N, heads / cp_size, …) in natural order as the shard's (T, heads, …)."""
    assert pack.zigzag is not None
    size = group.size()
    gathered = natural.index_select(0, pack.zigzag.to_shards)
    even = [len(natural) // size] * size
    got = all_to_all(gathered.flatten(1), group, sends=even, receives=even)
    by_lane: Tensor = got.unflatten(0, (size, -1)).unflatten(2, natural.shape[1:])
    return by_lane.transpose(0, 1).flatten(1, 2)
