"""SwiGLU, the feed-forward part of a dense layer: down(silu(gate(x)) · up(x)).

In: hidden states (T, C), each token by itself. Out: (T, C). With all weights 1, C = 1 and width 2,
the token 1 becomes 2·silu(1) = 1.462.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from longshore.model.config import MLPConfig
from longshore.model.fill import RESIDUAL, Fill
from longshore.model.opaque import Context
from longshore.model.part import Norm


class MLP(nn.Module):
    FILLS: ClassVar[Mapping[str, Fill]] = {"down_proj.weight": RESIDUAL}

    def __init__(self, config: MLPConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, config.width, bias=False)
        self.up_proj = nn.Linear(width, config.width, bias=False)
        self.down_proj = nn.Linear(config.width, width, bias=False)

    def forward(self, x_TC: Tensor, ctx: Context) -> tuple[Tensor, None]:
        made: Tensor = self.down_proj(functional.silu(self.gate_proj(x_TC)) * self.up_proj(x_TC))
        return made, None
