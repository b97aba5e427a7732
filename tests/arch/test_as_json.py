"""Configs of users: what may be registered, and what comes back."""

from dataclasses import dataclass

import pytest
from tests.parallel.my_mixer import MeanConfig

from longshore.arch.as_json import REGISTERED, config_from_json, config_to_json, register_config
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Part


def decoder(mixer):
    return DecoderConfig(vocab_size=7, width=8, layers=(LayerConfig(mixer, MLPConfig(width=4)),))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr("longshore.arch.as_json.REGISTERED", {**REGISTERED})


@dataclass(frozen=True)
class Inner:
    scale: float


@dataclass(frozen=True)
class Outer(MeanConfig):
    inner: object = Inner(0.5)


def test_a_registered_config_names_its_module_and_comes_back():
    data = config_to_json(decoder(MeanConfig()))
    mixer = {"kind": "MeanConfig", "module": "tests.parallel.my_mixer"}
    assert data["layers"][0]["mixer"] == {**mixer, "heads": 4, "head_dim": 8}
    assert config_from_json(data) == decoder(MeanConfig())


@pytest.mark.usefixtures("registered")
def test_a_config_inside_one_is_registered_too():
    register_config(Outer)
    with pytest.raises(ValueError, match=r"^Inner is not registered, so .* register_config"):
        config_to_json(decoder(Outer()))
    register_config(Inner)
    register_config(Inner)
    assert config_from_json(config_to_json(decoder(Outer()))) == decoder(Outer())
    with pytest.raises(ValueError, match=r"^Outer\.inner is a frozenset, which cannot be saved"):
        config_to_json(decoder(Outer(inner=frozenset())))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"module": "their.mixers"}, None),
        (
            {"kind": "Other", "module": "their.mixers"},
            "'Other' of the Python module 'their.mixers', .* model.module=their.mixers .*--module",
        ),
        (
            {"kind": "Other", "module": "a b"},
            "kind is 'Other', which this version of Longshore does not know",
        ),
        ({"depth": 3}, "MeanConfig has no field depth in this version of its module"),
    ],
)
def test_what_is_not_registered_is_named(change, reason):
    """A class is found by its name, so that a user may rename the file."""
    data = config_to_json(decoder(MeanConfig()))
    data["layers"][0]["mixer"] |= change
    if reason is None:
        assert config_from_json(data) == decoder(MeanConfig())
        return
    with pytest.raises(ValueError, match=reason):
        config_from_json(data)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"__module__": "mine", "__annotations__": {}}, "the name MeanConfig is taken by a config"),
        ({"__annotations__": {"kind": str}}, "has a field kind, which its JSON needs"),
    ],
)
def test_what_cannot_be_registered(body, reason):
    with pytest.raises(ValueError, match=reason):
        register_config(dataclass(type("MeanConfig", (), body)))
    with pytest.raises(ValueError, match="Plain is not a dataclass"):
        register_config(type("Plain", (), {}))
    with pytest.raises(ValueError, match="the name MLPConfig is taken by a config of longshore"):
        register_config(dataclass(type("MLPConfig", (), {})))


def test_a_part_that_lacks_a_method_is_refused():
    class Half(Part):
        def flops(self, width, length):
            return 0

    with pytest.raises(
        ValueError, match=r"^Half has no parameters; a part of a layer must have parameters, flops"
    ):
        LayerConfig(Half(), None)
    with pytest.raises(ValueError, match=r"^object is no Part; a part of a layer inherits Part"):
        LayerConfig(object(), None)
