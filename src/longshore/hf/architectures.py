"""The architectures of transformers that we read and write: their keys and their tensors' names.

In: a config.json as a dict. Out: a DecoderConfig, and back; and for each of our tensors its source
in a Hugging Face folder. No torch, so that a bad folder is refused fast.

    find_architecture({"architectures": ["LlamaForCausalLM"], …}).name  "LlamaForCausalLM"

A new architecture is an entry of ARCHITECTURES: two functions for the keys, and in tensor_map.py a
table of names. Where a tensor of ours is several of theirs, or interleaved, a class of
tensor_map.py says so.

A checkpoint folder in our own format, for decoders that transformers has no architecture for.

In: a DecoderConfig, a user's mixers included. Out: an Architecture whose config.json holds the
config as it is, and whose tensors keep our names; model.from_hf reads it like any other:

    config.json          {"model_type": "longshore", "torch_dtype": "float32",
                          "decoder": {"kind": "DecoderConfig", "vocab_size": 256, …}}
    model.safetensors    embed.weight, layers.0.mixer_norm.weight, …

A user's mixer is stored by its name, so its module must be imported first (model.module). No torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig
from longshore.hf.deepseek import (
    deepseek_keys,
    deepseek_v4_keys,
    place_deepseek_v4,
    read_deepseek,
    read_deepseek_v4,
)
from longshore.hf.mamba import mamba2_keys, nemotron_keys, read_mamba2, read_nemotron
from longshore.hf.qwen_llama import (
    llama_keys,
    qwen3_keys,
    qwen3_moe_keys,
    qwen3_next_keys,
    read_llama,
    read_qwen3,
    read_qwen3_moe,
    read_qwen3_next,
)
from longshore.hf.tensor_map import (
    DENSE_NAMES,
    MAMBA_NAMES,
    MOE_NAMES,
    NEXT_NAMES,
    Place,
    Source,
    StorageLayout,
    by_table,
    place_deepseek,
    place_nemotron,
)
from longshore.hf.typed_keys import SHOWN, Raw, shown

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


OLD_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Tensors of old folders that are not weights and are never read."""

REFUSED = {
    "deepseek_v32": "its attention is sparse, to tokens that an index chooses",
}
"""Model types that look supported, and why they are not."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of transformers."""

    name: str
    """As in the key `architectures` of config.json."""
    model_type: str
    """As in config.json; unique."""
    read: Callable[[Raw], DecoderConfig]
    """From the keys of config.json to our config."""
    keys: Callable[[DecoderConfig], dict[str, Any]]
    """Back, without name and model_type; raises ValueError if the config is not of this kind."""
    place: Place
    """From the name of one of our tensors to its source in the folder."""
    ignored: str = OLD_BUFFERS
    """A pattern of tensor names that are not read."""


_DENSE = by_table(DENSE_NAMES)
ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture("Qwen3ForCausalLM", "qwen3", read_qwen3, qwen3_keys, _DENSE),
        Architecture("LlamaForCausalLM", "llama", read_llama, llama_keys, _DENSE),
        Architecture(
            "Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe, qwen3_moe_keys, by_table(MOE_NAMES)
        ),
        Architecture(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            read_qwen3_next,
            qwen3_next_keys,
            by_table(NEXT_NAMES),
        ),
        Architecture(
            "DeepseekV3ForCausalLM", "deepseek_v3", read_deepseek, deepseek_keys, place_deepseek
        ),
        Architecture(
            "DeepseekV4ForCausalLM",
            "deepseek_v4",
            read_deepseek_v4,
            deepseek_v4_keys,
            place_deepseek_v4,
            ignored=r"mtp\..*",
        ),
        Architecture(
            "Mamba2ForCausalLM", "mamba2", read_mamba2, mamba2_keys, by_table(MAMBA_NAMES)
        ),
        Architecture(
            "NemotronHForCausalLM", "nemotron_h", read_nemotron, nemotron_keys, place_nemotron
        ),
    )
}

OWN = Architecture("LongshoreDecoder", MODEL_TYPE, read_own, own_keys, place_own, ignored="")
"""Our own format: read like the others, and written only where it is asked for."""


def find_architecture(raw: Raw) -> Architecture:
    """The architecture a config.json names, by model_type where it names none."""
    named = raw.get("architectures") or []
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        raise ValueError(f"model_type {kind} is not supported: {REFUSED[kind]}")
    for architecture in (*ARCHITECTURES.values(), OWN):
        if architecture.name in names or (not names and kind == architecture.model_type):
            _check_model_type(architecture, names, kind)
            return architecture
    what = " ".join(names)[:SHOWN] or f"of model_type {shown(kind)}"
    raise ValueError(
        f"architecture {what} is not supported; supported are {', '.join(ARCHITECTURES)}; "
        "longshore train and longshore score run others as transformers' own code, with "
        "model.code=transformers"
    )


def _check_model_type(architecture: Architecture, names: list[str], kind: object) -> None:
    """model_type, which transformers reads, and architectures, for others, must agree."""
    others = [name for name in names if name in ARCHITECTURES and name != architecture.name]
    if others:
        raise ValueError(f"architectures names {architecture.name} and {others[0]}; keep one")
    if kind is not None and kind != architecture.model_type:
        raise ValueError(
            f"model_type is {shown(kind)}, and architectures names {architecture.name}, whose "
            f"model_type is {architecture.model_type!r}; correct the one that is wrong"
        )


def architecture_for(config: DecoderConfig) -> Architecture:
    """The first architecture that fits this decoder."""
    reasons = []
    for architecture in ARCHITECTURES.values():
        try:
            architecture.keys(config)
        except ValueError as error:
            reasons.append(f"{architecture.name}: {error}")
        else:
            return architecture
    raise ValueError(f"no architecture of transformers fits this decoder ({'; '.join(reasons)})")
