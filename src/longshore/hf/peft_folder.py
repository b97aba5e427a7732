"""Low-rank factors as a folder that PEFT loads onto the base model of transformers.

In: the saved factors of a run. Out: adapter_config.json and adapter_model.safetensors, with the
names of transformers' modules:

    layers.3.mixer.q_proj.lora.b  →  base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight

Where a weight's rows are in another order there (DeepSeek's rotary rows), so are those of B. A
module that transformers does not have as one linear layer is refused, and so is what PEFT 0.21
would load elsewhere or not at all; depths of multi-token prediction are left out, because
transformers has none.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from longshore.arch.decoder import DecoderConfig, has_experts
from longshore.arch.lora import LoRAConfig
from longshore.files import new_folder
from longshore.hf.checkpoint import storage_layout
from longshore.hf.config_file import choose_architecture, foreign_base
from longshore.hf.tensor_files import write_files
from longshore.hf.tensor_map import Interleaved, Source
from longshore.hf.weights import SavedWeights

EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate")
"""In models with experts PEFT takes these names for the experts' own tensors, everywhere."""
MAMBA = ("mamba2", "nemotron_h")
"""Model types of which PEFT refuses out_proj: transformers reads its weight by itself."""
STEM = "adapter_model"
SHARD_BYTES = 1 << 60
"""PEFT reads one file."""


def write_adapter(folder: str | Path, saved: SavedWeights, *, base: Path | None) -> list[str]:
    """Writes a new folder; returns notes about what is not in it. base: of the run."""
    config = saved.config
    if config.lora is None:
        raise ValueError(
            "--adapter is for runs with model.lora, and this one had none; leave --adapter out"
        )
    modules = sorted({name[: -len(".lora.a")] for name in saved.tensors})
    absent = [module for module in modules if module.startswith("mtp.")]
    sources = _sources(saved, [module for module in modules if module not in absent], base)
    notes = [
        f"left out: {len(absent)} modules of multi-token prediction, which transformers does not "
        "have"
    ]
    with new_folder(folder) as partial:
        names = [source.theirs.removesuffix(".weight") for source in sources.values()]
        write_files(partial, _tensors(saved, sources), stem=STEM, shard_bytes=SHARD_BYTES)
        text = json.dumps(_adapter_config(config.lora, names, base), indent=2, ensure_ascii=False)
        (partial / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    return notes if absent else []


def _sources(saved: SavedWeights, modules: list[str], base: Path | None) -> dict[str, Source]:
    """Where transformers has the weight of each module."""
    config = saved.config.merged()
    if saved.code == "transformers":
        sources = {module: Source(f"{module}.weight") for module in modules}
        for module, source in sources.items():
            _check(module, source, config, "this model")
        return sources
    architecture = choose_architecture(config, base)
    layout = storage_layout(config, foreign_base(base))
    sources = {}
    for module in modules:
        source = architecture.place(f"{module}.weight", layout)
        _check(module, source, config, architecture.name, architecture.model_type)
        if architecture.model_type == "nemotron_h":  # in memory the decoder is called so
            source = replace(source, theirs=re.sub(r"^backbone\.", "model.", source.theirs))
        sources[module] = source
    return sources


def _check(
    module: str, source: Source, config: DecoderConfig, name: str, model_type: str = ""
) -> None:
    """Refuses what PEFT would not load, or onto something else. name: of the architecture."""
    leaf, why = source.theirs.removesuffix(".weight").rpartition(".")[2], ""
    if type(source) not in (Source, Interleaved):
        why = "it is not one linear layer in transformers"
    elif has_experts(config) and leaf in EXPERTS:
        why = f"PEFT takes every {leaf} of a model with experts for one of the experts"
    elif model_type in MAMBA and leaf == "out_proj":
        why = "PEFT refuses it, because transformers reads its weight outside the module"
    if why:
        raise ValueError(
            f"PEFT cannot hold the factors of {module} for {name}: {why}; export without "
            "--adapter, which merges them, or train with other model.lora.targets"
        )


def _tensors(saved: SavedWeights, sources: dict[str, Source]) -> Iterator[tuple[str, Tensor]]:
    for module, source in sources.items():
        start = f"base_model.model.{source.theirs.removesuffix('.weight')}"
        yield f"{start}.lora_A.weight", saved.tensors[f"{module}.lora.a"].contiguous()
        ((_, b),) = source.write(saved.tensors[f"{module}.lora.b"])
        yield f"{start}.lora_B.weight", b.contiguous()


def _adapter_config(lora: LoRAConfig, modules: list[str], base: Path | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": sorted(modules),
        "use_dora": False,
        "use_rslora": False,
    }
