"""DeepSeek-V3: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. How the experts' bias is updated is a matter of training: config.json does not say it.

    {"num_hidden_layers": 61, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, …}
    61 layers, of which 3 have an MLP and 58 experts, and one depth of multi-token prediction

A folder that transformers saved has no tensors for multi-token prediction, though its config.json
has num_nextn_predict_layers; config_file.py checks, and reads such a folder without depths.

DeepSeek-V4: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. The weight of the index's loss and how the experts' bias is updated are matters of
training: config.json does not say them.

    {"num_hidden_layers": 4, "layer_types": ["sliding_attention", …], "num_hash_layers": 3, …}
    four layers, of which token ids choose the experts of the first three

DeepSeek's own files say compress_ratios, 0, 4 or 128 for each layer and one more for the depth,
where transformers writes layer_types and compress_rates; num_hash_layers where it writes
mlp_layer_types; qk_rope_head_dim where it writes partial_rotary_factor. Both are read, and the
latter written. Positions of layers with entries have a base of their own, and may be scaled.

A depth of multi-token prediction has a window and no entries. transformers leaves depths out, and
those of DeepSeek's own folders join their inputs in another way: both are read without depths.

DeepSeek-V4: which tensors of a folder hold each tensor of ours.

In: the name of one of our tensors. Out: its Source; see hf/tensor_map.py. A folder has the names
that transformers saves, which are those of DeepSeek's own folders but for the beginning and the
ends: model.layers.0.attn.wq_a.weight here is layers.0.attn.wq_a.weight there. Both are read.

    layers.3.mixer.q_up.weight        model.layers.3.attn.wq_b.weight
    layers.3.mixer.biases.entries     model.layers.3.attn.compressor.ape

RoPE rotates dims 2i and 2i + 1 of a head's last ones there, and i and i + R here. So all rows that
make such dims, and the columns that read them, are in another order: of every head of 6 dims, 4 of
them rotary, theirs 0 1 2 3 4 5 are ours in the order 0 1 2 4 3 5.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from longshore.arch.attention import MLAConfig
from longshore.arch.decoder import MOST_DEPTHS, DecoderConfig, HyperConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig
from longshore.hf.keys import (
    SILU,
    common_part,
    common_part_or_none,
    decoder_keys,
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
    write_rope,
)
from longshore.hf.tensor_map import (
    BlockReader,
    Index,
    Interleaved,
    Make,
    PerExpert,
    Row,
    Source,
    StorageLayout,
    look_up,
)
from longshore.hf.typed_keys import Raw, count, flag, number, shown

if TYPE_CHECKING:
    from torch import Tensor

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


WINDOW, CSA, HCA = KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
OF_RATIO = {0: WINDOW, 4: CSA, 128: HCA}
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
ROTARY_SHARE = 64 / 512
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
"""Keys of DeepSeek's own files, with the meaning of others that we write."""


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
    mixers = parts_of_kind((*config.layers, *config.mtp), "mixer", SparseAttentionConfig)
    if None in mixers:
        raise ValueError(f"layer {mixers.index(None)} is not compressed sparse attention")
    depth = len(config.layers)
    if any(mixer is not None and mixer.ratio for mixer in mixers[depth:]):
        raise ValueError("a depth of multi-token prediction has entries")
    return {
        **decoder_keys(config),
        **_mixer_keys(_Kinds.of(mixers)),
        **_v4_expert_keys(config),
        "layer_types": [_kind(mixer) for mixer in mixers[:depth] if mixer is not None],
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
        kinds = [OF_RATIO[ratio] for ratio in ratios]
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
    rope_dim = _read_rope_dim(raw)
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
    rates = _read_rates(raw)
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
    return _rotary_dims(raw, head_dim, ROTARY_SHARE)


def _rotary_dims(holder: Raw, head_dim: int, default: float) -> int:
    share = number(holder, "partial_rotary_factor", default)
    if not 0 < share <= 1:
        raise ValueError(f"partial_rotary_factor is {share:g}; it must be above 0 and at most 1")
    return int(head_dim * share)


def _read_ropes(raw: Raw, rope_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window alone, and of those with entries."""
    given = rope_object(raw)
    main, compressed = given.get("main"), given.get("compress")
    if not isinstance(main, Mapping) or not isinstance(compressed, Mapping):
        main = {"rope_theta": number(raw, "rope_theta")}
        compressed = {**given, "rope_theta": number(raw, "compress_rope_theta")}
        if "yarn" in (compressed.get("rope_type"), compressed.get("type")):
            compressed = {"attention_factor": 1.0, **compressed}
    ropes = []
    for label, rope in (("main", main), ("compress", compressed)):
        head_dim, given_here = count(raw, "head_dim"), rope.get("partial_rotary_factor") is not None
        if given_here and _rotary_dims(rope, head_dim, ROTARY_SHARE) != rope_dim:
            raise ValueError(
                f"rope_parameters.{label}.partial_rotary_factor is "
                f"{shown(rope.get('partial_rotary_factor'))}; it must be that of all layers, "
                f"{rope_dim / head_dim:g}"
            )
        lengths = {"max_position_embeddings": raw["max_position_embeddings"]}
        plain = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        ropes.append(read_rope({**lengths, "rope_parameters": plain}))
    return ropes[0], ropes[1]


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


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The mixer of each kind of layer; None where there is no such layer."""

    window: SparseAttentionConfig | None
    chosen: SparseAttentionConfig | None
    pooled: SparseAttentionConfig | None

    @staticmethod
    def of(mixers: list[SparseAttentionConfig | None]) -> "_Kinds":
        def common(kind: str) -> SparseAttentionConfig | None:
            alike = [m if m is not None and _kind(m) == kind else None for m in mixers]
            return common_part_or_none(alike, kind)

        kinds = _Kinds(common(WINDOW), common(CSA), common(HCA))
        alike = [
            replace(mixer, ratio=0, index=None, rope=RopeConfig())
            for mixer in (kinds.window, kinds.chosen, kinds.pooled)
            if mixer is not None
        ]
        common_part(alike, "size of attention")
        return kinds


def _kind(mixer: SparseAttentionConfig) -> str:
    if mixer.index is not None:
        return CSA
    return HCA if mixer.ratio else WINDOW


def _mixer_keys(kinds: _Kinds) -> dict[str, Any]:
    present = [m for m in (kinds.window, kinds.chosen, kinds.pooled) if m is not None]
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
            CSA: kinds.chosen.ratio if kinds.chosen else RATES[CSA],
            HCA: kinds.pooled.ratio if kinds.pooled else RATES[HCA],
        },
    }
    if kinds.chosen is not None and (index := kinds.chosen.index) is not None:
        keys |= {
            "index_n_heads": index.heads,
            "index_head_dim": index.head_dim,
            "index_topk": index.top_k,
        }
    main = kinds.window.rope if kinds.window else RopeConfig()
    theta = V4_DEFAULTS["compress_rope_theta"]
    far = compressed[0].rope if compressed else RopeConfig(theta=theta)
    return keys | _rope_keys(mixer, main, far)


