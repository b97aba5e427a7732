"""config.json of a Hugging Face folder. No torch, so that a bad folder is refused fast.

In: a folder. Out: its DecoderConfig; and for a DecoderConfig the text of a config.json. A folder
that was read and is written again gets the same text, byte for byte, keys we do not know included:

    config_text(read_config(base), base=base, dtype=None) == (base / "config.json").read_text()

Whether a decoder has multi-token prediction depends on the folder's tensors, not on config.json
alone: transformers saves folders without them, and Qwen3-Next's config.json does not mention them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from longshore.arch.decoder import DecoderConfig
from longshore.hf.architectures import OWN, Architecture, architecture_for, find_architecture
from longshore.hf.deepseek import OLDER_KEYS, OTHER_NAMES
from longshore.hf.keys import ROPE_KEYS, bare, refuse_quantized
from longshore.hf.mamba import OLDER
from longshore.hf.qwen_llama import balance_weight
from longshore.hf.tensor_map import StorageLayout, read_tensor_names

CONFIG = "config.json"
MOST_CONFIG_BYTES = 10_000_000
MOST_BYTES = 1_000_000_000
"""The limit of any other file of JSON; an index of a million tensors has a tenth of this."""
DEFAULT_LENGTH = 32768
"""max_position_embeddings where nothing says it."""

BALANCED = ("Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "DeepseekV4ForCausalLM")
"""Architectures whose model in transformers adds a balance loss if output_router_logits is true."""

RESPELLED = (*ROPE_KEYS, *OLDER, *OLDER_KEYS, *OTHER_NAMES, "layers_block_type", "layer_types")
"""Keys with the meaning of another key; we write only one of them."""


def read_config(folder: str | Path) -> DecoderConfig:
    """The decoder a Hugging Face folder holds."""
    return describe(folder)[2]


def describe(folder: str | Path) -> tuple[dict[str, Any], Architecture, DecoderConfig]:
    """The keys of a folder's config.json, its architecture, and the decoder."""
    folder = Path(folder)
    raw = load_object(folder / CONFIG, most_bytes=MOST_CONFIG_BYTES)
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


def load_object(path: Path, *, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file, which has at most `most_bytes`."""
    if path.is_file() and (size := path.stat().st_size) > most_bytes:
        raise ValueError(f"{path} has {size:,} bytes; the limit is {most_bytes:,}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {path.name}" if path.parent.is_dir() else "is not a folder"
        raise ValueError(f"{path.parent} {what}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except RecursionError:
        raise ValueError(f"{path} is broken: its lists and objects are nested too deep") from None
    except ValueError:
        raise ValueError(f"{path} is broken: it is not JSON") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} is broken: it must hold a JSON object")
    return data


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
