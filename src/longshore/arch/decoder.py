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

HyperConfig: with hyper-connections a token has several residual rows of the decoder's width. Before
a part they are collapsed into one row, and its output is added to all of them, while they are mixed
by a doubly stochastic matrix; all weights of this are made from the rows of the token
(model/hyper_connection.py). With 4 rows at width 4096 each part has (2·4 + 4²)·(4·4096 + 1) + 3 =
393,243 parameters of that, and a token takes 2·24·4·4096 FLOPs for the weights and
2·(4² + 2·4)·4096 for the mixing: 983,040 forward.

LoRAConfig: low-rank factors, which alone are trained. A layer whose weight is W (F, C) computes
x·Wᵀ + alpha / rank · (x·Aᵀ)·Bᵀ with A (rank, C) and B (F, rank). A target is the end of a module's
name, at a dot:

    config = LoRAConfig(rank=8, alpha=16, targets=("q_proj", "layers.0.mlp.up_proj"))
    config.matches("layers.3.mixer.q_proj")                   True
    config.matches("layers.3.mlp.up_proj")                    False
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd

from longshore.arch.part import Norm, Part, Product, Saved, check_part
from longshore.arch.rope import RopeConfig
from longshore.settings import check_counts, check_more_than


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Manifold-constrained hyper-connections, as in DeepSeek-V4."""

    count: int
    """Residual rows of each token."""
    iterations: int = 20
    """Iterations of Sinkhorn's algorithm, which makes the mixing matrix doubly stochastic."""
    eps: float = 1e-6
    """Added to weights and divisors."""

    def __post_init__(self) -> None:
        check_counts(self, "count", "iterations")
        check_more_than(0, self, "eps")

    @property
    def weights(self) -> int:
        """Weights of a token at one part: to collapse, to expand, and the mixing matrix."""
        return (2 + self.count) * self.count

    def parameters(self, width: int) -> int:
        """Parameters at one part: a projection, its bias, and a scale for each kind of weights."""
        return self.weights * (self.count * width + 1) + 3

    def collapse_parameters(self, width: int) -> int:
        """Parameters of a collapse alone, before the last norm."""
        return self.count * (self.count * width + 1) + 1

    def products(self, width: int) -> tuple[Product, ...]:
        """Products at one part."""
        return (Product(self.count * width, self.weights),)

    def flops(self, width: int) -> int:
        """Forward, of one token at one part."""
        (projected,) = self.products(width)
        return projected.flops + 2 * self.weights * width

    def collapse_flops(self, width: int) -> int:
        """Forward, of one token before the last norm."""
        return 2 * self.count * self.count * width + 2 * self.count * width

    def saved(self, width: int) -> Saved:
        """At one part, besides the rows that come: its output, and the weights in float32.

        Each half iteration of Sinkhorn's algorithm saves the matrix and its sums. As kernels do it:
        plain torch keeps the rows in float32 as well, where they are bfloat16.
        """
        sinkhorn = 2 * self.iterations * (self.count + 1) * self.count
        return Saved(width, 4 * self.weights + sinkhorn + 2)

    def collapse_saved(self, width: int) -> Saved:
        """Before the last norm, with the rows that come."""
        return Saved(self.count * width, 4 * self.count + 2)


ALL_LINEAR = "all-linear"
"""As a target: all linear layers of mixers and feed-forward parts."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Low-rank factors beside the weights of linear layers."""

    rank: int
    """Rows of A, columns of B."""
    alpha: float
    """Factors' products are multiplied by alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Ends of modules' names."""

    def __post_init__(self) -> None:
        check_counts(self, "rank")
        check_more_than(0, self, "alpha")
        if not self.targets:
            raise ValueError("LoRAConfig.targets is empty; name modules, such as q_proj")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def matches(self, module: str) -> bool:
        """Whether a linear layer of this name, in a mixer or feed-forward part, is a target."""
        return any(
            target == ALL_LINEAR or f".{module}".endswith(f".{target}") for target in self.targets
        )

    def factors(self, products: Iterable[Product]) -> tuple[Product, ...]:
        """The products of factors beside these products, two for each that has some."""
        targets = (each for each in products if self.adapts(each.name))
        pairs = ((Product(each.k, self.rank), Product(self.rank, each.n)) for each in targets)
        return tuple(chain.from_iterable(pairs))

    def adapts(self, name: str) -> bool:
        """Whether a linear layer of this name below its part is a target in any layer.

        name: such as q_proj; "" for what can have no factors.
        """
        ends = (re.sub(r"^(.*\.)?(mixer|mlp)\.", "", target) for target in self.targets)
        return bool(name) and replace(self, targets=tuple(ends)).matches(name)


