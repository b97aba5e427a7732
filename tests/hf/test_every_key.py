"""Every key of a config.json is followed, refused, or left out because training does not see it.

The lists are tried, and compared with the fields of the installed transformers: one that is in
none of them fails here, so that a new key is never passed over unread.
"""

import dataclasses
import json

import pytest
from tests.lazy import transformers

from longshore.hf.config_file import ARCHITECTURES, asked_balance, describe, find_architecture
from longshore.hf.tensor_map import StorageLayout

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_scaling": DYNAMIC,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
BASES = {
    "qwen3": {
        **SIZES,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "llama": SIZES,
    "qwen3_moe": {
        **SIZES,
        **EXPERTS,
        "use_sliding_window": True,
        "sliding_window": 4,
        "mlp_only_layers": [0],
        "output_router_logits": True,
    },
    "qwen3_next": {
        **SIZES,
        **EXPERTS,
        "mlp_only_layers": [0],
        "layer_types": ["linear_attention", "full_attention"],
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "output_router_logits": True,
    },
    "deepseek_v3": {
        **{key: SIZES[key] for key in SIZES if key not in ("head_dim", "num_key_value_heads")},
        "num_key_value_heads": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "qk_rope_head_dim": 8,
        "first_k_dense_replace": 1,
    },
    "deepseek_v4": {
        **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")},
        "num_hidden_layers": 3,
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "o_groups": 4,
        "index_head_dim": 8,
        "compress_ratios": [0, 4, 128, 0],
        "num_hash_layers": 1,
        "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 8},
        "max_position_embeddings": 64,
        "output_router_logits": True,
    },
    "mamba2": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}
    | {"head_dim": 8, "n_groups": 2},
    "nemotron_h": {"vocab_size": 64, "hidden_size": 32, "n_groups": 2}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
}

