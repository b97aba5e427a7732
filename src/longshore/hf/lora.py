"""The base of a LoRA run, and its weights with the trained factors in them.

In: a decoder with factors, the folder that the run began with, or the seed of its new weights, and
the factors. Out: whole tensors under our names, W + alpha / rank · B·A, in float32 at least:

    base = find_base(config, "Qwen3-8B", seed=0)
    base.as_json()                          {"folder": "/models/Qwen3-8B", "seed": 0, "digest": …}
    merged_decoder(config, base, factors)["layers.0.mixer.q_proj.weight"]

A base is read one tensor at a time. Its digest says that it is still the same: it covers
config.json, and of each file of weights its name, its size and its first and last mebibyte.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longshore.arch.as_json import config_to_json
from longshore.arch.decoder import DecoderConfig, LoRAConfig
from longshore.hf.checkpoint import TABLE, open_weights, tensor_shapes
from longshore.hf.tensor_map import Shape
from longshore.model.init import initial_block
from longshore.model.lora import is_factor

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelBase:
    """What a run began with; a LoRA run does not save it."""

    folder: Path | None
    """A Hugging Face folder; None for new weights."""
    seed: int
    """The seed of new weights."""
    digest: str
    """SHA-256 of the folder's content, or of the decoder."""

    def as_json(self) -> dict[str, Any]:
        folder = None if self.folder is None else str(self.folder)
        return {"folder": folder, "seed": self.seed, "digest": self.digest}


def base_from_json(data: Mapping[str, Any]) -> ModelBase:
    folder = data["folder"]
    return ModelBase(
        None if folder is None else Path(folder), int(data["seed"]), str(data["digest"])
    )


def find_base(config: DecoderConfig, folder: str | Path | None, *, seed: int) -> ModelBase:
    """The base as it is now; config: with or without factors."""
    if folder is None or not str(folder):
        text = json.dumps(config_to_json(config.merged()), sort_keys=True)
        return ModelBase(None, seed, hashlib.sha256(f"{seed} {text}".encode()).hexdigest())
    return ModelBase(Path(folder).resolve(), seed, _digest(Path(folder)))


def _digest(folder: Path) -> str:
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"\0{path.name} {size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(READ_BYTES))
            file.seek(max(0, size - READ_BYTES))
            digest.update(file.read(READ_BYTES))
    return digest.hexdigest()


def check_base(known: ModelBase, now: ModelBase) -> None:
    """Refuses another base than the one that factors were trained on."""
    if known.digest != now.digest:
        where = now.folder or "the decoder that model.preset or model.module describes"
        raise ValueError(
            f"{where} is not the base that these low-rank factors were trained on: its content "
            "differs; restore it, or name the folder where it is now (model.from_hf, or --base of "
            "longshore export)"
        )


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale · B·A, in float32 at least, as wide as the widest of the three."""
    wide = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
    return weight.to(wide) + scale * (b.to(wide) @ a.to(wide))


class MergedTensors(Mapping[str, Tensor]):
    """The whole model, in the order in which runs write it; each tensor is made when asked for.

    shapes: of all tensors of the base; read: returns one of them.
    """

    def __init__(
        self,
        config: LoRAConfig,
        factors: Mapping[str, Tensor],
        *,
        shapes: Mapping[str, Shape],
        read: Callable[[str], Tensor],
    ) -> None:
        self.scale, self.factors, self.shapes, self._base = config.scale, factors, shapes, read

    def __getitem__(self, name: str) -> Tensor:
        tensor, module = self._base(name), name.removesuffix(".weight")
        if f"{module}.lora.a" in self.factors:
            a, b = (self.factors[f"{module}.lora.{factor}"] for factor in "ab")
            return merge(tensor, a, b, self.scale)
        return _widened(tensor)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in float32."""
        return 4 * sum(torch.Size(shape).numel() for shape in self.shapes.values())


def merged_decoder(
    config: DecoderConfig, base: ModelBase, factors: Mapping[str, Tensor]
) -> MergedTensors:
    """The whole tensors of one of our own models."""
    assert config.lora is not None
    shapes = tensor_shapes(config.merged())

    def new(name: str) -> Tensor:
        rows = (slice(0, shapes[name][0]),)
        block = initial_block(config.merged(), name, shapes[name], rows, seed=base.seed)
        return block.long() if TABLE.fullmatch(name) else block

    read = new if base.folder is None else open_weights(base.folder).__getitem__
    return MergedTensors(config.lora, factors, shapes=shapes, read=read)


def merged_stream(
    config: LoRAConfig, factors: Iterable[str], tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Merges a stream of weights and factors, where a module's weight comes before its factors.

    factors: the names of all factors.
    """
    modules = {name[: -len(".lora.a")] for name in factors}
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        module = name[: -len(".lora.a")] if is_factor(name) else name.rpartition(".")[0]
        if module not in modules:
            yield name, _widened(tensor)
            continue
        waiting[name] = tensor
        if name.endswith(".lora.b"):
            a, b, weight = (
                waiting.pop(f"{module}.{end}") for end in ("lora.a", "lora.b", "weight")
            )
            yield f"{module}.weight", merge(weight, a, b, config.scale)
            yield from ((other, _widened(left)) for other, left in waiting.items())
            waiting.clear()


def _widened(tensor: Tensor) -> Tensor:
    """Floats in float32 at least, as what was merged."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def factor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all factors."""
    return {name: shape for name, shape in tensor_shapes(config).items() if is_factor(name)}
