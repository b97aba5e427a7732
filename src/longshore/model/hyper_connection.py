"""Hyper-connections: several residual rows a token, collapsed, mixed and expanded around a part.

In: rows (T, N·C), N residuals of C channels after each other. Out: one row (T, C) for the part, and
how its output returns to all of them. The weights follow from the token's own rows x, normed over
all N·C channels without a scale, by one projection w:

    pre_n     sigmoid(w·s₀ + b) + eps        collapsed = Σ_n pre_n · x_n
    post_k    2·sigmoid(w·s₁ + b)            new x_k = post_k · part(collapsed) + Σ_n mix_nk · x_n
    mix_nk    softmax(w·s₂ + b) over k, plus eps; then its columns and rows are divided by their
              sums in turn (Sinkhorn), so that both sum to 1 in the end

With weights of zeros, N = 2 and rows 1 and 3 of one channel: pre is ½ each, so 2 is collapsed; post
is 1, mix ½ everywhere: a part that returns 5 leaves 5 + 2 = 7 in both rows.

Weights are float32 at least, and so is what is computed from them. What reads whole rows is in
ops/pointwise.py, `expand` too. T tokens, N residuals, C channels, S = N·C.
"""

import torch
from torch import Tensor, nn

from longshore.arch.decoder import HyperConfig
from longshore.model.fill import NORMAL, ONES, ZEROS, Fill
from longshore.model.norm_rope import Float32Parameters
from longshore.ops.pointwise import collapse, project

FILLS: dict[str, Fill] = {"weight": NORMAL, "base": ZEROS, "scale": ONES}
"""First values of both modules' parameters."""


class _ProjectedRows(Float32Parameters):
    """weight: (weights, S). base: (weights). scale: (scales)."""

    def __init__(
        self, config: HyperConfig, width: int, *, weights: int, scales: int, norm_eps: float
    ) -> None:
        super().__init__()
        self.config, self.norm_eps = config, norm_eps
        self.weight = nn.Parameter(torch.empty(weights, config.count * width))
        self.base = nn.Parameter(torch.zeros(weights))
        self.scale = nn.Parameter(torch.ones(scales))
        nn.init.normal_(self.weight, std=0.02)


class HyperConnection(_ProjectedRows):
    """Around one part: weight ((2 + N)·N, S), base ((2 + N)·N), scale (3)."""

    def __init__(self, config: HyperConfig, width: int, *, norm_eps: float) -> None:
        super().__init__(config, width, weights=config.weights, scales=3, norm_eps=norm_eps)

    def forward(self, rows_TS: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The part's row (T, C), and the weights of `expand`: post (T, N) and mix (T, N, N)."""
        count, eps = self.config.count, self.config.eps
        projected = project(rows_TS, self.weight, eps=self.norm_eps)
        sizes = [count, count, count * count]
        parts = projected.split(sizes, dim=1), self.base.split(sizes), self.scale.unbind()
        pre_TN, post_TN, mix_TM = (
            part * scale + base for part, base, scale in zip(*parts, strict=True)
        )
        mix_TNN = _doubly_stochastic(mix_TM.unflatten(1, (count, count)), self.config)
        collapsed_TC = collapse(rows_TS, pre_TN.sigmoid() + eps)
        return collapsed_TC, (2 * post_TN.sigmoid(), mix_TNN)


class Collapse(_ProjectedRows):
    """The residual rows become one, before the last norm: weight (N, S), base (N), scale (1)."""

    def __init__(self, config: HyperConfig, width: int, *, norm_eps: float) -> None:
        super().__init__(config, width, weights=config.count, scales=1, norm_eps=norm_eps)

    def forward(self, rows_TS: Tensor) -> Tensor:
        """(T, C)."""
        projected_TN = project(rows_TS, self.weight, eps=self.norm_eps)
        pre_TN = (projected_TN * self.scale + self.base).sigmoid() + self.config.eps
        return collapse(rows_TS, pre_TN)


def _doubly_stochastic(logits_TNN: Tensor, config: HyperConfig) -> Tensor:
    """Columns are divided first and last; rows then sum to 1 as nearly as iterations allow."""
    mix_TNN = logits_TNN.softmax(2) + config.eps
    mix_TNN = mix_TNN / (mix_TNN.sum(1, keepdim=True) + config.eps)
    for _ in range(config.iterations - 1):
        mix_TNN = mix_TNN / (mix_TNN.sum(2, keepdim=True) + config.eps)
        mix_TNN = mix_TNN / (mix_TNN.sum(1, keepdim=True) + config.eps)
    return mix_TNN
