"""First values of a decoder's parameters, the same for every way of sharding it.

In: the config, a parameter's name and shape, a block of it, a seed. Out: that block.
Matrices are normal with the config's init_std, the projections that end a mixer or a feed-forward
part smaller by sqrt(2·layers), norms 1, biases 0. Other parameters of a module are listed in
its FILLS. Values are made in float32, so a float64 model begins with the same ones. A table of
token ids has K distinct experts in each row: the places of the K least of E random numbers.

Rank 1 of 2 owns rows 128…256 of the embedding of a vocabulary of 256:

    initial_block(config, "embed.weight", (256, 64), (slice(128, 256), slice(0, 64)), seed=7)
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.model.decoder import Decoder
from longshore.model.fill import NORM, NORMAL, ZEROS, Fill, fill_rows
from longshore.model.hyper_connection import FILLS as HYPER_FILLS
from longshore.model.lora import factor_block, is_factor
from longshore.model.registry import FEED_FORWARDS, MIXERS


def initial_block(
    config: DecoderConfig, name: str, shape: Sequence[int], index: Sequence[slice], *, seed: int
) -> Tensor:
    """A block of the first values of that parameter: float32, on the CPU.

    index: a range of each dim, or of the first ones alone.
    """
    if is_factor(name):
        return factor_block(name, shape, index, seed=seed)
    rows, *rest = index
    fill = fill_of(config, name)
    if name == "head.weight" and config.tied:
        name = "embed.weight"
    if fill.constant is not None:
        constant = 0.0 if fill.norm and config.zero_centred else fill.constant
        return fill_rows(name, shape, rows, seed=seed, constant=constant, rest=rest)
    if fill.experts:
        scores = fill_rows(name, (shape[0], fill.experts), rows, seed=seed, std=1.0)
        table = scores.argsort(dim=1, stable=True)[:, : shape[1]]
        return table[(slice(None), *rest)].float()
    if fill.by_row is not None:
        numbers = torch.arange(rows.start, rows.stop, dtype=torch.float64)
        return fill.by_row(numbers, shape[0]).float()
    std = config.init_std * fill.std if fill.own_std is None else fill.own_std
    if fill.residual:
        std /= (2 * len(config.layers)) ** 0.5
    return fill_rows(name, shape, rows, seed=seed, std=std, rest=rest)


def init_decoder(model: Decoder, seed: int) -> None:
    """Gives parameters and buffers their first values; they are plain tensors, on any device."""
    with torch.no_grad():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            rows = (slice(0, len(tensor)),)
            tensor.copy_(initial_block(model.config, name, tensor.shape, rows, seed=seed))


def fill_of(config: DecoderConfig, name: str) -> Fill:
    """How the parameter of that name begins."""
    match name.split("."):
        case ["embed" | "head", "weight"] | ["mtp", _, "proj", "weight"]:
            return NORMAL
        case ["norm", "weight"] | ["mtp", _, "norm" | "embed_norm" | "hidden_norm", "weight"]:
            return NORM
        case ["collapse", part] | ["mtp", _, "collapse", part] if config.residuals:
            return HYPER_FILLS[part]
        case ["layers", index, *rest] if _has(config.layers, index) and len(rest) > 1:
            return _fill_in_block(config.layers[int(index)], rest)
        case ["mtp", index, "block", *rest] if _has(config.mtp, index) and len(rest) > 1:
            return _fill_in_block(config.mtp[int(index)], rest)
    raise ValueError(f"a decoder has no parameter {name!r}")


def _has(layers: tuple[LayerConfig, ...], index: str) -> bool:
    return index.isdecimal() and int(index) < len(layers)


def _fill_in_block(layer: LayerConfig, name: list[str]) -> Fill:
    child, *rest = name
    if child in ("mixer_norm", "mlp_norm"):
        return NORM
    if child in ("mixer_hyper", "mlp_hyper") and layer.residuals:
        return HYPER_FILLS[rest[-1]]
    part = layer.mixer if child == "mixer" else layer.mlp
    assert part is not None
    if part.id_rows and rest == ["router", "table"]:
        return Fill(experts=part.routed_experts)
    modules = MIXERS if child == "mixer" else FEED_FORWARDS
    own: Mapping[str, Fill] = getattr(modules[type(part)], "FILLS", {})
    return own.get(".".join(rest), ZEROS if rest[-1] == "bias" else NORMAL)
