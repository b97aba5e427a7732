"""RMS norms, plain and with a gate, parameters that are never cast, and rotary tables.

A norm takes (…, C), with a gate its rows too, and returns the same shape and dtype; half precision
is normed in float32. The row [3, 4] has root mean square sqrt(12.5), so with a weight of ones and
no eps it becomes [0.849, 1.131]; a zero-centred norm does the same with a weight of zeros. With a
gate so large that silu(gate) = gate = [g, g], NormAfterGate (Mamba2) gives [0.849, 1.131] whatever
g is, NormBeforeGate (gated delta net) [0.849·g, 1.131·g].

A rotary table is the (cos, sin), each (T, R), by which ops/pointwise.py rotates dims i and i + R
together; R is half of the RopeConfig's rotary_dim. With theta 100 and 4 rotary dims the frequencies
are 1 and 0.1: at position 3 the pair (0, 2) is rotated by 3 and the pair (1, 3) by 0.3 radians.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from longshore.arch.part import Norm
from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from longshore.batch import SeqContext
from longshore.ops.pointwise import (
    add_norm,
    norm_after_gate,
    norm_before_gate,
    rms_norm,
    shared_norm_after_gate,
)


class RMSNorm(nn.Module):
    def __init__(self, width: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.full((width,), 0.0 if norm.zero_centred else 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.norm.eps, zero_centred=self.norm.zero_centred)

    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta, or x itself, and its norm in the weight's dtype."""
        return add_norm(x, delta, self.weight, self.norm.eps, zero_centred=self.norm.zero_centred)


class Float32Parameters(nn.Module):
    """A module whose parameters keep their dtype while others are cast to that of the arithmetic.

    Decay rates are exponentiated and multiplied over a whole sequence: bfloat16, with 8 bits, would
    turn a decay of 0.999 into 1. Such a module holds no other parameters, and its forward returns
    new tensors made of them: parallel/fsdp.py wraps it on its own, and takes the gathered
    parameters away when forward returns.
    """


class NormAfterGate(nn.Module):
    """weight · norm(x · silu(gate)), each of `groups` parts of the channels normed apart."""

    mean_over_ranks: Callable[[Tensor], Tensor] | None = None
    """The mean of mean squares (…, 1), where ranks share a part's channels; set by parallel/."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self.mean_over_ranks is not None:
            return shared_norm_after_gate(
                x, gate, self.weight, eps=self.eps, mean_over_ranks=self.mean_over_ranks
            )
        return norm_after_gate(x, gate, self.weight, groups=self.groups, eps=self.eps)


class NormBeforeGate(nn.Module):
    """weight · norm(x) · silu(gate) over the last dim."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return norm_before_gate(x, gate, self.weight, eps=self.eps)


Tables = Mapping[RopeConfig, tuple[Tensor, Tensor]]
Frequencies = list[float]


