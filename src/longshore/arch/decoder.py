"""A decoder as data, layer by layer. Pure Python, so that a wrong config is rejected quickly.

In: numbers. Out: frozen configs, checked. A layer is a mixer (attention, …) and a feed-forward
part, each after its own norm; either may be left out. A decoder of two layers, the second with a
window of 128 tokens:

    full = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
    near = replace(full, window=128)
    DecoderConfig(vocab_size=256, width=64, layers=(
        LayerConfig(full, MLPConfig(width=192)), LayerConfig(near, MLPConfig(width=192))))

A mixer or feed-forward config knows what it costs (see `Part`), so a new kind is a config, a
module and its registration. `full` in that decoder has 4·16·64·2 + 2·16·64·2 = 12,288
parameters and takes 2·12,288·n + 4·4·16·n(n+1)/2 FLOPs forward for n tokens.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from longshore.arch.checks import check_counts, check_more_than
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.hyper import HyperConfig
from longshore.arch.lora import LoRAConfig
from longshore.arch.part import Norm, Part, Saved, check_part
from longshore.arch.rope import RopeConfig
from longshore.errors import SettingError

MOST_LAYERS = 4096
MOST_DEPTHS = 64
MOST_EXPERTS = 1 << 18
MOST_PARAMETERS = 10**15
"""Limits far beyond any model, so that a typo is reported before memory runs out."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: a mixer, then a feed-forward part; None leaves it and its norm out."""

    mixer: Part | None
    mlp: Part | None
    residuals: HyperConfig | None = None
    """Set by the decoder, the same in all its layers."""

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a LayerConfig has neither mixer nor mlp; give at least one")
        for part in self.parts:
            check_part(part)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part in (self.mixer, self.mlp) if part is not None)

    def parameters(self, width: int) -> int:
        """With the norm before each part, and its hyper-connections."""
        mixing = self.residuals.parameters(width) if self.residuals else 0
        return sum(width + mixing + part.parameters(width) for part in self.parts)

    def flops(self, width: int, length: int) -> int:
        mixing = self.residuals.flops(width) * length if self.residuals else 0
        return sum(mixing + part.flops(width, length) for part in self.parts)

    def saved(self, width: int) -> Saved:
        """What the parts save, with the input and the output of each norm."""
        around = Saved(2 * width, 1) + self.mixing_saved(width)
        return sum((around + part.saved(width) for part in self.parts), start=Saved(0))

    def with_residuals(self, residuals: HyperConfig | None) -> "LayerConfig":
        return self if self.residuals == residuals else replace(self, residuals=residuals)

    def row(self, width: int) -> int:
        """Values of a token between blocks."""
        return width * self.residuals.count if self.residuals else width

    def mixing_saved(self, width: int) -> Saved:
        """What hyper-connections save at one part, with the rows that come; 0 without them."""
        if self.residuals is None:
            return Saved(0)
        return Saved(self.row(width)) + self.residuals.saved(width)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder: embedding, layers, norm, head."""

    vocab_size: int
    """Rows of the embedding and of the head."""
    width: int
    """Channels of the hidden states."""
    layers: tuple[LayerConfig, ...]
    """In order, at least one."""
    norm_eps: float = 1e-6
    """Of all RMS norms."""
    zero_centred: bool = False
    """Of all RMS norms, see Norm."""
    tied: bool = False
    """The head uses the embedding's weight."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    mtp: tuple[LayerConfig, ...] = ()
    """A layer for each depth of multi-token prediction."""
    pad_token_id: int | None = None
    """A token whose embedding gets no gradient as an input, as in transformers; None for none."""
    float32_residual: bool = False
    """The residual stream is float32 at least, whatever dtype the layers compute in."""
    residuals: HyperConfig | None = None
    """Several residual rows of each token, joined by hyper-connections; None: one, and sums."""
    lora: LoRAConfig | None = None
    """Low-rank factors, which alone are trained; None: everything is."""

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "width")
        check_more_than(0, self, "norm_eps", "init_std")
        for name in ("layers", "mtp"):
            layers = tuple(layer.with_residuals(self.residuals) for layer in getattr(self, name))
            if self.lora is not None:  # a router's bias is frozen, too
                layers = tuple(_balanced(layer, None, 0.0) for layer in layers)
            object.__setattr__(self, name, layers)
        if not self.layers:
            raise ValueError("DecoderConfig.layers is empty; a decoder has at least one layer")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"DecoderConfig.pad_token_id is {self.pad_token_id}; it must be a token, from 0 "
                f"to {self.vocab_size - 1}"
            )
        self._check_hashed()
        self._check_size()

    def _check_hashed(self) -> None:
        if any(hashed_rows(layer) for layer in self.mtp):
            raise ValueError(
                "DecoderConfig.mtp has a layer whose experts are chosen by token ids; a depth of "
                "multi-token prediction must have a router that chooses, so leave out hash_rows"
            )
        for number, layer in enumerate(self.layers):
            if (rows := hashed_rows(layer)) not in (0, self.vocab_size):
                raise ValueError(
                    f"MoEConfig.hash_rows of layer {number} is {rows}; the table has a row for "
                    f"each token, so it must be vocab_size, {self.vocab_size}"
                )

    def _check_size(self) -> None:
        layers = (*self.layers, *self.mtp)
        kinds = Counter(layers)
        sizes = {
            "layers": (len(self.layers), MOST_LAYERS),
            "depths of multi-token prediction": (len(self.mtp), MOST_DEPTHS),
            "experts in all layers": (sum(map(_experts, layers)), MOST_EXPERTS),
            "parameters": (
                2 * self.vocab_size * self.width
                + sum(layer.parameters(self.width) * times for layer, times in kinds.items()),
                MOST_PARAMETERS,
            ),
        }
        for what, (size, most) in sizes.items():
            if size > most:
                raise ValueError(f"a decoder has at most {most:,} {what}; this one has {size:,}")

    def merged(self) -> "DecoderConfig":
        """Without low-rank factors: of the base, or of weights that have them inside."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def row_width(self) -> int:
        """Values of a token between blocks."""
        return self.width * (self.residuals.count if self.residuals else 1)

    @property
    def join_parameters(self) -> int:
        """Of a depth of multi-token prediction, besides those of its layer."""
        collapse = self.residuals.collapse_parameters(self.width) if self.residuals else 0
        return (2 * self.width + 3) * self.width + collapse

    @property
    def norm_parameters(self) -> int:
        """Of the last norm, and of the collapse before it."""
        collapse = self.residuals.collapse_parameters(self.width) if self.residuals else 0
        return self.width + collapse

    @property
    def hashed_layers(self) -> tuple[int, ...]:
        """The numbers of layers that read token ids, to choose experts by them."""
        return tuple(n for n, layer in enumerate(self.layers) if hashed_rows(layer))

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, self.zero_centred)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary tables of all layers, each once, in the order of first use."""
        return ropes_of((*self.layers, *self.mtp))


