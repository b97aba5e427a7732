"""config.json of models with experts, latent attention and scans becomes our config, and back."""

import json
from dataclasses import replace

import pytest

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.presets import preset
from longshore.arch.rope import RopeConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.hf.config_file import ARCHITECTURES, architecture_for, config_text, read_config
from longshore.hf.keys import bare

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
MOE = {
    "model_type": "qwen3_moe",
    **SIZES,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
NEXT = {"model_type": "qwen3_next", **SIZES}
DEEPSEEK = {"model_type": "deepseek_v3", **SIZES, "num_key_value_heads": 4}
MAMBA = {"model_type": "mamba2", "vocab_size": 64, "num_hidden_layers": 2}
NEMOTRON = {"model_type": "nemotron_h", "vocab_size": 64, "hidden_size": 32}
NEMOTRON |= {"hybrid_override_pattern": "M-*-"}


@pytest.fixture
def read(tmp_path):
    def read_keys(raw):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)

    return read_keys


def test_missing_keys_have_the_values_of_transformers(read):
    moe = read({**MOE, "num_experts_per_tok": 3}).layers[0]
    assert (moe.mixer.heads, moe.mixer.kv_heads) == (4, 4)
    assert moe.mlp == MoEConfig(experts=8, top_k=3, width=768, normalise=False)
    config = read(NEXT)
    scan = DeltaNetConfig(key_heads=16, value_heads=32, key_dim=128, value_dim=128, kernel=4)
    assert [layer.mixer for layer in config.layers[:3]] == [scan] * 3
    full = config.layers[3].mixer
    assert (full.kv_heads, full.head_dim, full.rope) == (2, 256, RopeConfig(rotary_dim=64))
    assert config.layers[0].mlp == MoEConfig(
        experts=512, top_k=10, width=512, shared_width=512, shared_gate=True
    )
    assert config.zero_centred
    config = read(DEEPSEEK)
    assert [type(layer.mlp) for layer in config.layers] == [MLPConfig] * 3 + [MoEConfig]
    assert config.layers[0].mixer == MLAConfig(
        heads=4, kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128
    )
    mamba = read(MAMBA)
    assert mamba.width == 4096
    assert mamba.layers[1].mixer == Mamba2Config(
        heads=128, head_dim=64, state_dim=128, groups=8, norm_groups=1
    )
    nemotron = read(NEMOTRON)
    assert nemotron.norm_eps == 1e-5
    assert nemotron.layers == (
        LayerConfig(
            Mamba2Config(heads=128, head_dim=64, state_dim=128, groups=8, dt_min=1e-3), None
        ),
        LayerConfig(None, MLPConfig(width=21504, activation="relu2")),
        LayerConfig(AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=None), None),
        LayerConfig(None, MLPConfig(width=21504, activation="relu2")),
    )


def test_where_experts_are(read):
    config = read(MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 9})
    dense = MLPConfig(width=9)
    assert [layer.mlp == dense for layer in config.layers] == [True, False, True, True]
    assert read(json.loads(config_text(config, base=None, dtype=None))) == config
    assert read(MOE | {"num_local_experts": 16}).layers[0].mlp.experts == 16


def test_kinds_of_layers_in_all_spellings(read):
    config = read(NEXT | {"full_attention_interval": 2})
    assert [type(layer.mixer).__name__[0] for layer in config.layers] == list("DADA")
    kinds = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    config = read(NEXT | {"layer_types": kinds})
    assert [type(layer.mixer).__name__[0] for layer in config.layers] == list("ADDD")
    wanted = read(NEMOTRON)
    for kinds in (
        ["mamba", "mlp", "attention", "mlp"],
        ["linear_attention", "mlp", "full_attention", "mlp"],
    ):
        assert read(NEMOTRON | {"layers_block_type": kinds}) == wanted
    older = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_dt_min": 0.5, "attention_head_dim": 16}
    config = read(NEMOTRON | older)
    scan = config.layers[0].mixer
    assert (scan.groups, scan.kernel, scan.dt_min) == (4, 3, 0.5)
    assert config.layers[2].mixer.head_dim == 16


@pytest.mark.parametrize("most", [float("inf"), {"__float__": "Infinity"}, 0.5])
def test_limits_of_steps(read, most):
    config = read(MAMBA | {"time_step_limit": [0.25, most]})
    scan = config.layers[0].mixer
    assert (scan.dt_min, scan.dt_max) == (0.25, 0.5 if most == 0.5 else None)
    assert read(json.loads(config_text(config, base=None, dtype=None))) == config


