"""Attention as data: grouped-query attention and multi-head latent attention (MLA). Pure Python.

In: numbers. Out: frozen configs, checked, which are Parts. With MLA, as in DeepSeek-V3, a token has
one latent of `kv_rank` numbers for all heads, and one rotary key of `rope_dim` numbers; each head
projects its own `nope_dim` key and `value_dim` value from the latent.

MLA with 2 heads, kv_rank 8, nope_dim 4, rope_dim 2, value_dim 6 and a plain query projection at
width 16 has these parameters: q 16·2·6 = 192, down 16·10 = 160, norm 8, up 8·2·10 = 160, output
2·6·16 = 192: 712. Lanes exchange 10 numbers per token; its keys and values would be 2·(6 + 6) = 24.

What a layer's core gathers and expands (`exchanged`), where a lane is full of its shard of a pack
at CP size c and fetches rows in forward, and again in backward:

    gather   the rows seen and their gradients, 2·(c + 1/2); then either the core's buffers, or the
             gradients joined and added up by lane, (c + 1/2) + c
    heads    queries, keys and values of c·T rows in 1/c of the heads: their gradients, and either
             the core's buffers, or their copies by lane and as received
    MLA      latents as by gather; of each row seen, also at CP size 1, keys, values, their product
             and the gradients of all, of as many heads as ops/sizes.py allows at a time

With 8 KV heads of 128 in half precision a row has 2·8·128·2 = 4,096 bytes; at CP size 8 a token of
the lane needs (2·8.5 + 8.5 + 8)·4,096 = 137,216 by gather. With 32 heads by heads 3·48·128·2 =
36,864.
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from longshore.arch.cuts import TensorCut, TPRank, TPUnits
from longshore.arch.part import (
    BackwardMoment,
    Part,
    PartMemory,
    Product,
    Saved,
    Sharing,
    visible_rows,
)
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.ops.sizes import expanded_values, most_expanded
from longshore.settings import check_counts, names_of

Form = Literal["decompressed", "absorbed"]
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig(Part):
    """Grouped-query attention."""

    graph_layer: ClassVar[str] = "attention"
    timed_as: ClassVar[str] = "attention"

    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; must divide `heads`."""
    head_dim: int
    """Width of a head."""
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    """Rotary position embeddings; None for none."""
    qk_norm: bool = False
    """RMS norm of each head's queries and keys."""
    bias: bool = False
    """Whether the query, key and value projections have biases."""
    output_bias: bool = False
    """Whether the output projection has one."""
    window: int | None = None
    """A token sees itself and the window − 1 tokens before it; None for all before it."""
    gate: bool = False
    """A head's output is multiplied by a sigmoid gate, computed by the query projection."""

    def __post_init__(self) -> None:
        check_counts(self, "heads", "kv_heads", "head_dim")
        check_counts(self, "window", optional=True)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"AttentionConfig.kv_heads is {self.kv_heads}; it must divide heads, {self.heads}"
            )
        _ = self.ropes

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return () if self.rope is None else (self.rope.within(self.head_dim),)

    def parameters(self, width: int) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        gates = queries * self.gate
        biases = (queries + gates + 2 * keys) * self.bias + width * self.output_bias
        weights = width * (2 * queries + gates + 2 * keys)
        return weights + biases + 2 * self.head_dim * self.qk_norm

    def flops(self, width: int, length: int) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = 2 * length * width * (2 * queries + queries * self.gate + 2 * keys)
        return projections + 4 * queries * causal_pairs(length, window=self.window)

    def products(self, width: int) -> tuple[Product, ...]:
        """Products of queries with their gates, keys, values and the output."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Product(width, queries * (1 + self.gate), "q_proj"),
            Product(width, keys, "k_proj"),
            Product(width, keys, "v_proj"),
            Product(queries, width, "o_proj"),
        )

    def saved(self, width: int) -> Saved:
        """Rotated queries and keys, values and the output; with qk_norm also its inputs.

        With a gate, its sigmoid and the gated output; and where queries are saved as projected,
        the gates stored between them.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        kept = Saved(2 * queries + 2 * keys, self.heads)
        if self.qk_norm:
            kept += Saved(queries + keys, self.heads + self.kv_heads)
        if self.gate:
            kept += Saved(queries * (3 if self.qk_norm or self.rope is None else 2))
        return kept

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_dim, self.heads * self.head_dim

    def kernel_memory(self, width: int) -> PartMemory:
        """Flash attention's backward adds up dq in float32, and with shared KV heads dk and dv."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        saved = Saved(2 * queries + 2 * keys, self.heads)
        if self.qk_norm or (self.rope is None and self.gate):
            saved += Saved(queries * (2 if self.gate else 1) + keys * self.qk_norm)
        elif self.gate:
            saved += Saved(2 * queries)
        if self.gate:
            saved += Saved(queries)
        shared = 2 * keys if self.heads > self.kv_heads else 0
        core = Saved(2 * queries + 2 * keys + 2 * width, queries + shared + 2 * self.heads)
        return PartMemory(saved, (BackwardMoment(core, width * queries),))

    def gathered(self) -> int:
        """Its key and value."""
        return 2 * self.kv_heads * self.head_dim

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        return (self.kv_heads,) if sharing.attention == "heads" else ()

    def exchanged(self, cp_size: int, tokens: int, *, sharing: Sharing, item: int) -> int:
        if cp_size == 1:
            return 0
        width, shared = self.head_dim, self.heads > self.kv_heads
        buffers = self.kv_heads * _buffers(width, width, shared=shared, item=item)
        if self._by_heads(cp_size, sharing):
            values = (self.heads + 2 * self.kv_heads) * width * item
            return tokens * (values + max(2 * values, buffers))
        rows, visible = cp_size * tokens, visible_rows(tokens, cp_size)
        gathered = self.gathered() * item
        return 2 * visible * gathered + max((visible + rows) * gathered, rows * buffers)

    def _by_heads(self, cp_size: int, sharing: Sharing) -> bool:
        """Whether lanes share out the heads: as model/attention.py chooses."""
        if sharing.attention == "gather":
            return False
        fewer = 3 * cp_size * self.kv_heads > 2 * (self.heads + self.kv_heads)
        return sharing.attention == "heads" or (self.kv_heads % cp_size == 0 and fewer)

    def tp_units(self) -> tuple[TPUnits, ...]:
        heads = TPUnits("heads", "attention heads", self.heads)
        return heads, TPUnits("kv_heads", "KV heads", self.kv_heads, shared=True)

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        query = self.head_dim * (2 if self.gate else 1)
        named = {
            "q_proj.weight": at.of(self.heads, query),
            "k_proj.weight": at.of(self.kv_heads, self.head_dim),
            "v_proj.weight": at.of(self.kv_heads, self.head_dim),
            "o_proj.weight": at.of(self.heads, self.head_dim, dim=1),
        }
        if self.bias:
            named |= {f"{name}_proj.bias": named[f"{name}_proj.weight"] for name in "qkv"}
        return named | ({"o_proj.bias": at.first_only(width)} if self.output_bias else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig(Part):
    """Multi-head latent attention."""

    graph_layer: ClassVar[str] = "attention"
    timed_as: ClassVar[str] = "mla"

    heads: int
    """Query, key and value heads."""
    kv_rank: int
    """Width of the latent that all heads' keys and values are projected from."""
    nope_dim: int
    """Leading dims of a head's query and key, without position."""
    rope_dim: int
    """Trailing dims of a head's query and key, with rotary position."""
    value_dim: int
    """Width of a head's value."""
    q_rank: int | None = None
    """Width of the queries' latent; None for one plain projection."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embeddings of the rope_dim dims."""
    bias: bool = False
    """Whether the projections down to the latents and the output projection have biases."""
    form: Form = "decompressed"
    """decompressed: projects the keys and values of all heads from the latents. absorbed: projects
    queries to the latents and attends there, with one key head of kv_rank + rope_dim. Both give the
    same numbers; decompressed is cheaper to train."""

    def __post_init__(self) -> None:
        check_counts(self, "heads", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        check_counts(self, "q_rank", optional=True)
        if self.form not in names_of(Form):
            raise ValueError(
                f"MLAConfig.form is {self.form!r}; known are {', '.join(names_of(Form))}"
            )
        _ = self.ropes

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope.within(self.rope_dim),)

    def bare(self) -> Self:
        return replace(self, form="decompressed")

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Numbers per token for all heads: the latent and the rotary key."""
        return self.kv_rank + self.rope_dim

    @property
    def scale(self) -> float:
        """Scale of scores: 1/√head_dim, by YaRN times (0.1·mscale_all_dim·ln(factor) + 1)²."""
        plain, scaling = 1 / math.sqrt(self.head_dim), self.rope.scaling
        if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
            return plain
        mscale = 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0)) + 1
        return plain * mscale * mscale

    def parameters(self, width: int) -> int:
        norms = self.kv_rank + (self.q_rank or 0)
        downs = self.latent_dim + (self.q_rank or 0)
        return self._weights(width) + norms + (downs + width) * self.bias

    def flops(self, width: int, length: int) -> int:
        """FLOPs of the decompressed form, whichever is run."""
        pairs = causal_pairs(length)
        core = 2 * pairs * self.heads * (self.head_dim + self.value_dim)
        return 2 * length * self._weights(width) + core

    def products(self, width: int) -> tuple[Product, ...]:
        """Products of the decompressed form, whichever is run."""
        queries, up = self.heads * self.head_dim, self.heads * (self.nope_dim + self.value_dim)
        q = [Product(width, queries, "q_proj")]
        if self.q_rank is not None:
            q = [Product(width, self.q_rank, "q_down"), Product(self.q_rank, queries, "q_up")]
        kv = Product(width, self.latent_dim, "kv_down"), Product(self.kv_rank, up, "kv_up")
        return *q, *kv, Product(self.heads * self.value_dim, width, "o_proj")

    def saved(self, width: int) -> Saved:
        """Queries, latents and the output; the norms' inputs; absorbed, also its projections."""
        kept = Saved(self.heads * (self.head_dim + self.value_dim), self.heads)
        kept += Saved(2 * self.latent_dim, 1)
        if self.q_rank is not None:
            kept += Saved(2 * self.q_rank, 1)
        if self.form == "absorbed":
            kept += Saved(self.heads * (self.latent_dim + self.kv_rank))
        return kept

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_dim, self.heads * self.value_dim

    def kernel_memory(self, width: int) -> PartMemory:
        """Without keys and values made from latents, head by head, which `exchanged` counts."""
        queries, values = self.heads * self.head_dim, self.heads * self.value_dim
        core = Saved(queries + values + 2 * width, queries)
        return PartMemory(self.saved(width), (BackwardMoment(core, values * width),))

    def gathered(self) -> int:
        """Its latent and its rotary key, whatever the setting: no CP size is excluded by heads."""
        return self.latent_dim

    def exchanged(self, cp_size: int, tokens: int, *, sharing: Sharing, item: int) -> int:
        """Latents of the rows, and what model/attention.py makes of those that are seen."""
        rows, visible = cp_size * tokens, visible_rows(tokens, cp_size)
        latents = 0 if cp_size == 1 else self.latent_dim * (3 * visible + rows) * item
        if self.form == "absorbed":
            key, value = self.latent_dim, self.kv_rank
            buffers = _buffers(key, value, shared=True, item=item)
            return latents + visible * (key + value) * item + rows * buffers
        key, value, product = self.head_dim, self.value_dim, self.nope_dim + self.value_dim
        expanded = expanded_values(key, product, value) * item
        together = most_expanded(visible, self.heads, expanded)
        buffers = _buffers(key, value, shared=False, item=item)
        return latents + together + -(-together * rows * buffers // max(visible * expanded, 1))

    def tp_units(self) -> tuple[TPUnits, ...]:
        return (TPUnits("heads", "attention heads", self.heads),)

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        queries = "q_proj.weight" if self.q_rank is None else "q_up.weight"
        named = {
            queries: at.of(self.heads, self.head_dim),
            "kv_up.weight": at.of(self.heads, self.nope_dim + self.value_dim),
            "o_proj.weight": at.of(self.heads, self.value_dim, dim=1),
        }
        return named | ({"o_proj.bias": at.first_only(width)} if self.bias else {})

    def _weights(self, width: int) -> int:
        """Values of all matrices."""
        queries = self.heads * self.head_dim
        q = width * queries if self.q_rank is None else self.q_rank * (width + queries)
        kv = width * self.latent_dim + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return q + kv + self.heads * self.value_dim * width


def _buffers(key: int, value: int, *, shared: bool, item: int) -> int:
    """Bytes of a row and KV head in the core's backward.

    shared: by several query heads. Kernels, which serve half precision, then add up the gradients
    of keys and values in float32; plain torch copies keys twice, values, and the gradients of both.
    """
    if item < FLOAT32_BYTES:
        return (key + value) * FLOAT32_BYTES if shared else 0
    return (3 * key + 2 * value) * item


def causal_pairs(length: int, *, window: int | None = None) -> int:
    """Pairs of a token and one it sees: 5 tokens make 15, with a window of 2 only 9."""
    near = length if window is None else min(window, length)
    return near * (near + 1) // 2 + (length - near) * near
