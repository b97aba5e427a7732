"""Mamba2 and Nemotron-H: the keys of config.json, and our config.

In: a config.json as a dict. Out: a DecoderConfig, and back. Missing keys have the defaults of
transformers. In both a layer is one part: in Nemotron-H's pattern M is Mamba2, * is attention
without RoPE, and - is an MLP.

    {"hybrid_override_pattern": "M-*", …}
    layers[0] Mamba2 and no mlp, layers[1] an MLP and no mixer, layers[2] attention and no mlp
"""

import math
from typing import Any

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import MOST_LAYERS, DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.scan import Mamba2Config
from longshore.hf.keys import (
    SILU,
    Raw,
    common_part,
    common_part_or_none,
    count,
    decoder_keys,
    flag,
    number,
    parts_of_kind,
    read_decoder,
    read_kv_heads,
    read_layers,
    refuse_unsupported,
    require_no_mtp,
    require_plain_norms,
    shown,
)

MAMBA2_DEFAULTS = {
    "num_heads": 128,
    "head_dim": 64,
    "hidden_size": 4096,
    "state_size": 128,
    "conv_kernel": 4,
    "n_groups": 8,
    "expand": 2,
    "initializer_range": 0.1,
}
NEMOTRON_DEFAULTS = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_min": 0.001,
}
OLDER = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
"""Older names of keys; they take precedence."""

LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}


def read_mamba2(raw: Raw) -> DecoderConfig:
    raw = {**MAMBA2_DEFAULTS, **raw}
    refuse_unsupported(raw, SILU)
    least, most = _limits(raw)
    mixer = Mamba2Config(
        heads=count(raw, "num_heads"),
        head_dim=count(raw, "head_dim"),
        state_dim=count(raw, "state_size"),
        groups=count(raw, "n_groups"),
        kernel=count(raw, "conv_kernel"),
        norm_groups=1,
        bias=flag(raw, "use_bias"),
        conv_bias=flag(raw, "use_conv_bias", True),
        dt_min=least,
        dt_max=most,
    )
    width, expand = count(raw, "hidden_size"), count(raw, "expand")
    if mixer.inner != width * expand:
        raise ValueError(
            f"num_heads {mixer.heads} times head_dim {mixer.head_dim} is not hidden_size {width} "
            f"times expand {expand}, which transformers refuses in a Mamba2ForCausalLM"
        )
    return read_decoder(
        raw,
        (LayerConfig(mixer, None),) * read_layers(raw),
        norm_eps=number(raw, "layer_norm_epsilon", 1e-5),
        float32_residual=flag(raw, "residual_in_fp32", True),
    )


def mamba2_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a Mamba2."""
    require_plain_norms(config)
    require_no_mtp(config)
    mixer = common_part(parts_of_kind(config.layers, "mixer", Mamba2Config), "Mamba2")
    for i, layer in enumerate(config.layers):
        if layer != LayerConfig(mixer, None):
            raise ValueError(f"layer {i} is not Mamba2 alone")
    if (mixer.norm_groups or mixer.groups) != 1:
        raise ValueError(f"its gated norm has {mixer.norm_groups or mixer.groups} groups")
    if mixer.inner % config.width:
        raise ValueError(
            f"its {mixer.inner} channels are not a multiple of its width {config.width}"
        )
    return {
        **decoder_keys(config),
        "num_heads": mixer.heads,
        "head_dim": mixer.head_dim,
        "state_size": mixer.state_dim,
        "n_groups": mixer.groups,
        "conv_kernel": mixer.kernel,
        "expand": mixer.inner // config.width,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "hidden_act": "silu",
        "layer_norm_epsilon": config.norm_eps,
        "residual_in_fp32": config.float32_residual,
        "time_step_limit": [mixer.dt_min, math.inf if mixer.dt_max is None else mixer.dt_max],
    }


def read_nemotron(raw: Raw) -> DecoderConfig:
    renamed = {new: raw[old] for old, new in OLDER.items() if old in raw}
    raw = {**NEMOTRON_DEFAULTS, **raw, **renamed}
    refuse_unsupported(raw, {"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish")})
    for key in ("attention_bias", "sliding_window", "num_nextn_predict_layers"):
        if raw.get(key):
            raise ValueError(f"{key} is {shown(raw[key])}; a Nemotron-H with it is not supported")
    scan = Mamba2Config(
        heads=count(raw, "mamba_num_heads"),
        head_dim=count(raw, "mamba_head_dim"),
        state_dim=count(raw, "ssm_state_size"),
        groups=count(raw, "n_groups"),
        kernel=count(raw, "conv_kernel"),
        bias=flag(raw, "use_bias"),
        conv_bias=flag(raw, "use_conv_bias", True),
        dt_min=number(raw, "time_step_min"),
    )
    heads = count(raw, "num_attention_heads")
    key = "head_dim" if raw.get("head_dim") is not None else "attention_head_dim"
    full = AttentionConfig(
        heads=heads,
        kv_heads=read_kv_heads(raw, heads),
        head_dim=count({"attention_head_dim": 128, **raw}, key),
        rope=None,
    )
    mlp = MLPConfig(width=count(raw, "intermediate_size"), activation="relu2")
    kinds = {
        "M": LayerConfig(scan, None),
        "*": LayerConfig(full, None),
        "-": LayerConfig(None, mlp),
    }
    return read_decoder(
        raw,
        [kinds[letter] for letter in _read_pattern(raw)],
        norm_eps=number(raw, "layer_norm_epsilon", 1e-5),
        tied=False,  # transformers never ties it, whatever tie_word_embeddings says
    )


def nemotron_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json for this config; raises ValueError if it is not a Nemotron-H."""
    require_plain_norms(config)
    require_no_mtp(config)
    if config.tied:
        raise ValueError("its head is tied to the embedding, which it never is in transformers")
    scan = common_part_or_none(parts_of_kind(config.layers, "mixer", Mamba2Config), "Mamba2")
    full = common_part_or_none(parts_of_kind(config.layers, "mixer", AttentionConfig), "attention")
    mlp = common_part_or_none(parts_of_kind(config.layers, "mlp", MLPConfig), "MLP")
    pattern = ""
    for i, layer in enumerate(config.layers):
        match layer:
            case LayerConfig(mixer=Mamba2Config(), mlp=None):
                pattern += "M"
            case LayerConfig(mixer=AttentionConfig(), mlp=None):
                pattern += "*"
            case LayerConfig(mixer=None, mlp=MLPConfig()):
                pattern += "-"
            case _:
                raise ValueError(f"layer {i} is not one part: Mamba2, attention or an MLP")
    return {
        **decoder_keys(config),
        "hybrid_override_pattern": pattern,
        **({} if full is None else _bare_attention_keys(full)),
        **({} if mlp is None else _squared_keys(mlp)),
        **({} if scan is None else _scan_keys(scan)),
        "layer_norm_epsilon": config.norm_eps,
    }


