"""Which tensors of a Hugging Face folder ("theirs") hold each tensor of our decoder ("ours").

In: the name of one of our tensors, and the layout of a folder. Out: its Source, which reads blocks
of ours from the folder's files, and splits ours into their tensors for writing. No torch until a
tensor is read or written.

    place = by_table(DENSE_NAMES)
    place("layers.3.mlp.up_proj.weight", layout).theirs    "model.layers.3.mlp.up_proj.weight"

Each architecture has a table of names. A row is (ours, theirs), or (ours, theirs, make) where
make(theirs, layout) returns the Source; {i} is a layer's number, {part} the rest of the name, the
same on both sides. The first matching row counts. There is a class for each way to store a tensor:

    Source("lm_head.weight")                       one of theirs, unchanged
    Copied("lm_head.weight", copies=("a", "b"))    and copies of it under other names
    PerExpert("mlp.experts", parts=("gate_proj", "up_proj"))
        row e of ours is mlp.experts.e.gate_proj.weight above mlp.experts.e.up_proj.weight
    Interleaved("q_proj.weight", block=6, rotary=4)
        of every 6 rows the last 4, theirs 0 1 2 3, are ours in the order 0 2 1 3

`read_tensor_names` reads the names of a folder's tensors from the headers of its files alone; None
where it has no weights. A safetensors file begins with the length of its header, 8 bytes, and the
header, JSON:

    read_tensor_names("DeepSeek-V3")    {"lm_head.weight", "model.layers.61.eh_proj.weight", …}

Whether the files are complete and fit the config is checked in hf/tensor_files.py and
hf/checkpoint.py.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from longshore.arch.attention import MLAConfig
from longshore.arch.decoder import DecoderConfig
from longshore.files import parse_json
from longshore.hf.typed_keys import Raw, flag

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


Index = Sequence[slice]
"""A block of a tensor: a range of each dim, or of the first dims alone. Slices have no steps."""


class BlockReader(Protocol):
    """Files whose tensors are read in blocks."""

    def shape(self, name: str) -> Shape: ...

    def block(self, name: str, index: Index) -> "Tensor": ...


@dataclass(frozen=True, slots=True)
class Source:
    """Ours is one of theirs, unchanged."""

    theirs: str

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shape of each of their tensors, for this shape of ours."""
        return {self.theirs: shape}

    def read(self, files: BlockReader, index: Index) -> "Tensor":
        """A block of ours."""
        return files.block(self.theirs, index)

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        """Their tensors."""
        yield self.theirs, tensor


