"""LoRA on models of transformers that run as transformers' own code.

In: a TransformersModel and a LoRAConfig, whose targets are names of transformers' modules. Out: the
same model with factors beside its linear layers, as our own models have them (model/lora.py); and
whole tensors under transformers' names, with trained factors in them:

    model.layers.0.self_attn.q_proj.lora.a (8, 1024)
    merged_foreign(config, base, factors)["model.layers.0.self_attn.q_proj.weight"]

Experts, whose weights transformers holds in one tensor, have no factors.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from longshore.arch.decoder import DecoderConfig
from longshore.arch.lora import LoRAConfig
from longshore.hf.foreign_weights import HEAD, open_foreign, shapes_of
from longshore.hf.lora import MergedTensors, ModelBase
from longshore.hf.transformers_model import TransformersModel, empty_model
from longshore.model.lora import add_factors, check_names


def add_foreign_factors(model: TransformersModel, config: LoRAConfig) -> None:
    """Factors beside the targets among the linear layers of its blocks; all else is frozen."""
    linears = [
        (f"{block}.{name}", module)
        for block in model.layer_names
        for name, module in model.get_submodule(block).named_modules()
        if type(module) is nn.Linear
    ]
    check_names(config, [name for name, _ in linears])
    add_factors(model, config, linears)


def merged_foreign(
    config: DecoderConfig, base: ModelBase, factors: Mapping[str, Tensor]
) -> MergedTensors:
    """All tensors of the base's folder, under the names that its model has in memory."""
    assert config.lora is not None
    assert base.folder is not None
    shapes, tied = _shapes(base.folder)
    weights = open_foreign(base.folder, shapes, tied=tied)
    return MergedTensors(config.lora, factors, shapes=shapes, read=weights.__getitem__)


def _shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Of the folder's model, and whether its head uses the embedding's weight."""
    hf = empty_model(str(folder))
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    shapes = shapes_of(hf)
    if tied:
        shapes.pop(HEAD, None)
    return shapes, tied
