"""The simplest core: a mixer's function sees whole sequences.

In: a function mix(x, bounds) over joined sequences, a lane's rows and the context. Out: its rows of
what the function makes. Here every pack must be whole on its lane; parallel/context/whole.py
gathers those that are not. A mixer that has nothing better, or is new, starts with it.

    local_packs(running_mean, x_TC, ctx)       each sequence's mean so far, token by token
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longshore.batch import Boundaries, SeqContext
from longshore.model.attention import refuse_shared

Mix = Callable[[Tensor, Boundaries], Tensor]


def local_packs(mix: Mix, x_TC: Tensor, ctx: SeqContext) -> Tensor:
    made = []
    for pack in ctx.packs:
        refuse_shared(pack)
        made.append(mix(x_TC[pack.rows], pack.padded))
    return torch.cat(made)
