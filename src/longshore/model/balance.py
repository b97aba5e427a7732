"""How the experts of a whole decoder are kept even, changed. Torch-free.

In: a DecoderConfig and the numbers to change. Out: the same decoder, trained in another way: what
it computes and what its folder holds stay the same.

    with_balance(read_config("Qwen3-30B-A3B"), aux_weight=1e-3)
    with_balance(preset("deepseek-v3"), bias_update=0.0)     its bias stays where it is
"""

from dataclasses import replace

from longshore.model.config import DecoderConfig, LayerConfig
from longshore.model.moe_config import MoEConfig


def has_experts(config: DecoderConfig) -> bool:
    return any(isinstance(layer.mlp, MoEConfig) for layer in (*config.layers, *config.mtp))


def with_balance(
    config: DecoderConfig, *, aux_weight: float | None = None, bias_update: float | None = None
) -> DecoderConfig:
    """With these numbers in all layers and depths, see MoEConfig; None leaves them as they are."""
    for name, number in (("aux_weight", aux_weight), ("bias_update", bias_update)):
        if number and not has_experts(config):
            raise ValueError(f"{name} is for experts, and this model has none; leave it out")
    layers, mtp = (
        tuple(_changed(layer, aux_weight, bias_update) for layer in found)
        for found in (config.layers, config.mtp)
    )
    return replace(config, layers=layers, mtp=mtp)


def _changed(
    layer: LayerConfig, aux_weight: float | None, bias_update: float | None
) -> LayerConfig:
    moe = layer.mlp
    if not isinstance(moe, MoEConfig):
        return layer
    if bias_update and not moe.bias:
        raise ValueError(
            "bias_update moves a bias of the router, and the experts of this model have none; "
            "balance them by aux_weight"
        )
    if aux_weight is not None:
        moe = replace(moe, aux_weight=aux_weight)
    if bias_update is not None:
        moe = replace(moe, bias_update=bias_update)
    return replace(layer, mlp=moe)
