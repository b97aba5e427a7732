"""What any decoder of transformers costs, from the common keys of its config.json. No torch.

In: a config.json as a dict. Out: a DecoderConfig that describes its size: for the planner's cost,
FLOPs, memory and the shapes that lanes exchange. It is not the model, which is transformers' own
code (hf/adapter.py); where we know the architecture, the description is exact.

    describe_decoder({"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, …})
    18 layers of width 640, of which those named sliding_attention have a window
"""

from dataclasses import replace

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.hf.architectures import find_architecture
from longshore.hf.typed_keys import Raw, count, flag

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")
DENSE = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
OLDER = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
"""Older spellings of keys."""
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")


def describe_decoder(raw: Raw) -> DecoderConfig:
    """Exact for architectures we know, else by the common keys; without further depths."""
    try:
        return replace(find_architecture(raw).read(raw), mtp=())
    except ValueError:
        return generic_decoder(raw)


def generic_decoder(raw: Raw) -> DecoderConfig:
    """By the common keys alone."""
    raw = {**{ours: raw[old] for old, ours in OLDER.items() if old in raw}, **raw}
    width, heads = count(raw, "hidden_size"), count(raw, "num_attention_heads")
    layers = range(count(raw, "num_hidden_layers"))
    kinds = raw.get("layer_types")
    kinds = kinds if isinstance(kinds, list) and len(kinds) == len(layers) else None
    window = _one(raw, ("sliding_window",))
    if kinds is None and not flag(raw, "use_sliding_window", True):
        window = None
    kv_heads = _one(raw, ("num_key_value_heads",)) or heads
    attention = AttentionConfig(
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=_one(raw, ("head_dim",)) or max(2, width // heads),
        bias=bool(raw.get("attention_bias")),
        output_bias=bool(raw.get("attention_bias")),
    )
    near = replace(attention, window=window) if window else attention
    return DecoderConfig(
        vocab_size=count(raw, "vocab_size"),
        width=width,
        layers=tuple(
            LayerConfig(
                near if kinds is None or kinds[i] == "sliding_attention" else attention,
                _feed_forward(raw, i, width),
            )
            for i in layers
        ),
        tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _feed_forward(raw: Raw, layer: int, width: int) -> MLPConfig | MoEConfig:
    experts, dense = _one(raw, EXPERTS), _one(raw, DENSE) or 4 * width
    if not experts or layer < (_one(raw, ("first_k_dense_replace",)) or 0):
        return MLPConfig(width=dense)
    each = _one(raw, ("moe_intermediate_size", "expert_ffn_hidden_size")) or dense
    shared = _one(raw, SHARED) or each * (_one(raw, ("n_shared_experts",)) or 0)
    top_k = min(_one(raw, TOP_K) or 1, experts)
    return MoEConfig(experts=experts, top_k=top_k, width=each, shared_width=shared)


def _one(raw: Raw, keys: tuple[str, ...]) -> int | None:
    """The first of these keys that has a value."""
    return next((count(raw, key, least=0) for key in keys if raw.get(key)), None)
