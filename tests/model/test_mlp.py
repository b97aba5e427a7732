import math

import torch
from tests.model.exact import assert_close

from longshore.batch import whole_context
from longshore.model.config import MLPConfig
from longshore.model.mlp import MLP
from longshore.model.part import Norm


def test_example():
    mlp = MLP(MLPConfig(width=2), 1, norm=Norm(1e-6))
    for parameter in mlp.parameters():
        torch.nn.init.ones_(parameter)
    got = mlp(torch.ones(1, 1), whole_context((1,)))[0].item()
    assert math.isclose(got, 2 / (1 + math.exp(-1)), rel_tol=1e-6)


def test_as_written_out():
    torch.manual_seed(0)
    mlp = MLP(MLPConfig(width=9), 5, norm=Norm(1e-6)).double()
    x_TC = torch.randn(7, 5, dtype=torch.float64)
    gate, up = x_TC @ mlp.gate_proj.weight.T, x_TC @ mlp.up_proj.weight.T
    want = (gate / (1 + torch.exp(-gate)) * up) @ mlp.down_proj.weight.T
    assert_close(mlp(x_TC, whole_context((3, 4)))[0], want)
