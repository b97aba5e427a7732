"""model.module: what a user's file may hold. What is refused by words alone is in tests/cli."""

import sys

import pytest

from longshore.arch.as_json import REGISTERED
from longshore.arch.presets import preset
from longshore.config.check import decoder_config
from longshore.config.load import load_config
from longshore.config.schema import ModelConfig

OWN = """\
from dataclasses import dataclass, replace
from longshore.arch.as_json import register_config
from longshore.arch.decoder import LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset

as_it_is = preset("tiny-qwen3")

class Unknown(MLPConfig):
    pass

class Plain(MLPConfig):
    __eq__ = object.__eq__
    __hash__ = object.__hash__

@dataclass(frozen=True, eq=False)
class Loose(Plain):
    pass

register_config(Loose)

def returned():
    return preset("tiny-qwen3-moe")

def with_mlp(mlp):
    return replace(as_it_is, layers=(LayerConfig(None, mlp),))

def unknown():
    return with_mlp(Unknown(width=8))

loose = with_mlp(Loose(width=8))
"""


@pytest.fixture(autouse=True)
def own_models(tmp_path, monkeypatch):
    monkeypatch.setattr("longshore.arch.as_json.REGISTERED", {**REGISTERED})
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


def test_a_function_or_a_config():
    assert decoder_config(ModelConfig(module="own_models:as_it_is")) == preset("tiny-qwen3")
    experts = decoder_config(ModelConfig(module="own_models:returned", aux_weight=0.5))
    assert experts == decoder_config(ModelConfig(preset="tiny-qwen3-moe", aux_weight=0.5))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "own_models:unknown: Unknown is not registered, so it can be neither trained"),
        ("loose", "own_models:loose: its config changes when it is saved as JSON"),
        ("with_mlp", r"own_models:with_mlp raised TypeError: with_mlp\(\) missing 1 required"),
        ("MLPConfig", r"own_models:MLPConfig raised TypeError: .*'width'"),
    ],
)
def test_what_could_not_be_saved_is_refused(name, reason):
    with pytest.raises(ValueError, match=f"^model.module: {reason}"):
        decoder_config(ModelConfig(module=f"own_models:{name}"))


def test_a_word_takes_the_recipes_model_out(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\npreset = "tiny-llama"\nlayers = 2\n')
    model = load_config(str(recipe), ["model.module=mine:decoder"]).model
    assert model == ModelConfig(module="mine:decoder")
    recipe.write_text('[model]\nmodule = "mine:decoder"\n')
    model = load_config(str(recipe), ["model.from_hf=out"]).model
    assert model == ModelConfig(module="mine:decoder", from_hf="out")
    assert load_config(str(recipe), ["model.preset=tiny-llama"]).model.module == ""
