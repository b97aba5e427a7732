"""Rotary position embeddings and their scaling beyond the trained length. Pure Python.

In: numbers. Out: frozen configs, checked; model/norm_rope.py computes the tables. With theta 10,000
and 64 dims in a head, dims i and i + 32 rotate by 10,000^(−i/32) per token.
"""

from dataclasses import dataclass, replace

from longshore.settings import check_counts, check_more_than, is_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All positions divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        check_more_than(0, self, "factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK: theta grows with each sequence's own length, once it is beyond `original_length`."""

    factor: float
    original_length: int

    def __post_init__(self) -> None:
        check_more_than(0, self, "factor")
        check_counts(self, "original_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: slow dims are interpolated by `factor`, fast ones stay, with a ramp in between."""

    factor: float
    """The extended length over the original one."""
    original_length: int
    """The length the model was trained with."""
    beta_fast: float = 32.0
    """Dims with more rotations than this within original_length stay."""
    beta_slow: float = 1.0
    """Dims with fewer rotations than this are interpolated fully."""
    attention_factor: float | None = None
    """Scales queries and keys. None: 0.1·ln(factor) + 1, or with both mscales
    (0.1·mscale·ln(factor) + 1) / (0.1·mscale_all_dim·ln(factor) + 1)."""
    mscale: float | None = None
    """See attention_factor."""
    mscale_all_dim: float | None = None
    """See attention_factor and MLAConfig.scale."""
    truncate: bool = True
    """Round the ends of the ramp to whole dims."""

    def __post_init__(self) -> None:
        check_more_than(0, self, "factor", "beta_fast", "beta_slow")
        check_more_than(0, self, "attention_factor", optional=True)
        check_counts(self, "original_length")
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"YarnScaling.beta_fast is {self.beta_fast:g} and beta_slow {self.beta_slow:g}; "
                "beta_fast must be the larger one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths above original_length/low are scaled, below …/high they stay."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        check_more_than(0, self, "factor", "low_freq_factor", "high_freq_factor")
        check_counts(self, "original_length")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"Llama3Scaling.high_freq_factor is {self.high_freq_factor:g}; it must be more "
                f"than low_freq_factor, {self.low_freq_factor:g}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE: a factor for each pair of dims, depending on the sequence's length."""

    short_factor: tuple[float, ...]
    """For sequences up to original_length."""
    long_factor: tuple[float, ...]
    """For longer sequences."""
    original_length: int
    """The length the model was trained with."""
    factor: float | None = None
    """The extended length over the original one."""
    attention_factor: float | None = None
    """Scales queries and keys. None: sqrt(1 + ln(factor) / ln(original_length)), or 1 without a
    factor."""

    def __post_init__(self) -> None:
        check_more_than(0, self, "factor", "attention_factor", optional=True)
        check_counts(self, "original_length")
        if self.original_length < 2:
            raise ValueError("LongRopeScaling.original_length is 1; it must be 2 or more")
        for name in ("short_factor", "long_factor"):
            values = tuple(getattr(self, name))
            if not all(map(is_positive, values)):
                raise ValueError(f"LongRopeScaling.{name} is {values}; each must be more than 0")
            object.__setattr__(self, name, values)


RopeScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embeddings of a head; model/norm_rope.py computes the tables."""

    theta: float = 10_000.0
    """The base of the frequencies."""
    rotary_dim: int | None = None
    """The first dims of a head, which rotate; None for all."""
    scaling: RopeScaling | None = None
    """How positions beyond the trained length are scaled."""

    def __post_init__(self) -> None:
        check_more_than(1, self, "theta")
        if self.rotary_dim is None:
            return
        check_counts(self, "rotary_dim")
        if self.rotary_dim % 2:
            raise ValueError(
                f"RopeConfig.rotary_dim is {self.rotary_dim}; it must be even: dims rotate in pairs"
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
        """The config with its `rotary_dim` set: the key of a rotary table."""
        if self.rotary_dim is None:
            return replace(self, rotary_dim=head_dim)
        if self.rotary_dim > head_dim:
            raise ValueError(
                f"RopeConfig.rotary_dim is {self.rotary_dim}; a head has only {head_dim} dims"
            )
        return self
