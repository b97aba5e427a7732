"""Checks of parallel.tp and parallel.ep against the model and the ranks. No torch, and fast.

In: a config, its decoder and the number of lanes. Out: nothing, or a ValueError that names the key
and sizes that work. With 8 heads parallel.tp may be 1, 2, 4 or 8; with 2 lanes, tp 2 and layers of
6 experts parallel.ep may be 1 or 2, which divide both 2·2 and 6; each limit is told on its own.
"""

from longshore.arch.cuts import decoder_on_tp_rank
from longshore.arch.decoder import DecoderConfig
from longshore.arch.expert_cuts import check_ep
from longshore.config.located import settings_in_keys
from longshore.config.schema import RunConfig


def check_parallel(config: RunConfig, decoder: DecoderConfig, *, lanes: int) -> None:
    with settings_in_keys():
        decoder_on_tp_rank(decoder, config.parallel.tp)
        check_ep(decoder, config.parallel.ep)
    _check_ep_ranks(config, lanes=lanes)


def _check_ep_ranks(config: RunConfig, *, lanes: int) -> None:
    ep, tp = config.parallel.ep, config.parallel.tp
    if ep > 1 and config.plan.sync == "step":
        raise ValueError(
            f"plan.sync=step does not work with parallel.ep {ep}: the ranks that share experts "
            "wait for each other in every layer; use plan.sync=round, or parallel.ep=1"
        )
    ranks = lanes * tp
    if ranks % ep:
        works = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        raise ValueError(
            f"parallel.ep is {ep}, which does not divide the {ranks} ranks of a pipeline stage "
            f"({lanes} lanes × parallel.tp {tp}); use one of {works}, or another number of ranks"
        )