def _bare_attention_keys(full: AttentionConfig) -> dict[str, Any]:
    plain = AttentionConfig(
        heads=full.heads, kv_heads=full.kv_heads, head_dim=full.head_dim, rope=None
    )
    if full != plain:
        raise ValueError("its attention has positions, norms, biases, a window or a gate")
    return {
        "num_attention_heads": full.heads,
        "num_key_value_heads": full.kv_heads,
        "head_dim": full.head_dim,
        "attention_head_dim": full.head_dim,
        "attention_bias": False,
    }


def _squared_keys(mlp: MLPConfig) -> dict[str, Any]:
    if mlp.activation != "relu2":
        raise ValueError(f"its MLP is {mlp.activation}, not relu2")
    return {"intermediate_size": mlp.width, "mlp_hidden_act": "relu2", "mlp_bias": False}


def _scan_keys(scan: Mamba2Config) -> dict[str, Any]:
    if scan.norm_groups not in (None, scan.groups) or scan.dt_max is not None or not scan.dt_min:
        raise ValueError("its Mamba2 has other norm groups or limits of dt than Nemotron-H")
    return {
        "mamba_num_heads": scan.heads,
        "mamba_head_dim": scan.head_dim,
        "mamba_hidden_act": "silu",
        "ssm_state_size": scan.state_dim,
        "n_groups": scan.groups,
        "conv_kernel": scan.kernel,
        "use_bias": scan.bias,
        "use_conv_bias": scan.conv_bias,
        "time_step_min": scan.dt_min,
    }


def _limits(raw: Raw) -> tuple[float, float | None]:
    """time_step_limit; infinity, which JSON does not have, is spelled in several ways."""
    limits = raw.get("time_step_limit")
    if limits is None:
        return 0.0, None
    if not isinstance(limits, list) or len(limits) != 2:
        raise ValueError(f"time_step_limit is {shown(limits)}; it must be a list of two numbers")
    values = []
    for value in limits:
        if isinstance(value, dict) and list(value) == ["__float__"]:
            value = value["__float__"]
        try:
            values.append(float(value))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"time_step_limit has {shown(value)}, which is not a number") from None
    least, most = values
    return least, None if math.isinf(most) else most


def _read_pattern(raw: Raw) -> str:
    pattern = raw.get("hybrid_override_pattern")
    kinds = raw.get("layer_types", raw.get("layers_block_type"))
    if kinds is not None:
        if not isinstance(kinds, list) or not all(
            isinstance(kind, str) and kind in LETTERS for kind in kinds
        ):
            raise ValueError(f"layers_block_type is {shown(kinds)}; known are {', '.join(LETTERS)}")
        pattern = "".join(LETTERS[kind] for kind in kinds)
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set("M*-E"):
        raise ValueError(
            f"hybrid_override_pattern is {shown(pattern)}; it must name each layer with M, * or -"
        )
    if len(pattern) > MOST_LAYERS:
        raise ValueError(
            f"hybrid_override_pattern has {len(pattern)} layers; at most {MOST_LAYERS} are "
            "supported"
        )
    if "E" in pattern:
        raise ValueError(
            f"layer {pattern.index('E')} has experts without a gate (E, moe), which are not "
            "supported; supported are M, * and -"
        )
    return pattern
