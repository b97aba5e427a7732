"""A checkpoint folder of our own, for decoders that no architecture of transformers can be.

In: a DecoderConfig, a user's mixers included. Out: an Architecture whose config.json holds the
config as it is, and whose tensors keep our names; model.from_hf reads it like any other:

    config.json          {"model_type": "longshore", "torch_dtype": "float32",
                          "decoder": {"kind": "DecoderConfig", "vocab_size": 256, …}}
    model.safetensors    embed.weight, layers.0.mixer_norm.weight, …

A user's mixer stands there by name; its module must have been imported before (model.module). No
torch.
"""

from typing import Any

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig
from longshore.hf.tensor_map import Layout, Source
from longshore.hf.typed_keys import Raw

MODEL_TYPE = "longshore"


def read_own(raw: Raw) -> DecoderConfig:
    """The decoder of a config.json of ours."""
    return config_from_json(raw.get("decoder"))


def own_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of a config.json of ours."""
    return {"decoder": config_to_json(config)}


def place_own(name: str, layout: Layout) -> Source:
    """Every tensor lies under its own name."""
    return Source(name)
