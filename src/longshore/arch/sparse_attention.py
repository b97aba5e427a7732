"""DeepSeek-V4's attention as data: a window of near tokens, and entries that pool groups of tokens.

In: numbers. Out: frozen configs, checked; the mixer's is a Part. A token at position p sees the
tokens p − window + 1 … p of its sequence and, with a ratio r, the entries j < (p + 1) // r, each of
which pools the tokens j·r … j·r + r − 1. Without an index it sees all of them (HCA, r = 128); with
one the top_k that the index scores highest (CSA, r = 4), where an entry also pools the group before
its own. Keys are the values too, and all heads share them.

    entry_pairs(9, ratio=4) = 8: positions 3 … 6 see one entry, 7 and 8 see two; 6 with most=1

With window 2, ratio 4 and no index, a sequence of 9 tokens has 17 pairs of tokens and 8 of a token
and an entry, so that H heads of D dims have 4·H·D·25 FLOPs in the core.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from longshore.arch.attention import causal_pairs
from longshore.arch.part import Part, Product, Saved
from longshore.arch.rope import DynamicScaling, LongRopeScaling, RopeConfig
from longshore.settings import check_counts, check_more_than


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """What chooses the entries that a token attends to."""

    heads: int
    """Query heads; all of them score one key of each entry."""
    head_dim: int
    """Width of its queries and keys."""
    top_k: int
    """Entries that a token attends to, at most."""
    loss_weight: float = 1.0
    """Weight of its loss in the total; 0 to leave it untrained."""

    def __post_init__(self) -> None:
        check_counts(self, "heads", "head_dim", "top_k")
        if self.loss_weight != 0:
            check_more_than(0, self, "loss_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttentionConfig(Part):
    """Attention to a window and to pooled entries."""

    has_float32: ClassVar[bool] = True
    needs_curve: ClassVar[bool] = True

    heads: int
    """Query heads; they share one key, which is the value too."""
    head_dim: int
    """Width of a head."""
    rope_dim: int
    """Trailing dims of a head, with rotary position; those of the index's heads too."""
    q_rank: int
    """Width of the queries' latent."""
    window: int
    """A token sees itself and the window − 1 tokens before it."""
    ratio: int = 0
    """Tokens of an entry's group; 0: there are no entries."""
    index: IndexConfig | None = None
    """Chooses entries, whose groups then overlap; None: a token attends to all it may see."""
    o_groups: int = 1
    """Groups of heads, each projected to o_rank on its own."""
    o_rank: int
    """Width of each group's projection."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Rotary position embeddings of the rope_dim dims."""

    def __post_init__(self) -> None:
        check_counts(self, "heads", "head_dim", "rope_dim", "q_rank", "window", "o_groups")
        check_counts(self, "o_rank")
        if self.ratio != 0:
            check_counts(self, "ratio")
        name = type(self).__name__
        if self.index is not None and not self.ratio:
            raise ValueError(
                f"{name}.index is given, but ratio is 0: there are no entries to choose"
            )
        narrowest = min(self.head_dim, self.index.head_dim if self.index else self.head_dim)
        if self.rope_dim > narrowest:
            raise ValueError(
                f"{name}.rope_dim is {self.rope_dim}; the narrowest head has {narrowest} dims"
            )
        if self.heads % self.o_groups:
            raise ValueError(
                f"{name}.o_groups is {self.o_groups}; it must divide heads, {self.heads}"
            )
        if isinstance(self.rope.scaling, DynamicScaling | LongRopeScaling):
            raise ValueError(
                f"{name}.rope has {type(self.rope.scaling).__name__}; entries of sequences of all "
                "lengths have the same positions, so it may not depend on the length"
            )
        _ = self.ropes

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope.within(self.rope_dim),)

    def bare(self) -> Self:
        index = self.index and replace(self.index, loss_weight=1.0)
        return replace(self, index=index)

    @property
    def entry_channels(self) -> int:
        """Channels of a token that entries pool: two rows where groups overlap."""
        if not self.ratio:
            return 0
        return self.head_dim * (2 if self.index is not None else 1)

    @property
    def uncast_parameters(self) -> int:
        """Sinks and biases, which are float32 at least."""
        biases = self.ratio * self.entry_channels
        if self.index is not None:
            biases += self.ratio * 2 * self.index.head_dim
        return self.heads + biases

    def parameters(self, width: int) -> int:
        norms = self.q_rank + self.head_dim + (self.head_dim if self.ratio else 0)
        if self.index is not None:
            norms += self.index.head_dim
        return self._weights(width) + norms + self.uncast_parameters

    def flops(self, width: int, length: int) -> int:
        """Scores of the index are counted twice where an entry is chosen: for its loss, too.

        The choice itself has no backward, so that three times this is a little too much for a step.
        """
        index, near = self.index, causal_pairs(length, window=self.window)
        most = None if index is None else index.top_k
        attended = entry_pairs(length, ratio=self.ratio, most=most)
        core = 4 * self.heads * self.head_dim * (near + attended)
        if index is not None:
            scored = entry_pairs(length, ratio=self.ratio) + attended
            core += 2 * index.heads * index.head_dim * scored
        return 2 * length * self._weights(width) + core

    def products(self, width: int) -> tuple[Product, ...]:
        queries, groups = self.heads * self.head_dim, self.o_groups
        pooled = ("entries.kv_proj", "entries.gate_proj") if self.ratio else ()
        return (
            Product(width, self.q_rank, "q_down"),
            Product(self.q_rank, queries, "q_up"),
            Product(width, self.head_dim, "kv_proj"),
            *(Product(width, self.entry_channels, name) for name in pooled),
            *self._index_products(width),
            *(Product(queries // groups, self.o_rank, "o_down"),) * groups,
            Product(groups * self.o_rank, width, "o_up"),
        )

    def saved(self, width: int) -> Saved:
        """Queries before their norm and rotated, the output before and after its rotation, the
        rotation; the latents and keys with their norms' inputs; what is pooled, and its gates.

        Of entries, pooled and rotated, a token has its share, and of the rows of overlapping ones.
        The index's queries and weights of heads; the chosen entries and the attention they got, as
        many as there may be.
        """
        queries, index = self.heads * self.head_dim, self.index
        kept = Saved(4 * queries + self.o_groups * self.o_rank, 3 * self.heads + self.rope_dim // 2)
        kept += Saved(2 * self.q_rank + 2 * self.head_dim + 2 * self.entry_channels, 2)
        if self.ratio:
            kept += Saved(-(-2 * self.head_dim // self.ratio), 1)
        if index is not None:
            kept += Saved(index.heads * (index.head_dim + 1) + 4 * index.head_dim, 2 * index.top_k)
            kept += Saved(-(-2 * index.head_dim // self.ratio), 5)
        return kept

    def gathered(self) -> int:
        """Its share of an entry, and of the index's key of it, whatever the setting."""
        if not self.ratio:
            return 0
        keys = self.head_dim + (self.index.head_dim if self.index is not None else 0)
        return -(-keys // self.ratio)

    def _index_products(self, width: int) -> tuple[Product, ...]:
        """Products of its keys and their gates, its queries and the weights of its heads."""
        index = self.index
        if index is None:
            return ()
        keys, queries = 2 * index.head_dim, index.heads * index.head_dim
        return (
            Product(width, keys, "index.keys.kv_proj"),
            Product(width, keys, "index.keys.gate_proj"),
            Product(self.q_rank, queries, "index.q_up"),
            Product(width, index.heads, "index.weights_proj"),
        )

    def _weights(self, width: int) -> int:
        """Values of all matrices."""
        return sum(product.k * product.n for product in self.products(width))


def entry_pairs(length: int, *, ratio: int, most: int | None = None) -> int:
    """Pairs of a token and an entry it sees, `most` of each token: the latest or the chosen ones.

    Position p sees min(most, (p + 1) // ratio): of 9 tokens at ratio 4 four see one, two see two.
    """
    if not ratio:
        return 0
    full = length // ratio
    counted = full if most is None else min(full, most)
    # Entry j is seen from position (j + 1)·ratio − 1 on; beyond `most` a token drops another one.
    return counted * (length + 1) - ratio * counted * (counted + 1) // 2
