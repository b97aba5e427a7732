"""Checks of parallel.tp and parallel.ep against the model and the ranks. No torch, and fast.

In: a config, its decoder and the number of lanes. Out: nothing, or a ValueError that names the key
and sizes that work. With 8 heads parallel.tp may be 1, 2, 4 or 8; with 2 lanes, tp 2 and layers of
6 experts parallel.ep may be 1 or 2, which divide both 2·2 and 6.
"""

import math
from collections.abc import Iterator

from longshore.arch.cuts import decoder_on_tp_rank
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Part
from longshore.config.located import settings_in_keys
from longshore.config.schema import RunConfig


def check_parallel(config: RunConfig, decoder: DecoderConfig, *, lanes: int) -> None:
    with settings_in_keys():
        decoder_on_tp_rank(decoder, config.parallel.tp)
    _check_expert_parallel(config, decoder, lanes=lanes)


def _check_expert_parallel(config: RunConfig, decoder: DecoderConfig, *, lanes: int) -> None:
    ep, tp = config.parallel.ep, config.parallel.tp
    if ep == 1:
        return
    experts = sorted({part.experts for part in _parts(decoder) if isinstance(part, MoEConfig)})
    if not experts:
        raise ValueError(
            f"parallel.ep is {ep}, but this model has no experts; leave parallel.ep out"
        )
    if config.plan.sync == "step":
        raise ValueError(
            f"plan.sync=step does not work with parallel.ep {ep}: the ranks that share experts "
            "wait for each other in every layer; use plan.sync=round, or parallel.ep=1"
        )
    ranks = lanes * tp
    works = _divisors(math.gcd(ranks, *experts))
    use = f"use one of {_listed(works)}, or another number of ranks"
    if ranks % ep:
        raise ValueError(
            f"parallel.ep is {ep}, which does not divide the {ranks} ranks of a pipeline stage "
            f"({lanes} lanes × parallel.tp {tp}); {use}"
        )
    if any(count % ep for count in experts):
        raise ValueError(
            f"parallel.ep is {ep}, which does not divide the {_listed(experts)} experts of a "
            f"layer; {use}"
        )


def _parts(decoder: DecoderConfig) -> Iterator[Part]:
    return (part for layer in (*decoder.layers, *decoder.mtp) for part in layer.parts)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
