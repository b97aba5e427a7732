"""The feed-forward part of a layer: MLPConfig and, with experts, MoEConfig. Pure Python.

In: numbers. Out: frozen configs, checked, which are Parts. A layer of experts like those of
Qwen3-30B-A3B, and one that chooses as DeepSeek-V3 does:

    MoEConfig(experts=128, top_k=8, width=768)
    MoEConfig(experts=256, top_k=8, width=2048, score="sigmoid", groups=8, top_groups=4, scale=2.5,
              shared_width=2048, bias_update=1e-3, aux_weight=1e-4)

At hidden width 2048 the first has 128·2048 + 128·3·2048·768 = 604,241,920 parameters, and a
token takes 2·(128·2048 + 8·3·2048·768) = 76,021,760 FLOPs forward.

With hash_rows a frozen table of (hash_rows, top_k) says which experts serve a token of each id, and
the router only weighs them, as in the first layers of DeepSeek-V4. It is no parameter.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from longshore.arch.cuts import TensorCut, TPRank, TPUnits
from longshore.arch.part import BackwardMoment, Part, PartMemory, Product, Saved, TimedPiece
from longshore.settings import check_counts, check_more_than, names_of

Score = Literal["softmax", "sigmoid", "sqrt-softplus"]


Activation = Literal["swiglu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig(Part):
    """An MLP with `width` intermediate channels."""

    graph_layer: ClassVar[str] = "mlp"
    timed_as: ClassVar[str] = "mlp"

    width: int
    activation: Activation = "swiglu"
    """swiglu: down(silu(gate(x)) · up(x)). relu2: down(relu(up(x))²), without a gate."""
    limit: float = 0.0
    """Where swiglu's gate is clipped from above, and up on both sides; 0: nowhere."""

    def __post_init__(self) -> None:
        check_counts(self, "width")
        if self.limit != 0:
            check_more_than(0, self, "limit")
            if not self.gated:
                raise ValueError("MLPConfig.limit clips swiglu's gate; relu2 has none, so leave it")
        if self.activation not in names_of(Activation):
            raise ValueError(
                f"MLPConfig.activation is {self.activation!r}; known are "
                f"{', '.join(names_of(Activation))}"
            )

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    def parameters(self, width: int) -> int:
        return (3 if self.gated else 2) * width * self.width

    def flops(self, width: int, length: int) -> int:
        return 2 * length * self.parameters(width)

    def products(self, width: int) -> tuple[Product, ...]:
        inner = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        first = [Product(width, self.width, name) for name in inner]
        return *first, Product(self.width, width, "down_proj")

    def saved(self, width: int) -> Saved:
        """Gate, silu(gate), up, and their product; or relu(up) and its square.

        Clipped, gate and up are saved as they were, too.
        """
        return Saved(((6 if self.limit else 4) if self.gated else 2) * self.width)

    @property
    def sizes(self) -> tuple[int, int]:
        return 1, self.width

    def kernel_memory(self, width: int) -> PartMemory:
        """Clipped by plain torch, which keeps gate and up as they were, too."""
        kept = (2 if self.gated else 1) * self.width
        inner = BackwardMoment(Saved(kept + self.width + width), 0)
        weights = BackwardMoment(Saved(kept + 2 * width), self.parameters(width))
        return PartMemory(Saved((2 if self.limit else 1) * kept), (inner, weights))

    def factor_values(self) -> int:
        """Its inner row once more, of gate and up."""
        return 2 * self.width

    def tp_units(self) -> tuple[TPUnits, ...]:
        return (TPUnits("width", "channels of a feed-forward part", self.width),)

    def tp_cuts(self, width: int, at: TPRank) -> dict[str, TensorCut]:
        inner = ("gate_proj.weight", "up_proj.weight") if self.gated else ("up_proj.weight",)
        named = {name: at.of(self.width) for name in inner}
        return named | {"down_proj.weight": at.of(self.width, dim=1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig(Part):
    """A mixture of SwiGLU experts."""

    timed_as: ClassVar[str] = "experts"
    has_float32: ClassVar[bool] = True

    experts: int
    """Number of routed experts."""
    top_k: int
    """Experts that each token is routed to."""
    width: int
    """Intermediate channels of each expert."""
    score: Score = "softmax"
    """How a logit becomes an expert's score."""
    normalise: bool = True
    """A token's weights are normalised to sum to 1, before `scale`."""
    groups: int = 1
    """Groups that the experts are divided into."""
    top_groups: int = 1
    """A token is routed within the groups whose two best scores have the largest sums."""
    scale: float = 1.0
    """Multiplies the weights."""
    shared_width: int = 0
    """Intermediate channels of the shared expert, which every token uses; 0 for none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid of a projection of the token."""
    bias: bool = False
    """Each expert's score has a bias, used to choose experts but not to weigh them."""
    bias_update: float = 0.0
    """How far the bias moves after each step, towards even counts; above 0 it implies `bias`."""
    aux_weight: float = 0.0
    """Weight of the balance loss; 0 for none."""
    limit: float = 0.0
    """Limit of all its experts, see MLPConfig."""
    hash_rows: int = 0
    """The vocabulary's size, where a frozen table of token ids chooses experts; 0: the router."""

    def __post_init__(self) -> None:
        check_counts(self, "experts", "top_k", "width", "groups", "top_groups")
        check_more_than(0, self, "scale")
        for name in ("shared_width", "hash_rows"):
            if getattr(self, name) != 0:
                check_counts(self, name)
        for name in ("bias_update", "aux_weight", "limit"):
            if getattr(self, name) != 0:
                check_more_than(0, self, name)
        if self.score not in names_of(Score):
            raise ValueError(
                f"MoEConfig.score is {self.score!r}; known are {', '.join(names_of(Score))}"
            )
        if self.shared_gate and not self.shared_width:
            raise ValueError("MoEConfig.shared_gate needs a shared expert; give a shared_width")
        object.__setattr__(self, "bias", bool(self.bias or self.bias_update))
        self._check_groups()
        if self.hash_rows and (self.bias or self.aux_weight or self.groups > 1):
            raise ValueError(
                "MoEConfig.hash_rows fixes which experts serve a token; it goes with no bias, no "
                "bias_update, no aux_weight and no groups"
            )

    @property
    def shared(self) -> MLPConfig:
        """The shared expert, where there is one."""
        return MLPConfig(width=self.shared_width, limit=self.limit)

    def _check_groups(self) -> None:
        if self.experts % self.groups or (self.groups > 1 and self.experts < 2 * self.groups):
            raise ValueError(
                f"MoEConfig.groups is {self.groups}; it must divide the {self.experts} experts "
                "into groups of 2 or more"
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"MoEConfig.top_groups is {self.top_groups}; it can be at most groups, "
                f"{self.groups}"
            )
        within = self.experts // self.groups * self.top_groups
        if self.top_k > within:
            raise ValueError(
                f"MoEConfig.top_k is {self.top_k}; a token can choose among only {within} experts"
            )

    def parameters(self, width: int) -> int:
        return self.expert_parameters(width) + self._common(width)

    def flops(self, width: int, length: int) -> int:
        return 2 * length * (self.top_k * 3 * width * self.width + self._common(width))

    def _common(self, width: int) -> int:
        """Parameters that every token uses: router, shared expert and its gate."""
        return width * (self.experts + 3 * self.shared_width + self.shared_gate)

    def products(self, width: int) -> tuple[Product, ...]:
        """Products of router and shared expert; those of routed experts, grouped, are the core."""
        router = (Product(width, self.experts),)
        gate = (Product(width, 1, "shared_gate"),) * self.shared_gate
        if not self.shared_width:
            return router
        shared = [replace(each, name=f"shared.{each.name}") for each in self.shared.products(width)]
        return *router, *shared, *gate

    def saved(self, width: int) -> Saved:
        """For each of top_k rows its input, gate, silu(gate), up, product and output.

        The router saves its input in float32, the scores, and what the balance loss computes from
        them; for each row a weight, an id and indices.
        """
        inner = 6 if self.limit else 4
        routed = Saved(self.top_k * (2 * width + inner * self.width))
        scores = 3 if self.aux_weight else 1
        router = Saved(0, width + scores * self.experts + 8 * self.top_k)
        shared = Saved(inner * self.shared_width + (width + 1) * self.shared_gate)
        return routed + router + shared

    @property
    def sizes(self) -> tuple[int, int]:
        return self.width, self.experts

    def timed(self, width: int) -> tuple[TimedPiece, ...]:
        """The routed experts, and a shared one as an MLP beside them."""
        if not self.shared_width:
            return Part.timed(self, width)
        gate = (Product(width, 1),) * self.shared_gate
        shared = TimedPiece(
            kind="mlp",
            channels=self.shared_width,
            products=(*self.shared.products(width), *gate),
            saved=self.shared.saved(width) + Saved((width + 1) * self.shared_gate),
        )
        return *self.without_shared().timed(width), shared

    def without_shared(self) -> "MoEConfig":
        """Without the shared expert, which is measured and predicted as an MLP."""
        return replace(self, shared_width=0, shared_gate=False)

    def kernel_memory(self, width: int) -> PartMemory:
        """Experts keep gate and up of each row; the router its float32 input and the scores."""
        if self.limit:  # which the kernels do not know
            return Part.kernel_memory(self, width)
        inner, top_k = self.width, self.top_k
        scores = (3 if self.aux_weight else 1) * self.experts
        saved = Saved(2 * top_k * inner, width + scores + 8 * top_k)
        saved += Saved(2 * self.shared_width + (width + 1) * self.shared_gate)
        one = self.experts * width * inner
        rows = width + 4 * inner, width + 3 * inner, width + 2 * inner
        moments = (
            BackwardMoment(Saved(top_k * row + 2 * width), count)
            for row, count in zip(rows, (0, one, 3 * one), strict=True)
        )
        return PartMemory(saved, tuple(moments))

    @property
    def routed_experts(self) -> int:
        return self.experts

    def expert_parameters(self, width: int) -> int:
        return self.experts * 3 * width * self.width

    def dispatched(self, ep: int) -> int:
        return min(self.top_k, ep) if ep > 1 else 0

    def dispatch_saved(self, ep: int) -> Saved:
        """Weights and ids of the rows that came, and where their copies are."""
        ranks = self.dispatched(ep)
        return Saved(0, (4 * ranks + 8) * self.top_k if ranks else 0)

    def bare(self) -> Self:
        return replace(self, aux_weight=0.0, bias_update=0.0)

    @property
    def id_rows(self) -> int:
        return self.hash_rows

    def balanced(self, *, aux_weight: float | None, bias_update: float | None) -> Self:
        if self.hash_rows:
            return self
        if bias_update and not self.bias:
            raise ValueError(
                "model.bias_update needs a router with a bias, which this model does not have; "
                "balance its experts with model.aux_weight"
            )
        return replace(
            self,
            aux_weight=self.aux_weight if aux_weight is None else aux_weight,
            bias_update=self.bias_update if bias_update is None else bias_update,
        )
