"""The weights at the end of a run, under our own names, and low-rank factors as a folder of PEFT.

In: a config, a stream of tensors, the Hugging Face folder the run began with. Out: a folder, and
from it the same again, every file checked against its checksum; or a folder that PEFT loads onto
the base model of transformers. A run that began with Qwen3-8B ends with

    weights.json                            {"format": "longshore weights", "version": 2,
                                             "config": {"kind": "DecoderConfig", …},
                                             "base": "/models/Qwen3-8B", "files": checksums of
                                             the files below, "sha256": of this file}
    weights-00001-of-00007.safetensors …    embed.weight, layers.0.mixer_norm.weight, …
    weights.safetensors.index.json
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig, LoRAConfig, has_experts
from longshore.files import new_folder, open_sealed, read_json_object, sealed_json
from longshore.hf.checkpoint import (
    SHARD_BYTES,
    TABLE,
    Weights,
    check_stream,
    check_tensors,
    storage_layout,
    tensor_shapes,
)
from longshore.hf.config_file import choose_architecture, transformers_base
from longshore.hf.lora import (
    ModelBase,
    base_from_json,
    check_base,
    factor_shapes,
    find_base,
    merged_decoder,
)
from longshore.hf.tensor_files import TensorFiles, write_files
from longshore.hf.tensor_map import Interleaved, Shape, Source
from longshore.hf.transformers_weights import merged_transformers
from longshore.settings import ModelCode
from longshore.train.checkpoint_files import DamagedError, SavedFile, check_file

FORMAT = "longshore weights"
VERSION = 2
STEM = "weights"


@dataclass(frozen=True, slots=True, eq=False)
class SavedWeights:
    """A decoder and its tensors."""

    config: DecoderConfig
    """What it is; for models of transformers what it costs."""
    base: Path | None
    """The Hugging Face folder it began with."""
    tensors: Mapping[str, Tensor]
    """The tensors by name."""
    lora: ModelBase | None = None
    """Where the tensors are low-rank factors alone: what they were trained on."""
    code: ModelCode = "longshore"
    """transformers: the tensors have the names that transformers gives them."""

    def merged(self, base: Path | None = None) -> "SavedWeights":
        """Whole weights, with factors in them; base: where its folder is now, if it moved."""
        now = self.check_base(base)
        if now is None:
            return self if base is None else replace(self, base=base)
        merged = merged_decoder if self.code == "longshore" else merged_transformers
        tensors = merged(self.config, now, self.tensors)
        return SavedWeights(self.config.merged(), now.folder, tensors, code=self.code)

    def check_base(self, base: Path | None = None) -> ModelBase | None:
        """What low-rank factors were trained on, if it is still the same; None without factors."""
        if self.lora is None:
            return None
        folder = base or self.lora.folder
        if folder is not None and not folder.is_dir():
            raise ValueError(
                f"the run began with {folder}, which does not exist; name its folder with --base"
            )
        now = find_base(self.config, folder, seed=self.lora.seed)
        check_base(self.lora, now)
        return now


def save_weights(
    folder: str | Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    base: str | Path | None,
    shard_bytes: int = SHARD_BYTES,
    is_replaced: bool = False,
    lora: ModelBase | None = None,
    code: ModelCode = "longshore",
) -> None:
    """Writes a stream of our (name, tensor) pairs into a new folder, in their own dtypes.

    is_replaced: an existing folder is replaced once the new one is complete. lora: the tensors are
    low-rank factors alone, trained on this.
    """
    shapes = _shapes(config) if code == "longshore" else {}
    checked = check_stream(tensors, shapes, dtype=None) if shapes else tensors
    about = {
        "format": FORMAT,
        "version": VERSION,
        "config": config_to_json(config),
        "base": None if base is None else str(Path(base).resolve()),
        **({} if lora is None else {"lora": lora.as_json()}),
        **({} if code == "longshore" else {"code": code}),
    }
    with new_folder(folder, is_replaced=is_replaced) as partial:
        _, saved = write_files(partial, checked, stem=STEM, shard_bytes=shard_bytes, names=shapes)
        files = {name: asdict(file) for name, file in saved.items()}
        (partial / f"{STEM}.json").write_bytes(sealed_json({**about, "files": files}, indent=1))


def load_weights(folder: str | Path) -> SavedWeights:
    """What save_weights wrote; tensors are read when they are asked for."""
    folder = Path(folder)
    path = folder / f"{STEM}.json"
    about = read_json_object(path)
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError(
            f"{path} is {about.get('format')!r} version {about.get('version')!r}; this Longshore "
            f"reads {FORMAT!r} version {VERSION}"
        )
    _check_bytes(folder, path)
    try:
        config = config_from_json(about.get("config"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    base, lora = about.get("base"), about.get("lora")
    code: ModelCode = "transformers" if about.get("code") == "transformers" else "longshore"
    files = TensorFiles(folder, STEM)
    if code == "transformers":
        shapes = {name: files.shape(name) for name in files.names}
    else:
        shapes = _shapes(config)
        check_tensors(files, shapes, tables=frozenset(filter(TABLE.fullmatch, shapes)))
    return SavedWeights(
        config=config,
        base=None if base is None else Path(base),
        tensors=Weights(files, {name: Source(name) for name in shapes}, shapes),
        lora=None if lora is None else base_from_json(lora),
        code=code,
    )


def _shapes(config: DecoderConfig) -> dict[str, Shape]:
    """The shapes of what is saved: low-rank factors alone where there are some."""
    return factor_shapes(config) if config.lora is not None else tensor_shapes(config)


def _check_bytes(folder: Path, path: Path) -> None:
    """Compares weights.json and all files that it names with their checksums."""
    try:
        try:
            files = open_sealed(path.read_bytes())["files"]
            expected = {folder / str(name): SavedFile(**file) for name, file in files.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is damaged: {error}") from None
        for each, file in expected.items():
            check_file(each, file)
    except DamagedError as error:
        raise ValueError(
            f"{error}; copy it again, or have its run write it again with longshore train --resume"
        ) from None


EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate")
"""In models with experts PEFT takes these names for the experts' own tensors, everywhere."""
MAMBA = ("mamba2", "nemotron_h")
"""Model types of which PEFT refuses out_proj: transformers reads its weight by itself."""