@dataclass(frozen=True, slots=True)
class Copied(Source):
    """The folder has copies of it under other names."""

    copies: tuple[str, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        return dict.fromkeys((self.theirs, *self.copies), shape)

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        yield self.theirs, tensor
        for name in self.copies:
            # safetensors refuses two tensors that share memory.
            yield name, tensor.clone()


@dataclass(frozen=True, slots=True)
class PerExpert(Source):
    """Each row of ours is an expert: its `parts`, tensors of their own, one above the other."""

    parts: tuple[str, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        experts, rows, *rest = shape
        part = (rows // len(self.parts), *rest)
        return {name: part for expert in range(experts) for name in self._names(expert)}

    def read(self, files: BlockReader, index: Index) -> "Tensor":
        import torch

        experts, *rest = index
        if experts.start == experts.stop:
            return self._expert(files, 0, rest)[None][:0]
        return torch.stack(
            [self._expert(files, i, rest) for i in range(experts.start, experts.stop)]
        )

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        for expert, rows in enumerate(tensor):
            yield from zip(self._names(expert), rows.chunk(len(self.parts)), strict=True)

    def _expert(self, files: BlockReader, expert: int, index: Index) -> "Tensor":
        import torch

        whole = (slice(None), *index[1:])
        joined = torch.cat([files.block(name, whole) for name in self._names(expert)])
        return joined[index[0]] if index else joined

    def _names(self, expert: int) -> list[str]:
        return [f"{self.theirs}.{expert}.{part}.weight" for part in self.parts]


@dataclass(frozen=True, slots=True)
class Interleaved(Source):
    """Of every `block` rows the last `rotary` are in another order.

    RoPE rotates them in pairs: theirs are rows 2i and 2i + 1, ours i and i + rotary/2.
    """

    block: int
    rotary: int

    def read(self, files: BlockReader, index: Index) -> "Tensor":
        rows, *rest = index
        start, stop = rows.start, rows.stop
        first = start // self.block * self.block
        last = min(-(-stop // self.block) * self.block, files.shape(self.theirs)[0])
        theirs = files.block(self.theirs, (slice(first, max(first, last)), *rest))
        plain, rotary = self._split(theirs)
        rotary = rotary.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return self._joined(plain, rotary)[start - first : stop - first]

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        plain, rotary = self._split(tensor)
        rotary = rotary.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        yield self.theirs, self._joined(plain, rotary)

    def _split(self, rows: "Tensor") -> tuple["Tensor", "Tensor"]:
        """The first and the rotary rows of each block."""
        blocks = rows.unflatten(0, (-1, self.block))
        plain, rotary = blocks.split([self.block - self.rotary, self.rotary], dim=1)
        return plain, rotary

    def _joined(self, plain: "Tensor", rotary: "Tensor") -> "Tensor":
        import torch

        return torch.cat([plain, rotary], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """What, besides the name, decides how a tensor is stored."""

    config: DecoderConfig
    raw: Raw
    """config.json of the folder to read, or of the base of the folder to write."""
    tensor_names: frozenset[str] = frozenset()
    """Of the tensors in that folder; none for a model that came from no folder."""


Make = Callable[[str, StorageLayout], Source]
Row = tuple[str, str] | tuple[str, str, Make]
Place = Callable[[str, StorageLayout], Source]
"""From the name of one of our tensors to its Source."""


def by_table(table: Sequence[Row]) -> Place:
    """A Place that looks names up in a table."""
    return lambda name, layout: look_up(name, table, layout)


def look_up(name: str, table: Sequence[Row], layout: StorageLayout) -> Source:
    for ours, theirs, *make in table:
        pattern = (
            re.escape(ours).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{part\}", "(?P<part>.+)")
        )
        if match := re.fullmatch(pattern, name):
            filled = theirs.format(**match.groupdict())
            return make[0](filled, layout) if make else Source(filled)
    raise ValueError(f"tensor {name} has no name in transformers; a row is missing in the table")


def gate_up(theirs: str, layout: StorageLayout) -> Source:
    """gate_proj and up_proj of all experts: one tensor, or two for each expert."""
    return _of_experts(theirs, layout, fused="gate_up_proj", parts=("gate_proj", "up_proj"))


def down(theirs: str, layout: StorageLayout) -> Source:
    """down_proj of all experts: one tensor, or one for each expert."""
    return _of_experts(theirs, layout, fused="down_proj", parts=("down_proj",))


def _of_experts(
    theirs: str, layout: StorageLayout, *, fused: str, parts: tuple[str, ...]
) -> Source:
    name = f"{theirs}.{fused}"
    return Source(name) if name in layout.tensor_names else PerExpert(theirs, parts)


def queries(theirs: str, layout: StorageLayout) -> Source:
    """Rows of MLA's queries: RoPE rotates the last ones of each head."""
    return _interleaved(theirs, layout, block=_latent(layout).head_dim)


def latents(theirs: str, layout: StorageLayout) -> Source:
    """Rows of MLA's latent, of which RoPE rotates the last."""
    return _interleaved(theirs, layout, block=_latent(layout).latent_dim)


def _interleaved(theirs: str, layout: StorageLayout, *, block: int) -> Source:
    if not flag(layout.raw, "rope_interleave", True):
        return Source(theirs)
    return Interleaved(theirs, block=block, rotary=_latent(layout).rope_dim)


def _latent(layout: StorageLayout) -> MLAConfig:
    mixer = layout.config.layers[0].mixer
    assert isinstance(mixer, MLAConfig)
    return mixer


ENDS: tuple[Row, ...] = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
)


def _norms(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.mixer_norm.weight", f"{theirs}.input_layernorm.weight"),
        (f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight"),
    )


def _experts(ours: str, theirs: str, shared: str = "") -> tuple[Row, ...]:
    """A feed-forward part, of experts or dense. shared: their name of the shared expert."""
    return (
        (f"{ours}.mlp.router.weight", f"{theirs}.mlp.gate.weight"),
        (f"{ours}.mlp.router.bias", f"{theirs}.mlp.gate.e_score_correction_bias"),
        (f"{ours}.mlp.experts.gate_up", f"{theirs}.mlp.experts", gate_up),
        (f"{ours}.mlp.experts.down", f"{theirs}.mlp.experts", down),
        (f"{ours}.mlp.shared_gate.weight", f"{theirs}.mlp.shared_expert_gate.weight"),
        (f"{ours}.mlp.shared.{{part}}", f"{theirs}.mlp.{shared}.{{part}}"),
        (f"{ours}.mlp.{{part}}", f"{theirs}.mlp.{{part}}"),
    )


def _next_layer(ours: str, theirs: str) -> tuple[Row, ...]:
    """A layer of Qwen3-Next; tensors of a delta net have other names than those of attention."""
    scan = f"{theirs}.linear_attn"
    return (
        *_norms(ours, theirs),
        (f"{ours}.mixer.per_head.{{part}}", f"{scan}.{{part}}"),
        (f"{ours}.mixer.in_proj_{{part}}", f"{scan}.in_proj_{{part}}"),
        (f"{ours}.mixer.conv1d.{{part}}", f"{scan}.conv1d.{{part}}"),
        (f"{ours}.mixer.norm.{{part}}", f"{scan}.norm.{{part}}"),
        (f"{ours}.mixer.out_proj.{{part}}", f"{scan}.out_proj.{{part}}"),
        (f"{ours}.mixer.{{part}}", f"{theirs}.self_attn.{{part}}"),
        *_experts(ours, theirs, "shared_expert"),
    )


OURS, THEIRS = "layers.{i}", "model.layers.{i}"
DENSE_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_norms(OURS, THEIRS),
    ("layers.{i}.mixer.{part}", "model.layers.{i}.self_attn.{part}"),
    ("layers.{i}.mlp.{part}", "model.layers.{i}.mlp.{part}"),
)
MOE_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_norms(OURS, THEIRS),
    ("layers.{i}.mixer.{part}", "model.layers.{i}.self_attn.{part}"),
    *_experts(OURS, THEIRS),
)
NEXT_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_next_layer(OURS, THEIRS),
    ("mtp.0.embed_norm.weight", "mtp.pre_fc_norm_embedding.weight"),
    ("mtp.0.hidden_norm.weight", "mtp.pre_fc_norm_hidden.weight"),
    ("mtp.0.proj.weight", "mtp.fc.weight"),
    ("mtp.0.norm.weight", "mtp.norm.weight"),
    *_next_layer("mtp.{i}.block", "mtp.layers.{i}"),
)
DEEPSEEK_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_norms(OURS, THEIRS),
    ("layers.{i}.mixer.q_down.{part}", "model.layers.{i}.self_attn.q_a_proj.{part}"),
    ("layers.{i}.mixer.q_norm.{part}", "model.layers.{i}.self_attn.q_a_layernorm.{part}"),
    ("layers.{i}.mixer.q_up.{part}", "model.layers.{i}.self_attn.q_b_proj.{part}", queries),
    ("layers.{i}.mixer.q_proj.{part}", "model.layers.{i}.self_attn.q_proj.{part}", queries),
    (
        "layers.{i}.mixer.kv_down.{part}",
        "model.layers.{i}.self_attn.kv_a_proj_with_mqa.{part}",
        latents,
    ),
    ("layers.{i}.mixer.kv_norm.{part}", "model.layers.{i}.self_attn.kv_a_layernorm.{part}"),
    ("layers.{i}.mixer.kv_up.{part}", "model.layers.{i}.self_attn.kv_b_proj.{part}"),
    ("layers.{i}.mixer.o_proj.{part}", "model.layers.{i}.self_attn.o_proj.{part}"),
    *_experts(OURS, THEIRS, "shared_experts"),
    ("layers.{i}.embed_norm.weight", "model.layers.{i}.enorm.weight"),
    ("layers.{i}.hidden_norm.weight", "model.layers.{i}.hnorm.weight"),
    ("layers.{i}.proj.weight", "model.layers.{i}.eh_proj.weight"),
    ("layers.{i}.norm.weight", "model.layers.{i}.shared_head.norm.weight"),
)
MAMBA_NAMES: tuple[Row, ...] = (
    ("embed.weight", "backbone.embeddings.weight"),
    ("layers.{i}.mixer_norm.weight", "backbone.layers.{i}.norm.weight"),
    ("layers.{i}.mixer.per_head.{part}", "backbone.layers.{i}.mixer.{part}"),
    ("layers.{i}.mixer.{part}", "backbone.layers.{i}.mixer.{part}"),
    ("layers.{i}.mlp_norm.weight", "backbone.layers.{i}.norm.weight"),
    ("layers.{i}.mlp.{part}", "backbone.layers.{i}.mixer.{part}"),
    ("norm.weight", "backbone.norm_f.weight"),
    ("head.weight", "lm_head.weight"),
)


def place_deepseek(name: str, layout: StorageLayout) -> Source:
    """Depth d of multi-token prediction is layer num_hidden_layers + d in the folder.

    A folder may have copies of embedding and head there.
    """
    layers = len(layout.config.layers)
    match = re.fullmatch(r"mtp\.(\d+)\.(?:block\.)?(.+)", name)
    if match:
        name = f"layers.{layers + int(match[1])}.{match[2]}"
    source = look_up(name, DEEPSEEK_NAMES, layout)
    if name not in ("embed.weight", "head.weight"):
        return source
    parts = {"embed.weight": ["embed_tokens"], "head.weight": ["shared_head.head"]}[name]
    if name == "embed.weight" and layout.config.tied:
        parts = ["embed_tokens", "shared_head.head"]
    depths = range(layers, layers + len(layout.config.mtp))
    copies = [f"model.layers.{i}.{part}.weight" for i in depths for part in parts]
    return Copied(source.theirs, tuple(name for name in copies if name in layout.tensor_names))


def place_nemotron(name: str, layout: StorageLayout) -> Source:
    """Folders name the decoder `backbone` or, as transformers does in memory, `model`."""
    theirs = look_up(name, MAMBA_NAMES, layout).theirs
    renamed = re.sub(r"^backbone\.", "model.", theirs)
    return Source(renamed if renamed in layout.tensor_names else theirs)


LONGEST_HEADER = 100_000_000


def read_tensor_names(folder: Path, stem: str = "model") -> frozenset[str] | None:
    """Names of the tensors; None where there are no weights, or broken ones."""
    try:
        if (single := folder / f"{stem}.safetensors").is_file():
            names = read_header(single)
        else:
            index = folder / f"{stem}.safetensors.index.json"
            names = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        return frozenset(names) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_header(path: Path) -> dict[str, object]:
    """The header of a safetensors file: each tensor's dtype, shape and place."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = parse_json(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no header")
    return header
