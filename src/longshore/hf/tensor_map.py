"""Which tensors of a Hugging Face folder ("stored") hold each tensor of our decoder ("ours").

In: the name of one of our tensors, and the layout of a folder. Out: its Source, which reads blocks
of ours from the folder's files, and splits ours into the stored tensors for writing. No torch until
a tensor is read or written.

    find = by_table(DECODER_NAMES)
    find("layers.3.mlp.up_proj.weight", layout).stored    "model.layers.3.mlp.up_proj.weight"

Each architecture has a table of names. A row is (ours, stored), or (ours, stored, make) where
make(stored, layout) returns the Source; {i} is a layer's number, {part} the rest of the name, the
same on both sides. The first matching row counts. There is a class for each way to store a tensor.

Whether the files are complete and fit the config is checked in hf/tensor_files.py and
hf/checkpoint.py.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longshore.arch.attention import MLAConfig
from longshore.arch.decoder import DecoderConfig
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.files import parse_json
from longshore.hf.keys import UNQUANTIZED, Raw, flag

if TYPE_CHECKING:
    from torch import Tensor

    from longshore.hf.tensor_files import TensorFiles

Shape = tuple[int, ...]
Index = Sequence[slice]
"""A block of a tensor: a range of each dim, or of the first dims alone. Slices have no steps."""


@dataclass(frozen=True, slots=True)
class Source:
    """Ours is one stored tensor, unchanged; the folder may have copies of it under other names."""

    stored: str
    copies: tuple[str, ...] = field(default=(), kw_only=True)

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shape of each stored tensor, for this shape of ours."""
        return dict.fromkeys((self.stored, *self.copies), shape)

    def read(self, files: "TensorFiles", index: Index) -> "Tensor":
        """A block of ours."""
        return files.block(self.stored, index)

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        """The names and tensors to store."""
        yield self.stored, tensor
        for name in self.copies:
            # safetensors refuses two tensors that share memory.
            yield name, tensor.clone()


