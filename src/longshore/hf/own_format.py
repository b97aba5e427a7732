"""A checkpoint folder in our own format, for decoders that transformers has no architecture for.

In: a DecoderConfig, a user's mixers included. Out: an Architecture whose config.json holds the
config as it is, and whose tensors keep our names; model.from_hf reads it like any other:

    config.json          {"model_type": "longshore", "torch_dtype": "float32",
                          "decoder": {"kind": "DecoderConfig", "vocab_size": 256, …}}
    model.safetensors    embed.weight, layers.0.mixer_norm.weight, …

A user's mixer is stored by its name, so its module must be imported first (model.module). No torch.
"""

from typing import Any

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig
from longshore.hf.tensor_map import Source, StorageLayout
from longshore.hf.typed_keys import Raw

MODEL_TYPE = "longshore"


def read_own(raw: Raw) -> DecoderConfig:
    """The decoder of a config.json of ours."""
    return config_from_json(raw.get("decoder"))


def own_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of a config.json of ours."""
    return {"decoder": config_to_json(config)}


def place_own(name: str, layout: StorageLayout) -> Source:
    """Every tensor keeps our name."""
    return Source(name)
