"""Attention as data: grouped-query attention and multi-head latent attention (MLA). Pure Python.

In: numbers. Out: frozen configs, checked, which follow `Part`. With MLA, as in DeepSeek-V3, a token
has one latent of `kv_rank` numbers for all heads, and one rotary key of `rope_dim` numbers; each
head projects its own `nope_dim` key and `value_dim` value from the latent.

MLA with 2 heads, kv_rank 8, nope_dim 4, rope_dim 2, value_dim 6 and a plain query projection at
width 16 has these parameters: q 16·2·6 = 192, down 16·10 = 160, norm 8, up 8·2·10 = 160, output
2·6·16 = 192: 712. Lanes exchange 10 numbers per token; its keys and values would be 2·(6 + 6) = 24.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from longshore.arch.part import Product, Saved, Sharing, causal_pairs
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.settings import check_counts, names_of

Form = Literal["decompressed", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention."""

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
    """Of the query, key and value projections."""
    output_bias: bool = False
    """Of the output projection."""
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
        """Of queries with their gates, keys, values and the output."""
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

    def gathered(self) -> int:
        """Its key and value."""
        return 2 * self.kv_heads * self.head_dim

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        return (self.kv_heads,) if sharing.attention == "heads" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention."""

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
    """Of the projections down to the latents and of the output projection."""
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
        """Of the scores: 1/√head_dim, times (0.1·mscale_all_dim·ln(factor) + 1)² with YaRN."""
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
        """Of the decompressed form, whichever is run."""
        pairs = causal_pairs(length)
        core = 2 * pairs * self.heads * (self.head_dim + self.value_dim)
        return 2 * length * self._weights(width) + core

    def products(self, width: int) -> tuple[Product, ...]:
        """Of the decompressed form, whichever is run."""
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

    def gathered(self) -> int:
        """Its latent and its rotary key."""
        return self.latent_dim

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        """None: lanes fetch latents, whatever the setting."""
        return ()

    def _weights(self, width: int) -> int:
        """Of all matrices."""
        queries = self.heads * self.head_dim
        q = width * queries if self.q_rank is None else self.q_rank * (width + queries)
        kv = width * self.latent_dim + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return q + kv + self.heads * self.value_dim * width
