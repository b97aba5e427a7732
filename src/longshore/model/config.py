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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from longshore.model.checks import check_counts, check_more_than
from longshore.model.part import Norm, Part, Saved, causal_pairs
from longshore.model.rope_config import RopeConfig

ACTIVATIONS = ("swiglu", "relu2")

MOST_LAYERS = 4096
MOST_DEPTHS = 64
MOST_EXPERTS = 1 << 18
MOST_PARAMETERS = 10**15
"""Limits far beyond any model, so that a mistyped number is answered before memory runs out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention. window: a token sees itself and the window − 1 before it.

    bias: of the query, key and value projections. output_bias: of the last projection. gate: a
    head's output is multiplied by the sigmoid of numbers that the query projection makes as well.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    window: int | None = None
    gate: bool = False

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

    def saved(self, width: int) -> Saved:
        """Turned queries and keys, values and the output; with qk_norm also what it normed.

        With a gate, its sigmoid and the gated output; and where queries are kept as they were
        projected, the gates that lie between them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """`width` channels inside, by their activation.

    swiglu: down(silu(gate(x)) · up(x)). relu2: down(relu(up(x))²), without a gate.
    """

    width: int
    activation: Literal["swiglu", "relu2"] = "swiglu"

    def __post_init__(self) -> None:
        check_counts(self, "width")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"MLPConfig.activation is {self.activation!r}; known are {', '.join(ACTIVATIONS)}"
            )

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return ()

    def parameters(self, width: int) -> int:
        return (3 if self.gated else 2) * width * self.width

    def flops(self, width: int, length: int) -> int:
        return 2 * length * self.parameters(width)

    def saved(self, width: int) -> Saved:
        """Gate, silu(gate), up, and their product; or relu(up) and its square."""
        return Saved((4 if self.gated else 2) * self.width)

    def gathered(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One block: a mixer, then a feed-forward part; None leaves it and its norm out."""

    mixer: Part | None
    mlp: Part | None

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
    """A decoder: embedding, layers, norm, head.

    zero_centred: of its norms, see Norm. tied: the head uses the embedding's weight. mtp: a layer
    for each depth of multi-token prediction. pad_token_id: a token whose row of the embedding gets
    no gradient where it is an input, as in transformers; None for none. float32_residual: what
    goes from layer to layer is float32 at least, whatever the layers compute in.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float = 1e-6
    zero_centred: bool = False
    tied: bool = False
    init_std: float = 0.02
    mtp: tuple[LayerConfig, ...] = ()
    pad_token_id: int | None = None
    float32_residual: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "width")
        check_more_than(0, self, "norm_eps", "init_std")
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "mtp", tuple(self.mtp))
        if not self.layers:
            raise ValueError("DecoderConfig.layers is empty; a decoder has at least one layer")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"DecoderConfig.pad_token_id is {self.pad_token_id}; it must be a token, from 0 "
                f"to {self.vocab_size - 1}"
            )
        self._check_size()

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

    @property
    def norm(self) -> Norm:
        return Norm(self.norm_eps, self.zero_centred)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary tables of all layers, each once, in the order of first use."""
        return ropes_of((*self.layers, *self.mtp))


def ropes_of(layers: Sequence[LayerConfig]) -> tuple[RopeConfig, ...]:
    """The rotary tables these layers read, each once, in the order of first use."""
    found = [rope for layer in layers for part in layer.parts for rope in part.ropes]
    return tuple(dict.fromkeys(found))


def _experts(layer: LayerConfig) -> int:
    experts = getattr(layer.mlp, "experts", 0)
    assert isinstance(experts, int)
    return experts