# A key is given another value, or several keys are where they must fit together.
ATTENTION = {
    "vocab_size": 65,
    "hidden_size": 64,
    "intermediate_size": 49,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 65,
    "initializer_range": 0.5,
    "rms_norm_eps": 0.5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_scaling": None, "rope_parameters": {"rope_theta": 5.0}},
    "attention_bias": True,
    "pad_token_id": 3,
}
MOE = {
    **ATTENTION,
    "num_hidden_layers": 3,
    "decoder_sparse_step": 9,
    "moe_intermediate_size": 17,
    "num_experts_per_tok": 3,
    "num_experts": 9,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.5,
    "mlp_only_layers": [],
}
FOLLOWED = {
    "qwen3": {
        **ATTENTION,
        "use_sliding_window": False,
        "sliding_window": 5,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama": ATTENTION,
    "qwen3_moe": {
        **MOE,
        "use_sliding_window": False,
        "sliding_window": 5,
        "norm_topk_prob": True,
        "num_local_experts": 9,
    },
    "qwen3_next": {
        **MOE,
        "num_hidden_layers": {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        "norm_topk_prob": False,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "shared_expert_intermediate_size": 3,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3": {
        **{key: ATTENTION[key] for key in ATTENTION if key not in ("head_dim", "rms_norm_eps")},
        "num_key_value_heads": {"num_key_value_heads": 2, "num_attention_heads": 2},
        "moe_intermediate_size": 17,
        "n_shared_experts": 2,
        "n_routed_experts": 16,
        "num_local_experts": 16,
        "routed_scaling_factor": 1.5,
        "kv_lora_rank": 4,
        "q_lora_rank": None,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": 2,
        "norm_topk_prob": None,
        "rope_interleave": None,
        "num_mtp_layers": 0,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v4": {
        **{key: ATTENTION[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
        **{key: ATTENTION[key] for key in ("initializer_range", "rms_norm_eps", "pad_token_id")},
        **{key: ATTENTION[key] for key in ("max_position_embeddings", "tie_word_embeddings")},
        "num_attention_heads": 8,
        "head_dim": 32,
        "moe_intermediate_size": 17,
        "n_routed_experts": 16,
        "num_experts_per_tok": 1,
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.0,
        "swiglu_limit": 3.0,
        "mlp_layer_types": ["moe"] * 3,
        "num_hash_layers": 2,
        "q_lora_rank": 4,
        "o_groups": 2,
        "o_lora_rank": 4,
        "sliding_window": 5,
        "layer_types": ["sliding_attention"] * 3,
        "compress_ratios": [4, 4, 4],
        "compress_rates": {"compressed_sparse_attention": 2},
        "compress_rate_csa": 8,
        "compress_rate_hca": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 3,
        "rope_theta": 5.0,
        "compress_rope_theta": 5.0,
        "rope_parameters": {"rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
        "partial_rotary_factor": 0.5,
        "qk_rope_head_dim": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "hc_eps": 0.5,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.5,
        "num_nextn_predict_layers": 0,
    },
    "mamba2": {
        "num_heads": {"num_heads": 4, "head_dim": 16},
        "head_dim": {"num_heads": 2, "head_dim": 32},
        "vocab_size": 65,
        "hidden_size": {"hidden_size": 64, "num_heads": 16},
        "expand": {"expand": 1, "num_heads": 4},
        "state_size": 5,
        "num_hidden_layers": 1,
        "layer_norm_epsilon": 0.5,
        "conv_kernel": 3,
        "n_groups": 1,
        "use_bias": True,
        "use_conv_bias": False,
        "initializer_range": 0.5,
        "residual_in_fp32": False,
        "time_step_limit": [0.5, 0.9],
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "vocab_size": 65,
        "hidden_size": 64,
        "layers_block_type": ["mlp"],
        "layer_types": ["mlp"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "intermediate_size": 49,
        "ssm_state_size": 5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 5,
        "n_groups": 1,
        "conv_kernel": 3,
        "time_step_min": 0.5,
        "use_conv_bias": False,
        "use_bias": True,
        "initializer_range": 0.5,
        "layer_norm_epsilon": 0.5,
    },
}
EVERY_REFUSED = {
    "is_causal": False,
    "per_layer_config": {"0": {"hidden_size": 16}},
    "transformers_weights": "other.safetensors",
    "fusion_config": {"patch": True},
    "quantization_config": {"quant_method": "fp8"},
}
SMOOTH = {"hidden_act": "gelu", "attention_dropout": 0.1}
REFUSED = {
    "qwen3": SMOOTH,
    "llama": {**SMOOTH, "mlp_bias": True},
    "qwen3_moe": SMOOTH,
    "qwen3_next": SMOOTH,
    "deepseek_v3": {**SMOOTH, "rms_norm_eps": 0.5, "head_dim": 16},
    "deepseek_v4": {
        **SMOOTH,
        "mlp_bias": True,
        "attention_bias": True,
        "router_jitter_noise": 0.1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_local_experts": 9,
        "intermediate_size": 9,
    },
    "mamba2": {"hidden_act": "gelu"},
    "nemotron_h": {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "sliding_window": 4,
        "mlp_hidden_act": "silu",
        "mlp_bias": True,
        "mamba_hidden_act": "gelu",
        "num_nextn_predict_layers": 1,
    },
}

# Names and labels, generation, what is returned, first values, how a scan is cut: no gradient
# depends on them.
EVERY_IGNORED = {
    "_name_or_path": "x",
    "transformers_version": "4.0.0",
    "dtype": "bfloat16",
    "id2label": {"0": "x"},
    "label2id": {"x": 0},
    "problem_type": "regression",
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "chunk_size_feed_forward": 4,
    "is_encoder_decoder": True,
    "use_cache": False,
    "bos_token_id": 3,
    "eos_token_id": [3, 4],
}
SCANS = {
    "pad_token_id": 3,
    "chunk_size": 8,
    "time_step_max": 0.5,
    "time_step_floor": 0.5,
    "rescale_prenorm_residual": True,
}
IGNORED = {
    "qwen3": {},
    "llama": {"pretraining_tp": 2},
    "qwen3_moe": {},
    "qwen3_next": {},
    # A DeepSeek-V3 of transformers has no balance loss.
    "deepseek_v3": {"pretraining_tp": 2, "output_router_logits": True, "qk_head_dim": 99},
    "deepseek_v4": {"num_key_value_heads": 2},
    "mamba2": {**SCANS, "time_step_rank": 3, "time_step_min": 0.5},
    # Its model reads neither; layers with experts are refused.
    "nemotron_h": {
        **SCANS,
        "tie_word_embeddings": True,
        "residual_in_fp32": True,
        "num_logits_to_keep": 2,
        "max_position_embeddings": 65,
        "use_mamba_kernels": False,
        "expand": 3,
        "time_step_limit": [0.5, 0.9],
        "mamba_proj_bias": True,
        "mamba_ssm_cache_dtype": "bfloat16",
        "mtp_layers_block_type": ["mlp"],
        "n_routed_experts": 9,
        "num_local_experts": 9,
        "output_router_logits": True,
        "n_shared_experts": 2,
        "moe_intermediate_size": 9,
        "moe_shared_expert_intermediate_size": 9,
        "moe_latent_size": 9,
        "moe_shared_expert_overlap": False,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.0,
        "n_group": 2,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
}
KINDS = {entry.model_type: entry for entry in ARCHITECTURES.values()}


def config_class(kind):
    return getattr(transformers, KINDS[kind].name.replace("ForCausalLM", "Config"))


@pytest.fixture
def reading(tmp_path):
    """All that is read from a config.json: the decoder, its balance loss, how its rows lie."""

    def read(kind, value=None, key=""):
        changed = value if isinstance(value, dict) and key in value else {key: value}
        raw = {"model_type": kind, **BASES[kind], **(changed if key else {})}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        raw, architecture, config = describe(tmp_path)
        rows = kind == "deepseek_v3" and architecture.source(
            "layers.0.mixer.kv_down.weight", StorageLayout(config, raw)
        )
        return config, asked_balance(tmp_path), rows

    return read


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_transformers_is_in_one_list(kind):
    fields = {field.name for field in dataclasses.fields(config_class(kind))}
    fields |= config_class(kind)().to_dict().keys()
    lists = [
        FOLLOWED[kind].keys(),
        REFUSED[kind].keys() | EVERY_REFUSED.keys(),
        IGNORED[kind].keys() | EVERY_IGNORED.keys(),
        {"architectures", "model_type"},
    ]
    unread = {name: sum(name in listed for listed in lists) for name in fields}
    assert {name for name, times in unread.items() if times != 1} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_followed_keys_change_what_is_read(kind, reading):
    plain = reading(kind)
    for key, value in FOLLOWED[kind].items():
        assert reading(kind, value, key) != plain, key


@pytest.mark.parametrize("kind", KINDS)
def test_refused_keys_are_named(kind, reading):
    for key, value in (REFUSED[kind] | EVERY_REFUSED).items():
        with pytest.raises(ValueError, match=key):
            reading(kind, value, key)


@pytest.mark.parametrize("kind", KINDS)
def test_ignored_keys_change_nothing(kind, reading):
    plain = reading(kind)
    for key, value in (IGNORED[kind] | EVERY_IGNORED).items():
        assert reading(kind, value, key) == plain, key


def test_architectures_and_model_type_must_agree():
    for kind, entry in KINDS.items():
        for names in ([], None, [entry.name], ["Other", entry.name]):
            raw = {"architectures": names, "model_type": kind}
            assert find_architecture(raw) is entry
        assert find_architecture({"architectures": [entry.name]}) is entry
        other = "llama" if kind != "llama" else "qwen3"
        with pytest.raises(ValueError, match=f"model_type is '{other}', and .* '{kind}'; correct"):
            find_architecture({"architectures": [entry.name], "model_type": other})
    with pytest.raises(ValueError, match="names Qwen3ForCausalLM and LlamaForCausalLM; keep one"):
        find_architecture({"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]})
