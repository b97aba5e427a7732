"""Configs of the recurrent mixers, Mamba2 and gated delta net. No torch.

In: numbers. Out: frozen configs, which are Parts. FLOPs are those of the recurrent form, which
does not depend on the chunk size: for each token every head updates its state and reads it; adding
an outer product to a P×N state, like multiplying it by a vector, is 2·P·N.

    Mamba2Config(heads=4, head_dim=8, state_dim=16) at width 16, conv channels 32 + 2·16 = 64:
    parameters 16·(32 + 64 + 4) + 64·5 + 3·4 + 32 + 32·16 = 2,476
    FLOPs of a token 2·16·100 + 2·64·4 + 4·(4·8·16) + 2·32·16 = 6,784
"""

from dataclasses import dataclass
from typing import ClassVar

from longshore.arch.cuts import TensorCut, TPRank, TPUnits
from longshore.arch.part import BackwardMoment, Part, PartMemory, Product, Saved, Sharing
from longshore.ops.sizes import CHUNK_ROWS
from longshore.settings import check_counts, check_more_than, is_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config(Part):
    """Mamba2."""

    graph_layer: ClassVar[str] = "mamba"
    timed_as: ClassVar[str] = "mamba"
    in_chunks: ClassVar[bool] = True
    has_float32: ClassVar[bool] = True

    heads: int
    """Heads, each with its own state."""
    head_dim: int
    """Channels of a head."""
    state_dim: int
    """N of each head's head_dim × N state."""
    groups: int = 1
    """Heads of one group share B and C."""
    kernel: int = 4
    """Tokens that the convolution sees."""
    norm_groups: int | None = None
    """Groups of channels that are normed separately; None for as many as `groups`."""
    bias: bool = False
    """Whether both projections have biases."""
    conv_bias: bool = True
    """Whether the convolution has one."""
    dt_min: float = 0.0
    """Lower limit of a token's step size."""
    dt_max: float | None = None
    """Upper limit of a token's step size; None for none."""

    def __post_init__(self) -> None:
        check_counts(self, "heads", "head_dim", "state_dim", "groups", "kernel")
        check_counts(self, "norm_groups", optional=True)
        if not (self.dt_min == 0 or is_positive(self.dt_min)):
            raise ValueError(
                f"Mamba2Config.dt_min is {self.dt_min!r}; it must be a finite number of 0 or more"
            )
        check_more_than(self.dt_min, self, "dt_max", optional=True)
        if self.heads % self.groups:
            raise ValueError(
                f"Mamba2Config.groups is {self.groups}; it must divide heads, {self.heads}"
            )
        if self.inner % (self.norm_groups or self.groups):
            raise ValueError(
                f"Mamba2Config.norm_groups is {self.norm_groups}; it must divide heads times "
                f"head_dim, {self.inner}"
            )

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of x, B and C."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def projected(self) -> int:
        """Channels of the gate z, of x, B and C, and the step of each head."""
        return self.inner + self.conv_dim + self.heads

    def parameters(self, width: int) -> int:
        projections = width * (self.projected + self.inner) + (self.projected + width) * self.bias
        conv = self.conv_dim * (self.kernel + self.conv_bias)
        return projections + conv + 3 * self.heads + self.inner

    def flops(self, width: int, length: int) -> int:
        """2 for each weight of projections and convolution, 4·P·N for each head."""
        weights = width * (self.projected + self.inner) + self.conv_dim * self.kernel
        return length * (2 * weights + 4 * self.inner * self.state_dim)

    def products(self, width: int) -> tuple[Product, ...]:
        return Product(width, self.projected, "in_proj"), Product(self.inner, width, "out_proj")

    def saved(self, width: int) -> Saved:
        """The convolution's output and the normed output; the rest in float32, like scan and norm.

        The scan saves two rows of a chunk's scores and decays for each head and one for each
        group, and two states for each chunk.
        """
        rows = CHUNK_ROWS * (2 * self.heads + self.groups)
        states = 2 * self.inner * self.state_dim // CHUNK_ROWS
        groups = 6 * self.groups * self.state_dim + (self.norm_groups or self.groups)
        copies = 3 * self.conv_dim + 9 * self.inner + 5 * self.heads + groups
        return Saved(self.conv_dim + self.inner, rows + states + copies)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.head_dim, self.inner

    def kernel_memory(self, width: int) -> PartMemory:
        """The states that enter and leave each chunk exist in backward alone."""
        inner, conv = self.inner, self.conv_dim
        saved = Saved(self.projected + conv + 2 * inner, 3 * self.heads + self.groups)
        states = 2 * inner * self.state_dim // CHUNK_ROWS
        rows = 3 * inner + conv + states + self.groups * CHUNK_ROWS + 2 * width
        scan = BackwardMoment(Saved(rows, 4 * self.heads), inner * width)
        taps = BackwardMoment(Saved(2 * inner + 2 * conv + 2 * width, conv), 0)
        return PartMemory(saved, (scan, taps))

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        return (self.heads, self.groups) if sharing.scan == "heads" else ()

    def tp_units(self) -> tuple[TPUnits, ...]:
        norm_groups = self.norm_groups or self.groups
        return (
            TPUnits("heads", "heads of Mamba2", self.heads),
            TPUnits("groups", "groups of Mamba2", self.groups, shared=True),
            TPUnits("norm_groups", "norm groups of Mamba2", norm_groups, shared=True),
        )

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        x, group = (self.heads, self.head_dim), (self.groups, self.state_dim)
        named = {
            "in_proj.weight": at.joined([x, x, group, group, (self.heads, 1)]),
            "conv1d.weight": at.joined([x, group, group]),
            "norm.weight": at.of(*x),
            "out_proj.weight": at.of(*x, dim=1),
            **{f"per_head.{name}": at.of(self.heads) for name in ("A_log", "dt_bias", "D")},
        }
        if self.bias:
            named["in_proj.bias"] = named["in_proj.weight"]
            named["out_proj.bias"] = at.first_only(width)
        return named | ({"conv1d.bias": named["conv1d.weight"]} if self.conv_bias else {})

    def norm_ranks(self, tp: int) -> int:
        return max(1, tp // (self.norm_groups or self.groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig(Part):
    """Gated delta net."""

    graph_layer: ClassVar[str] = "delta"
    timed_as: ClassVar[str] = "delta"
    in_chunks: ClassVar[bool] = True
    has_float32: ClassVar[bool] = True

    key_heads: int
    """Heads of queries and keys; must divide `value_heads`."""
    value_heads: int
    """Heads of values, each with its own state; value_heads / key_heads share a key head."""
    key_dim: int
    """Width of a key head."""
    value_dim: int
    """Width of a value head."""
    kernel: int = 4
    """Tokens that the convolution sees."""

    def __post_init__(self) -> None:
        check_counts(self, "key_heads", "value_heads", "key_dim", "value_dim", "kernel")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"DeltaNetConfig.key_heads is {self.key_heads}; it must divide value_heads, "
                f"{self.value_heads}"
            )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels of queries, keys and values."""
        return 2 * self.keys + self.values

    def parameters(self, width: int) -> int:
        conv = self.conv_dim * self.kernel
        return self._projections(width) + conv + 2 * self.value_heads + self.value_dim

    def flops(self, width: int, length: int) -> int:
        """2 for each weight of projections and convolution, 6·K·V for each head of values.

        A head reads its state at the key, corrects it there, and reads it at the query.
        """
        weights = self._projections(width) + self.conv_dim * self.kernel
        return length * (2 * weights + 6 * self.values * self.key_dim)

    def products(self, width: int) -> tuple[Product, ...]:
        """Products of q, k, v and z; of beta and the decay; of the output."""
        return (
            Product(width, self.conv_dim + self.values, "in_proj_qkvz"),
            Product(width, 2 * self.value_heads, "in_proj_ba"),
            Product(self.values, width, "out_proj"),
        )

    def saved(self, width: int) -> Saved:
        """The normed output; the rest in float32, like scan and norm.

        The scan saves five rows of a chunk's matrices for each head, and two states for each chunk.
        """
        rows = 5 * CHUNK_ROWS * self.value_heads
        states = 2 * self.values * self.key_dim // CHUNK_ROWS
        keys = 2 * (self.keys + self.key_heads) + 8 * self.value_heads * self.key_dim
        copies = 3 * self.conv_dim + keys + 10 * self.values + 8 * self.value_heads
        return Saved(self.values, rows + states + copies)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.key_dim, self.values

    def kernel_memory(self, width: int) -> PartMemory:
        """flash-linear-attention keeps normed q and k and a chunk's matrix; states in backward."""
        heads, values, conv = self.value_heads, self.values, self.conv_dim
        kept = 2 * conv + 3 * values + 2 * self.keys + heads * CHUNK_ROWS
        saved = Saved(kept, 6 * heads + 2 * self.key_heads)
        keys = heads * self.key_dim
        states = 2 * values * self.key_dim // CHUNK_ROWS
        scan = Saved(3 * keys + 5 * values + states + 2 * width, 2 * keys + 4 * heads)
        return PartMemory(saved, (BackwardMoment(scan, values * width),))

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        return (self.key_heads,) if sharing.scan == "heads" else ()

    def tp_units(self) -> tuple[TPUnits, ...]:
        return (
            TPUnits("key_heads", "key heads of the delta net", self.key_heads),
            TPUnits("value_heads", "value heads of the delta net", self.value_heads),
        )

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        served = self.value_heads // self.key_heads
        key, value = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        return {
            "in_proj_qkvz.weight": at.of(self.key_heads, 2 * self.key_dim + 2 * served * value[1]),
            "in_proj_ba.weight": at.of(self.key_heads, 2 * served),
            "conv1d.weight": at.joined([key, key, value]),
            "out_proj.weight": at.of(*value, dim=1),
            **{f"per_head.{name}": at.of(self.value_heads) for name in ("A_log", "dt_bias")},
        }

    def _projections(self, width: int) -> int:
        """Weights of q, k, v, the gate z, and of beta and the decay; and of the output."""
        return width * (self.conv_dim + 2 * self.values + 2 * self.value_heads)
