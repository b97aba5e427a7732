import math

import pytest
import torch
from tests.model.exact import assert_close

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import MLP
from longshore.model.init import init_decoder


@pytest.mark.parametrize(
    ("activation", "token", "want"),
    [("swiglu", 1.0, 2 / (1 + math.exp(-1))), ("relu2", 3.0, 18.0), ("relu2", -3.0, 0.0)],
)
def test_example(activation, token, want):
    mlp = MLP(MLPConfig(width=2, activation=activation), 1, norm=Norm(1e-6))
    for parameter in mlp.parameters():
        torch.nn.init.ones_(parameter)
    got = mlp(torch.tensor([[token]]), whole_context((1,)))[0].item()
    assert math.isclose(got, want, rel_tol=1e-6)


def test_swiglu_as_written_out():
    torch.manual_seed(0)
    mlp = MLP(MLPConfig(width=9), 5, norm=Norm(1e-6)).double()
    x_TC = torch.randn(7, 5, dtype=torch.float64)
    gate, up = x_TC @ mlp.gate_proj.weight.T, x_TC @ mlp.up_proj.weight.T
    want = (gate / (1 + torch.exp(-gate)) * up) @ mlp.down_proj.weight.T
    assert_close(mlp(x_TC, whole_context((3, 4)))[0], want)


def test_relu2_as_written_out():
    torch.manual_seed(0)
    mlp = MLP(MLPConfig(width=9, activation="relu2"), 5, norm=Norm(1e-6)).double()
    assert [name for name, _ in mlp.named_parameters()] == ["up_proj.weight", "down_proj.weight"]
    x_TC = torch.randn(7, 5, dtype=torch.float64)
    up = x_TC @ mlp.up_proj.weight.T
    want = torch.where(up > 0, up * up, 0.0) @ mlp.down_proj.weight.T
    assert_close(mlp(x_TC, whole_context((3, 4)))[0], want)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_costs(activation):
    config = MLPConfig(width=9, activation=activation)
    mlp = MLP(config, 5, norm=Norm(1e-6)).double()
    parameters = sum(p.numel() for p in mlp.parameters())
    assert config.parameters(5) == parameters
    assert config.flops(5, 7) == 2 * 7 * parameters
    x_TC = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    skipped = {t.data_ptr() for t in (x_TC, *mlp.parameters())}
    kept = {}

    def note(tensor):
        if tensor.data_ptr() not in skipped:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made = mlp(x_TC, whole_context((7,)))
    assert made[0].shape == (7, 5)
    assert sum(tensor.numel() for tensor in kept.values()) == 7 * config.saved(5).values


def test_relu2_ends_smaller_in_a_decoder():
    layer = LayerConfig(None, MLPConfig(width=64, activation="relu2"))
    model = Decoder(DecoderConfig(vocab_size=9, width=64, layers=(layer,) * 8, init_std=0.08))
    init_decoder(model, seed=0)
    mlp = model.layers["3"].mlp
    assert mlp.up_proj.weight.std().item() == pytest.approx(0.08, rel=0.05)
    assert mlp.down_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_an_unknown_activation():
    with pytest.raises(ValueError, match="activation is 'gelu'; known are swiglu, relu2"):
        MLPConfig(width=4, activation="gelu")
