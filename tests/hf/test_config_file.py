"""config.json, in the spellings of transformers 4 and 5, becomes our config; or is refused."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.hf.folders import LLAMA3, LONGROPE, SIZES, YARN

from longshore.arch.presets import preset
from longshore.arch.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from longshore.hf.config_file import ARCHITECTURES, architecture_for, config_text, read_config
from longshore.hf.tensor_map import DECODER_NAMES, StorageLayout, by_table

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, **SIZES}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


@pytest.fixture
def read(tmp_path):
    def read_keys(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)

    return read_keys


def test_a_qwen3_config(read):
    config = read(QWEN3 | {"rms_norm_eps": 1e-5, "attention_bias": True})
    mixer = config.layers[0].mixer
    assert (config.vocab_size, config.width, len(config.layers)) == (64, 32, 3)
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim) == (4, 2, 16)
    assert (mixer.qk_norm, mixer.bias, mixer.output_bias, mixer.window) == (True, True, True, None)
    assert config.layers[0].mlp.width == 48
    assert (config.norm_eps, config.tied, config.init_std) == (1e-5, False, 0.15)


def test_missing_keys_have_the_values_of_transformers(read):
    few = {key: LLAMA[key] for key in LLAMA if key not in ("num_key_value_heads", "architectures")}
    mixer = read(few).layers[0].mixer
    assert (mixer.kv_heads, mixer.head_dim, mixer.rope) == (4, 8, RopeConfig())
    wide = {key: QWEN3[key] for key in QWEN3 if key not in ("num_key_value_heads", "head_dim")}
    mixer = read(wide | {"num_attention_heads": 32}).layers[0].mixer
    assert (mixer.kv_heads, mixer.head_dim) == (32, 128)
    assert read(QWEN3 | {"head_dim": None}).layers[0].mixer.head_dim == 8


SCALINGS = {
    "linear": ({"factor": 2}, LinearScaling(factor=2.0)),
    "dynamic": ({"factor": 2.0}, DynamicScaling(factor=2.0, original_length=64)),
    "yarn": (YARN, YarnScaling(factor=4.0, original_length=16)),
    "llama3": (
        LLAMA3,
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=16),
    ),
    "longrope": (
        LONGROPE,
        LongRopeScaling(
            short_factor=(1.0, 1.1, 1.2, 1.3),
            long_factor=(1.0, 2.0, 3.0, 4.0),
            original_length=16,
            factor=4.0,
        ),
    ),
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_positions_in_all_spellings(read, kind):
    keys, scaling = SCALINGS[kind]
    keys = {**keys, "rope_type": kind}
    older = {"type" if key == "rope_type" else key: value for key, value in keys.items()}
    rope = RopeConfig(theta=5e5, scaling=scaling)
    for spelled in (
        {"rope_parameters": keys | {"rope_theta": 500000}},
        {"rope_theta": 500000.0, "rope_scaling": keys},
        {"rope_theta": 500000.0, "rope_scaling": older},
        {"rope_theta": 500000.0, "rope_parameters": keys, "rope_scaling": None},
    ):
        assert read(LLAMA | spelled).layers[2].mixer.rope == rope


@pytest.mark.parametrize("kind", SCALINGS)
def test_positions_are_written_as_they_are_read(read, kind):
    keys, _ = SCALINGS[kind]
    config = read(LLAMA | {"rope_scaling": {**keys, "rope_type": kind}, "rope_theta": 7.0})
    assert read(json.loads(config_text(config, base=None, dtype=None))) == config


def test_yarn_in_full(read):
    keys = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5, "mscale": 1.0}
    keys |= {"mscale_all_dim": 0.5, "truncate": False}
    config = read(LLAMA | {"rope_scaling": YARN | keys})
    wanted = YarnScaling(factor=4.0, original_length=16, **keys)
    assert config.layers[0].mixer.rope.scaling == wanted
    assert read(json.loads(config_text(config, base=None, dtype=None))) == config
    without = {"rope_type": "yarn", "factor": 4.0}
    config = read(LLAMA | {"rope_scaling": without})
    assert config.layers[0].mixer.rope.scaling.original_length == 64


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 4}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 4}, (None, None, None)),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
            (None, None, 4),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 0,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (4, None, 4),
        ),
    ],
)
def test_windows(read, keys, windows):
    config = read(QWEN3 | keys)
    assert tuple(layer.mixer.window for layer in config.layers) == windows
    assert read(json.loads(config_text(config, base=None, dtype=None))) == config


REFUSED = {
    "architecture": (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supp"),
    "v3.2": ({"model_type": "deepseek_v32"}, "deepseek_v32 is not supported: its attention is s"),
    "model type": (
        {**SIZES, "model_type": "gpt2"},
        "of model_type 'gpt2' is not supported.*; longshore train and .* model.code=transformers",
    ),
    "activation": (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
    "quantized": (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
    "mlp bias": (LLAMA | {"mlp_bias": True}, "mlp_bias is true"),
    "dropout": (LLAMA | {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "llama window": (LLAMA | {"sliding_window": 4}, "sliding_window is 4, but LlamaForCausalLM"),
    "rope type": (LLAMA | {"rope_scaling": {"type": "ntk"}}, "rope_type is 'ntk'; supported are d"),
    "partial": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "nested": (LLAMA | {"rope_parameters": {"full_attention": {}}}, "differ by layer type"),
    "rope": (LLAMA | {"rope_parameters": [1]}, "must be an object"),
    "factor": (LLAMA | {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "factors": (LLAMA | {"rope_scaling": LONGROPE | {"long_factor": 3}}, "long_factor is 3"),
    "no window": (QWEN3 | {"layer_types": ["sliding_attention"] * 3}, "there is no window"),
    "layer types": (QWEN3 | {"layer_types": ["full_attention"]}, "each of the 3 layers"),
    "layer type": (QWEN3 | {"layer_types": ["mamba"] * 3}, "layer_types has 'mamba'"),
    "text": (QWEN3 | {"hidden_size": "32"}, "hidden_size is '32'; it must be a whole number"),
    "zero": (QWEN3 | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "flag": (QWEN3 | {"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or"),
    "heads": (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide"),
    "head dim": (LLAMA | {"hidden_size": 33}, "hidden_size 33 is not a multiple"),
    "windows": (
        QWEN3 | {"use_sliding_window": True, "max_window_layers": None},
        "max_window_layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(read, case):
    raw, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason) as caught:
        read(raw)
    assert "config.json: " in str(caught.value)


def test_a_missing_key_is_refused(read):
    with pytest.raises(ValueError, match="vocab_size is missing"):
        read({key: value for key, value in LLAMA.items() if key != "vocab_size"})


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is broken: it is not JSON"):
        read_config(tmp_path)


def test_decoders_that_no_architecture_can_be_are_refused():
    config = preset("tiny-qwen3", window=8)
    assert architecture_for(config).name == "Qwen3ForCausalLM"
    layer, other = config.layers
    near = replace(layer, mixer=replace(layer.mixer, window=4))
    for layers, reason in [
        ((layer, near), r"its windows differ \(4, 8\)"),
        ((layer, replace(other, mlp=None)), "layer 1 is not attention and an MLP"),
        ((replace(layer, mixer=replace(layer.mixer, rope=None)),), "no rotary positions"),
        ((replace(layer, mixer=replace(layer.mixer, bias=True)),), "only some projections"),
        ((layer, replace(other, mlp=replace(other.mlp, width=7))), "another MLP than layer 0"),
        ((layer, replace(other, mixer=replace(other.mixer, heads=16))), "another mixer"),
        ((replace(layer, mixer=replace(layer.mixer, gate=True)),), "layer 0 has gated attention"),
        ((replace(layer, mlp=replace(layer.mlp, activation="relu2")),), "MLP is relu2"),
    ]:
        with pytest.raises(ValueError, match=reason):
            architecture_for(replace(config, layers=layers))


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama"])
def test_a_dense_model_has_plain_norms_and_one_prediction(name):
    config = preset(name)
    for change, reason in [
        ({"zero_centred": True}, "its norms are zero-centred"),
        ({"mtp": config.layers[:1]}, "has multi-token prediction"),
    ]:
        with pytest.raises(ValueError, match=f"LlamaForCausalLM: [^;]*{reason}"):
            architecture_for(replace(config, **change))


def test_max_length_may_not_change_the_positions(read):
    config = read(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    with pytest.raises(ValueError, match="would change how positions are scaled"):
        config_text(config, base=None, dtype=None, max_length=128)
    assert json.loads(config_text(config, base=None, dtype=None))["max_position_embeddings"] == 64


def test_every_stored_name_comes_from_one_of_ours():
    find_source, layout = by_table(DECODER_NAMES), StorageLayout(preset("tiny-llama"), {})
    assert find_source("layers.12.mixer.q_norm.weight", layout).stored == (
        "model.layers.12.self_attn.q_norm.weight"
    )
    with pytest.raises(ValueError, match=r"tensor mtp\.0\.weight has no name"):
        find_source("mtp.0.weight", layout)
    assert all(name == entry.name for name, entry in ARCHITECTURES.items())


def test_a_config_is_read_without_torch():
    code = "import sys, longshore.hf.config_file; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
