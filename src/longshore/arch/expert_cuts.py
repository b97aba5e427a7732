"""Expert parallelism as data: which experts of a layer a rank has. Pure Python.

In: a decoder's config, the number of EP ranks, a rank. Out: a TensorCut of the experts' parameters,
whose first dim counts the experts, or an error that says which sizes work.

8 experts on 4 EP ranks, rank 2: dim 0 of 8, (Span(4, 6),), axis "ep", so experts 4 and 5.
"""

from math import gcd

from longshore.arch.cuts import Span, TensorCut
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.errors import SettingError


def check_ep(config: DecoderConfig, ep: int) -> None:
    """Raises if this decoder's experts cannot be divided evenly over `ep` ranks."""
    layers = (*config.layers, *config.mtp)
    sizes = [layer.mlp.experts for layer in layers if isinstance(layer.mlp, MoEConfig)]
    if ep == 1:
        return
    if not sizes:
        raise SettingError("{ep} is {given}, but the model has no experts; use {ep:1}", given=ep)
    odd = [size for size in sizes if size % ep]
    if odd:
        most = gcd(*sizes)
        raise SettingError(
            "{ep} is {given}, which does not divide the {experts} experts of a layer; use one of "
            "{works}",
            given=ep,
            experts=odd[0],
            works=", ".join(str(size) for size in range(1, most + 1) if most % size == 0),
        )


def expert_cut(experts: int, *, ep: int, ep_rank: int) -> TensorCut:
    """An EP rank's experts, of a parameter (experts, …)."""
    assert experts % ep == 0, "check_ep comes first"
    each = experts // ep
    return TensorCut(0, experts, (Span(ep_rank * each, (ep_rank + 1) * each),), "ep")