def write_adapter(folder: str | Path, saved: SavedWeights, *, base: Path | None) -> list[str]:
    """Writes a folder of PEFT; returns notes about what is not in it. base: of the run.

    adapter_config.json and adapter_model.safetensors have the names of transformers' modules:
    layers.3.mixer.q_proj.lora.b is base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight.
    Where a weight's rows are in another order there (DeepSeek's rotary rows), so are those of B. A
    module that transformers does not have as one linear layer is refused, and so is what PEFT 0.21
    would load elsewhere or not at all. Depths of multi-token prediction, which transformers does
    not have, are left out.
    """
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
        names = [source.stored.removesuffix(".weight") for source in sources.values()]
        # PEFT reads one file.
        write_files(partial, _tensors(saved, sources), stem="adapter_model", shard_bytes=1 << 60)
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
    layout = storage_layout(config, transformers_base(base))
    sources = {}
    for module in modules:
        source = architecture.source(f"{module}.weight", layout)
        _check(module, source, config, architecture.name, architecture.model_type)
        if architecture.model_type == "nemotron_h":  # in memory the decoder is called so
            source = replace(source, stored=re.sub(r"^backbone\.", "model.", source.stored))
        sources[module] = source
    return sources


def _check(
    module: str, source: Source, config: DecoderConfig, name: str, model_type: str = ""
) -> None:
    """Refuses what PEFT would not load, or onto something else. name: of the architecture."""
    leaf, why = source.stored.removesuffix(".weight").rpartition(".")[2], ""
    if type(source) not in (Source, Interleaved) or source.copies:
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
        start = f"base_model.model.{source.stored.removesuffix('.weight')}"
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
