"""model.lora: from a recipe to a decoder with factors, and what is refused."""

from pathlib import Path

import pytest

from longshore.arch.decoder import LoRAConfig
from longshore.config.check import check_config, decoder_config, lora_config
from longshore.config.load import load_config

LLAMA = ("model.preset=tiny-llama", "data.mock={mode='distribution'}", "data.batch=4")


def config_of(*words):
    return load_config(None, [*LLAMA, *words])


def checked(*words):
    decoder = decoder_config(config_of(*words).model)
    return decoder.lora


def test_the_same_from_words_and_from_a_table(tmp_path: Path):
    words = ["model.lora.rank=8", "model.lora.alpha=4", "model.lora.targets=q_proj,v_proj"]
    want = LoRAConfig(8, 4.0, ("q_proj", "v_proj"))
    assert checked(*words) == want
    recipe = tmp_path / "lora.toml"
    recipe.write_text(
        '[model]\npreset = "tiny-llama"\n'
        'lora = { rank = 8, alpha = 4, targets = ["q_proj", "v_proj"] }\n'
    )
    config = load_config(str(recipe))
    assert decoder_config(config.model).lora == want
    recipe.write_text(config.to_toml())
    assert load_config(str(recipe)) == config


def test_defaults():
    assert checked() is None
    assert checked("model.lora.rank=0") is None
    assert checked("model.lora.rank=8") == LoRAConfig(8, 16.0, ("all-linear",))
    assert config_of("model.lora.rank=8").train.lr == 2e-4
    assert config_of("model.lora.rank=0").train.lr == config_of().train.lr == 3e-4


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"rank": 1.5}, "model.lora.rank is 1.5; it must be a whole number from 0 to"),
        ({"rank": 4, "alpha": 0}, "model.lora.alpha is 0; it must be a number above 0"),
        ({"rank": 4, "targets": []}, "model.lora.targets is empty; name modules"),
        ({"rank": 4, "targets": 3}, "model.lora.targets is 3; it must be a list of strings"),
        ({"r": 4}, "there is no model.lora.r; model.lora has rank, alpha or targets"),
        ({"alpha": 4}, "model.lora has no rank; add model.lora.rank=8"),
    ],
)
def test_wrong_tables(table, told):
    with pytest.raises(ValueError, match="lora") as error:
        lora_config(table)
    assert str(error.value).startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["model.lora.targets=q_proj,wq"],
            "model.lora.targets: no linear layer of this model is named 'wq'; there are down_proj, "
            "gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear for all of them",
        ),
        (["model.lora.targets=roj"], "named 'roj'"),
        (["model.preset=tiny-qwen3-moe", "model.lora.targets=gate_up"], "experts' own weights"),
        (["model.preset=tiny-deepseek-v3", "model.bias_update=0.1"], "a router's bias is frozen"),
        (["graph.layers=all"], "graph.layers does not work with model.lora"),
    ],
)
def test_what_is_refused(words, told):
    config = config_of("model.lora.rank=4", *words)
    with pytest.raises(ValueError, match="lora") as error:
        check_config(config, ranks=1)
    assert told in str(error.value)


def test_a_routers_bias_is_frozen():
    deepseek = "model.preset=tiny-deepseek-v3"
    plain, frozen = (
        [getattr(layer.mlp, "bias_update", 0) for layer in decoder_config(model).layers]
        for model in (config_of(deepseek).model, config_of(deepseek, "model.lora.rank=4").model)
    )
    assert max(plain) > 0
    assert max(frozen) == 0
