"""config.json of a Hugging Face folder, and the architectures of transformers that we know.

In: a folder. Out: its DecoderConfig; and for a DecoderConfig the text of a config.json. A folder
that was read and is written again gets the same text, byte for byte, keys we do not know included:

    config_text(read_config(base), base=base, dtype=None) == (base / "config.json").read_text()

A new architecture is an entry of ARCHITECTURES: two functions for the keys, and in tensor_map.py a
table of names. A decoder that none of them fits, one with a user's mixers for example, is stored in
our own format: config.json holds the config as it is, and tensors keep our names.

    {"model_type": "longshore", "torch_dtype": "float32", "decoder": {"kind": "DecoderConfig", …}}

No torch, so that a bad folder is refused fast.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig
from longshore.files import read_json_object
from longshore.hf.deepseek import (
    OLDER_KEYS,
    OTHER_NAMES,
    deepseek_keys,
    deepseek_v4_keys,
    read_deepseek,
    read_deepseek_v4,
)
from longshore.hf.keys import ROPE_KEYS, SHOWN, Raw, bare, refuse_quantized, shown
from longshore.hf.mamba import OLDER, mamba2_keys, nemotron_keys, read_mamba2, read_nemotron
from longshore.hf.qwen_llama import (
    balance_weight,
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
    StorageLayout,
    by_table,
    find_deepseek,
    find_deepseek_v4,
    find_nemotron,
    read_tensor_names,
)

CONFIG = "config.json"
MOST_CONFIG_BYTES = 10_000_000
DEFAULT_LENGTH = 32768
"""max_position_embeddings where nothing says it."""

BALANCED = ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "DeepseekV4ForCausalLM")
"""Architectures whose model in transformers adds a balance loss if output_router_logits is true."""

RESPELLED = (*ROPE_KEYS, *OLDER, *OLDER_KEYS, *OTHER_NAMES, "layers_block_type", "layer_types")
"""Keys with the meaning of another key; we write only one of them."""

OLD_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Tensors of old folders that are not weights and are never read."""

REFUSED = {"deepseek_v32": "its attention is sparse, to tokens that an index chooses"}
"""Model types that look supported, and why they are not."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of transformers."""

    name: str
    """Its name in the key `architectures` of config.json."""
    model_type: str
    """The same key of config.json; unique."""
    read: Callable[[Raw], DecoderConfig]
    """Makes our config from the keys of config.json."""
    keys: Callable[[DecoderConfig], dict[str, Any]]
    """Back, without name and model_type; raises ValueError if the config is not of this kind."""
    source: FindSource
    """Finds the source of one of our tensors in the folder."""
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


def read_config(folder: str | Path) -> DecoderConfig:
    """The decoder a Hugging Face folder holds."""
    return describe(folder)[2]


def describe(folder: str | Path) -> tuple[dict[str, Any], Architecture, DecoderConfig]:
    """The keys of a folder's config.json, its architecture, and the decoder.

    Whether it has multi-token prediction depends on the folder's tensors: transformers saves
    folders without them, and Qwen3-Next's config.json does not mention them.
    """
    folder = Path(folder)
    raw = read_json_object(folder / CONFIG, most_bytes=MOST_CONFIG_BYTES)
    try:
        refuse_quantized(raw)  # before the architecture: a quantized one may be unknown, too
        architecture = find_architecture(raw)
        config = architecture.read(raw)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None
    if config.mtp:
        join = architecture.source("mtp.0.proj.weight", StorageLayout(config, raw)).stored
        names = read_tensor_names(folder)
        if names is not None and join not in names:
            config = replace(config, mtp=())
    return raw, architecture, config


def asked_balance(folder: str | Path) -> float:
    """The weight of the balance loss that transformers adds by itself; 0 for none."""
    raw, architecture, _ = describe(folder)
    return balance_weight(raw) if architecture.name in BALANCED else 0.0


def transformers_base(base: Path | None) -> Path | None:
    """The base if an architecture of transformers describes it; None for a folder of our format."""
    return None if base is None or describe(base)[1] is OWN else base


def choose_architecture(config: DecoderConfig, base: Path | None) -> Architecture:
    """The architecture of transformers to write: that of the base, or the first that fits."""
    base = transformers_base(base)
    if base is None:
        return architecture_for(config)
    _, architecture, _ = describe(base)
    try:
        architecture.keys(config)
    except ValueError as error:
        raise ValueError(
            f"the decoder does not fit {architecture.name}, the architecture of {base}: {error}"
        ) from None
    return architecture


def config_text(
    config: DecoderConfig, *, base: Path | None, dtype: str | None, max_length: int | None = None
) -> str:
    """The text of a config.json. dtype: of the weights, None to leave what the base says.

    max_length: max_position_embeddings; None for what the scaling of positions or the base says.
    """
    if base is None:
        raw: dict[str, Any] = {}
        changed = _rewritten(config, architecture_for(config), raw)
        changed |= {"bos_token_id": None, "eos_token_id": None}
    else:
        raw, architecture, base_config = describe(base)
        same = bare(config) == bare(base_config)
        changed = dict(raw) if same else _rewritten(config, architecture, raw)
    if dtype is not None and (base is None or "dtype" in raw or "torch_dtype" in raw):
        changed["dtype" if "dtype" in raw else "torch_dtype"] = dtype
    if max_length is not None:
        changed["max_position_embeddings"] = max_length
        read = find_architecture(changed).read(changed)
        if bare(replace(read, mtp=config.mtp)) != bare(config):
            raise ValueError(
                f"max_length {max_length} would change how positions are scaled; leave it out"
            )
    if base is not None and changed == raw:
        return (base / CONFIG).read_text(encoding="utf-8")
    return json.dumps(changed, indent=2, ensure_ascii=False) + "\n"


def own_config_text(config: DecoderConfig, *, dtype: str) -> str:
    """The text of a config.json in our own format."""
    keys = {"model_type": OWN.model_type, "torch_dtype": dtype, **OWN.keys(config)}
    return json.dumps(keys, indent=2, ensure_ascii=False) + "\n"


def _rewritten(
    config: DecoderConfig, architecture: Architecture, raw: dict[str, Any]
) -> dict[str, Any]:
    """The keys of `config` over those of the base; positions are spelled in one way only."""
    kept = {key: value for key, value in raw.items() if key not in RESPELLED}
    head = {"architectures": [architecture.name], "model_type": architecture.model_type}
    return {**head, "max_position_embeddings": DEFAULT_LENGTH, **kept, **architecture.keys(config)}
