"""Weights and LoRA of models that run as transformers' own code, under transformers' own names.

In: a Hugging Face folder and a TransformersModel, on `meta`, already split over the lanes. Out: its
parameters, each rank reading the blocks that it holds; or, from a stream of whole tensors, a folder
like the first that transformers loads. Untrained, all tensors are the same bytes again. With a
LoRAConfig, whose targets are names of transformers' modules: factors beside its linear layers, and
whole tensors with trained factors in them.

Files may store each expert on its own, where the model has one tensor for all of them:

    model.layers.0.mlp.experts.gate_up_proj    (8, 2·32, 48) from 8 times
    model.layers.0.mlp.experts.3.gate_proj.weight (32, 48) above ….3.up_proj.weight (32, 48)

and under other names, which transformers' own table replaces: GPT-NeoX's embed_out.weight is the
model's lm_head.weight.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longshore.arch.decoder import DecoderConfig, LoRAConfig
from longshore.files import read_json_object
from longshore.hf.checkpoint import (
    SHARD_BYTES,
    Weights,
    check_copy,
    check_tensors,
    stored_shapes,
    write_folder,
)
from longshore.hf.config_file import CONFIG, OLD_BUFFERS
from longshore.hf.lora import MergedTensors, ModelBase
from longshore.hf.tensor_files import TensorFiles
from longshore.hf.tensor_map import PerExpert, Shape, Source
from longshore.hf.transformers_model import TransformersModel, empty_model
from longshore.model.lora import add_factors, factor_block, is_factor, name_refusals
from longshore.parallel.pipeline import saved_buffers
from longshore.parallel.shards import fill

EXPERT_PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""What files call the parts of an expert, by what the model calls all of them."""
HEAD = "lm_head.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def fill_transformers(
    model: TransformersModel, device: torch.device, folder: str | Path, *, seed: int = 0
) -> None:
    """Reads the rank's blocks of every tensor; buffers that no file has keep what they hold.

    seed: of low-rank factors, where the model has some.
    """
    shapes = {name: shape for name, shape in shapes_of(model).items() if not is_factor(name)}
    weights = open_transformers(folder, shapes, tied=model.tied)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}

    def block(name: str, shape: torch.Size, index: tuple[slice, ...]) -> Tensor:
        if is_factor(name):
            return factor_block(name, shape, index, seed=seed)
        return weights.block(name, index) if name in weights.shapes else kept[name][index]

    fill(model, device, block)


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """The names and whole shapes of all tensors that a folder holds."""
    tensors = chain(model.named_parameters(), saved_buffers(model))
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def open_transformers(folder: str | Path, shapes: Mapping[str, Shape], *, tied: bool) -> Weights:
    """The tensors of a folder, after checking that all are there and fit."""
    files = TensorFiles(folder)
    sources = find_sources(shapes, names_in_model(files), tied=tied)
    check_tensors(files, stored_shapes(sources, shapes), ignored=OLD_BUFFERS)
    for source in sources.values():
        for copy in source.copies:
            check_copy(files, copy, source.stored, why="the head uses the embedding's weight")
    return Weights(files, sources, dict(shapes))


def names_in_model(files: TensorFiles) -> dict[str, str]:
    """The names of a folder's tensors, by themselves and by what transformers renames them to."""
    raw = read_json_object(files.folder / CONFIG)
    own = {name: name for name in files.names}
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:  # `longshore export` needs it for such names alone
        return own
    kind = str(raw.get("model_type"))
    tables = map(
        get_checkpoint_conversion_mapping, (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind), kind)
    )
    rules = next((table for table in tables if table is not None), ())
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    # In order, because some renamings depend on those before.
    renamed = {rename_source_key(name, renamings, [])[0]: name for name in sorted(own)}
    return {**renamed, **own}


def find_sources(
    names: Iterable[str], stored: Mapping[str, str], *, tied: bool
) -> dict[str, Source]:
    """The source of each tensor of the model. stored: what names_in_model returns.

    A tensor that the folder does not have keeps its name, and is missed later.
    """
    sources = {name: _find_source(name, stored) for name in names}
    if tied and HEAD in stored:
        embedding = next(name for name in sources if _is_embedding(name))
        sources[embedding] = replace(sources[embedding], copies=(stored[HEAD],))
    return sources