def _rope_keys(mixer: SparseAttentionConfig, main: RopeConfig, far: RopeConfig) -> dict[str, Any]:
    share = mixer.rope_dim / mixer.head_dim
    if int(mixer.head_dim * share) != mixer.rope_dim:
        raise ValueError(
            f"its rotary share of heads, {mixer.rope_dim} of {mixer.head_dim}, is not read back as "
            "it is written; use another head_dim"
        )
    if main.scaling is not None or not isinstance(far.scaling, YarnScaling | None):
        raise ValueError(
            "its positions are scaled in another way than by yarn in layers with entries"
        )
    length = scaled_length(far)
    return {
        **({"max_position_embeddings": length} if length else {}),
        "rope_theta": main.theta,
        "compress_rope_theta": far.theta,
        "partial_rotary_factor": share,
        "rope_parameters": {
            label: {
                "rope_type": "default",
                **(write_rope(rope, mixer.rope_dim)["rope_scaling"] or {}),
                "rope_theta": rope.theta,
                "partial_rotary_factor": share,
            }
            for label, rope in (("main", main), ("compress", far))
        },
    }


def _v4_expert_keys(config: DecoderConfig) -> dict[str, Any]:
    parts = parts_of_kind((*config.layers, *config.mtp), "mlp", MoEConfig)
    if None in parts:
        raise ValueError(f"layer {parts.index(None)} has no experts")
    moes = [moe for moe in parts if moe is not None]
    depth = len(config.layers)
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
        "mlp_layer_types": [HASHED if m.hash_rows else ROUTED for m in moes[:depth]],
    }


