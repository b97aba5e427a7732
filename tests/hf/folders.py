"""Tiny models of transformers with random weights, saved as it saves them."""

from copy import deepcopy

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

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
    config = Qwen3Config(**SIZES | {"head_dim": 16} | deepcopy(keys))
    return _saved(Qwen3ForCausalLM, config, folder, seed, shard)


def llama(folder, *, seed=0, shard="1GB", **keys):
    return _saved(LlamaForCausalLM, LlamaConfig(**SIZES | deepcopy(keys)), folder, seed, shard)


def load(folder, dtype=torch.float32):
    """The folder, as transformers loads it."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval()


def _saved(kind, config, folder, seed, shard):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config._attn_implementation = "sdpa"
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_()
    model.save_pretrained(folder, max_shard_size=shard)
    return model