def test_depths_are_those_of_the_config_where_there_are_no_weights(read):
    assert len(read(DEEPSEEK).mtp) == 1
    config = read(DEEPSEEK | {"num_nextn_predict_layers": 2})
    assert config.mtp == config.layers[-1:] * 2
    assert read(DEEPSEEK | {"num_nextn_predict_layers": 0}).mtp == ()
    assert read(NEXT).mtp == read(NEXT).layers[-1:]
    assert read(NEXT | {"num_nextn_predict_layers": 0}).mtp == ()


PRESETS = {
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "qwen3-next-80b-a3b": "Qwen3NextForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "nemotron-h-8b": "NemotronHForCausalLM",
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_as_they_are_read(read, name):
    config = preset(name)
    assert architecture_for(config).name == PRESETS[name]
    raw = json.loads(config_text(config, base=None, dtype=None))
    assert read(raw) == bare(config)
    if name == "deepseek-v3":
        assert raw["max_position_embeddings"] == 163_840


REFUSED = {
    "rope by layer": (
        MOE | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
        r"differ by layer type \(full_attention\)",
    ),
    "dense layers": (MOE | {"mlp_only_layers": [4]}, r"mlp_only_layers is \[4\]; .* from 0 to 3"),
    "top k": (MOE | {"num_experts": 1}, r"top_k is 2; a token can choose among only 1"),
    "jitter": (MOE | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; dropout and noise"),
    "activation": (NEXT | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
    "kind": (NEXT | {"layer_types": ["mamba"] * 4}, "layer_types has 'mamba'"),
    "kinds": (NEXT | {"layer_types": ["full_attention"]}, "for each of the 4 layers"),
    "share": (NEXT | {"partial_rotary_factor": 0}, "partial_rotary_factor is 0; it must be a num"),
    "depths": (NEXT | {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; only 0"),
    "eps": (DEEPSEEK | {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05; it must be 1e-06"),
    "score": (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is"),
    "method": (DEEPSEEK | {"topk_method": "greedy"}, "topk_method is 'greedy'; supported is"),
    "frequency": (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq is 2; supported is 1"),
    "index": (DEEPSEEK | {"index_topk": 2048}, "index_topk is 2048, which means sparse"),
    "kv heads": (DEEPSEEK | {"num_key_value_heads": 2}, "num_key_value_heads is 2; latent"),
    "interleave": (DEEPSEEK | {"rope_interleave": 1}, "rope_interleave is 1; it must be true or"),
    "fp8": (DEEPSEEK | {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
    "shared": (DEEPSEEK | {"n_shared_experts": 0}, "n_shared_experts is 0"),
    "limits": (MAMBA | {"time_step_limit": 3}, "time_step_limit is 3; it must be a list"),
    "limit": (MAMBA | {"time_step_limit": [0, "x"]}, "time_step_limit has 'x', which is not a num"),
    "experts": (NEMOTRON | {"hybrid_override_pattern": "MM*E"}, "layer 3 has experts without a g"),
    "moe": (NEMOTRON | {"layers_block_type": ["mamba", "moe"]}, "layer 1 has experts without a g"),
    "letter": (NEMOTRON | {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'MX'"),
    "none": (NEMOTRON | {"hybrid_override_pattern": None}, "hybrid_override_pattern is None"),
    "block": (NEMOTRON | {"layers_block_type": ["x"]}, r"layers_block_type is \['x'\]; known are"),
    "relu": (NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported is relu2"),
    "window": (NEMOTRON | {"sliding_window": 4}, "sliding_window is 4; a Nemotron-H with it"),
    "dropout": (NEMOTRON | {"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
    "nemotron mtp": (NEMOTRON | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(read, case):
    raw, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason) as caught:
        read(raw)
    assert "config.json: " in str(caught.value)


def changed(config, field, **numbers):
    """All layers and depths with these numbers of their mixers or mlps, where these have them."""

    def change(layer):
        part = getattr(layer, field)
        if not all(hasattr(part, name) for name in numbers):
            return layer
        return replace(layer, **{field: replace(part, **numbers)})

    layers, mtp = ([change(layer) for layer in found] for found in (config.layers, config.mtp))
    return replace(config, layers=layers, mtp=mtp)


def last_changed(config, **parts):
    return replace(config, layers=(*config.layers[:-1], replace(config.layers[-1], **parts)))


NOT_WRITTEN = [
    ("qwen3-moe", lambda c: replace(c, zero_centred=True), "norms are zero-centred"),
    ("qwen3-moe", lambda c: replace(c, mtp=c.layers[:1]), "has multi-token prediction"),
    ("qwen3-moe", lambda c: changed(c, "mixer", gate=True), "its attention has a gate"),
    ("qwen3-moe", lambda c: changed(c, "mixer", qk_norm=False), "have no norm"),
    ("qwen3-moe", lambda c: changed(c, "mixer", rope=None), "no rotary positions"),
    ("qwen3-moe", lambda c: changed(c, "mixer", bias=True), "only some projections"),
    ("qwen3-moe", lambda c: changed(c, "mlp", score="sigmoid"), "plain softmax"),
    ("qwen3-moe", lambda c: changed(c, "mlp", shared_width=32), "has a shared expert"),
    ("qwen3-moe", lambda c: last_changed(c, mlp=None), "layer 1 has neither experts nor an MLP"),
    ("qwen3-moe", lambda c: last_changed(c, mixer=None), "layer 1 is not attention"),
    (
        "qwen3-moe",
        lambda c: last_changed(c, mlp=MLPConfig(width=8, activation="relu2")),
        "MLP is relu2",
    ),
    (
        "qwen3-moe",
        lambda c: last_changed(c, mlp=replace(c.layers[0].mlp, top_k=3)),
        "layer 1 has another layer of experts than layer 0",
    ),
    ("qwen3-next", lambda c: replace(c, zero_centred=False), "norms are not zero-centred"),
    ("qwen3-next", lambda c: changed(c, "mixer", gate=False), "its attention has no gate"),
    ("qwen3-next", lambda c: changed(c, "mixer", window=4), "has windows"),
    ("qwen3-next", lambda c: changed(c, "mlp", shared_gate=False), "no shared expert with a gate"),
    ("qwen3-next", lambda c: replace(c, mtp=c.layers[:1]), "is not one depth of attention"),
    (
        "qwen3-next",
        lambda c: last_changed(c, mixer=None),
        "layer 3 is neither attention nor a delta net",
    ),
    ("deepseek-v3", lambda c: replace(c, norm_eps=1e-5), "its norms have eps 1e-05"),
    ("deepseek-v3", lambda c: changed(c, "mlp", score="softmax"), "sigmoid scores and a bias"),
    ("deepseek-v3", lambda c: changed(c, "mlp", shared_width=33), "33 channels, not a multiple"),
    ("deepseek-v3", lambda c: replace(c, layers=c.layers[::-1]), "comes before one without"),
    (
        "deepseek-v3",
        lambda c: replace(c, layers=c.layers[:1], mtp=c.layers[:1]),
        "a depth of multi-token prediction has no experts",
    ),
    ("deepseek-v3", lambda c: last_changed(c, mixer=None), "layer 2 is not latent attention"),
    ("nemotron-h", lambda c: changed(c, "mlp", activation="swiglu"), "MLP is swiglu"),
    ("nemotron-h", lambda c: replace(c, tied=True), "its head is tied to the embedding"),
    ("nemotron-h", lambda c: changed(c, "mixer", rope=RopeConfig()), "attention has positions"),
    ("nemotron-h", lambda c: changed(c, "mixer", dt_max=0.5), "other norm groups or limits"),
    ("nemotron-h", lambda c: changed(c, "mixer", norm_groups=1), "other norm groups or limits"),
    (
        "nemotron-h",
        lambda c: last_changed(c, mlp=MLPConfig(width=256, activation="relu2")),
        "layer 3 is not one part",
    ),
]
NAMES = {
    "qwen3-moe": "Qwen3MoeForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "nemotron-h": "NemotronHForCausalLM",
}


@pytest.mark.parametrize(("name", "change", "reason"), NOT_WRITTEN)
def test_what_an_architecture_cannot_be_is_not_written(name, change, reason):
    config, architecture = preset(f"tiny-{name}"), ARCHITECTURES[NAMES[name]]
    architecture.keys(config)
    with pytest.raises(ValueError, match=reason):
        architecture.keys(change(config))


def test_a_mamba2_is_mamba2_alone(read):
    config, keys = read(MAMBA), ARCHITECTURES["Mamba2ForCausalLM"].keys
    for change, reason in [
        (changed(config, "mixer", norm_groups=None), "its gated norm has 8 groups"),
        (changed(config, "mixer", heads=136), "8704 channels are not a multiple of its width 4096"),
        (last_changed(config, mlp=MLPConfig(width=8)), "layer 1 is not Mamba2 alone"),
    ]:
        with pytest.raises(ValueError, match=reason):
            keys(change)


def test_tiny_hybrid_is_none_of_them():
    with pytest.raises(ValueError, match="no architecture of transformers fits") as caught:
        architecture_for(preset("tiny-hybrid"))
    assert all(name in str(caught.value) for name in ARCHITECTURES)
