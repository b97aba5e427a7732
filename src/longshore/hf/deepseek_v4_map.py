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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.hf.tensor_map import (
    BlockReader,
    Index,
    Interleaved,
    Make,
    Row,
    Source,
    StorageLayout,
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
