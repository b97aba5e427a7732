"""The feed-forward part of a dense layer: SwiGLU, or a squared ReLU without a gate.

In: hidden states (T, C), each token by itself. Out: (T, C). SwiGLU is down(silu(gate(x)) · up(x)),
relu2 is down(relu(up(x))²). With all weights 1, C = 1 and width 2, the token 1 becomes
2·silu(1) = 1.462, and by relu2 the token 3 becomes 2·3² = 18.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Norm
from longshore.model.fill import RESIDUAL, Fill
from longshore.model.interface import Context


class MLP(nn.Module):
    """gate_proj: None where the activation has no gate."""

    FILLS: ClassVar[Mapping[str, Fill]] = {"down_proj.weight": RESIDUAL}

    def __init__(self, config: MLPConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, config.width, bias=False) if config.gated else None
        self.up_proj = nn.Linear(width, config.width, bias=False)
        self.down_proj = nn.Linear(config.width, width, bias=False)

    def forward(self, x_TC: Tensor, ctx: Context) -> tuple[Tensor, None]:
        up_TF = self.up_proj(x_TC)
        if self.gate_proj is None:
            inner_TF = functional.relu(up_TF).square()
        else:
            inner_TF = functional.silu(self.gate_proj(x_TC)) * up_TF
        output_TC: Tensor = self.down_proj(inner_TF)
        return output_TC, None
