"""What a decoder is made of, layer by layer. Pure Python, so that a bad one is refused fast.

In: numbers. Out: frozen configs, checked. A layer is a mixer (attention, …) and a feed-forward
part, each behind its own norm; either may be left out. A decoder of two layers whose second sees
only the 128 tokens before it:

    full = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
    near = replace(full, window=128)
    DecoderConfig(vocab_size=256, width=64, layers=(
        LayerConfig(full, MLPConfig(width=192)), LayerConfig(near, MLPConfig(width=192))))

A mixer or feed-forward config knows what it costs (see `Part`), so a new kind is a config, a
module and a line in model/registry.py. `full` in that decoder has 4·16·64·2 + 2·16·64·2 = 12,288
parameters and takes 2·12,288·n + 4·4·16·n(n+1)/2 FLOPs forward for n tokens.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol


class Part(Protocol):
    """A mixer's or feed-forward part's config: what it costs behind hidden states of `width`."""

    @property
    def ropes(self) -> "tuple[RopeConfig, ...]":
        """The rotary tables it reads, each with its `rotary_dim`."""
        ...

    def parameters(self, width: int) -> int: ...

    def flops(self, width: int, length: int) -> int:
        """FLOPs of the forward matrix products over one sequence of `length` tokens."""
        ...

    def saved(self, width: int) -> "Saved":
        """What a token keeps for backward, without the part's input."""
        ...

    def gathered(self) -> int:
        """Values a lane fetches for each token of a pack that several lanes share."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """Numbers a token keeps: `values` in the model's dtype, `stats` always in float32 or more."""

    values: int
    stats: int = 0

    def __add__(self, other: "Saved") -> "Saved":
        return Saved(self.values + other.values, self.stats + other.stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _more_than(0, self, "factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK: theta grows with each sequence's own length, once it is beyond `original_length`."""

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        _more_than(0, self, "factor")
        _counts(self, "original_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow dims are squeezed by `factor`, fast ones stay, with a ramp between.

    Dims that turn more than `beta_fast` times within original_length are fast, fewer than
    `beta_slow` slow. Queries and keys are scaled by `attention_factor`; None: 0.1·ln(factor) + 1,
    or with both mscales 0.1·mscale·ln(factor) + 1 over the same with mscale_all_dim.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _more_than(0, self, "factor", "beta_fast", "beta_slow")
        _more_than(0, self, "attention_factor", optional=True)
        _counts(self, "original_length")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YarnScaling.beta_fast is {self.beta_fast:g} and beta_slow {self.beta_slow:g}; "
                "beta_fast is the larger one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: waves longer than original_length/low are squeezed, shorter than …/high stay."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _more_than(0, self, "factor", "low_freq_factor", "high_freq_factor")
        _counts(self, "original_length")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor is {self.high_freq_factor:g}; it must be more "
                f"than low_freq_factor, {self.low_freq_factor:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """A factor for each pair of dims; the long ones for sequences beyond `original_length`.

    Queries and keys are scaled by `attention_factor`; None: sqrt(1 + ln(factor) /
    ln(original_length)), or 1 without a factor. factor: the longest length over the original.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _more_than(0, self, "factor", "attention_factor", optional=True)
        _counts(self, "original_length")
        if self.original_length < 2:
            raise ValueError("LongRopeScaling.original_length is 1; it must be 2 or more")
        for name in ("short_factor", "long_factor"):
            values = tuple(getattr(self, name))
            if not all(map(_is_positive, values)):
                raise ValueError(f"LongRopeScaling.{name} is {values}; each must be more than 0")
            object.__setattr__(self, name, values)


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: the first `rotary_dim` dims of a head turn, all of them for None.

    scaling: how positions beyond the trained length are squeezed in; see model/rope.py.
    """

    theta: float = 10_000.0
    rotary_dim: int | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _more_than(1, self, "theta")
        if self.rotary_dim is None:
            return
        _counts(self, "rotary_dim")
        if self.rotary_dim % 2:
            raise ValueError(
                f"RopeConfig.rotary_dim is {self.rotary_dim}; dims turn in pairs, so it is even"
            )
        if isinstance(self.scaling, DynamicScaling) and self.rotary_dim < 4:
            raise ValueError("DynamicScaling needs a rotary_dim of 4 or more")
        if isinstance(self.scaling, LongRopeScaling):
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.scaling, name))) != self.rotary_dim // 2:
                    raise ValueError(
                        f"LongRopeScaling.{name} has {count} factors; {self.rotary_dim} rotary "
                        f"dims need {self.rotary_dim // 2}"
                    )

    def within(self, head_dim: int) -> "RopeConfig":
        """The same with its `rotary_dim` known: a key of the rotary tables."""
        if self.rotary_dim is None:
            return replace(self, rotary_dim=head_dim)
        if self.rotary_dim > head_dim:
            raise ValueError(
                f"RopeConfig.rotary_dim is {self.rotary_dim}; a head has only {head_dim} dims"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention. window: a token sees itself and the window − 1 before it.

    bias: of the query, key and value projections. output_bias: of the last projection.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        _counts(self, "heads", "kv_heads", "head_dim")
        _counts(self, "window", optional=True)
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
        biases = (queries + 2 * keys) * self.bias + width * self.output_bias
        return 2 * width * (queries + keys) + biases + 2 * self.head_dim * self.qk_norm

    def flops(self, width: int, length: int) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = 2 * length * width * 2 * (queries + keys)
        return projections + 4 * queries * causal_pairs(length, window=self.window)

    def saved(self, width: int) -> Saved:
        """Turned queries and keys, values and the output; with qk_norm also what it normed."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        core = Saved(2 * queries + 2 * keys, self.heads)
        if not self.qk_norm:
            return core
        return core + Saved(queries + keys, self.heads + self.kv_heads)

    def gathered(self) -> int:
        """Its key and value."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """SwiGLU with `width` channels inside."""

    width: int

    def __post_init__(self) -> None:
        _counts(self, "width")

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return ()

    def parameters(self, width: int) -> int:
        return 3 * width * self.width

    def flops(self, width: int, length: int) -> int:
        return 2 * length * self.parameters(width)

    def saved(self, width: int) -> Saved:
        """Gate, silu(gate), up, and their product."""
        return Saved(4 * self.width)

    def gathered(self) -> int:
        return 0


MixerConfig = AttentionConfig
FeedForwardConfig = MLPConfig


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One block: a mixer, then a feed-forward part; None leaves it and its norm out."""

    mixer: MixerConfig | None
    mlp: FeedForwardConfig | None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a LayerConfig has neither mixer nor mlp; give at least one")

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.mixer, self.mlp) if part is not None)

    def parameters(self, width: int) -> int:
        """With the norm before each part."""
        return sum(width + part.parameters(width) for part in self.parts)

    def flops(self, width: int, length: int) -> int:
        return sum(part.flops(width, length) for part in self.parts)

    def saved(self, width: int) -> Saved:
        """Each part's, with the input of its norm and the norm's output."""
        return sum((Saved(2 * width, 1) + part.saved(width) for part in self.parts), start=Saved(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: embedding, layers, norm, head. tied: the head uses the embedding's weight."""

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    tied: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _counts(self, "vocab_size", "width")
        _more_than(0, self, "norm_eps", "init_std")
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("DecoderConfig.layers is empty; a decoder has at least one layer")

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary tables of all layers, each once, in the order of first use."""
        return ropes_of(self.layers)


def ropes_of(layers: Sequence[LayerConfig]) -> tuple[RopeConfig, ...]:
    """The rotary tables these layers read, each once, in the order of first use."""
    found = [rope for layer in layers for part in layer.parts for rope in part.ropes]
    return tuple(dict.fromkeys(found))


def causal_pairs(length: int, *, window: int | None = None) -> int:
    """Pairs of a token and one it sees: 5 tokens make 15, with a window of 2 only 9."""
    near = length if window is None else min(window, length)
    return near * (near + 1) // 2 + (length - near) * near


def _counts(config: object, *names: str, optional: bool = False) -> None:
    """Refuses anything but whole numbers of 1 or more; None passes where it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        try:
            found = operator.index(value)
        except TypeError:
            found = 0
        if found < 1 or isinstance(value, bool):
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a whole number of "
                "1 or more"
            )
        object.__setattr__(config, name, found)


def _more_than(least: float, config: object, *names: str, optional: bool = False) -> None:
    """Refuses anything but finite numbers above `least`; None passes where it is optional."""
    for name in names:
        value = getattr(config, name)
        if value is None and optional:
            continue
        if not _is_positive(value) or value <= least:
            raise ValueError(
                f"{type(config).__name__}.{name} is {value!r}; it must be a finite number above "
                f"{least:g}"
            )


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0
