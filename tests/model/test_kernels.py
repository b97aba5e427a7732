"""A dense decoder with the kernels of its norms, gates and rotations against plain torch."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.batch import Depth, Targets, whole_context
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.ops import backends

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = AttentionConfig(heads=2, kv_heads=1, head_dim=6, qk_norm=True)
MLA = MLAConfig(heads=2, kv_rank=5, nope_dim=3, rope_dim=4, value_dim=3, q_rank=7)
DENSE = LayerConfig(ATTENTION, MLPConfig(width=11))


def config(*layers, **options):
    return DecoderConfig(vocab_size=13, width=10, layers=layers, init_std=0.3, **options)


CONFIGS = {
    "dense": config(DENSE, DENSE),
    "float32_residual": config(DENSE, float32_residual=True),
    "zero_centred": config(DENSE, zero_centred=True),
    "no qk_norm": config(replace(DENSE, mixer=replace(ATTENTION, qk_norm=False))),
    "no rope": config(replace(DENSE, mixer=replace(ATTENTION, rope=None))),
    "gate": config(replace(DENSE, mixer=replace(ATTENTION, gate=True)), zero_centred=True),
    "parts left out": config(LayerConfig(ATTENTION, None), LayerConfig(None, MLPConfig(width=5))),
    "relu2": config(replace(DENSE, mlp=MLPConfig(width=11, activation="relu2"))),
    "mla": config(replace(DENSE, mixer=MLA)),
    "mtp": config(DENSE, mtp=(DENSE,)),
}


def losses_and_gradients(model):
    ctx = whole_context((1, 4, 2), device=torch.device(DEVICE))
    ids = (torch.arange(7, device=DEVICE) * 5) % 13
    depths = [Depth(ids.roll(-1), Targets(ids.roll(-2), None)) for _ in model.mtp]
    output = model(ids, ctx, ids.roll(-1), depths)
    losses = torch.stack([output.values, *output.mtp])
    model.zero_grad()
    losses.sum().backward()
    return {"losses": losses, **{name: p.grad for name, p in model.named_parameters()}}


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_give_the_same_losses_and_gradients(name, monkeypatch):
    model = Decoder(CONFIGS[name]).to(DEVICE)
    init_decoder(model, seed=3)
    with backends.using_kernels("plain"):
        plain = losses_and_gradients(model)
    monkeypatch.setattr(backends, "_interpreted", lambda: True)
    by_kernels = losses_and_gradients(model)
    assert "triton" in (backends.chosen()["norm"], backends.chosen().get("gate"))
    assert by_kernels.keys() == plain.keys()
    for key, want in plain.items():
        assert want.abs().max() > 0, key
        assert (by_kernels[key] - want).abs().max() <= 1e-5 * want.abs().max(), key
