"""Numbers, lists and files that no model has are answered at once, in one short line."""

import json

import pytest
from tests.hf.test_every_key import BASES, FOLLOWED

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.presets import preset
from longshore.hf.config_file import find_architecture, read_config
from longshore.hf.tensor_map import read_tensor_names

ABSURD = (
    10**9,
    10**18,
    10**400,
    -1,
    2.5,
    1e308,
    float("inf"),
    float("nan"),
    True,
    "x" * 5000,
    [1] * 5000,
    [[[]]],
    {"a": {"b": 1}},
    {"rope_type": ["x"], "factor": 10**400},
    ["full_attention"] * 5000,
    "M" * 5000,
)
MORE = ("rope_theta", "full_attention_interval", "hybrid_override_pattern", "model_type")


@pytest.mark.parametrize("kind", BASES)
def test_any_value_of_any_key_is_read_or_refused_in_a_line(kind):
    for key in {*BASES[kind], *FOLLOWED[kind], *MORE}:
        for value in ABSURD:
            said = answer({"model_type": kind, **BASES[kind], key: value})
            assert len(said) < 500, key


def answer(raw):
    """What a config.json is refused with, or nothing."""
    try:
        find_architecture(raw).read(raw)
    except ValueError as error:
        return str(error)
    return ""


TOO_MANY = {
    "llama": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; .* at most 4096"),
    "qwen3": ({"vocab_size": 10**18}, "vocab_size is 1000000000000000000; .* at most 2147483647"),
    "qwen3_next": ({"num_experts": 1 << 19}, "at most 262,144 experts in all layers; .* 1,048,576"),
    "deepseek_v3": ({"num_nextn_predict_layers": 10**9}, "is 1000000000; .* at most 64"),
    "qwen3_moe": ({"moe_intermediate_size": 2**31 - 1, "hidden_size": 1 << 20}, "parameters"),
    "nemotron_h": ({"layers_block_type": ["mlp"] * 9999}, "has 9999 layers; at most 4096"),
}


@pytest.mark.parametrize("kind", TOO_MANY)
def test_what_is_too_large_is_named(tmp_path, kind):
    keys, reason = TOO_MANY[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **BASES[kind], **keys}))
    with pytest.raises(ValueError, match=reason):
        read_config(tmp_path)


def test_deep_and_large_files_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ValueError, match=r"config\.json is broken: its lists .* nested too deep"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert read_tensor_names(tmp_path) is None
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(200_000_000)
    with pytest.raises(ValueError, match="has 200,000,000 bytes; the limit is 10,000,000"):
        read_config(tmp_path)


def test_a_deep_config_of_ours_is_refused():
    inner = config_to_json(preset("tiny-llama"))
    for _ in range(5000):
        inner = {"kind": "DecoderConfig", "layers": inner}
    with pytest.raises(ValueError, match="nested too deep"):
        config_from_json(inner)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-hybrid"])
def test_a_preset_of_too_many_layers_is_refused(name):
    for layers in (10**9, 0, -1, 2.0):
        with pytest.raises(ValueError, match=r"layers is .*; it must be .* from 1 to 4096"):
            preset(name, layers=layers)
    with pytest.raises(ValueError, match="at most 1,000,000,000,000,000 parameters"):
        preset(name, vocab_size=10**18)
