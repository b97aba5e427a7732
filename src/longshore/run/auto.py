"""What a run decides for itself: everything that is "auto" in its configuration.

In: a config, the decoder, the ranks' memory and dtype, the longest sequence. Out: Settled, in which
nothing is open, with lines that say how each choice came about:

    parallel.shard: none, every rank holds all: model and optimizer take 2% of a rank's memory
"""

from dataclasses import dataclass, replace

from longshore.arch.decoder import DecoderConfig
from longshore.arch.memory import ShardMode, auto_capacity, model_bytes
from longshore.config.check import check_longest
from longshore.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Settled:
    """A configuration after everything "auto" in it was decided; `lines` say how, for people.

    dtype: its name, such as bfloat16.
    """

    config: RunConfig
    decoder: DecoderConfig
    mode: ShardMode
    capacity: int
    dtype: str
    lines: tuple[str, ...]


def settle(
    config: RunConfig,
    decoder: DecoderConfig,
    *,
    lanes: int,
    dtype: str,
    memory: int,
    longest: int,
) -> Settled:
    """Decides what is "auto"; memory: bytes of the rank that has least."""
    mode, why = _mode(config, decoder, lanes=lanes, dtype=dtype, memory=memory)
    lines = [f"parallel.shard: {why}"] if config.parallel.shard == "auto" else []
    capacity = config.plan.capacity
    if capacity == "auto":
        capacity, arithmetic = auto_capacity(
            decoder,
            memory_bytes=memory,
            lanes=lanes,
            shard=mode,
            dtype=dtype,
            recompute=config.train.recompute == "blocks",
            longest=longest,
        )
        lines.append(f"plan.capacity: {capacity:,} tokens a rank and round")
        lines += [f"  {line}" for line in arithmetic]
    fixed = replace(config, plan=replace(config.plan, capacity=capacity))
    check_longest(fixed, lanes, longest)
    return Settled(fixed, decoder, mode, capacity, dtype, tuple(lines))


def _mode(
    config: RunConfig, decoder: DecoderConfig, *, lanes: int, dtype: str, memory: int
) -> tuple[ShardMode, str]:
    """How the model is shared out: whole on every rank while that takes a quarter of the memory."""
    if config.parallel.shard != "auto":
        return config.parallel.shard, ""
    whole = model_bytes(decoder, lanes=1, shard="none", dtype=dtype).total
    share = f"model and optimizer take {whole / memory:.0%} of a rank's memory"
    if lanes == 1 or whole <= memory / 4:
        return "none", f"none, every rank holds all: {share}"
    if config.plan.sync == "step":
        return "zero2", f"zero2, because plan.sync is step: {share}"
    return "zero3", f"zero3: {share}"
