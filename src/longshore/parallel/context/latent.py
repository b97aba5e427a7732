"""Latent attention over the lanes of a CP group: the core that parallel/apply.py puts in.

In: a lane's queries and latents, kv_up's weight, and the micro-batch's context. Out: the lane's
attention output. Lanes exchange latents alone, L = kv_rank + rope_dim numbers a token; each makes
keys and values from them itself, and the weight's gradient is what its own queries ask of it.

With T rows a lane at CP size c, forward brings a lane (c − 1)·T·L numbers and backward twice that:
the latents again, for only the shards are kept, and their gradients. At CP size 2, 1,000 rows of
DeepSeek-V3 are 3·576,000; the keys and values of its heads would be 3·40,960,000.
"""

from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.arch.attention import Form
from longshore.batch import PackContext, SeqContext
from longshore.distributed.cp_groups import CPGroups
from longshore.model.mla import Reach, meet, own
from longshore.parallel.context.seen import fetch_seen, return_seen


class ContextLatent:
    """The core of latent attention for packs of any CP size."""

    def __init__(self, groups: CPGroups) -> None:
        self.groups = groups

    def __call__(
        self,
        q_THD: Tensor,
        latent_TL: Tensor,
        weight_HXR: Tensor,
        ctx: SeqContext,
        /,
        *,
        scale: float,
        form: Form,
    ) -> Tensor:
        return meet(q_THD, latent_TL, weight_HXR, ctx, scale=scale, form=form, reach=self._reach)

    def _reach(self, pack: PackContext) -> Reach:
        if pack.group.cp_size == 1:
            return own(pack)
        return gathered(pack, self.groups.group(pack.group.first_lane, pack.group.cp_size))


def gathered(pack: PackContext, group: ProcessGroup) -> Reach:
    """The reach of a lane's chunks over all lanes that share the pack."""
    assert pack.zigzag is not None
    return Reach(
        pack.zigzag.chunks,
        pack.zigzag.seen,
        lambda shard_TL: fetch_seen(shard_TL, pack, group),
        lambda grad_SL: return_seen(grad_SL, pack, group),
    )
