"""Tiny models of transformers with random weights, saved as it saves them."""

import json
from copy import deepcopy
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.lazy import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}


# Keys are copied because transformers adds to the rope_parameters it is given.
def qwen3(folder, *, seed=0, shard="1GB", **keys):
    """A Qwen3 with heads of 16, wider together than the model, and norms that are not 1."""
    config = transformers.Qwen3Config(**SIZES | {"head_dim": 16} | deepcopy(keys))
    return _saved(transformers.Qwen3ForCausalLM, config, folder, seed, shard)


def llama(folder, *, seed=0, shard="1GB", **keys):
    config = transformers.LlamaConfig(**SIZES | deepcopy(keys))
    return _saved(transformers.LlamaForCausalLM, config, folder, seed, shard)


EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
NEMOTRON_KINDS = ["linear_attention", "mlp", "full_attention", "linear_attention"]


def qwen3_moe(folder, *, seed=0, shard="1GB", **keys):
    """Layer 1 of 3 is dense."""
    sizes = SIZES | EXPERTS | {"head_dim": 16, "num_experts": 5, "mlp_only_layers": [1]}
    config = transformers.Qwen3MoeConfig(**sizes | deepcopy(keys))
    return _saved(transformers.Qwen3MoeForCausalLM, config, folder, seed, shard)


def gpt_neox(folder, *, seed=0, shard="1GB", **keys):
    """Its head is embed_out in the files and lm_head in the model."""
    config = transformers.GPTNeoXConfig(**SIZES | {"eos_token_id": 1} | deepcopy(keys))
    return _saved(transformers.GPTNeoXForCausalLM, config, folder, seed, shard)


def exaone_moe(folder, *, seed=0, shard="1GB", **keys):
    """Its routing bias has another name in the files."""
    config = transformers.ExaoneMoeConfig(**SIZES | EXPERTS | {"num_experts": 4} | deepcopy(keys))
    return _saved(transformers.ExaoneMoeForCausalLM, config, folder, seed, shard)


SLIDING = {"sliding_window": 5, "head_dim": 8} | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
}


def gemma3(folder, *, seed=0, shard="1GB", **keys):
    """Tied, with windows and a scale of its own."""
    sizes = SIZES | SLIDING | {"query_pre_attn_scalar": 3, "pad_token_id": None}
    config = transformers.Gemma3TextConfig(**sizes | deepcopy(keys))
    return _saved(transformers.Gemma3ForCausalLM, config, folder, seed, shard)


def gemma2(folder, *, seed=0, shard="1GB", **keys):
    """With softcaps of scores and of logits."""
    sizes = SIZES | SLIDING | {"final_logit_softcapping": 1.5, "pad_token_id": None}
    config = transformers.Gemma2Config(**sizes | deepcopy(keys))
    return _saved(transformers.Gemma2ForCausalLM, config, folder, seed, shard)


def granite(folder, *, seed=0, shard="1GB", **keys):
    """Logits are divided by 6."""
    config = transformers.GraniteConfig(**SIZES | {"logits_scaling": 6.0} | deepcopy(keys))
    return _saved(transformers.GraniteForCausalLM, config, folder, seed, shard)


def cohere(folder, *, seed=0, shard="1GB", **keys):
    """Logits are multiplied by a quarter."""
    config = transformers.CohereConfig(**SIZES | {"logit_scale": 0.25} | deepcopy(keys))
    return _saved(transformers.CohereForCausalLM, config, folder, seed, shard)


def gpt_oss(folder, *, seed=0, shard="1GB", **keys):
    """With sinks, windows and experts."""
    sizes = SIZES | SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = transformers.GptOssConfig(**sizes | rope | deepcopy(keys))
    return _saved(transformers.GptOssForCausalLM, config, folder, seed, shard)


def qwen3_next(folder, *, seed=0, shard="1GB", **keys):
    sizes = SIZES | EXPERTS | {"head_dim": 16, "num_experts": 5}
    # With larger numbers rounding alone shows beyond 1e-5: the gated norm divides by small outputs.
    sizes |= {"shared_expert_intermediate_size": 20, "initializer_range": 0.1}
    sizes |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = transformers.Qwen3NextConfig(**sizes | deepcopy(keys))
    return _saved(transformers.Qwen3NextForCausalLM, config, folder, seed, shard)


