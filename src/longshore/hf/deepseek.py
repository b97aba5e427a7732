"""DeepSeek-V3 and DeepSeek-V4: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. How the experts' bias is updated and the weight of the index's loss are matters of
training: config.json does not say them.

    {"num_hidden_layers": 61, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, …}
    61 layers, of which 3 have an MLP and 58 experts, and one depth of multi-token prediction

transformers saves no tensors for multi-token prediction, though config.json says
num_nextn_predict_layers, and depths of DeepSeek-V4's own folders join their inputs in another way:
config_file.py reads both without depths.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longshore.arch.attention import MLAConfig
from longshore.arch.decoder import MOST_DEPTHS, DecoderConfig, HyperConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig
from longshore.hf.keys import (
    SILU,
    Raw,
    all_of_kind,
    common_part,
    common_part_or_none,
    count,
    decoder_keys,
    flag,
    number,
    parts_of_kind,
    read_decoder,
    read_layers,
    read_pad_token,
    read_rope,
    refuse_unsupported,
    require_gated,
    require_plain_norms,
    rope_keys,
    rope_object,
    scaled_length,
    scaling_keys,
    shown,
)

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
    mixers = all_of_kind(layers, "mixer", MLAConfig, "is not latent attention")
    mixer = common_part(mixers, "latent attention")
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
    neither = "has neither experts nor an MLP"
    mlps = all_of_kind(config.layers[:dense], "mlp", MLPConfig, neither)
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


WINDOW = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
KINDS = (WINDOW, CSA, HCA)
HASHED, ROUTED = "hash_moe", "moe"

V4_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_nextn_predict_layers": 1,
}
RATES = {CSA: 4, HCA: 128}
SCORES = {"sqrtsoftplus": "sqrt-softplus", "sigmoid": "sigmoid"}
V4_ONLY = {
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_shared_experts": (1,),
    "attention_bias": (False,),
    "n_group": (None, 1),
    "topk_group": (None, 1),
}
"""Keys with the values that transformers and we support."""

OLDER_KEYS = (
    "compress_ratios",
    "compress_rate_csa",
    "compress_rate_hca",
    "num_hash_layers",
    "qk_rope_head_dim",
)
"""Keys of DeepSeek's own files, read and never written: layer_types with compress_rates,
mlp_layer_types and partial_rotary_factor say the same."""


def read_deepseek_v4(raw: Raw) -> DecoderConfig:
    raw = {**V4_DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    _refuse_v4(raw)
    mixers, moes = _read_mixers(raw), _read_v4_experts(raw)
    depths = count(raw, "num_nextn_predict_layers", least=0, most=MOST_DEPTHS)
    pairs = zip(_layer_kinds(raw), _expert_kinds(raw), strict=True)
    return read_decoder(
        raw,
        [LayerConfig(mixers[kind], moes[experts]) for kind, experts in pairs],
        mtp=(LayerConfig(mixers[WINDOW], moes[ROUTED]),) * depths,
        residuals=HyperConfig(
            count=count(raw, "hc_mult"),
            iterations=count(raw, "hc_sinkhorn_iters"),
            eps=number(raw, "hc_eps"),
        ),
        pad_token_id=read_pad_token(raw),
    )


def deepseek_v4_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a DeepSeek-V4."""
    require_plain_norms(config)
    residuals = config.residuals
    if residuals is None:
        raise ValueError("it has no hyper-connections")
    layers, depth = (*config.layers, *config.mtp), len(config.layers)
    other = "is not compressed sparse attention"
    mixers = all_of_kind(layers, "mixer", SparseAttentionConfig, other)
    if any(mixer.ratio for mixer in mixers[depth:]):
        raise ValueError("a depth of multi-token prediction has entries")
    return {
        **decoder_keys(config),
        **_mixer_keys(mixers),
        **_v4_expert_keys(config),
        "layer_types": [_kind(mixer) for mixer in mixers[:depth]],
        "hc_mult": residuals.count,
        "hc_sinkhorn_iters": residuals.iterations,
        "hc_eps": residuals.eps,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "num_nextn_predict_layers": len(config.mtp),
    }


def _refuse_v4(raw: Raw) -> None:
    refuse_unsupported(raw, SILU)
    for key, known in V4_ONLY.items():
        if key in raw and raw[key] not in known:
            raise ValueError(f"{key} is {shown(raw[key])}; supported is {known[0]!r}")
    for alias, key in (
        ("num_local_experts", "n_routed_experts"),
        ("intermediate_size", "moe_intermediate_size"),
    ):
        if alias in raw and raw[alias] != raw[key]:
            raise ValueError(
                f"{alias} is {shown(raw[alias])} and {key} is {shown(raw[key])}, but both mean the "
                f"same; remove {alias}"
            )


