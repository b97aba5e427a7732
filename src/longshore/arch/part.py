"""`Part`, which the config of every mixer and feed-forward part inherits. Pure Python.

In: numbers. Out: what a part costs and how ranks share it, asked of the part itself. A new kind of
mixer or feed-forward is a config, a module and its registration; docs/adding-a-mixer.md says how.
A config must have `parameters`, `flops` and `saved`. The rest has defaults, which are right for a
part that gathers nothing, is whole on every TP rank, runs without CUDA graphs, and whose time is
predicted by its FLOPs and bytes:

    FLOPs and time    flops, products, timed_as, sizes, timed, in_chunks, has_float32, needs_curve
    memory            parameters, saved, kernel_memory, factor_values
    shared packs      gathered, shared_heads, exchanged
    TP                tp_units, tp_cuts, norm_ranks
    CUDA graphs       graph_layer
    experts           routed_experts, expert_parameters, dispatched, dispatch_saved, id_rows,
                      balanced
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from longshore.arch.cuts import TensorCut, TPRank, TPUnits
from longshore.arch.rope import RopeConfig

REQUIRED = ("parameters", "flops", "saved")
"""What has no default."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMS norms of a decoder."""

    eps: float
    zero_centred: bool = False
    """The scale is 1 + weight, and weights are initialised to 0."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How lanes share a pack: parallel.attention and parallel.scan of a recipe, such as heads."""

    attention: str
    scan: str


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product of a part's forward: for each token a row of k numbers becomes one of n."""

    k: int
    n: int
    name: str = field(default="", compare=False)
    """Its linear layer's name below the part, for low-rank factors; "" where it can have none."""

    @property
    def flops(self) -> int:
        """FLOPs of one token."""
        return 2 * self.k * self.n


@dataclass(frozen=True, slots=True)
class Saved:
    """Numbers saved for backward per token."""

    values: int
    """In the model's dtype."""
    stats: int = 0
    """Always in float32 or more."""

    def __add__(self, other: "Saved") -> "Saved":
        return Saved(self.values + other.values, self.stats + other.stats)


@dataclass(frozen=True, slots=True)
class BackwardMoment:
    """One moment of a part's backward."""

    rows: Saved
    """What exists of each token, beside what the part has saved."""
    gradients: int
    """Parameters whose gradients exist by then."""


@dataclass(frozen=True, slots=True)
class PartMemory:
    """A part on a GPU with Longshore's kernels."""

    saved: Saved
    """What is kept of each token until backward, without the part's input and its norm's."""
    backward: tuple[BackwardMoment, ...]
    """The moments that may need most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPiece:
    """What of a part is measured and predicted as one."""

    kind: str
    """One of advisor/machine.py's KINDS."""
    head_dim: int = 1
    """By which measured times are looked up first."""
    channels: int
    """By which they are looked up next."""
    products: tuple[Product, ...]
    """Its plain products."""
    saved: Saved
    """What is saved of a token, with what the norm before it saves."""
    weights: int = 0
    """Weights that are read and whose gradients are written, beside those of plain products."""


