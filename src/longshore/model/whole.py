"""The simplest core: a mixer's function sees whole sequences.

In: a function mix(x, bounds) over joined sequences, a lane's rows and the context. Out: its rows of
what the function makes. Here every pack must be whole on its lane, or `refuse_shared` says so;
parallel/context/whole.py gathers those that are not. A mixer that is new starts with it.

    local_packs(running_mean, x_TC, ctx)       each sequence's mean so far, token by token
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longshore.batch import Boundaries, PackContext, SeqContext

Mix = Callable[[Tensor, Boundaries], Tensor]


def refuse_shared(pack: PackContext, what: str) -> None:
    """ValueError for a pack that a core of one lane cannot serve. what: of the model."""
    if pack.group.cp_size != 1:
        raise ValueError(
            f"a pack is shared by {pack.group.cp_size} lanes, and this model's {what} knows only "
            "its own; make the model ready for context parallelism, or plan with a CP size of 1"
        )


def local_packs(mix: Mix, x_TC: Tensor, ctx: SeqContext) -> Tensor:
    made = []
    for pack in ctx.packs:
        refuse_shared(pack, "mixer")
        made.append(mix(x_TC[pack.rows], pack.padded))
    return torch.cat(made)
