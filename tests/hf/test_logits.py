"""Our decoder, with the weights of a Hugging Face folder, gives the logits of transformers."""

import pytest
import torch
from tests.hf.folders import (
    LLAMA3,
    LONGROPE,
    YARN,
    deepseek,
    llama,
    load,
    mamba2,
    nemotron,
    qwen3,
    qwen3_moe,
    qwen3_next,
)

from longshore.batch import whole_context
from longshore.hf.checkpoint import open_weights, read_config
from longshore.model.decoder import Decoder

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CASES = {
    "qwen3": (qwen3, {}),
    "qwen3-tied": (qwen3, {"tie_word_embeddings": True}),
    "qwen3-bias": (qwen3, {"attention_bias": True}),
    "qwen3-window": (qwen3, WINDOW),
    "qwen3-theta": (qwen3, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama": (llama, {}),
    "llama-bias": (llama, {"attention_bias": True, "rms_norm_eps": 1e-2}),
    "llama-head-dim": (llama, {"head_dim": 16, "num_key_value_heads": 1}),
    "llama-linear": (llama, {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": (llama, {"rope_parameters": LLAMA3 | {"rope_theta": 1000.0}}),
    "llama-yarn": (llama, {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        llama,
        {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "llama-longrope": (llama, {"rope_parameters": LONGROPE}),
    "qwen3-moe": (qwen3_moe, {"norm_topk_prob": True}),
    "qwen3-moe-window": (
        qwen3_moe,
        {"use_sliding_window": True, "sliding_window": 4, "attention_bias": True},
    ),
    "qwen3-moe-tied": (qwen3_moe, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3-next": (qwen3_next, {}),
    "qwen3-next-half": (
        qwen3_next,
        {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-3, "mlp_only_layers": [1]},
    ),
    "deepseek": (deepseek, {}),
    "deepseek-yarn": (
        deepseek,
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
    ),
    "deepseek-plain": (
        deepseek,
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek-one-group": (deepseek, {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "mamba2": (mamba2, {}),
    "mamba2-limits": (
        mamba2,
        {"time_step_limit": (0.5, 0.9), "use_bias": True, "tie_word_embeddings": False},
    ),
    "nemotron": (nemotron, {}),
    "nemotron-limits": (nemotron, {"time_step_min": 0.7, "use_bias": True, "use_conv_bias": False}),
}
LENGTHS = (1, 2, 13, 40)


def our_decoder(folder, dtype=torch.float32):
    model = Decoder(read_config(folder)).to(dtype)
    model.load_state_dict(dict(open_weights(folder)))
    return model.eval()


def packed_logits(model, sequences):
    """Logits of each sequence, all packed together."""
    lengths = [len(ids) for ids in sequences]
    return model(torch.cat(sequences), whole_context(lengths)).values.split(lengths)


def random_ids(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def worst(ours, theirs):
    return max((a - b).abs().max() / b.abs().max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, case):
    make, keys = CASES[case]
    make(tmp_path, **keys)
    theirs = load(tmp_path)
    sequences = random_ids(LENGTHS)
    ours = packed_logits(our_decoder(tmp_path), sequences)
    expected = [theirs(ids[None]).logits[0] for ids in sequences]
    assert worst(ours, expected) < 1e-5


@torch.no_grad()
def test_dynamic_positions_follow_each_sequences_own_length(tmp_path):
    keys = {"rope_type": "dynamic", "factor": 3.0}
    llama(tmp_path, rope_parameters=keys, max_position_embeddings=16)
    sequences = random_ids(LENGTHS)
    ours = packed_logits(our_decoder(tmp_path), sequences)
    # Loaded for each sequence: transformers keeps the longest length it has seen.
    expected = [load(tmp_path)(ids[None]).logits[0] for ids in sequences]
    assert worst(ours, expected) < 1e-5


@torch.no_grad()
def test_logits_agree_in_float64_where_transformers_computes_in_it(tmp_path, monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3 as theirs

    def norm(self, x):
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    def turn(self, x, position_ids):
        powers = torch.arange(0, 16, 2, dtype=torch.float64) / 16
        angles = position_ids[..., None].double() * 10_000.0**-powers
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(theirs.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(theirs.Qwen3RotaryEmbedding, "forward", turn)
    qwen3(tmp_path, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    model = load(tmp_path, torch.float64)
    sequences = random_ids(LENGTHS)
    ours = packed_logits(our_decoder(tmp_path, torch.float64), sequences)
    assert worst(ours, [model(ids[None]).logits[0] for ids in sequences]) < 1e-9