class _Tables(Tables):
    """Not a dict: FSDP casts what it finds in a dict among a block's inputs to half precision."""

    def __init__(self, tables: dict[RopeConfig, tuple[Tensor, Tensor]]) -> None:
        self.tables = tables

    def __getitem__(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        return self.tables[rope]

    def __iter__(self) -> Iterator[RopeConfig]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


def rope_tables(ropes: Sequence[RopeConfig], ctx: SeqContext, dtype: torch.dtype) -> Tables:
    """(cos, sin) of each config, float32, or float64 where that is the model's dtype.

    Scalings that depend on the length take each sequence's own, so that packing changes nothing.
    Angles are float64: at position 100,000 a float32 angle is wrong by up to 0.004. Nothing is read
    back from the device.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    positions_T1 = ctx.positions.double()[:, None]
    return _Tables(
        {rope: _cos_sin(rope, positions_T1 * _by_token(rope, ctx), wide) for rope in ropes}
    )


def rope_at(rope: RopeConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) at these positions (N), where the scaling does not depend on the length."""
    assert not isinstance(rope.scaling, DynamicScaling | LongRopeScaling)
    angles_NR = positions.double()[:, None] * _on_device(rope, False, positions.device)
    return _cos_sin(rope, angles_NR, dtype)


def _cos_sin(rope: RopeConfig, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    factor = attention_factor(rope)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return cos.to(dtype), sin.to(dtype)


def _by_token(rope: RopeConfig, ctx: SeqContext) -> Tensor:
    """Frequencies of each token, (T, R), or (1, R) where they do not depend on the length."""
    plain = _on_device(rope, False, ctx.positions.device)
    lengths_S, scaling = ctx.lengths.double(), rope.scaling
    if isinstance(scaling, DynamicScaling):
        by_sequence = _dynamic(rope, scaling, lengths_S)
    elif isinstance(scaling, LongRopeScaling):
        long = _on_device(rope, True, ctx.positions.device)
        by_sequence = torch.where((lengths_S > scaling.original_length)[:, None], long, plain)
    else:
        return plain[None]
    return by_sequence[ctx.sequence_index]


def _dynamic(rope: RopeConfig, scaling: DynamicScaling, lengths_S: Tensor) -> Tensor:
    """Frequencies of each sequence, (S, R), from its length."""
    dim = _dim(rope)
    over = lengths_S.clamp(min=scaling.original_length) / scaling.original_length
    growth = (scaling.factor * over - (scaling.factor - 1)) ** (dim / (dim - 2))
    powers = torch.arange(0, dim, 2, dtype=torch.float64, device=lengths_S.device) / dim
    return (rope.theta * growth)[:, None] ** -powers


def frequencies(rope: RopeConfig, *, long: bool = False) -> Frequencies:
    """Radians a token for each pair of dims; `long`: in a sequence beyond the original length.

    What DynamicScaling makes of a long sequence depends on how long it is: see `rope_tables`.
    """
    dim, scaling = _dim(rope), rope.scaling
    plain = [rope.theta ** -(i / dim) for i in range(0, dim, 2)]
    match scaling:
        case None | DynamicScaling():
            return plain
        case LinearScaling():
            return [frequency / scaling.factor for frequency in plain]
        case YarnScaling():
            return _yarn(plain, scaling, rope.theta)
        case Llama3Scaling():
            return [_llama3(frequency, scaling) for frequency in plain]
        case LongRopeScaling():
            factors = scaling.long_factor if long else scaling.short_factor
            return [frequency / by for frequency, by in zip(plain, factors, strict=True)]


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by, so that scores grow by its square."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling | LongRopeScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor is None or scaling.factor <= 1:
        return 1.0
    grown = math.log(scaling.factor)
    if isinstance(scaling, LongRopeScaling):
        return math.sqrt(1 + grown / math.log(scaling.original_length))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * grown + 1) / (0.1 * scaling.mscale_all_dim * grown + 1)
    return 0.1 * grown + 1


def _yarn(plain: Frequencies, scaling: YarnScaling, theta: float) -> Frequencies:
    """Pairs before `low` stay, those beyond `high` are divided by the factor."""
    dim = 2 * len(plain)

    def pair_that_rotates(times: float) -> float:
        waves = scaling.original_length / (times * 2 * math.pi)
        return dim * math.log(waves) / (2 * math.log(theta))

    low, high = pair_that_rotates(scaling.beta_fast), pair_that_rotates(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    scaled = []
    for pair, frequency in enumerate(plain):
        squeezed = min(max((pair - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency / scaling.factor * squeezed + frequency * (1 - squeezed))
    return scaled


def _llama3(frequency: float, scaling: Llama3Scaling) -> float:
    rotations = scaling.original_length * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stays = min(max((rotations - low) / (high - low), 0.0), 1.0)
    return (1 - stays) * frequency / scaling.factor + stays * frequency


def _dim(rope: RopeConfig) -> int:
    assert rope.rotary_dim is not None, "rotary tables are made for RopeConfig.within(head_dim)"
    return rope.rotary_dim


@lru_cache(maxsize=256)
def _on_device(rope: RopeConfig, long: bool, device: torch.device) -> Tensor:
    """float64 (R), copied once; the copy is finished on return, so any stream may read it."""
    return torch.tensor(frequencies(rope, long=long), dtype=torch.float64, device=device)