def _is_embedding(name: str) -> bool:
    return re.search(r"embed|wte", name) is not None and "position" not in name


def _find_source(name: str, stored: Mapping[str, str]) -> Source:
    without_trunk = name.partition(".")[2]
    for each in (name, without_trunk):
        if each in stored:
            return Source(stored[each])
    experts, _, fused = name.rpartition(".")
    for parts in EXPERT_PARTS.get(fused, ()):
        first = f".0.{parts[0]}.weight"
        if (first_name := stored.get(experts + first, "")).endswith(first):
            return PerExpert(first_name.removesuffix(first), parts)
    return Source(name)


def write_transformers(
    folder: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    base: str | Path,
    tied: bool,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder like the base, from a stream of the model's (name, tensor) pairs.

    tied: the head uses the embedding's weight, of which the base may have a copy. dtype: of most
    tensors, None for their own; those whose dtype in the base is not that of most of its tensors
    keep it. config.json and the tokenizer are the base's.
    """
    base = Path(base)
    files, raw = TensorFiles(base), read_json_object(base / CONFIG)
    write_folder(
        folder,
        _stored(tensors, files, tied=tied, dtype=dtype),
        files.names,
        lambda kind: _config_text(base, raw, kind),
        base=base,
        shard_bytes=shard_bytes,
    )


def _stored(
    tensors: Iterable[tuple[str, Tensor]],
    files: TensorFiles,
    *,
    tied: bool,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """The stream under the names of the files, in their dtypes."""
    names, in_model = frozenset(files.names), names_in_model(files)
    left = {name for name in names if not re.fullmatch(OLD_BUFFERS, name)}
    floats = Counter(kind for kind in map(files.dtype, names) if kind in DTYPES)
    most = floats.most_common(1)[0][0]
    for name, tensor in tensors:
        source = find_sources([name], in_model, tied=tied and _is_embedding(name))[name]
        for stored, part in source.write(tensor):
            if stored not in left:
                raise ValueError(f"tensor {name} is not one of {files.folder}")
            left.remove(stored)
            # A base of other sizes may have the same names, and its config.json would be written.
            if part.shape != files.shape(stored):
                raise ValueError(
                    f"tensor {stored} has the shape {tuple(part.shape)}, but {files.shape(stored)} "
                    f"in {files.folder}, which so is not the folder that the run began with"
                )
            kept = files.dtype(stored)
            kind = dtype if kept == most else DTYPES.get(kept, dtype)
            is_cast = dtype is not None and kind is not None and part.is_floating_point()
            yield stored, part.to(kind) if is_cast else part
    if left:
        raise ValueError(f"missing among the tensors to write: {', '.join(sorted(left)[:3])}")


def _config_text(base: Path, raw: dict[str, Any], dtype: str) -> str:
    """The base's, with the dtype of the weights."""
    key = "dtype" if "dtype" in raw else "torch_dtype"
    if raw.get(key, dtype) == dtype:
        return (base / CONFIG).read_text(encoding="utf-8")
    return json.dumps({**raw, key: dtype}, indent=2, ensure_ascii=False) + "\n"


def add_transformers_factors(model: TransformersModel, config: LoRAConfig) -> None:
    """Factors beside the targets among the linear layers of its blocks; all else is frozen."""
    linears = [
        (f"{block}.{name}", module)
        for block in model.layer_names
        for name, module in model.get_submodule(block).named_modules()
        if type(module) is nn.Linear
    ]
    if why := next(name_refusals(config, [name for name, _ in linears]), ""):
        raise ValueError(why)
    add_factors(model, config, linears)


def merged_transformers(
    config: DecoderConfig, base: ModelBase, factors: Mapping[str, Tensor]
) -> MergedTensors:
    """All tensors of the base's folder, under the names that its model has in memory."""
    assert config.lora is not None
    assert base.folder is not None
    hf = empty_model(str(base.folder))
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    shapes = shapes_of(hf)
    if tied:
        shapes.pop(HEAD, None)
    weights = open_transformers(base.folder, shapes, tied=tied)
    return MergedTensors(config.lora, factors, shapes=shapes, read=weights.__getitem__)