def _layer_kinds(raw: Raw) -> list[str]:
    """A kind for each layer; surplus ones, as that of the depth in compress_ratios, are cut off."""
    layers, kinds = read_layers(raw), raw.get("layer_types")
    if kinds is None and (ratios := raw.get("compress_ratios")) is not None:
        if not isinstance(ratios, list) or any(r not in (0, 4, 128) for r in ratios):
            raise ValueError(f"compress_ratios is {shown(ratios)}; each must be 0, 4 or 128")
        kinds = [{0: WINDOW, 4: CSA, 128: HCA}[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [HCA, HCA, *(CSA if i % 2 else HCA for i in range(layers))]
    return _checked_kinds(kinds, layers, "layer_types", KINDS)


def _expert_kinds(raw: Raw) -> list[str]:
    layers, kinds = read_layers(raw), raw.get("mlp_layer_types")
    if kinds is None:
        hashed = min(count(raw, "num_hash_layers", least=0), layers)
        kinds = [HASHED] * hashed + [ROUTED] * layers
    return _checked_kinds(kinds, layers, "mlp_layer_types", (HASHED, ROUTED))


def _checked_kinds(kinds: object, layers: int, key: str, known: tuple[str, ...]) -> list[str]:
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise ValueError(f"{key} must name a kind for each of the {layers} layers")
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"{key} has {shown(kind)}; supported are {', '.join(known)}")
    return kinds[:layers]


def _read_mixers(raw: Raw) -> dict[str, SparseAttentionConfig]:
    rope_dim, rates = _read_rope_dim(raw), _read_rates(raw)
    main, compressed = _read_ropes(raw, rope_dim)
    window = SparseAttentionConfig(
        heads=count(raw, "num_attention_heads"),
        head_dim=count(raw, "head_dim"),
        rope_dim=rope_dim,
        q_rank=count(raw, "q_lora_rank"),
        window=count(raw, "sliding_window"),
        o_groups=count(raw, "o_groups"),
        o_rank=count(raw, "o_lora_rank"),
        rope=main,
    )
    index = IndexConfig(
        heads=count(raw, "index_n_heads"),
        head_dim=count(raw, "index_head_dim"),
        top_k=count(raw, "index_topk"),
    )
    chosen = replace(window, ratio=rates[CSA], index=index, rope=compressed)
    return {WINDOW: window, CSA: chosen, HCA: replace(chosen, ratio=rates[HCA], index=None)}


def _read_rates(raw: Raw) -> dict[str, int]:
    given = raw.get("compress_rates", {})
    if not isinstance(given, Mapping):
        raise ValueError(f"compress_rates is {shown(given)}; it must be an object")
    older = {CSA: raw.get("compress_rate_csa"), HCA: raw.get("compress_rate_hca")}
    rates = {**RATES, **given, **{kind: rate for kind, rate in older.items() if rate is not None}}
    return {kind: count(rates, kind) for kind in RATES}


def _read_rope_dim(raw: Raw) -> int:
    head_dim, share = count(raw, "head_dim"), raw.get("partial_rotary_factor")
    if share is None and raw.get("qk_rope_head_dim") is not None:
        return count(raw, "qk_rope_head_dim", most=head_dim)
    return _rotary_dims(raw, head_dim)


def _rotary_dims(holder: Raw, head_dim: int) -> int:
    share = number(holder, "partial_rotary_factor", 64 / 512)
    if share > 1:
        raise ValueError(f"partial_rotary_factor is {share:g}; it must be above 0 and at most 1")
    return int(head_dim * share)


def _read_ropes(raw: Raw, rope_dim: int) -> list[RopeConfig]:
    """Positions of layers with a window alone, and of those with entries."""
    given = rope_object(raw)
    main, compressed = given.get("main"), given.get("compress")
    if not isinstance(main, Mapping) or not isinstance(compressed, Mapping):
        main = {"rope_theta": number(raw, "rope_theta")}
        compressed = {**given, "rope_theta": number(raw, "compress_rope_theta")}
        if "yarn" in (compressed.get("rope_type"), compressed.get("type")):
            compressed = {"attention_factor": 1.0, **compressed}
    ropes, head_dim = [], count(raw, "head_dim")
    for label, rope in (("main", main), ("compress", compressed)):
        share = rope.get("partial_rotary_factor")
        if share is not None and _rotary_dims(rope, head_dim) != rope_dim:
            raise ValueError(
                f"rope_parameters.{label}.partial_rotary_factor is {shown(share)}; it must be that "
                f"of all layers, {rope_dim / head_dim:g}"
            )
        lengths = {"max_position_embeddings": raw["max_position_embeddings"]}
        plain = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        ropes.append(read_rope({**lengths, "rope_parameters": plain}))
    return ropes


def _read_v4_experts(raw: Raw) -> dict[str, MoEConfig]:
    score, width = raw.get("scoring_func", "sqrtsoftplus"), count(raw, "moe_intermediate_size")
    if not isinstance(score, str) or score not in SCORES:
        raise ValueError(f"scoring_func is {shown(score)}; supported are {', '.join(SCORES)}")
    routed = MoEConfig(
        experts=count(raw, "n_routed_experts"),
        top_k=count(raw, "num_experts_per_tok"),
        width=width,
        score=SCORES[score],  # type: ignore[arg-type]
        scale=number(raw, "routed_scaling_factor"),
        shared_width=width,
        limit=number(raw, "swiglu_limit"),
        bias=True,
    )
    hashed = replace(routed, bias=False, hash_rows=count(raw, "vocab_size"))
    return {ROUTED: routed, HASHED: hashed}


def _kind(mixer: SparseAttentionConfig) -> str:
    if mixer.index is not None:
        return CSA
    return HCA if mixer.ratio else WINDOW


def _mixer_keys(mixers: list[SparseAttentionConfig]) -> dict[str, Any]:
    window, chosen, pooled = kinds = [
        common_part_or_none([m if _kind(m) == kind else None for m in mixers], kind)
        for kind in KINDS
    ]
    present = [mixer for mixer in kinds if mixer is not None]
    alike = [replace(mixer, ratio=0, index=None, rope=RopeConfig()) for mixer in present]
    common_part(alike, "size of attention")
    mixer, compressed = present[0], [m for m in present if m.ratio]
    if len({m.rope for m in compressed}) > 1:
        raise ValueError("its layers with entries differ in their positions")
    keys: dict[str, Any] = {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": 1,
        "head_dim": mixer.head_dim,
        "q_lora_rank": mixer.q_rank,
        "sliding_window": mixer.window,
        "o_groups": mixer.o_groups,
        "o_lora_rank": mixer.o_rank,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "compress_rates": {
            CSA: chosen.ratio if chosen else RATES[CSA],
            HCA: pooled.ratio if pooled else RATES[HCA],
        },
    }
    if chosen is not None and (index := chosen.index) is not None:
        keys |= {
            "index_n_heads": index.heads,
            "index_head_dim": index.head_dim,
            "index_topk": index.top_k,
        }
    main = window.rope if window else RopeConfig()
    default = RopeConfig(theta=V4_DEFAULTS["compress_rope_theta"])
    return keys | _v4_rope_keys(mixer, main, compressed[0].rope if compressed else default)


def _v4_rope_keys(
    mixer: SparseAttentionConfig, main: RopeConfig, compressed: RopeConfig
) -> dict[str, Any]:
    share = mixer.rope_dim / mixer.head_dim
    if int(mixer.head_dim * share) != mixer.rope_dim:
        raise ValueError(
            f"its rotary share of heads, {mixer.rope_dim} of {mixer.head_dim}, is not read back as "
            "it is written; use another head_dim"
        )
    if main.scaling is not None or not isinstance(compressed.scaling, YarnScaling | None):
        raise ValueError(
            "its positions are scaled in another way than by yarn in layers with entries"
        )
    length = scaled_length(compressed)
    return {
        **({"max_position_embeddings": length} if length else {}),
        "rope_theta": main.theta,
        "compress_rope_theta": compressed.theta,
        "partial_rotary_factor": share,
        "rope_parameters": {
            label: {
                "rope_type": "default",
                **({} if rope.scaling is None else scaling_keys(rope.scaling)),
                "rope_theta": rope.theta,
                "partial_rotary_factor": share,
            }
            for label, rope in (("main", main), ("compress", compressed))
        },
    }


def _v4_expert_keys(config: DecoderConfig) -> dict[str, Any]:
    moes = all_of_kind((*config.layers, *config.mtp), "mlp", MoEConfig, "has no experts")
    routed = common_part_or_none([None if m.hash_rows else m for m in moes], "layer of experts")
    hashed = common_part_or_none([m if m.hash_rows else None for m in moes], "hashed layer")
    moe = routed or hashed
    assert moe is not None
    plain = replace(moe, bias=False, bias_update=0.0, aux_weight=0.0, hash_rows=0)
    if hashed is not None and replace(hashed, hash_rows=0) != plain:
        raise ValueError("experts chosen by token ids differ from those chosen by a router")
    names = {score: name for name, score in SCORES.items()}
    if moe.score not in names or not moe.normalise or moe.groups > 1 or moe.shared_gate:
        raise ValueError("its experts are not chosen and weighed as DeepSeek-V4's are")
    if (routed is not None and not routed.bias) or moe.shared_width != moe.width or not moe.limit:
        raise ValueError("its routers have no bias, its shared expert another width, or no limit")
    return {
        "moe_intermediate_size": moe.width,
        "n_routed_experts": moe.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": moe.top_k,
        "routed_scaling_factor": moe.scale,
        "norm_topk_prob": True,
        "scoring_func": names[moe.score],
        "swiglu_limit": moe.limit,
        "mlp_layer_types": [HASHED if m.hash_rows else ROUTED for m in moes[: len(config.layers)]],
    }
