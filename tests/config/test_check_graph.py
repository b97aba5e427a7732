"""The section graph: what it refuses, by name and with a way out."""

from dataclasses import replace

import pytest

from longshore.config.check import check_config, graph_layers
from longshore.config.load import load_config
from longshore.config.schema import GraphConfig, ModelConfig

DEMO = load_config(None, ["train.device=auto"])


def config(layers, preset="tiny-llama", **sections):
    changed = {name: replace(getattr(DEMO, name), **keys) for name, keys in sections.items()}
    graph = GraphConfig(layers=tuple(layers.split(",")) if layers else ())
    return replace(DEMO, **changed, model=ModelConfig(preset=preset), graph=graph)


def layers_of(layers, preset):
    from longshore.arch.presets import preset as decoder

    return graph_layers(config(layers), decoder(preset))


@pytest.mark.parametrize(
    ("layers", "preset", "kinds"),
    [
        ("", "tiny-llama", ()),
        ("all", "tiny-llama", ("attention", "mlp")),
        ("mlp,attention", "tiny-llama", ("attention", "mlp")),
        ("mlp", "tiny-llama", ("mlp",)),
        ("all", "tiny-qwen3-moe", ("attention",)),
        ("all", "tiny-nemotron-h", ("attention", "mamba", "mlp")),
        ("all,delta", "tiny-qwen3-next", ("attention", "delta")),
        ("attention", "tiny-deepseek-v3", ("attention",)),
    ],
)
def test_the_kinds_that_are_graphed(layers, preset, kinds):
    assert layers_of(layers, preset) == kinds


@pytest.mark.parametrize(
    ("layers", "sections", "message"),
    [
        ("step", {}, r"^graph\.layers=step would capture a whole step, .* graph\.layers=all, or"),
        ("attn", {}, r"^graph\.layers: unknown part 'attn'; it may be attention, mamba, delta, "),
        ("mamba", {}, r"^graph\.layers: this model has no part 'mamba'; it has attention and mlp$"),
        ("all", {"parallel": {"tp": 2}}, r"^graph\.layers does .* parallel\.tp 2: .* parallel.tp"),
        ("all", {"parallel": {"pp": 2}}, r"^graph\.layers does .* parallel\.pp 2: .* parallel.pp"),
        ("all", {"train": {"compile": True}}, r"^graph\.layers .* with train\.compile=true, "),
        ("all", {"train": {"device": "cpu"}}, r"^graph\.layers needs a GPU, .* out$"),
    ],
)
def test_what_graphs_do_not_work_with(layers, sections, message):
    refused = config(layers, **sections)
    with pytest.raises(ValueError, match=message):
        check_config(refused, 2)
    check_config(replace(refused, graph=GraphConfig()), 2)


def test_a_model_without_known_parts():
    from longshore.arch.presets import preset

    decoder = preset("tiny-qwen3-moe")
    experts = [layer for layer in decoder.layers if not layer.mlp.graph_layer]
    without = replace(decoder, layers=tuple(replace(layer, mixer=None) for layer in experts))
    with pytest.raises(ValueError, match="no part of this model can be graphed"):
        graph_layers(config("all"), without)


def test_graphs_by_themselves_pass():
    check_config(config("all"), 2)
    check_config(config("attention", train={"compile": False, "recompute": "blocks"}), 1)
