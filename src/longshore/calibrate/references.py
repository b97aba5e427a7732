"""The parts that calibration measures: those of the presets, so that each kind is near one.

In: "cuda" or "cpu". Out: References in the order of importance: one of each kind first, so that a
small budget still sees every kind. On CUDA they are those of large presets, on a CPU tiny ones.

    references("cpu")[0]        attention of tiny-qwen3 at width 64
"""

from dataclasses import dataclass, replace

import numpy as np

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Part
from longshore.arch.part_work import part_kind
from longshore.arch.presets import preset

Case = tuple[int, ...]
"""The lengths of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A part of a preset."""

    name: str
    """In words."""
    decoder: DecoderConfig
    """Whose width, vocabulary and norms count."""
    part: Part | None
    """None for the decoder's embedding or head, by `kind`."""
    kind: str
    """Of arch/machine.py's KINDS."""


def references(device: str) -> list[Reference]:
    """All that is measured on this kind of device."""
    return _on_cuda() if device == "cuda" else _on_cpu()


def cases_of(kind: str, device: str, *, quick: bool = False) -> list[Case]:
    """Micro-batches to measure a part with: totals, and for mixers lengths."""
    is_mixer = kind in ("attention", "mla", "mamba", "delta")
    totals: tuple[int, ...] = (2048, 8192, 32768) if device == "cuda" else (32, 128, 512)
    if quick:
        totals = totals[:-1]
    if not is_mixer:
        more = (4096, 16384) if device == "cuda" and not quick else (64, 256)
        return [(tokens,) for tokens in sorted({*totals, *more})]
    most, less = totals[-1], totals[-2]
    shares = (8, 128) if quick else (8, 32, 128)
    tails = [tail(most, most // share, seed=share) for share in shares]
    return [*((tokens,) for tokens in totals), *tails, tail(less, most // 32, seed=less)]


def tail(total: int, median: int, *, seed: int) -> Case:
    """Lognormal lengths of this median that make up the total: of no round size, as in data."""
    random, lengths = np.random.default_rng(seed), list[int]()
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(random.lognormal(np.log(median), 1.0)))))
    return tuple(lengths)


def _on_cuda() -> list[Reference]:
    small, large = preset("qwen3-0.6b"), preset("qwen3-8b")
    moe, mamba = preset("qwen3-30b-a3b", layers=1), preset("nemotron-h-8b", layers=8)
    delta, llama = preset("qwen3-next-80b-a3b", layers=4), preset("llama-3.2-1b")
    deepseek = preset("deepseek-v3", layers=3, mtp=())
    few = replace(_alone(_experts(delta)), experts=32)
    return [
        *(_part(name, decoder, 0, "mixer") for name, decoder in (("qwen3-0.6b", small),)),
        _part("qwen3-0.6b", small, 0, "mlp"),
        _end("qwen3-0.6b", small, "head"),
        _end("qwen3-0.6b", small, "embedding"),
        _part("qwen3-30b-a3b", moe, 0, "mlp"),
        _part("nemotron-h-8b", mamba, 0, "mixer"),
        _part("qwen3-next-80b-a3b", delta, 0, "mixer"),
        _part("qwen3-8b", large, 0, "mixer"),
        _part("qwen3-8b", large, 0, "mlp"),
        _end("qwen3-8b", large, "head"),
        Reference("32 experts of qwen3-next-80b-a3b", delta, few, "experts"),
        _part("llama-3.2-1b", llama, 0, "mixer"),
        _part("qwen3-next-80b-a3b", delta, 3, "mixer"),
        _part("deepseek-v3", deepseek, 0, "mixer"),
        _part("nemotron-h-8b", mamba, 1, "mlp"),
        _end("nemotron-h-8b", mamba, "embedding"),
    ]


def _on_cpu() -> list[Reference]:
    qwen, moe = preset("tiny-qwen3"), preset("tiny-qwen3-moe")
    hybrid, deepseek = preset("tiny-hybrid"), preset("tiny-deepseek-v3")
    return [
        _part("tiny-qwen3", qwen, 0, "mixer"),
        _part("tiny-qwen3", qwen, 0, "mlp"),
        _end("tiny-qwen3", qwen, "head"),
        _end("tiny-qwen3", qwen, "embedding"),
        _part("tiny-qwen3-moe", moe, 0, "mlp"),
        _part("tiny-hybrid", hybrid, 0, "mixer"),
        _part("tiny-hybrid", hybrid, 1, "mixer"),
        _part("tiny-deepseek-v3", deepseek, 0, "mixer"),
        _part("tiny-deepseek-v3", deepseek, 1, "mlp"),
    ]


def _part(name: str, decoder: DecoderConfig, index: int, place: str) -> Reference:
    layer: LayerConfig = decoder.layers[index]
    part = layer.mixer if place == "mixer" else layer.mlp
    assert part is not None, (name, index, place)
    part = _alone(part) if isinstance(part, MoEConfig) else part
    return Reference(f"{part_kind(part)} of {name}", decoder, part, part_kind(part))


def _end(name: str, decoder: DecoderConfig, kind: str) -> Reference:
    return Reference(f"{kind} of {name}", decoder, None, kind)


def _alone(moe: MoEConfig) -> MoEConfig:
    """Without the shared expert, which is predicted as an MLP."""
    return replace(moe, shared_width=0, shared_gate=False)


def _experts(decoder: DecoderConfig) -> MoEConfig:
    moe = decoder.layers[0].mlp
    assert isinstance(moe, MoEConfig)
    return moe
