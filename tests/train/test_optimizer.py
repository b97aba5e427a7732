import math

import pytest
import torch
from tests.ranks.hybrids import hybrid
from torch import nn

from longshore.model.decoder import Decoder
from longshore.train.optimizer import Schedule, make_optimizer


def schedule(kind: str, **changed) -> Schedule:
    return Schedule(
        **{"kind": kind, "lr": 1.0, "warmup": 10, "updates": 110, "min_lr": 0.1} | changed
    )


def test_the_rate_rises_then_falls() -> None:
    cosine = schedule("cosine")
    assert [cosine.at(n) for n in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert cosine.at(60) == pytest.approx(0.55)
    assert cosine.at(35) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert cosine.at(110) == cosine.at(500) == pytest.approx(0.1)
    linear = schedule("linear")
    assert [round(linear.at(n), 12) for n in (9, 10, 60, 110)] == [1.0, 1.0, 0.55, 0.1]
    constant = schedule("constant")
    assert [constant.at(n) for n in (0, 9, 50, 999)] == [0.1, 1.0, 1.0, 1.0]


def test_without_warmup_and_with_one_update() -> None:
    assert schedule("cosine", warmup=0).at(0) == 1.0
    assert schedule("linear", warmup=0, updates=1).at(0) == 1.0
    assert schedule("linear", warmup=5, updates=5).at(5) == 1.0


def test_norms_and_biases_do_not_decay() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.RMSNorm(4))
    optimizer = make_optimizer(model, weight_decay=0.3, betas=(0.9, 0.95), eps=1e-8)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    found = {name: decay[id(p)] for name, p in model.named_parameters()}
    assert found == {"0.weight": 0.3, "1.weight": 0.3, "1.bias": 0.0, "2.weight": 0.0}
    assert all(group["fused"] for group in optimizer.param_groups)
    assert torch.is_tensor(next(model.parameters()))


def test_routers_and_decay_rates_do_not_decay() -> None:
    model = Decoder(hybrid())
    optimizer = make_optimizer(model, weight_decay=0.3, betas=(0.9, 0.95), eps=1e-8)
    kept = {id(p) for p in optimizer.param_groups[1]["params"]}
    found = {name for name, p in model.named_parameters() if id(p) in kept}
    matrices = {name for name in found if model.get_parameter(name).dim() > 1}
    assert matrices == {"layers.2.mlp.router.weight", "mtp.0.block.mlp.router.weight"}
    assert {"layers.0.mixer.per_head.A_log", "layers.1.mixer.per_head.dt_bias"} <= found
    decaying = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert len(kept) + len(decaying) == len(list(model.parameters()))
