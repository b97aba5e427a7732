"""Multi-head latent attention, as DeepSeek-V3 has it: its numbers and its cost. Pure Python.

In: numbers. Out: a frozen config, checked. A token keeps one latent for all heads, `kv_rank`
numbers, and one key of `rope_dim` numbers that turns with its position; every head makes its own
`nope_dim` key and `value_dim` value from the latent.

With 2 heads, kv_rank 8, nope_dim 4, rope_dim 2, value_dim 6 and a plain query projection at width
16 the parameters are q 16·2·6 = 192, down 16·10 = 160, norm 8, up 8·2·10 = 160, output 2·6·16 =
192: 712. Over lanes a token is 10 numbers; its keys and values would be 2·(6 + 6) = 24.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from longshore.model.checks import check_counts
from longshore.model.part import Saved, causal_pairs
from longshore.model.rope_config import RopeConfig, YarnScaling

Form = Literal["decompressed", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """q_rank: of the queries' own latent; None for one plain projection.

    A head's query and key are nope_dim numbers without position and then rope_dim with it. bias: of
    the projections down to the latents and of the last one.

    form: "decompressed" makes keys and values of all heads from the latents, "absorbed" takes
    queries to the latents and attends there, with one key head of kv_rank + rope_dim. They give the
    same numbers; the first is the cheaper one to train.
    """

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    bias: bool = False
    form: Form = "decompressed"

    def __post_init__(self) -> None:
        check_counts(self, "heads", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        check_counts(self, "q_rank", optional=True)
        if self.form not in get_args(Form):
            raise ValueError(
                f"MLAConfig.form is {self.form!r}; known are {', '.join(get_args(Form))}"
            )
        _ = self.ropes

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope.within(self.rope_dim),)

    @property
    def head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Numbers a token keeps for all heads."""
        return self.kv_rank + self.rope_dim

    @property
    def scale(self) -> float:
        """Of the scores: 1/√head_dim, with YaRN's mscale_all_dim times its own growth squared."""
        plain, scaling = 1 / math.sqrt(self.head_dim), self.rope.scaling
        if not isinstance(scaling, YarnScaling) or not scaling.mscale_all_dim:
            return plain
        grown = 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0)) + 1
        return plain * grown * grown

    def parameters(self, width: int) -> int:
        norms = self.kv_rank + (self.q_rank or 0)
        downs = self.latent_dim + (self.q_rank or 0)
        return self._weights(width) + norms + (downs + width) * self.bias

    def flops(self, width: int, length: int) -> int:
        """Of the decompressed form, whichever is run."""
        pairs = causal_pairs(length)
        core = 2 * pairs * self.heads * (self.head_dim + self.value_dim)
        return 2 * length * self._weights(width) + core

    def saved(self, width: int) -> Saved:
        """Queries, latents and the output; what the norms normed; absorbed, also what it made."""
        kept = Saved(self.heads * (self.head_dim + self.value_dim), self.heads)
        kept += Saved(2 * self.latent_dim, 1)
        if self.q_rank is not None:
            kept += Saved(2 * self.q_rank, 1)
        if self.form == "absorbed":
            kept += Saved(self.heads * (self.latent_dim + self.kv_rank))
        return kept

    def gathered(self) -> int:
        """Its latent and its turned key."""
        return self.latent_dim

    def _weights(self, width: int) -> int:
        """Of all matrices."""
        queries = self.heads * self.head_dim
        q = width * queries if self.q_rank is None else self.q_rank * (width + queries)
        kv = width * self.latent_dim + self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        return q + kv + self.heads * self.value_dim * width
