"""The architectures of transformers that we read and write: their keys and their tensors' names.

In: a config.json as a dict. Out: a DecoderConfig, and back; and for each of our tensors its source
in a Hugging Face folder. No torch, so that a bad folder is refused fast.

    find_architecture({"architectures": ["LlamaForCausalLM"], …}).name  "LlamaForCausalLM"

A new architecture is an entry of ARCHITECTURES: two functions for the keys, and in tensor_map.py a
table of names. A decoder that none of them fits, one with a user's mixers for example, is stored in
our own format: config.json holds the config as it is, and tensors keep our names.

    {"model_type": "longshore", "torch_dtype": "float32", "decoder": {"kind": "DecoderConfig", …}}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig
from longshore.hf.deepseek import (
    deepseek_keys,
    deepseek_v4_keys,
    read_deepseek,
    read_deepseek_v4,
)
from longshore.hf.keys import SHOWN, Raw, shown
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
    DECODER_NAMES,
    MAMBA_NAMES,
    NEXT_NAMES,
    FindSource,
    Source,
    by_table,
    find_deepseek,
    find_deepseek_v4,
    find_nemotron,
)

OLD_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Tensors of old folders that are not weights and are never read."""

REFUSED = {"deepseek_v32": "its attention is sparse, to tokens that an index chooses"}
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
    source: FindSource
    """From the name of one of our tensors to its source in the folder."""
    ignored: str = OLD_BUFFERS
    """A pattern of tensor names that are not read."""


_by_decoder_names = by_table(DECODER_NAMES)
_all = (
    Architecture("Qwen3ForCausalLM", "qwen3", read_qwen3, qwen3_keys, _by_decoder_names),
    Architecture("LlamaForCausalLM", "llama", read_llama, llama_keys, _by_decoder_names),
    Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe, qwen3_moe_keys, _by_decoder_names
    ),
    Architecture(
        "Qwen3NextForCausalLM", "qwen3_next", read_qwen3_next, qwen3_next_keys, by_table(NEXT_NAMES)
    ),
    Architecture(
        "DeepseekV3ForCausalLM", "deepseek_v3", read_deepseek, deepseek_keys, find_deepseek
    ),
    Architecture(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        read_deepseek_v4,
        deepseek_v4_keys,
        find_deepseek_v4,
        ignored=r"mtp\..*",
    ),
    Architecture("Mamba2ForCausalLM", "mamba2", read_mamba2, mamba2_keys, by_table(MAMBA_NAMES)),
    Architecture("NemotronHForCausalLM", "nemotron_h", read_nemotron, nemotron_keys, find_nemotron),
)
ARCHITECTURES: Mapping[str, Architecture] = {each.name: each for each in _all}

OWN = Architecture(
    "LongshoreDecoder",
    "longshore",
    lambda raw: config_from_json(raw.get("decoder")),
    lambda config: {"decoder": config_to_json(config)},
    lambda name, layout: Source(name),
    ignored="",
)
"""Our own format: read like the others, and written only where it is asked for.

A user's mixer is stored by its name, so its module must be imported first (model.module)."""


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
