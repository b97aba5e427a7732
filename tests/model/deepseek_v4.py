"""Attention of DeepSeek-V4 as transformers has it, in float64, and ours with the same weights."""

from dataclasses import replace

import torch
from tests.hf.folders import TensorsInMemory
from tests.lazy import Lazy, transformers

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.part import Norm
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig
from longshore.hf.tensor_map import StorageLayout, look_up, sparse_attention_rows
from longshore.model.sparse_attention import SparseAttention

MODELING = "transformers.models.deepseek_v4.modeling_deepseek_v4"
theirs = Lazy(MODELING)
WIDTH, EPS = 12, 1e-3
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}
BASE = SparseAttentionConfig(
    heads=4, head_dim=10, rope_dim=4, q_rank=7, window=9, o_groups=2, o_rank=3
)
COMPRESSED = RopeConfig(
    theta=160_000.0,
    scaling=YarnScaling(factor=16.0, original_length=64, attention_factor=1.0),
)
CONFIGS = {
    "sliding_attention": BASE,
    "compressed_sparse_attention": replace(
        BASE, ratio=4, index=IndexConfig(heads=3, head_dim=6, top_k=5), rope=COMPRESSED
    ),
    "heavily_compressed_attention": replace(BASE, ratio=128, rope=COMPRESSED),
}
KINDS = tuple(CONFIGS)


class WideTorch:
    """torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def stable_topk(scores, k, dim=-1):
    """As Tensor.topk, but of equal values the first: many scores of an index are exactly 0."""
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))


def in_float64(monkeypatch):
    """Makes DeepSeek-V4 of transformers compute in float64, positions too."""
    monkeypatch.setattr(f"{MODELING}.torch", WideTorch())
    monkeypatch.setattr(transformers.modeling_rope_utils, "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)


def their_config(kind, **changes):
    config = transformers.DeepseekV4Config(
        **{
            "hidden_size": WIDTH,
            "num_attention_heads": BASE.heads,
            "head_dim": BASE.head_dim,
            "partial_rotary_factor": BASE.rope_dim / BASE.head_dim,
            "q_lora_rank": BASE.q_rank,
            "sliding_window": BASE.window,
            "o_groups": BASE.o_groups,
            "o_lora_rank": BASE.o_rank,
            "num_hidden_layers": 1,
            "layer_types": [kind],
            "index_n_heads": 3,
            "index_head_dim": 6,
            "index_topk": 5,
            "rms_norm_eps": EPS,
            "rope_parameters": dict(YARN),
            "max_position_embeddings": 1024,
        }
        | changes
    )
    config._attn_implementation = "eager"
    return config


def their_attention(kind):
    """Their module, with parameters far from what they begin as; in_float64 comes first."""
    torch.manual_seed(1)
    module = theirs.DeepseekV4Attention(their_config(kind), 0).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5)
    return module


def run_theirs(module, x_TC, *, weights=False):
    """The output of one sequence; weights: also the probabilities (H, T, T + E)."""
    positions = torch.arange(len(x_TC))[None]
    rotary = theirs.DeepseekV4RotaryEmbedding(module.config)
    embeddings = {name: rotary(x_TC, positions, layer_type=name) for name in ("main", "compress")}
    back = positions[0][:, None] - positions[0]
    visible = (back >= 0) & (back < module.sliding_window)
    mask = torch.where(visible, 0.0, -torch.inf).double()[None, None]
    output, probabilities = module(x_TC[None], embeddings, positions, mask)
    return (output[0], probabilities[0]) if weights else output[0]


def folder_name(name):
    """Of one of their parameters, as the folder that transformers saves has it."""
    renamed = {
        "compressor.indexer.scorer.weights_proj": "indexer.weights_proj",
        "compressor.indexer.q_b_proj": "indexer.wq_b",
        "compressor.indexer": "indexer.compressor",
        "q_a_norm": "q_norm",
        "kv_norm": "norm",
        "position_bias": "ape",
        "q_a_proj": "wq_a",
        "q_b_proj": "wq_b",
        "kv_proj": "wkv",
        "gate_proj": "wgate",
        "o_a_proj": "wo_a",
        "o_b_proj": "wo_b",
        "sinks": "attn_sink",
    }
    for old, new in renamed.items():
        name = name.replace(old, new)
    return f"attn.{name}"


def to_ours(tensors, config, names):
    """Our tensors of these names, from theirs by name."""
    files = TensorsInMemory({folder_name(name): tensor for name, tensor in tensors.items()})
    layer = LayerConfig(config, None)
    decoder = DecoderConfig(vocab_size=1, width=WIDTH, layers=(layer,))
    ours = {}
    for name in names:
        rows = sparse_attention_rows("mixer", "attn")
        source = look_up(f"mixer.{name}", rows, StorageLayout(decoder, {}))
        ours[name] = source.read(files, [slice(0, n) for n in files.shape(source.stored)])
    return ours


def our_attention(config, module):
    """Our mixer with the weights of their module."""
    ours = SparseAttention(config, WIDTH, norm=Norm(EPS)).double()
    names = [name for name, _ in ours.named_parameters()]
    weights = to_ours(dict(module.named_parameters()), config, names)
    ours.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    return ours