@dataclass(frozen=True, slots=True)
class PerExpert(Source):
    """Each row of ours is an expert: its `parts`, stored on their own, one above the other.

    With parts gate_proj and up_proj, row e is E.e.gate_proj.weight above E.e.up_proj.weight.
    """

    parts: tuple[str, ...]

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        experts, rows, *rest = shape
        part = (rows // len(self.parts), *rest)
        return {name: part for expert in range(experts) for name in self._names(expert)}

    def read(self, files: "TensorFiles", index: Index) -> "Tensor":
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

    def _expert(self, files: "TensorFiles", expert: int, index: Index) -> "Tensor":
        import torch

        whole = (slice(None), *index[1:])
        joined = torch.cat([files.block(name, whole) for name in self._names(expert)])
        return joined[index[0]] if index else joined

    def _names(self, expert: int) -> list[str]:
        return [f"{self.stored}.{expert}.{part}.weight" for part in self.parts]


@dataclass(frozen=True, slots=True)
class Interleaved(Source):
    """The last `rotary` of every `block` rows, or of columns with dim 1, are in another order.

    RoPE rotates them in pairs: stored 2i and 2i + 1, ours i and i + rotary/2. With block 6 and
    rotary 4, stored rows 0 1 2 3 4 5 are ours in the order 0 1 2 4 3 5.
    """

    block: int
    rotary: int
    dim: int = 0

    def read(self, files: "TensorFiles", index: Index) -> "Tensor":
        size, dim, block = files.shape(self.stored)[self.dim], self.dim, self.block
        start, stop, _ = (index[dim] if len(index) > dim else slice(None)).indices(size)
        first = start // block * block
        last = max(first, min(-(-stop // block) * block, size))
        stored = files.block(self.stored, (*index[:dim], slice(first, last), *index[dim + 1 :]))
        ours = self._reordered(stored, (-1, 2))
        return ours.narrow(dim, start - first, stop - start).contiguous()

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        yield self.stored, self._reordered(tensor, (2, -1))

    def _reordered(self, tensor: "Tensor", pairs: tuple[int, int]) -> "Tensor":
        """pairs: how to see the rotary ones as a matrix, which is transposed."""
        import torch

        inner = self.dim + 1
        blocks = tensor.unflatten(self.dim, (-1, self.block))
        plain, rotary = blocks.split([self.block - self.rotary, self.rotary], dim=inner)
        rotary = rotary.unflatten(inner, pairs).transpose(inner, inner + 1)
        return torch.cat([plain, rotary.flatten(inner, inner + 1)], dim=inner).flatten(
            self.dim, inner
        )


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """What, besides the name, decides how a tensor is stored."""

    config: DecoderConfig
    raw: Raw
    """config.json of the folder to read, or of the base of the folder to write."""
    tensor_names: frozenset[str] = frozenset()
    """Names of the tensors in that folder; none for a model that came from no folder."""


FindSource = Callable[[str, StorageLayout], Source]
"""Finds the Source of one of our tensors, by its name."""
Make = Callable[[str, StorageLayout], Source]
Row = tuple[str, str] | tuple[str, str, Make]


def by_table(table: Sequence[Row]) -> FindSource:
    """A function that looks names up in a table."""
    return lambda name, layout: look_up(name, table, layout)


def look_up(name: str, table: Sequence[Row], layout: StorageLayout) -> Source:
    for ours, stored, *make in table:
        pattern = (
            re.escape(ours).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{part\}", "(?P<part>.+)")
        )
        if match := re.fullmatch(pattern, name):
            filled = stored.format(**match.groupdict())
            return make[0](filled, layout) if make else Source(filled)
    raise ValueError(f"tensor {name} has no name in transformers; a row is missing in the table")


def _all_experts(fused: str, *parts: str) -> Make:
    """All experts in one tensor, where the folder has it ("": none has), or `parts` for each."""

    def make(stored: str, layout: StorageLayout) -> Source:
        name = f"{stored}.{fused}"
        return Source(name) if name in layout.tensor_names else PerExpert(stored, parts)

    return make


def _latent_rows(block: str) -> Make:
    """Rows of MLA, of which RoPE rotates the last of each block. block: a field of MLAConfig."""

    def make(stored: str, layout: StorageLayout) -> Source:
        mixer = layout.config.layers[0].mixer
        assert isinstance(mixer, MLAConfig)
        if not flag(layout.raw, "rope_interleave", True):
            return Source(stored)
        return Interleaved(stored, block=getattr(mixer, block), rotary=mixer.rope_dim)

    return make


ENDS: tuple[Row, ...] = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
)


def _norms(ours: str, stored: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.mixer_norm.weight", f"{stored}.input_layernorm.weight"),
        (f"{ours}.mlp_norm.weight", f"{stored}.post_attention_layernorm.weight"),
    )


def _feed_forward(ours: str, stored: str, shared: str = "") -> tuple[Row, ...]:
    """Experts or a dense MLP. shared: the stored name of the shared expert."""
    gate_up = _all_experts("gate_up_proj", "gate_proj", "up_proj")
    down = _all_experts("down_proj", "down_proj")
    return (
        (f"{ours}.mlp.router.weight", f"{stored}.mlp.gate.weight"),
        (f"{ours}.mlp.router.bias", f"{stored}.mlp.gate.e_score_correction_bias"),
        (f"{ours}.mlp.experts.gate_up", f"{stored}.mlp.experts", gate_up),
        (f"{ours}.mlp.experts.down", f"{stored}.mlp.experts", down),
        (f"{ours}.mlp.shared_gate.weight", f"{stored}.mlp.shared_expert_gate.weight"),
        (f"{ours}.mlp.shared.{{part}}", f"{stored}.mlp.{shared}.{{part}}"),
        (f"{ours}.mlp.{{part}}", f"{stored}.mlp.{{part}}"),
    )


def _next_layer(ours: str, stored: str) -> tuple[Row, ...]:
    """A layer of Qwen3-Next; tensors of a delta net have other names than those of attention."""
    scan = f"{stored}.linear_attn"
    return (
        *_norms(ours, stored),
        (f"{ours}.mixer.per_head.{{part}}", f"{scan}.{{part}}"),
        (f"{ours}.mixer.in_proj_{{part}}", f"{scan}.in_proj_{{part}}"),
        (f"{ours}.mixer.conv1d.{{part}}", f"{scan}.conv1d.{{part}}"),
        (f"{ours}.mixer.norm.{{part}}", f"{scan}.norm.{{part}}"),
        (f"{ours}.mixer.out_proj.{{part}}", f"{scan}.out_proj.{{part}}"),
        (f"{ours}.mixer.{{part}}", f"{stored}.self_attn.{{part}}"),
        *_feed_forward(ours, stored, "shared_expert"),
    )


OURS, STORED = "layers.{i}", "model.layers.{i}"
DECODER_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_norms(OURS, STORED),
    ("layers.{i}.mixer.{part}", "model.layers.{i}.self_attn.{part}"),
    *_feed_forward(OURS, STORED),
)
"""Qwen3, Llama and Qwen3-MoE."""
NEXT_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_next_layer(OURS, STORED),
    ("mtp.0.embed_norm.weight", "mtp.pre_fc_norm_embedding.weight"),
    ("mtp.0.hidden_norm.weight", "mtp.pre_fc_norm_hidden.weight"),
    ("mtp.0.proj.weight", "mtp.fc.weight"),
    ("mtp.0.norm.weight", "mtp.norm.weight"),
    *_next_layer("mtp.{i}.block", "mtp.layers.{i}"),
)
_queries, _latents = _latent_rows("head_dim"), _latent_rows("latent_dim")
_kv_down = "model.layers.{i}.self_attn.kv_a_proj_with_mqa.{part}"
DEEPSEEK_NAMES: tuple[Row, ...] = (
    *ENDS,
    *_norms(OURS, STORED),
    ("layers.{i}.mixer.q_down.{part}", "model.layers.{i}.self_attn.q_a_proj.{part}"),
    ("layers.{i}.mixer.q_norm.{part}", "model.layers.{i}.self_attn.q_a_layernorm.{part}"),
    ("layers.{i}.mixer.q_up.{part}", "model.layers.{i}.self_attn.q_b_proj.{part}", _queries),
    ("layers.{i}.mixer.q_proj.{part}", "model.layers.{i}.self_attn.q_proj.{part}", _queries),
    ("layers.{i}.mixer.kv_down.{part}", _kv_down, _latents),
    ("layers.{i}.mixer.kv_norm.{part}", "model.layers.{i}.self_attn.kv_a_layernorm.{part}"),
    ("layers.{i}.mixer.kv_up.{part}", "model.layers.{i}.self_attn.kv_b_proj.{part}"),
    ("layers.{i}.mixer.o_proj.{part}", "model.layers.{i}.self_attn.o_proj.{part}"),
    *_feed_forward(OURS, STORED, "shared_experts"),
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


def find_deepseek(name: str, layout: StorageLayout) -> Source:
    """Depth d of multi-token prediction is layer num_hidden_layers + d in the folder.

    A folder may have copies of embedding and head there.
    """
    layers = len(layout.config.layers)
    if match := re.fullmatch(r"mtp\.(\d+)\.(?:block\.)?(.+)", name):
        name = f"layers.{layers + int(match[1])}.{match[2]}"
    source = look_up(name, DEEPSEEK_NAMES, layout)
    parts = {"embed.weight": ["embed_tokens"], "head.weight": ["shared_head.head"]}.get(name, [])
    if name == "embed.weight" and layout.config.tied:
        parts = ["embed_tokens", "shared_head.head"]
    depths = range(layers, layers + len(layout.config.mtp))
    copies = [f"model.layers.{i}.{part}.weight" for i in depths for part in parts]
    return replace(source, copies=tuple(name for name in copies if name in layout.tensor_names))


def find_nemotron(name: str, layout: StorageLayout) -> Source:
    """Folders name the decoder `backbone` or, as transformers does in memory, `model`."""
    stored = look_up(name, MAMBA_NAMES, layout).stored
    renamed = re.sub(r"^backbone\.", "model.", stored)
    return Source(renamed if renamed in layout.tensor_names else stored)


def _rotated(*, of_index: bool = False, dim: int = 0) -> Make:
    """Rows that make a head's dims in DeepSeek-V4, or columns that read them.

    of_index: heads of the index, which has a width of its own. All layers have the same heads.
    """

    def make(stored: str, layout: StorageLayout) -> Source:
        layers = (*layout.config.layers, *layout.config.mtp)
        mixers = [each.mixer for each in layers if isinstance(each.mixer, SparseAttentionConfig)]
        indices = [mixer.index for mixer in mixers if mixer.index is not None]
        block = indices[0].head_dim if of_index else mixers[0].head_dim
        return Interleaved(stored, block=block, rotary=mixers[0].rope_dim, dim=dim)

    return make


def _pooled_rows(ours: str, stored: str, *, bias: str, of_index: bool) -> tuple[Row, ...]:
    rows = _rotated(of_index=of_index)
    return (
        (f"{ours}.kv_proj.weight", f"{stored}.wkv.weight", rows),
        (f"{ours}.gate_proj.weight", f"{stored}.wgate.weight", rows),
        (f"{ours}.norm.weight", f"{stored}.norm.weight", rows),
        (bias, f"{stored}.ape", _rotated(of_index=of_index, dim=1)),
    )


def sparse_attention_rows(ours: str, stored: str) -> tuple[Row, ...]:
    """ours: such as layers.{i}.mixer. stored: such as model.layers.{i}.attn."""
    keys, index_keys = f"{stored}.compressor", f"{stored}.indexer.compressor"
    return (
        (f"{ours}.q_down.weight", f"{stored}.wq_a.weight"),
        (f"{ours}.q_norm.weight", f"{stored}.q_norm.weight"),
        (f"{ours}.q_up.weight", f"{stored}.wq_b.weight", _rotated()),
        (f"{ours}.kv_proj.weight", f"{stored}.wkv.weight", _rotated()),
        (f"{ours}.kv_norm.weight", f"{stored}.norm.weight", _rotated()),
        (f"{ours}.biases.sinks", f"{stored}.attn_sink"),
        (f"{ours}.o_down.weight", f"{stored}.wo_a.weight", _rotated(dim=1)),
        (f"{ours}.o_up.weight", f"{stored}.wo_b.weight"),
        *_pooled_rows(f"{ours}.entries", keys, bias=f"{ours}.biases.entries", of_index=False),
        (f"{ours}.index.q_up.weight", f"{stored}.indexer.wq_b.weight", _rotated(of_index=True)),
        (f"{ours}.index.weights_proj.weight", f"{stored}.indexer.weights_proj.weight"),
        *_pooled_rows(f"{ours}.index.keys", index_keys, bias=f"{ours}.biases.index", of_index=True),
    )


def _v4_layer(ours: str, stored: str) -> tuple[Row, ...]:
    shared = f"{stored}.ffn.shared_experts"
    return (
        (f"{ours}.mixer_norm.weight", f"{stored}.attn_norm.weight"),
        (f"{ours}.mlp_norm.weight", f"{stored}.ffn_norm.weight"),
        *_hyper_rows(f"{ours}.mixer_hyper", f"{stored}.hc_attn"),
        *_hyper_rows(f"{ours}.mlp_hyper", f"{stored}.hc_ffn"),
        *sparse_attention_rows(f"{ours}.mixer", f"{stored}.attn"),
        (f"{ours}.mlp.router.weight", f"{stored}.ffn.gate.weight"),
        (f"{ours}.mlp.router.bias", f"{stored}.ffn.gate.bias"),
        (f"{ours}.mlp.router.table", f"{stored}.ffn.gate.tid2eid"),
        (f"{ours}.mlp.experts.gate_up", f"{stored}.ffn.experts", _all_experts("", "w1", "w3")),
        (f"{ours}.mlp.experts.down", f"{stored}.ffn.experts", _all_experts("", "w2")),
        (f"{ours}.mlp.shared.gate_proj.weight", f"{shared}.w1.weight"),
        (f"{ours}.mlp.shared.down_proj.weight", f"{shared}.w2.weight"),
        (f"{ours}.mlp.shared.up_proj.weight", f"{shared}.w3.weight"),
    )


def _hyper_rows(ours: str, stored: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.weight", f"{stored}_fn"),
        (f"{ours}.base", f"{stored}_base"),
        (f"{ours}.scale", f"{stored}_scale"),
    )


DEEPSEEK_V4_NAMES: tuple[Row, ...] = (
    ("embed.weight", "embed.weight"),
    ("norm.weight", "norm.weight"),
    ("head.weight", "head.weight"),
    *_hyper_rows("collapse", "hc_head"),
    *_v4_layer("layers.{i}", "layers.{i}"),
    ("mtp.{i}.embed_norm.weight", "mtp.{i}.enorm.weight"),
    ("mtp.{i}.hidden_norm.weight", "mtp.{i}.hnorm.weight"),
    ("mtp.{i}.proj.weight", "mtp.{i}.eh_proj.weight"),
    ("mtp.{i}.norm.weight", "mtp.{i}.norm.weight"),
    *_hyper_rows("mtp.{i}.collapse", "mtp.{i}.hc_head"),
    *_v4_layer("mtp.{i}.block", "mtp.{i}"),
)
"""As in DeepSeek's own folders, except for a depth's `proj`, which is two tensors there."""

V4_IN_TRANSFORMERS = {
    "embed.weight": "model.embed_tokens.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
    "norm.weight": "model.norm.weight",
}
"""What transformers calls the tensors outside the layers."""


def find_deepseek_v4(name: str, layout: StorageLayout) -> Source:
    """As transformers saves it, or as in DeepSeek's own folders where the folder is one.

    layers.0.attn.wq_a.weight in DeepSeek's is model.layers.0.attn.wq_a.weight in transformers.
    """
    source = look_up(name, DEEPSEEK_V4_NAMES, layout)
    if "embed.weight" in layout.tensor_names:
        return source
    renamed = re.sub(r"^layers\.", "model.layers.", source.stored)
    return replace(source, stored=V4_IN_TRANSFORMERS.get(source.stored, renamed))


LONGEST_HEADER = 100_000_000
PACKED = (".qweight", ".weight_packed", ".weight_scale_inv", "_proj_blocks", ".quant_state.")
"""Parts of names that only quantized weights have."""


def read_tensor_names(folder: Path) -> frozenset[str] | None:
    """Names of the tensors, from the headers alone; None without weights, or with broken ones."""
    try:
        if (single := folder / "model.safetensors").is_file():
            names = read_header(single)
        else:
            index = folder / "model.safetensors.index.json"
            names = parse_json(index.read_text(encoding="utf-8"))["weight_map"]
        return frozenset(names) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, JSON after its length in 8 bytes: dtypes and shapes."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = parse_json(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no header")
    return header


def refuse_quantized_files(folder: str | Path) -> None:
    """Refuses quantized weights, by the dtypes and names in the headers of the folder's files."""
    for path in sorted(Path(folder).glob("model*.safetensors")):
        try:
            header = read_header(path)
        except (OSError, ValueError):
            continue  # the error comes when its tensors are read
        for name, entry in header.items():
            dtype = str(entry.get("dtype", "")) if isinstance(entry, dict) else ""
            is_fp8 = dtype.startswith("F8_")
            if is_fp8 or any(part in name for part in PACKED):
                raise ValueError(
                    f"{path.name} has the tensor {name} of {dtype}: its weights are quantized"
                    f"{' to FP8' if is_fp8 else ''}; only float weights can be trained, so convert "
                    f"the folder to bfloat16, or {UNQUANTIZED}"
                )