class Part:
    """The config of a mixer or feed-forward part: what it costs at hidden width `width`."""

    __slots__ = ()

    graph_layer: ClassVar[str] = ""
    """What graph.layers calls it; "" for a part that CUDA graphs cannot replay.

    The module of a mixer that they replay is a ThreeStepMixer, whose core reads nothing on the host
    and has no loss of its own.
    """
    timed_as: ClassVar[str] = "other"
    """The kind of advisor/machine.py's KINDS whose measured times are its own, too."""
    in_chunks: ClassVar[bool] = False
    """Whether its core computes whole chunks of each sequence, as scans do."""
    has_float32: ClassVar[bool] = False
    """Whether some of its parameters are never cast, which FSDP wraps on their own."""
    needs_curve: ClassVar[bool] = False
    """Whether squared lengths say nothing about its cost."""

    def bare(self) -> Self:
        """Without what decides only how it is trained or computed, such as weights of losses."""
        return self

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary tables it reads, each with its `rotary_dim`."""
        return ()

    def parameters(self, width: int) -> int:
        raise NotImplementedError

    def flops(self, width: int, length: int) -> int:
        """FLOPs of the forward matrix products over one sequence of `length` tokens."""
        raise NotImplementedError

    def saved(self, width: int) -> Saved:
        """What is saved for backward per token, without the part's input: the most of any backend.

        Plain torch, too, which saves more than kernels do (`kernel_memory`).
        """
        raise NotImplementedError

    def products(self, width: int) -> tuple[Product, ...]:
        """Products of its linear layers, by which time is predicted and factors are counted."""
        return ()

    @property
    def sizes(self) -> tuple[int, int]:
        """The width of a head, and channels: by which measured times are looked up."""
        return 1, 1

    def timed(self, width: int) -> tuple[TimedPiece, ...]:
        """The first piece has the core: all FLOPs beyond the products of all pieces."""
        head_dim, channels = self.sizes
        piece = TimedPiece(
            kind=self.timed_as,
            head_dim=head_dim,
            channels=channels,
            products=self.products(width),
            saved=Saved(2 * width, 1) + self.saved(width),
            weights=self.expert_parameters(width),
        )
        return (piece,)

    def kernel_memory(self, width: int) -> PartMemory:
        """What kernels keep, and need in backward; by default as `saved` says, and once more."""
        saved, count = self.saved(width), self.parameters(width)
        return PartMemory(saved, (BackwardMoment(saved + Saved(2 * width), count),))

    def factor_values(self) -> int:
        """Values per token that its low-rank factors (LoRA) save, beside the row between two."""
        return 0

    def gathered(self) -> int:
        """Values a lane gathers for each token of a pack that several lanes share."""
        return 0

    def shared_heads(self, sharing: Sharing) -> tuple[int, ...]:
        """Numbers that a CP size must divide, where lanes share heads; () for no limit."""
        return ()

    def exchanged(self, cp_size: int, tokens: int, *, sharing: Sharing, item: int) -> int:
        """Bytes that its core gathers and expands, at the moment of its backward with the most.

        Of a lane that is full of its shard of a pack: the rows that it sees and their gradients,
        which are joined and then added up by lane. item: bytes of a number.
        """
        if cp_size == 1:
            return 0
        return self.gathered() * item * (3 * visible_rows(tokens, cp_size) + cp_size * tokens)

    def tp_units(self) -> tuple[TPUnits, ...]:
        """What TP ranks divide; () for a part that every rank has whole."""
        return ()

    def on_tp_rank(self, tp: int) -> Self:
        """The config of what each of `tp` ranks has, which can divide the units."""
        local = {units.field: units.local(tp) for units in self.tp_units()}
        return self if tp == 1 or not local else replace(self, **local)  # type: ignore[type-var]

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        """A rank's part of the parameters that ranks divide, by their names below the part."""
        return {}

    def norm_ranks(self, tp: int) -> int:
        """How many ranks hold one group of channels that its module's `norm` norms together."""
        return 1

    @property
    def routed_experts(self) -> int:
        """Experts that EP ranks divide; under TP such a part works on a rank's own rows."""
        return 0

    def expert_parameters(self, width: int) -> int:
        """Parameters of the routed experts."""
        return 0

    def dispatched(self, ep: int) -> int:
        """To how many of `ep` ranks a token's row travels, at most; 0 where experts are whole."""
        return 0

    def dispatch_saved(self, ep: int) -> Saved:
        """What is saved of a token for the way of its row to other ranks' experts."""
        return Saved(0)

    @property
    def id_rows(self) -> int:
        """Rows of the table by which token ids choose its experts; 0: there is none."""
        return 0

    def balanced(self, *, aux_weight: float | None, bias_update: float | None) -> Self:
        """The same with these numbers, which balance experts; None: unchanged."""
        return self


def check_part(part: object) -> None:
    """Raises ValueError for a config that is no Part or lacks a method, and names it."""
    name, more = type(part).__name__, "see longshore/arch/part.py"
    if not isinstance(part, Part):
        raise ValueError(f"{name} is no Part; a part of a layer inherits Part, {more}")
    lacking = [each for each in REQUIRED if getattr(type(part), each) is getattr(Part, each)]
    if lacking:
        required = ", ".join(REQUIRED)
        raise ValueError(
            f"{name} has no {lacking[0]}; a part of a layer must have {required}, {more}"
        )


def visible_rows(tokens: int, cp_size: int) -> int:
    """Rows that a lane full of its shard of a pack sees; alone it sees its own.

    Its two chunks of each sequence see c + 1/2 rows for each of its own at CP size c: chunk r sees
    (r + 1)/2c of the sequence, chunk 2c − 1 − r the other (2c − r)/2c.
    """
    return cp_size * tokens + ((tokens + 1) // 2 if cp_size > 1 else 0)
