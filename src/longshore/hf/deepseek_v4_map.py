"""DeepSeek-V4: which tensors of a folder hold each tensor of ours.

In: the name of one of our tensors. Out: its Source; see hf/tensor_map.py. A folder has the names
that transformers saves, which are those of DeepSeek's own folders but for the beginning and the
ends: model.layers.0.attn.wq_a.weight here is layers.0.attn.wq_a.weight there. Both are read.

    layers.3.mixer.q_up.weight        model.layers.3.attn.wq_b.weight
    layers.3.mixer.biases.entries     model.layers.3.attn.compressor.ape

RoPE rotates dims 2i and 2i + 1 of a head's last ones there, and i and i + R here. So all rows that
make such dims, and the columns that read them, are in another order: of every head of 6 dims, 4 of
them rotary, theirs 0 1 2 3 4 5 are ours in the order 0 1 2 4 3 5.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.hf.tensor_map import (
    BlockReader,
    Index,
    Interleaved,
    Make,
    PerExpert,
    Row,
    Source,
    StorageLayout,
    look_up,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class InterleavedColumns(Interleaved):
    """Of every `block` columns the last `rotary` are in another order."""

    def read(self, files: BlockReader, index: Index) -> "Tensor":
        rows, *rest = index
        width = files.shape(self.theirs)[1]
        start, stop, _ = (rest[0] if rest else slice(None)).indices(width)
        first = start // self.block * self.block
        last = max(first, min(-(-stop // self.block) * self.block, width))
        theirs = files.block(self.theirs, (rows, slice(first, last)))
        plain, rotary = self._split(theirs.T)
        rotary = rotary.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return self._joined(plain, rotary)[start - first : stop - first].T.contiguous()

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        for name, rows in Interleaved.write(self, tensor.T):
            yield name, rows.T.contiguous()


def _head(theirs: str, layout: StorageLayout) -> Source:
    mixer = _any_mixer(layout)
    return Interleaved(theirs, block=mixer.head_dim, rotary=mixer.rope_dim)


def _head_columns(theirs: str, layout: StorageLayout) -> Source:
    mixer = _any_mixer(layout)
    return InterleavedColumns(theirs, block=mixer.head_dim, rotary=mixer.rope_dim)


def _index_head(theirs: str, layout: StorageLayout) -> Source:
    return Interleaved(theirs, block=_index_width(layout), rotary=_any_mixer(layout).rope_dim)


def _index_columns(theirs: str, layout: StorageLayout) -> Source:
    return InterleavedColumns(
        theirs, block=_index_width(layout), rotary=_any_mixer(layout).rope_dim
    )


def _mixers(layout: StorageLayout) -> list[SparseAttentionConfig]:
    layers = (*layout.config.layers, *layout.config.mtp)
    mixers = [layer.mixer for layer in layers]
    return [mixer for mixer in mixers if isinstance(mixer, SparseAttentionConfig)]


def _any_mixer(layout: StorageLayout) -> SparseAttentionConfig:
    """Heads are alike in all layers."""
    return _mixers(layout)[0]


def _index_width(layout: StorageLayout) -> int:
    return next(mixer.index.head_dim for mixer in _mixers(layout) if mixer.index is not None)


def _pooled_rows(ours: str, theirs: str, *, bias: str, make: Make, columns: Make) -> list[Row]:
    return [
        (f"{ours}.kv_proj.weight", f"{theirs}.wkv.weight", make),
        (f"{ours}.gate_proj.weight", f"{theirs}.wgate.weight", make),
        (f"{ours}.norm.weight", f"{theirs}.norm.weight", make),
        (bias, f"{theirs}.ape", columns),
    ]


def mixer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """ours: such as layers.{i}.mixer. theirs: such as model.layers.{i}.attn."""
    return (
        (f"{ours}.q_down.weight", f"{theirs}.wq_a.weight"),
        (f"{ours}.q_norm.weight", f"{theirs}.q_norm.weight"),
        (f"{ours}.q_up.weight", f"{theirs}.wq_b.weight", _head),
        (f"{ours}.kv_proj.weight", f"{theirs}.wkv.weight", _head),
        (f"{ours}.kv_norm.weight", f"{theirs}.norm.weight", _head),
        (f"{ours}.biases.sinks", f"{theirs}.attn_sink"),
        (f"{ours}.o_down.weight", f"{theirs}.wo_a.weight", _head_columns),
        (f"{ours}.o_up.weight", f"{theirs}.wo_b.weight"),
        *_pooled_rows(
            f"{ours}.entries",
            f"{theirs}.compressor",
            bias=f"{ours}.biases.entries",
            make=_head,
            columns=_head_columns,
        ),
        (f"{ours}.index.q_up.weight", f"{theirs}.indexer.wq_b.weight", _index_head),
        (f"{ours}.index.weights_proj.weight", f"{theirs}.indexer.weights_proj.weight"),
        *_pooled_rows(
            f"{ours}.index.keys",
            f"{theirs}.indexer.compressor",
            bias=f"{ours}.biases.index",
            make=_index_head,
            columns=_index_columns,
        ),
    )


def _gate_up(theirs: str, layout: StorageLayout) -> Source:
    return PerExpert(theirs, ("w1", "w3"))


def _down(theirs: str, layout: StorageLayout) -> Source:
    return PerExpert(theirs, ("w2",))


def _layer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.mixer_norm.weight", f"{theirs}.attn_norm.weight"),
        (f"{ours}.mlp_norm.weight", f"{theirs}.ffn_norm.weight"),
        *_hyper_rows(f"{ours}.mixer_hyper", f"{theirs}.hc_attn"),
        *_hyper_rows(f"{ours}.mlp_hyper", f"{theirs}.hc_ffn"),
        *mixer_rows(f"{ours}.mixer", f"{theirs}.attn"),
        (f"{ours}.mlp.router.weight", f"{theirs}.ffn.gate.weight"),
        (f"{ours}.mlp.router.bias", f"{theirs}.ffn.gate.bias"),
        (f"{ours}.mlp.router.table", f"{theirs}.ffn.gate.tid2eid"),
        (f"{ours}.mlp.experts.gate_up", f"{theirs}.ffn.experts", _gate_up),
        (f"{ours}.mlp.experts.down", f"{theirs}.ffn.experts", _down),
        (f"{ours}.mlp.shared.gate_proj.weight", f"{theirs}.ffn.shared_experts.w1.weight"),
        (f"{ours}.mlp.shared.down_proj.weight", f"{theirs}.ffn.shared_experts.w2.weight"),
        (f"{ours}.mlp.shared.up_proj.weight", f"{theirs}.ffn.shared_experts.w3.weight"),
    )


def _hyper_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.weight", f"{theirs}_fn"),
        (f"{ours}.base", f"{theirs}_base"),
        (f"{ours}.scale", f"{theirs}_scale"),
    )


DEEPSEEK_V4_NAMES: tuple[Row, ...] = (
    ("embed.weight", "embed.weight"),
    ("norm.weight", "norm.weight"),
    ("head.weight", "head.weight"),
    *_hyper_rows("collapse", "hc_head"),
    *_layer_rows("layers.{i}", "layers.{i}"),
    ("mtp.{i}.embed_norm.weight", "mtp.{i}.enorm.weight"),
    ("mtp.{i}.hidden_norm.weight", "mtp.{i}.hnorm.weight"),
    ("mtp.{i}.proj.weight", "mtp.{i}.eh_proj.weight"),
    ("mtp.{i}.norm.weight", "mtp.{i}.norm.weight"),
    *_hyper_rows("mtp.{i}.collapse", "mtp.{i}.hc_head"),
    *_layer_rows("mtp.{i}.block", "mtp.{i}"),
)
"""As in DeepSeek's own folders, but for the join of a depth: two tensors there."""

IN_TRANSFORMERS = {
    "embed.weight": "model.embed_tokens.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
    "norm.weight": "model.norm.weight",
}
"""What transformers calls the ends."""


def place_deepseek_v4(name: str, layout: StorageLayout) -> Source:
    """As transformers saves it, or as in DeepSeek's own folders where the folder is one."""
    source = look_up(name, DEEPSEEK_V4_NAMES, layout)
    if "embed.weight" in layout.tensor_names:
        return source
    theirs = IN_TRANSFORMERS.get(
        source.theirs, re.sub(r"^layers\.", "model.layers.", source.theirs)
    )
    return replace(source, theirs=theirs)
