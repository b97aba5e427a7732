from types import SimpleNamespace

import pytest
import torch

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.model.decoder import Decoder
from longshore.model.interface import Routed
from longshore.train.optimizer import RoutingCounts, update_bias

ONE_LANE = SimpleNamespace(groups=SimpleNamespace(lanes=SimpleNamespace(size=lambda: 1)))


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


def test_the_example():
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
