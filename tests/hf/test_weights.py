"""The weights of a run: saved and loaded under our names, config included."""

import json
from dataclasses import replace

import pytest
import torch

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.presets import PRESETS, preset
from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from longshore.files import sealed_json
from longshore.hf.checkpoint import tensor_shapes
from longshore.hf.weights import load_weights, save_weights

CONFIG = preset("tiny-qwen3")


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(CONFIG)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def change(folder, **keys):
    path = folder / "weights.json"
    path.write_bytes(sealed_json(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("shard_bytes", [10**9, 50_000])
def test_what_was_saved_is_loaded(tmp_path, tensors, shard_bytes):
    tensors["norm.weight"] = tensors["norm.weight"].bfloat16()
    folder = tmp_path / "weights"
    save_weights(folder, CONFIG, tensors.items(), base=tmp_path, shard_bytes=shard_bytes)
    assert (folder / "weights.safetensors").exists() == (shard_bytes == 10**9)
    saved = load_weights(folder)
    assert (saved.config, saved.base) == (CONFIG, tmp_path)
    assert saved.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert saved.tensors[name].dtype == tensor.dtype
        assert torch.equal(saved.tensors[name], tensor)
    rows = saved.tensors.block("embed.weight", (slice(100, 117),))
    assert torch.equal(rows, tensors["embed.weight"][100:117])


def test_a_run_may_have_begun_with_no_folder(tmp_path, tensors):
    save_weights(tmp_path / "weights", CONFIG, tensors.items(), base=None)
    assert load_weights(tmp_path / "weights").base is None


def test_broken_folders_are_refused(tmp_path, tensors):
    folder = tmp_path / "weights"
    with pytest.raises(ValueError, match="is not a folder"):
        load_weights(folder)
    save_weights(folder, CONFIG, tensors.items(), base=None)
    change(folder, config=config_to_json(preset("tiny-qwen3", layers=1)))
    with pytest.raises(ValueError, match=r"unknown layers\.1\..*, layers\.1\.mlp_norm"):
        load_weights(folder)
    change(folder, config={"kind": "MLPConfig", "width": 3})
    with pytest.raises(ValueError, match="it is MLPConfig; it must be a DecoderConfig"):
        load_weights(folder)
    change(folder, version=1)
    with pytest.raises(ValueError, match=r"version 1; this Longshore reads .* version 2"):
        load_weights(folder)
    (folder / "weights.json").unlink()
    with pytest.raises(ValueError, match=r"has no weights\.json"):
        load_weights(folder)


def test_a_bit_in_any_file_is_noticed(tmp_path, tensors):
    """Some 20 places in each, from the first byte to the last."""
    folder = tmp_path / "weights"
    save_weights(folder, CONFIG, tensors.items(), base=None, shard_bytes=200_000)
    assert len(load_weights(folder).tensors) == len(tensors)
    assert len([*folder.iterdir()]) > 3
    for path in folder.iterdir():
        whole = path.read_bytes()
        for at in sorted({*range(0, len(whole), -(-len(whole) // 20)), len(whole) - 1}):
            other = bytearray(whole)
            other[at] ^= 1 << at % 8
            path.write_bytes(other)
            with pytest.raises(ValueError, match=rf"{path.name}") as caught:
                load_weights(folder)
            assert path.name != "weights.json" or "weights.json" in str(caught.value)
        path.write_bytes(whole)
    load_weights(folder)


def test_weights_are_replaced_when_the_new_ones_are_whole(tmp_path, tensors):
    folder = tmp_path / "weights"
    save_weights(folder, CONFIG, tensors.items(), base=None)
    left = tmp_path / f".weights.partial-{2**22 + 1}"
    left.mkdir()  # of a process that is long gone

    def failing():
        yield next(iter(tensors.items()))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_weights(folder, CONFIG, failing(), base=None, is_replaced=True)
    assert torch.equal(load_weights(folder).tensors["norm.weight"], tensors["norm.weight"])
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    save_weights(folder, CONFIG, other.items(), base=None, is_replaced=True)
    assert torch.equal(load_weights(folder).tensors["norm.weight"], other["norm.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


SCALINGS = (
    None,
    LinearScaling(factor=0.1 + 0.2),
    DynamicScaling(factor=2.0, original_length=64),
    YarnScaling(factor=4.0, original_length=16, truncate=False),
    LongRopeScaling(short_factor=(1.0, 1.1), long_factor=(2.0, 1 / 3), original_length=16),
)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_configs_go_through_json_unchanged(scaling):
    layer = CONFIG.layers[0]
    rope = RopeConfig(theta=1e6, rotary_dim=4, scaling=scaling)
    layers = (
        replace(layer, mixer=replace(layer.mixer, rope=rope, window=7)),
        replace(layer, mlp=None),
        replace(layer, mixer=None),
    )
    config = replace(CONFIG, layers=layers, tied=True)
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize("name", PRESETS)
def test_all_presets_go_through_json(name):
    assert config_from_json(config_to_json(preset(name))) == preset(name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "Path"}, "kind is 'Path', which this version of Longshore does not know"),
        ({"kind": "replace"}, "kind is 'replace', which this version of Longshore does not know"),
        ({"kind": None}, "kind is None"),
        ({"depth": 3}, "DecoderConfig has no field depth"),
        ({"width": 0}, r"DecoderConfig\.width is 0"),
        ({"layers": [1]}, "DecoderConfig cannot be created: 'int' object has no attribute"),
        ({"layers": 1}, "DecoderConfig cannot be created: 'int' object is not iterable"),
    ],
)
def test_json_that_is_no_config_is_refused(change, reason):
    with pytest.raises(ValueError, match=reason):
        config_from_json(config_to_json(CONFIG) | change)


def test_json_with_a_field_missing_is_refused():
    found = config_to_json(CONFIG)
    del found["width"]
    with pytest.raises(ValueError, match=r"DecoderConfig cannot be created: .*'width'"):
        config_from_json(found)
    with pytest.raises(ValueError, match="it is NoneType; it must be a DecoderConfig"):
        config_from_json(None)
