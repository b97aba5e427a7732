"""DeepSeek-V3: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. How the experts' bias is updated is a matter of training: config.json does not say it.

    {"num_hidden_layers": 61, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, …}
    61 layers, of which 3 have an MLP and 58 experts, and one depth of multi-token prediction

A folder that transformers saved has no tensors for multi-token prediction, though its config.json
has num_nextn_predict_layers; config_file.py checks, and reads such a folder without depths.
"""

from typing import Any

from longshore.arch.attention import MLAConfig
from longshore.arch.decoder import MOST_DEPTHS, DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.rope import YarnScaling
from longshore.hf.rope_keys import read_rope, rope_object
from longshore.hf.shared_keys import (
    SILU,
    common_part,
    decoder_keys,
    parts_of_kind,
    read_decoder,
    read_layers,
    read_pad_token,
    refuse_unsupported,
    require_gated,
    require_plain_norms,
    rope_keys,
)
from longshore.hf.typed_keys import Raw, count, flag, number, shown

DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
"""Keys of DeepSeek's own code, with the only value that transformers and we support."""

OTHER_NAMES = {
    "num_local_experts": "n_routed_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
}
"""Other names that transformers accepts; they take precedence."""

LATENT_EPS = 1e-6


def read_deepseek(raw: Raw) -> DecoderConfig:
    renamed = {new: raw[old] for old, new in OTHER_NAMES.items() if old in raw}
    raw = {**DEEPSEEK_DEFAULTS, **raw, **renamed}
    _refuse(raw)
    mixer, moe = _read_latent(raw), _read_experts(raw)
    layers = read_layers(raw)
    first = min(count(raw, "first_k_dense_replace", least=0), layers)
    mlp = MLPConfig(width=count(raw, "intermediate_size"))
    depths = count(raw, "num_nextn_predict_layers", least=0, most=MOST_DEPTHS)
    return read_decoder(
        raw,
        (LayerConfig(mixer, mlp),) * first + (LayerConfig(mixer, moe),) * (layers - first),
        mtp=(LayerConfig(mixer, moe),) * depths,
        pad_token_id=read_pad_token(raw),
    )


def deepseek_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a DeepSeek-V3."""
    require_plain_norms(config)
    if config.norm_eps != LATENT_EPS:
        raise ValueError(f"its norms have eps {config.norm_eps:g}, not {LATENT_EPS:g}")
    layers = (*config.layers, *config.mtp)
    mixers = parts_of_kind(layers, "mixer", MLAConfig)
    mixer = common_part(mixers, "latent attention")
    if None in mixers:
        raise ValueError(f"layer {mixers.index(None)} is not latent attention")
    return {
        **decoder_keys(config),
        **_latent_keys(mixer),
        **_mlp_keys(config),
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "num_nextn_predict_layers": len(config.mtp),
    }


def _refuse(raw: Raw) -> None:
    refuse_unsupported(raw, SILU)
    for key, only in ONLY.items():
        if raw.get(key, only) != only:
            raise ValueError(f"{key} is {shown(raw[key])}; supported is {only!r}")
    for key in sorted(raw):
        if key.startswith("index_") and raw[key]:
            raise ValueError(
                f"{key} is {shown(raw[key])}, which means sparse attention as in DeepSeek-V3.2; "
                "only attention to all earlier tokens is supported"
            )
    if number(raw, "rms_norm_eps", LATENT_EPS) != LATENT_EPS:
        raise ValueError(
            f"rms_norm_eps is {raw['rms_norm_eps']!r}; it must be {LATENT_EPS:g}, which this "
            "architecture always uses in the norms of its latents"
        )
    heads = raw.get("num_key_value_heads")
    if heads is not None and heads != raw.get("num_attention_heads"):
        raise ValueError(
            f"num_key_value_heads is {shown(heads)}; latent attention has as many as "
            f"num_attention_heads, {shown(raw.get('num_attention_heads'))}"
        )
    if raw.get("head_dim") not in (None, raw["qk_rope_head_dim"]):
        raise ValueError(
            f"head_dim is {shown(raw['head_dim'])}; transformers uses it for rotary positions, so "
            f"it must equal qk_rope_head_dim, {shown(raw['qk_rope_head_dim'])}"
        )


def _read_latent(raw: Raw) -> MLAConfig:
    flag(raw, "rope_interleave", True)
    rope, growth = read_rope(raw), rope_object(raw).get("mscale_all_dim")
    if rope.scaling is not None and not isinstance(rope.scaling, YarnScaling) and growth:
        raise ValueError(
            f"mscale_all_dim is {shown(growth)}, but rope_type is not yarn; it is supported only "
            "with yarn"
        )
    return MLAConfig(
        heads=count(raw, "num_attention_heads"),
        kv_rank=count(raw, "kv_lora_rank"),
        nope_dim=count(raw, "qk_nope_head_dim"),
        rope_dim=count(raw, "qk_rope_head_dim"),
        value_dim=count(raw, "v_head_dim"),
        q_rank=None if raw["q_lora_rank"] is None else count(raw, "q_lora_rank"),
        rope=rope,
        bias=flag(raw, "attention_bias"),
    )


def _latent_keys(mixer: MLAConfig) -> dict[str, Any]:
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "kv_lora_rank": mixer.kv_rank,
        "q_lora_rank": mixer.q_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "qk_head_dim": mixer.head_dim,
        "head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "attention_dropout": 0.0,
        **rope_keys(mixer.rope, mixer.rope_dim),
    }


def _read_experts(raw: Raw) -> MoEConfig:
    width = count(raw, "moe_intermediate_size")
    return MoEConfig(
        experts=count(raw, "n_routed_experts"),
        top_k=count(raw, "num_experts_per_tok"),
        width=width,
        score="sigmoid",
        normalise=flag(raw, "norm_topk_prob", True),
        groups=count(raw, "n_group"),
        top_groups=count(raw, "topk_group"),
        scale=number(raw, "routed_scaling_factor"),
        shared_width=width * count(raw, "n_shared_experts"),
        bias=True,
    )


def _mlp_keys(config: DecoderConfig) -> dict[str, Any]:
    """Layers with an MLP come first; all others and every depth have the same experts."""
    moes = parts_of_kind((*config.layers, *config.mtp), "mlp", MoEConfig)
    dense = next((i for i, moe in enumerate(moes) if moe is not None), len(moes))
    if None in moes[dense:]:
        raise ValueError("a layer with experts comes before one without")
    if config.mtp and dense > len(config.layers):
        raise ValueError("a depth of multi-token prediction has no experts")
    mlps = parts_of_kind(config.layers[:dense], "mlp", MLPConfig)
    if None in mlps:
        raise ValueError(f"layer {mlps.index(None)} has neither experts nor an MLP")
    return {
        **({"intermediate_size": require_gated(common_part(mlps, "MLP")).width} if mlps else {}),
        "first_k_dense_replace": min(dense, len(config.layers)),
        **(_expert_keys(common_part(moes, "layer of experts")) if dense < len(moes) else {}),
    }


def _expert_keys(moe: MoEConfig) -> dict[str, Any]:
    if moe.score != "sigmoid" or not moe.bias or moe.shared_gate:
        raise ValueError("its experts are not chosen by sigmoid scores and a bias")
    if not moe.shared_width or moe.shared_width % moe.width:
        raise ValueError(
            f"its shared expert has {moe.shared_width} channels, not a multiple of {moe.width}"
        )
    return {
        "moe_intermediate_size": moe.width,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_width // moe.width,
        "num_experts_per_tok": moe.top_k,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": moe.normalise,
    }
