"""What the chunks of a lane may see of a shared pack, brought from all lanes, and gradients back.

In: a lane's rows (T, X) of a pack. Out: for each of its chunks, one after the other, all rows of
the sequence up to the chunk's last; and the way back. Neither is differentiated: whoever keeps only
the shards for backward calls both itself.

At CP size 2 lane 0 holds tokens 0 1 6 7 of 8, and its chunks see 0 1, then 0 1 2 3 4 5 6 7.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.batch import PackContext
from longshore.distributed.collectives import gather, reduce_scatter


def fetch_seen(rows_TX: Tensor, pack: PackContext, group: ProcessGroup) -> Tensor:
    assert pack.zigzag is not None
    with torch.no_grad():
        return gather(rows_TX, group).index_select(0, pack.zigzag.seen_rows)


def return_seen(grad_SX: Tensor, pack: PackContext, group: ProcessGroup) -> Tensor:
    """The gradient of the lane's rows, from all lanes' gradients of what they saw of them."""
    assert pack.zigzag is not None
    whole = grad_SX.new_zeros(len(pack.zigzag.to_natural), grad_SX.shape[1])
    # At most two chunks of a lane see a row, so the order of the additions cannot show.
    whole.index_add_(0, pack.zigzag.seen_rows, grad_SX)
    return reduce_scatter(whole, group)