MOST_LAYERS = 4096
MOST_DEPTHS = 64
MOST_EXPERTS = 1 << 18
MOST_PARAMETERS = 10**15
"""Limits far beyond any model, so that a typo is reported before memory runs out."""
MOST_TP = 64
"""The largest number of ranks that an error suggests."""


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

    def map_parts(self, change: Callable[[Part], Part]) -> "LayerConfig":
        mixer, mlp = (part and change(part) for part in (self.mixer, self.mlp))
        return replace(self, mixer=mixer, mlp=mlp)

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

    @property
    def id_rows(self) -> int:
        """Rows of the table by which token ids choose experts; 0 where a router does."""
        return self.mlp.id_rows if self.mlp is not None else 0

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
    """eps of all RMS norms."""
    zero_centred: bool = False
    """Whether all RMS norms are zero-centred, see Norm."""
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
                layers = tuple(layer.map_parts(_with_still_bias) for layer in layers)
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
        if any(layer.id_rows for layer in self.mtp):
            raise ValueError(
                "DecoderConfig.mtp has a layer whose experts are chosen by token ids; a depth of "
                "multi-token prediction must have a router that chooses, so leave out hash_rows"
            )
        for number, layer in enumerate(self.layers):
            if (rows := layer.id_rows) not in (0, self.vocab_size):
                raise ValueError(
                    f"MoEConfig.hash_rows of layer {number} is {rows}; the table has a row for "
                    f"each token, so it must be vocab_size, {self.vocab_size}"
                )

    def _check_size(self) -> None:
        kinds = Counter((*self.layers, *self.mtp))
        experts = sum(part.routed_experts for part in self.parts)
        sizes = {
            "layers": (len(self.layers), MOST_LAYERS),
            "depths of multi-token prediction": (len(self.mtp), MOST_DEPTHS),
            "experts in all layers": (experts, MOST_EXPERTS),
            "parameters": (
                2 * self.vocab_size * self.width
                + sum(layer.parameters(self.width) * times for layer, times in kinds.items()),
                MOST_PARAMETERS,
            ),
        }
        for what, (size, most) in sizes.items():
            if size > most:
                raise ValueError(f"a decoder has at most {most:,} {what}; this one has {size:,}")

    def map_parts(self, change: Callable[[Part], Part]) -> "DecoderConfig":
        """The same decoder with other parts in its layers and depths."""
        layers, mtp = (
            tuple(layer.map_parts(change) for layer in group) for group in (self.layers, self.mtp)
        )
        return replace(self, layers=layers, mtp=mtp)

    def merged(self) -> "DecoderConfig":
        """Without low-rank factors: of the base, or of weights that have them inside."""
        return self if self.lora is None else replace(self, lora=None)

    @property
    def parts(self) -> list[Part]:
        """Those of all layers and depths, in order."""
        return parts_of((*self.layers, *self.mtp))

    @property
    def row_width(self) -> int:
        """Values of a token between blocks."""
        return self.width * (self.residuals.count if self.residuals else 1)

    @property
    def join_parameters(self) -> int:
        """Parameters of a depth of multi-token prediction, besides those of its layer."""
        collapse = self.residuals.collapse_parameters(self.width) if self.residuals else 0
        return (2 * self.width + 3) * self.width + collapse

    @property
    def norm_parameters(self) -> int:
        """Parameters of the last norm, and of the collapse before it."""
        collapse = self.residuals.collapse_parameters(self.width) if self.residuals else 0
        return self.width + collapse

    @property
    def hashed_layers(self) -> tuple[int, ...]:
        """The numbers of layers that read token ids, to choose experts by them."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.id_rows)

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, self.zero_centred)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary tables of all layers, each once, in the order of first use."""
        return ropes_of((*self.layers, *self.mtp))


def parts_of(layers: Iterable[LayerConfig]) -> list[Part]:
    """The mixers and feed-forward parts of these layers, in order."""
    return [part for layer in layers for part in layer.parts]


def ropes_of(layers: Sequence[LayerConfig]) -> tuple[RopeConfig, ...]:
    """The rotary tables these layers read, each once, in the order of first use."""
    return tuple(dict.fromkeys(rope for part in parts_of(layers) for rope in part.ropes))


def has_experts(config: DecoderConfig) -> bool:
    return any(part.routed_experts for part in config.parts)


def with_balance(
    config: DecoderConfig, *, aux_weight: float | None = None, bias_update: float | None = None
) -> DecoderConfig:
    """The config with these numbers in all MoE layers, see MoEConfig; None: unchanged."""
    given = {"aux_weight": aux_weight, "bias_update": bias_update}
    for name, number in given.items():
        if number and not has_experts(config):
            raise ValueError(f"model.{name} is for experts, but this model has none; leave it out")
    return config.map_parts(lambda part: part.balanced(**given))


def _with_still_bias(part: Part) -> Part:
    return part.balanced(aux_weight=None, bias_update=0.0)


def decoder_on_tp_rank(config: DecoderConfig, tp: int) -> DecoderConfig:
    """All layers as one of `tp` ranks has them; embedding and head stay as they are."""
    if tp == 1:
        return config
    check_tp(config, tp)
    return config.map_parts(lambda part: part.on_tp_rank(tp))


def tp_refusals(config: DecoderConfig, tp: int) -> Iterator[str]:
    """What is wrong with the first part that `tp` ranks cannot divide, and what works."""
    units = [each for part in dict.fromkeys(config.parts) for each in part.tp_units()]
    wrong = next((each for each in units if not each.divides(tp)), None)
    if wrong is not None:
        works = [n for n in range(1, MOST_TP + 1) if all(each.divides(n) for each in units)]
        yield (
            f"parallel.tp is {tp}, which does not divide the {wrong.count} {wrong.name}; use one "
            f"of {', '.join(map(str, works))}"
        )


def check_tp(config: DecoderConfig, tp: int) -> None:
    """Raises if `tp` ranks cannot divide one of the parts."""
    if why := next(tp_refusals(config, tp), ""):
        raise ValueError(why)


def ep_refusals(config: DecoderConfig, ep: int) -> Iterator[str]:
    """Why this decoder's experts cannot be divided evenly over `ep` ranks, and what works."""
    if ep == 1:
        return
    sizes = [part.routed_experts for part in config.parts if part.routed_experts]
    if not sizes:
        yield f"parallel.ep is {ep}, but the model has no experts; use parallel.ep=1"
    for odd in (size for size in sizes if size % ep):
        most = gcd(*sizes)
        works = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        yield (
            f"parallel.ep is {ep}, which does not divide the {odd} experts of a layer; use one of "
            f"{works}"
        )


def check_ep(config: DecoderConfig, ep: int) -> None:
    """Raises if this decoder's experts cannot be divided evenly over `ep` ranks."""
    if why := next(ep_refusals(config, ep), ""):
        raise ValueError(why)
