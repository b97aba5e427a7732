"""Keys of config.json that several architectures share, read and written.

In: a config.json as a dict, or parts of our config. Out: parts of our config, or keys. Missing keys
have the defaults of transformers.

    read_attention({"num_attention_heads": 4, "hidden_size": 64, …}, qk_norm=True)
    AttentionConfig(heads=4, kv_heads=4, head_dim=16, qk_norm=True, …)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import MOST_LAYERS, DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Part
from longshore.arch.rope import RopeConfig
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.hf.quantized import refuse_quantized
from longshore.hf.rope_keys import read_rope, scaled_length, write_rope
from longshore.hf.typed_keys import Raw, count, flag, number, shown

Kind = TypeVar("Kind", bound=Part)


def read_decoder(raw: Raw, layers: Sequence[LayerConfig], **more: Any) -> DecoderConfig:  # noqa: ANN401
    """The decoder around these layers. more: fields of DecoderConfig."""
    named: dict[str, Any] = {
        "vocab_size": count(raw, "vocab_size"),
        "width": count(raw, "hidden_size"),
        "layers": tuple(layers),
        "norm_eps": number(raw, "rms_norm_eps", 1e-6),
        "tied": flag(raw, "tie_word_embeddings"),
        "init_std": number(raw, "initializer_range", 0.02),
    }
    return DecoderConfig(**named | more)


def read_layers(raw: Raw) -> int:
    return count(raw, "num_hidden_layers", most=MOST_LAYERS)


def read_layer_types(raw: Raw, known: Sequence[str]) -> list[str] | None:
    """layer_types, one of the `known` kinds for each layer; None where the key is missing."""
    layers, kinds = read_layers(raw), raw.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types must name a kind for each of the {layers} layers")
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"layer_types has {shown(kind)}; supported are {' and '.join(known)}")
    return kinds


def read_pad_token(raw: Raw) -> int | None:
    """pad_token_id, for architectures that freeze its row; below 0 it counts from the end."""
    token, vocab_size = raw.get("pad_token_id"), count(raw, "vocab_size")
    if token is None:
        return None
    is_whole = isinstance(token, int) and not isinstance(token, bool)
    if not is_whole or not -vocab_size <= token < vocab_size:
        raise ValueError(
            f"pad_token_id is {shown(token)}; it must be null, or a token id below vocab_size, "
            f"{vocab_size}"
        )
    return int(token) % vocab_size


def decoder_keys(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied,
        **({} if config.pad_token_id is None else {"pad_token_id": config.pad_token_id}),
    }


def read_attention(raw: Raw, *, qk_norm: bool, partial: bool = False) -> AttentionConfig:
    """partial: whether RoPE may rotate only a share of each head."""
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    head_dim = _head_dim(raw, width, heads)
    return AttentionConfig(
        heads=heads,
        kv_heads=read_kv_heads(raw, heads),
        head_dim=head_dim,
        rope=read_rope(raw, head_dim if partial else None),
        qk_norm=qk_norm,
        bias=flag(raw, "attention_bias"),
        output_bias=flag(raw, "attention_bias"),
    )


def attention_keys(mixer: AttentionConfig, *, partial: bool = False) -> dict[str, Any]:
    if mixer.rope is None:
        raise ValueError("its attention has no rotary positions")
    if mixer.bias != mixer.output_bias:
        raise ValueError("only some projections of its attention have a bias")
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "attention_bias": mixer.bias,
        "attention_dropout": 0.0,
        **rope_keys(mixer.rope, mixer.head_dim, partial=partial),
    }


def rope_keys(rope: RopeConfig, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """The keys of RoPE, and max_position_embeddings where the scaling depends on it."""
    length = scaled_length(rope)
    return {
        **({"max_position_embeddings": length} if length else {}),
        **write_rope(rope, head_dim, partial=partial),
    }


def read_kv_heads(raw: Raw, heads: int) -> int:
    """As many as heads where the key is missing."""
    if raw.get("num_key_value_heads") is None:
        return heads
    kv_heads = count(raw, "num_key_value_heads")
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads, {heads}"
        )
    return kv_heads


def _head_dim(raw: Raw, width: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return count(raw, "head_dim")
    if width % heads:
        raise ValueError(
            f"hidden_size {width} is not a multiple of num_attention_heads {heads}; give head_dim"
        )
    return width // heads


def refuse_unsupported(raw: Raw, activations: Mapping[str, Sequence[str]]) -> None:
    """Refuses what no architecture here supports. activations: the values allowed for each key."""
    for key, known in activations.items():
        if (activation := raw.get(key, known[0])) not in known:
            raise ValueError(f"{key} is {shown(activation)}; supported is {known[0]}")
    if not flag(raw, "is_causal", True):
        raise ValueError(f"is_causal is {raw['is_causal']!r}; only causal models are supported")
    for key, why in UNSUPPORTED_KEYS.items():
        if raw.get(key):
            raise ValueError(f"{key} is {shown(raw[key])}, {why}; this is not supported")
    refuse_quantized(raw)
    if flag(raw, "mlp_bias"):
        raise ValueError("mlp_bias is true; only MLPs without bias are supported")
    for key in ("attention_dropout", "hidden_dropout", "router_jitter_noise"):
        if raw.get(key):
            raise ValueError(
                f"{key} is {shown(raw[key])}; dropout and noise are not supported, so set it to 0"
            )


UNSUPPORTED_KEYS = {
    "per_layer_config": "which changes keys for some layers",
    "transformers_weights": "which names other files of weights",
    "fusion_config": "which joins tensors into others",
}
"""Keys that any config.json of transformers may have, and what they change."""

SILU = {"hidden_act": ("silu", "swish")}


def require_plain_norms(config: DecoderConfig) -> None:
    if config.zero_centred:
        raise ValueError("its norms are zero-centred")


def require_no_mtp(config: DecoderConfig) -> None:
    if config.mtp:
        raise ValueError("it has multi-token prediction, which this architecture cannot store")


def parts_of_kind(layers: Sequence[LayerConfig], field: str, kind: type[Kind]) -> list[Kind | None]:
    """The mixer or mlp of each layer; None where it is of another kind."""
    parts = (getattr(layer, field) for layer in layers)
    return [part if isinstance(part, kind) else None for part in parts]


def common_part(parts: Sequence[Kind | None], what: str) -> Kind:
    """The config that all layers with such a part share; raises if they differ or none has it."""
    present = [(i, part) for i, part in enumerate(parts) if part is not None]
    if not present:
        raise ValueError(f"it has no {what}")
    first, common = present[0]
    for i, part in present:
        if part != common:
            raise ValueError(f"layer {i} has another {what} than layer {first}")
    return common


def common_part_or_none(parts: Sequence[Kind | None], what: str) -> Kind | None:
    """The same, but None where no layer has such a part."""
    return common_part(parts, what) if any(part is not None for part in parts) else None


def bare(config: DecoderConfig) -> DecoderConfig:
    """The config without the fields that decide only how the model is trained and computed.

    These are the experts' balance loss and bias update, the form of MLA, the weight of an index's
    loss, pad_token_id and float32_residual. config.json has no keys for them, or keeps those of the
    base.
    """
    layers, mtp = map(_bare_layers, (config.layers, config.mtp))
    return replace(config, layers=layers, mtp=mtp, pad_token_id=None, float32_residual=False)


def _bare_layers(layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    bare_layers = []
    for layer in layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, MLAConfig):
            mixer = replace(mixer, form="decompressed")
        if isinstance(mixer, SparseAttentionConfig) and mixer.index is not None:
            mixer = replace(mixer, index=replace(mixer.index, loss_weight=1.0))
        if isinstance(mlp, MoEConfig):
            mlp = replace(mlp, aux_weight=0.0, bias_update=0.0)
        bare_layers.append(LayerConfig(mixer, mlp))
    return tuple(bare_layers)


def require_gated(mlp: MLPConfig) -> MLPConfig:
    if not mlp.gated:
        raise ValueError(f"its MLP is {mlp.activation}, without a gate")
    return mlp