def ropes_of(layers: Sequence[LayerConfig]) -> tuple[RopeConfig, ...]:
    """The rotary tables these layers read, each once, in the order of first use."""
    ropes = [rope for layer in layers for part in layer.parts for rope in part.ropes]
    return tuple(dict.fromkeys(ropes))


def _experts(layer: LayerConfig) -> int:
    experts = getattr(layer.mlp, "experts", 0)
    assert isinstance(experts, int)
    return experts


def hashed_rows(layer: LayerConfig) -> int:
    """Rows of the table by which a layer chooses experts; 0 where its router does."""
    return layer.mlp.hash_rows if isinstance(layer.mlp, MoEConfig) else 0


def has_experts(config: DecoderConfig) -> bool:
    return any(isinstance(layer.mlp, MoEConfig) for layer in (*config.layers, *config.mtp))


def with_balance(
    config: DecoderConfig, *, aux_weight: float | None = None, bias_update: float | None = None
) -> DecoderConfig:
    """The config with these numbers in all MoE layers, see MoEConfig; None: unchanged."""
    for name, number in (("aux_weight", aux_weight), ("bias_update", bias_update)):
        if number and not has_experts(config):
            raise SettingError(
                "{" + name + "} is for experts, but this model has none; leave it out"
            )
    layers, mtp = (
        tuple(_balanced(layer, aux_weight, bias_update) for layer in group)
        for group in (config.layers, config.mtp)
    )
    return replace(config, layers=layers, mtp=mtp)


def _balanced(
    layer: LayerConfig, aux_weight: float | None, bias_update: float | None
) -> LayerConfig:
    moe = layer.mlp
    if not isinstance(moe, MoEConfig) or moe.hash_rows:
        return layer
    if bias_update and not moe.bias:
        raise SettingError(
            "{bias_update} needs a router with a bias, which this model does not have; balance its "
            "experts with {aux_weight}"
        )
    if aux_weight is not None:
        moe = replace(moe, aux_weight=aux_weight)
    if bias_update is not None:
        moe = replace(moe, bias_update=bias_update)
    return replace(layer, mlp=moe)