@dataclass(frozen=True, slots=True)
class InterleavedColumns(Interleaved):
    """Of every `block` columns the last `rotary` are in another order."""

    def read(self, files: BlockReader, index: Index) -> "Tensor":
        rows, *rest = index
        width = files.shape(self.theirs)[1]
        start, stop, _ = (rest[0] if rest else slice(None)).indices(width)
        first = start // self.block * self.block
        last = max(first, min(-(-stop // self.block) * self.block, width))
        theirs = files.block(self.theirs, (rows, slice(first, last)))
        plain, rotary = self._split(theirs.T)
        rotary = rotary.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return self._joined(plain, rotary)[start - first : stop - first].T.contiguous()

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        for name, rows in Interleaved.write(self, tensor.T):
            yield name, rows.T.contiguous()


def _head(theirs: str, layout: StorageLayout) -> Source:
    mixer = _any_mixer(layout)
    return Interleaved(theirs, block=mixer.head_dim, rotary=mixer.rope_dim)


def _head_columns(theirs: str, layout: StorageLayout) -> Source:
    mixer = _any_mixer(layout)
    return InterleavedColumns(theirs, block=mixer.head_dim, rotary=mixer.rope_dim)


def _index_head(theirs: str, layout: StorageLayout) -> Source:
    return Interleaved(theirs, block=_index_width(layout), rotary=_any_mixer(layout).rope_dim)


def _index_columns(theirs: str, layout: StorageLayout) -> Source:
    return InterleavedColumns(
        theirs, block=_index_width(layout), rotary=_any_mixer(layout).rope_dim
    )


def _mixers(layout: StorageLayout) -> list[SparseAttentionConfig]:
    layers = (*layout.config.layers, *layout.config.mtp)
    mixers = [layer.mixer for layer in layers]
    return [mixer for mixer in mixers if isinstance(mixer, SparseAttentionConfig)]


def _any_mixer(layout: StorageLayout) -> SparseAttentionConfig:
    """Heads are alike in all layers."""
    return _mixers(layout)[0]


def _index_width(layout: StorageLayout) -> int:
    return next(mixer.index.head_dim for mixer in _mixers(layout) if mixer.index is not None)


def _pooled_rows(ours: str, theirs: str, *, bias: str, make: Make, columns: Make) -> list[Row]:
    return [
        (f"{ours}.kv_proj.weight", f"{theirs}.wkv.weight", make),
        (f"{ours}.gate_proj.weight", f"{theirs}.wgate.weight", make),
        (f"{ours}.norm.weight", f"{theirs}.norm.weight", make),
        (bias, f"{theirs}.ape", columns),
    ]


def mixer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """ours: such as layers.{i}.mixer. theirs: such as model.layers.{i}.attn."""
    return (
        (f"{ours}.q_down.weight", f"{theirs}.wq_a.weight"),
        (f"{ours}.q_norm.weight", f"{theirs}.q_norm.weight"),
        (f"{ours}.q_up.weight", f"{theirs}.wq_b.weight", _head),
        (f"{ours}.kv_proj.weight", f"{theirs}.wkv.weight", _head),
        (f"{ours}.kv_norm.weight", f"{theirs}.norm.weight", _head),
        (f"{ours}.biases.sinks", f"{theirs}.attn_sink"),
        (f"{ours}.o_down.weight", f"{theirs}.wo_a.weight", _head_columns),
        (f"{ours}.o_up.weight", f"{theirs}.wo_b.weight"),
        *_pooled_rows(
            f"{ours}.entries",
            f"{theirs}.compressor",
            bias=f"{ours}.biases.entries",
            make=_head,
            columns=_head_columns,
        ),
        (f"{ours}.index.q_up.weight", f"{theirs}.indexer.wq_b.weight", _index_head),
        (f"{ours}.index.weights_proj.weight", f"{theirs}.indexer.weights_proj.weight"),
        *_pooled_rows(
            f"{ours}.index.keys",
            f"{theirs}.indexer.compressor",
            bias=f"{ours}.biases.index",
            make=_index_head,
            columns=_index_columns,
        ),
    )


def _gate_up(theirs: str, layout: StorageLayout) -> Source:
    return PerExpert(theirs, ("w1", "w3"))


def _down(theirs: str, layout: StorageLayout) -> Source:
    return PerExpert(theirs, ("w2",))


def _layer_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.mixer_norm.weight", f"{theirs}.attn_norm.weight"),
        (f"{ours}.mlp_norm.weight", f"{theirs}.ffn_norm.weight"),
        *_hyper_rows(f"{ours}.mixer_hyper", f"{theirs}.hc_attn"),
        *_hyper_rows(f"{ours}.mlp_hyper", f"{theirs}.hc_ffn"),
        *mixer_rows(f"{ours}.mixer", f"{theirs}.attn"),
        (f"{ours}.mlp.router.weight", f"{theirs}.ffn.gate.weight"),
        (f"{ours}.mlp.router.bias", f"{theirs}.ffn.gate.bias"),
        (f"{ours}.mlp.router.table", f"{theirs}.ffn.gate.tid2eid"),
        (f"{ours}.mlp.experts.gate_up", f"{theirs}.ffn.experts", _gate_up),
        (f"{ours}.mlp.experts.down", f"{theirs}.ffn.experts", _down),
        (f"{ours}.mlp.shared.gate_proj.weight", f"{theirs}.ffn.shared_experts.w1.weight"),
        (f"{ours}.mlp.shared.down_proj.weight", f"{theirs}.ffn.shared_experts.w2.weight"),
        (f"{ours}.mlp.shared.up_proj.weight", f"{theirs}.ffn.shared_experts.w3.weight"),
    )


def _hyper_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        (f"{ours}.weight", f"{theirs}_fn"),
        (f"{ours}.base", f"{theirs}_base"),
        (f"{ours}.scale", f"{theirs}_scale"),
    )


DEEPSEEK_V4_NAMES: tuple[Row, ...] = (
    ("embed.weight", "embed.weight"),
    ("norm.weight", "norm.weight"),
    ("head.weight", "head.weight"),
    *_hyper_rows("collapse", "hc_head"),
    *_layer_rows("layers.{i}", "layers.{i}"),
    ("mtp.{i}.embed_norm.weight", "mtp.{i}.enorm.weight"),
    ("mtp.{i}.hidden_norm.weight", "mtp.{i}.hnorm.weight"),
    ("mtp.{i}.proj.weight", "mtp.{i}.eh_proj.weight"),
    ("mtp.{i}.norm.weight", "mtp.{i}.norm.weight"),
    *_hyper_rows("mtp.{i}.collapse", "mtp.{i}.hc_head"),
    *_layer_rows("mtp.{i}.block", "mtp.{i}"),
)
"""As in DeepSeek's own folders, but for the join of a depth: two tensors there."""

IN_TRANSFORMERS = {
    "embed.weight": "model.embed_tokens.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
    "norm.weight": "model.norm.weight",
}
"""What transformers calls the ends."""


def place_deepseek_v4(name: str, layout: StorageLayout) -> Source:
    """As transformers saves it, or as in DeepSeek's own folders where the folder is one."""
    source = look_up(name, DEEPSEEK_V4_NAMES, layout)
    if "embed.weight" in layout.tensor_names:
        return source
    theirs = IN_TRANSFORMERS.get(
        source.theirs, re.sub(r"^layers\.", "model.layers.", source.theirs)
    )
    return replace(source, theirs=theirs)
