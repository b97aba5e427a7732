"""LoRA on our own models: factors beside linear layers by name, everything else frozen.

In: a decoder, or a stage of one, and a LoRAConfig. Out: the same modules; those that the config
names have `lora.a` and `lora.b` (ops/linear.py), and only these want gradients:

    Decoder(replace(preset("tiny-llama"), lora=LoRAConfig(rank=8, alpha=16)))
    layers.0.mixer.q_proj.lora.a (8, 64)     layers.0.mixer.q_proj.lora.b (64, 8)

Linear layers of mixers and feed-forward parts can have factors. Experts' weights are tensors of
all experts together, and routers, norms, embedding and head are no linear layers here: they stay
as they are. `b` begins at 0, so that the first output is the base's; `a` as in PEFT, by its width.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from longshore.arch.decoder import ALL_LINEAR, DecoderConfig, LayerConfig, LoRAConfig
from longshore.model.feed_forward import AdaptedGatedLinear, GatedLinear
from longshore.model.fill import fill_rows
from longshore.model.norm_rope import Float32Parameters
from longshore.model.registry import make_feed_forward, make_mixer
from longshore.ops.linear import AdaptedLinear, LowRank, adapt

KINDS: dict[type[nn.Linear], type[nn.Linear]] = {
    nn.Linear: AdaptedLinear,
    GatedLinear: AdaptedGatedLinear,
}
"""The linear layers that can have factors, and what they become."""
B_STD = 0.0
"""The first values of `b`: zeros, but tests let both factors have gradients."""


def add_factors(
    model: nn.Module, config: LoRAConfig, linears: Iterable[tuple[str, nn.Linear]] | None = None
) -> None:
    """Puts factors beside the targets, and freezes all else, in place.

    linears: those that can have factors, by name; default: a decoder's.
    """
    model.requires_grad_(False)
    for name, linear in list(_linears(model) if linears is None else linears):
        if config.matches(name):
            _add(linear, rank=config.rank, scale=config.scale)


def add_same_factors(model: nn.Module, whole: nn.Module) -> None:
    """Factors where a module of the same kind has them, for a part of its rows or columns."""
    for name, module in whole.named_modules():
        if isinstance(module, LowRank):
            linear = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(linear, nn.Linear)
            _add(linear, rank=len(module.a), scale=module.scale)


def _add(linear: nn.Linear, *, rank: int, scale: float) -> None:
    with torch.device(linear.weight.device):
        lora = LowRank(linear.in_features, linear.out_features, rank=rank, scale=scale)
    adapt(linear, lora.to(linear.weight.dtype), KINDS[type(linear)])


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """All that can have factors, by their names in the decoder."""
    for name, module in model.named_modules():
        path = name.split(".")
        is_inside = path[0] == "layers" or path[::2][:2] == ["mtp", "block"]
        if is_inside and isinstance(module, nn.Linear) and type(module) in KINDS:
            yield name, module


def factor_block(name: str, shape: Sequence[int], index: Sequence[slice], *, seed: int) -> Tensor:
    """A block of the first values of a factor of that name, however it is cut; on the CPU."""
    rows, *rest = index
    # The variance of torch's linear layers, 1 / (3·columns), but normal.
    std = (3 * shape[1]) ** -0.5 if name.endswith(".a") else B_STD
    return fill_rows(name, shape, rows, seed=seed, std=std, rest=rest)


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is a low-rank factor."""
    return name.endswith((".lora.a", ".lora.b"))


def hold_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts what is not trained to the dtype of the arithmetic: no update needs more digits."""
    uncast = [module for module in model.modules() if isinstance(module, Float32Parameters)]
    kept = {parameter for module in uncast for parameter in module.parameters()}
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter not in kept:
            parameter.data = parameter.data.to(dtype)


def target_refusals(config: DecoderConfig) -> Iterator[str]:
    """Targets that name no linear layer, with the names there are."""
    if config.lora is not None:
        yield from name_refusals(config.lora, list(_names(config)))


def name_refusals(config: LoRAConfig, names: Sequence[str]) -> Iterator[str]:
    """The same for a model whose linear layers have these names."""
    short = sorted({name.rpartition(".")[2] for name in names})
    for target in config.targets:
        if not any(map(replace(config, targets=(target,)).matches, names)):
            yield (
                f"model.lora.targets: no linear layer of this model is named {target!r}; there are "
                f"{', '.join(short)}, or {ALL_LINEAR} for all of them (experts' own weights, "
                "routers, embedding and head have no factors)"
            )


def _names(config: DecoderConfig) -> Iterator[str]:
    """Names of all linear layers; layers of one kind are built once."""
    known = {layer: _names_in(layer, config) for layer in {*config.layers, *config.mtp}}
    for start, layers in (("layers.{}", config.layers), ("mtp.{}.block", config.mtp)):
        for number, layer in enumerate(layers):
            yield from (f"{start.format(number)}.{name}" for name in known[layer])


def _names_in(layer: LayerConfig, config: DecoderConfig) -> list[str]:
    parts = nn.ModuleDict()
    with torch.device("meta"):
        if layer.mixer is not None:
            parts["mixer"] = make_mixer(layer.mixer, config.width, norm=config.norm)
        if layer.mlp is not None:
            parts["mlp"] = make_feed_forward(layer.mlp, config.width, norm=config.norm)
    return [name for name, module in parts.named_modules() if type(module) in KINDS]
