"""The schedule, weight decay, and the update of the experts' bias."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.ranks.hybrids import hybrid
from torch import nn

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.model.decoder import Decoder
from longshore.model.interface import Routed
from longshore.train.optimizer import RoutingCounts, Schedule, make_optimizer, update_bias


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


ALONE = SimpleNamespace(size=lambda: 1)
ONE_LANE = SimpleNamespace(groups=SimpleNamespace(lanes=ALONE, tp=ALONE, pp=ALONE))


def routed(*counts: int) -> Routed:
    return Routed(torch.zeros(()), torch.tensor(counts, dtype=torch.int32))


def model_of(*experts: int, **settings) -> Decoder:
    layers = [
        LayerConfig(None, MoEConfig(experts=count, top_k=1, width=4, **settings))
        for count in experts
    ]
    dense = LayerConfig(None, MLPConfig(width=4))
    return Decoder(DecoderConfig(vocab_size=5, width=4, layers=(dense, *layers, dense)))


def biases(model: Decoder) -> list[list[float]]:
    return [b.tolist() for name, b in model.named_buffers() if name.endswith("router.bias")]


def test_the_bias_moves_towards_even_counts():
    model, counts = model_of(4, bias_update=0.5), RoutingCounts()
    counts.add([routed(10, 2, 6, 6)])
    update_bias(model, counts.over_lanes(ONE_LANE))
    assert biases(model) == [[-0.5, 0.5, 0.0, 0.0]]
    update_bias(model, counts.over_lanes(ONE_LANE))
    assert biases(model) == [[-1.0, 1.0, 0.0, 0.0]]


def test_rounds_add_up_and_layers_keep_apart():
    model, counts = model_of(2, 3, bias_update=0.25), RoutingCounts()
    first = (routed(3, 0), routed(1, 1, 1))
    counts.add(first)
    counts.add((routed(0, 4), routed(0, 1, 2)))
    assert [layer.tolist() for layer in counts.layers] == [[3, 4], [1, 2, 3]]
    assert first[0].counts.tolist() == [3, 0]
    update_bias(model, counts.over_lanes(ONE_LANE))
    assert biases(model) == [[0.25, -0.25], [0.25, 0.0, -0.25]]


def test_a_mean_that_is_no_integer_and_counts_past_float32():
    model, counts = model_of(3, bias_update=1.0), RoutingCounts()
    counts.add([Routed(torch.zeros(()), torch.tensor([1 << 40, (1 << 40) + 1, (1 << 40) + 1]))])
    update_bias(model, counts.over_lanes(ONE_LANE))
    assert biases(model) == [[1.0, -1.0, -1.0]]


def test_no_tokens_move_nothing():
    model, counts = model_of(4, bias_update=0.5), RoutingCounts()
    counts.add([routed(0, 0, 0, 0)])
    update_bias(model, counts.over_lanes(ONE_LANE))
    assert biases(model) == [[0.0] * 4]


@pytest.mark.parametrize("settings", [{}, {"bias": True}])
def test_without_an_update_nothing_is_moved(settings):
    model, counts = model_of(4, **settings), RoutingCounts()
    counts.add([routed(9, 0, 0, 0)])
    update_bias(model, counts.over_lanes(ONE_LANE))
    assert biases(model) == ([[0.0] * 4] if settings else [])


def test_a_dense_model_has_no_counts():
    counts = RoutingCounts()
    counts.add(())
    counts.add(())
    assert counts.over_lanes(None) == (), "and nothing is sent"
    update_bias(model_of(), ())


def test_counts_of_another_model_are_caught():
    counts = RoutingCounts()
    counts.add([routed(1, 1)])
    with pytest.raises(AssertionError, match="other MoE layers"):
        counts.add([routed(1, 1), routed(1, 1)])
    with pytest.raises(AssertionError, match="counts of some MoE layers are missing"):
        update_bias(model_of(2, 2, bias_update=0.1), counts.over_lanes(ONE_LANE))