def deepseek(folder, *, seed=0, shard="1GB", **keys):
    """One dense layer first; heads of 6 + 8, values of 10."""
    sizes = SIZES | EXPERTS | {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    sizes |= {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    sizes |= {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_rope_head_dim": 8}
    sizes |= {"qk_nope_head_dim": 6, "v_head_dim": 10}
    config = transformers.DeepseekV3Config(**sizes | deepcopy(keys))
    return _saved(transformers.DeepseekV3ForCausalLM, config, folder, seed, shard)


def deepseek_v4(folder, *, seed=0, shard="1GB", **keys):
    """Every kind of layer and of experts; entries of 4 and of 16 tokens."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 12, "hc_mult": 3}
    sizes |= {"num_attention_heads": 4, "head_dim": 10, "partial_rotary_factor": 0.4}
    sizes |= {"q_lora_rank": 7, "sliding_window": 9, "o_groups": 2, "o_lora_rank": 3}
    sizes |= {"index_n_heads": 3, "index_head_dim": 6, "index_topk": 5, "hc_sinkhorn_iters": 3}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.3}
    sizes |= {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 2}
    sizes |= {"compress_rate_hca": 16, "rope_parameters": YARN, "max_position_embeddings": 64}
    config = transformers.DeepseekV4Config(**deepcopy(sizes | {"initializer_range": 0.3} | keys))
    return _saved(transformers.DeepseekV4ForCausalLM, config, folder, seed, shard)


def mamba2(folder, *, seed=0, shard="1GB", **keys):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2}
    sizes |= {"state_size": 6, "num_hidden_layers": 3, "n_groups": 2, "chunk_size": 8}
    config = transformers.Mamba2Config(**sizes | {"tie_word_embeddings": True} | deepcopy(keys))
    return _saved(transformers.Mamba2ForCausalLM, config, folder, seed, shard)


def nemotron(folder, *, seed=0, shard="1GB", **keys):
    sizes = {key: SIZES[key] for key in SIZES if key != "num_hidden_layers"}
    sizes |= {"layers_block_type": NEMOTRON_KINDS, "head_dim": 16, "chunk_size": 8}
    sizes |= {"mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 5, "n_groups": 2}
    config = transformers.NemotronHConfig(**sizes | deepcopy(keys))
    return _saved(transformers.NemotronHForCausalLM, config, folder, seed, shard)


def change_tensors(folder, change):
    """Rewrites the one file of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_depth(folder, *, copies=True):
    """Gives a folder of `deepseek` the tensors of a depth, its last layer's with some noise."""
    generator = torch.Generator().manual_seed(9)

    def add(tensors):
        def noise(*shape):
            return torch.rand(shape, generator=generator) + 0.5

        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            near = tensors[name] * noise(*tensors[name].shape)
            tensors[name.replace("layers.2", "layers.3")] = near
        at = "model.layers.3"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{at}.{name}.weight"] = noise(32)
        tensors[f"{at}.eh_proj.weight"] = noise(32, 64) - 1
        if copies:
            tensors[f"{at}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
            tensors[f"{at}.shared_head.head.weight"] = head.clone()

    change_tensors(folder, add)


NOT_SDPA = ("mamba2", "deepseek_v4", "gpt_oss", "gemma2")


def load(folder, dtype=torch.float32):
    """The folder, as transformers loads it."""
    transformers.utils.logging.disable_progress_bar()
    kind = json.loads((Path(folder) / "config.json").read_text())["model_type"]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=None if kind in NOT_SDPA else "sdpa",
        experts_implementation="eager",
        local_files_only=True,
    )
    return model.eval()


def _saved(kind, config, folder, seed, shard):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    if kind._supports_sdpa:
        config._attn_implementation = "sdpa"
    model = kind(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            _make_lively(name, tensor)
            # Its norms are zero-centred, but for the gated one.
            if "Next" in kind.__name__ and "norm" in name and "linear_attn" not in name:
                tensor -= 1
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def _make_lively(name, tensor):
    """No norm, bias or decay that is 0 or 1 throughout, and no router that is nearly even."""
    if name.endswith("tid2eid"):
        tensor.copy_(torch.rand(len(tensor), 4).argsort(1)[:, : tensor.shape[1]])
    elif name.endswith(("sinks", "base", "scale")):
        tensor.uniform_(-1, 1)
    elif "norm" in name:
        tensor.uniform_(0.5, 1.5)
    elif name.endswith(("gate.weight", "e_score_correction_bias")):
        tensor.normal_(std=0.3)
    elif name.endswith(("bias", ".D")):
        tensor.normal_()
    elif name.endswith("A_log"):
        tensor.uniform_(-1, 1)


class TensorsInMemory:
    """Reads blocks of tensors as files do; see hf/tensor_files.py: TensorFiles."""

    def __init__(self, tensors):
        self.tensors = tensors

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def block(self, name, index):
        return self.tensors[name][tuple(index)]
