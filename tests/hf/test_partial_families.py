"""Folders that lack a kind of layer of their family are trained and written back like any other."""

import pytest
import torch
from tests.hf.folders import deepseek, llama, load, mamba2, nemotron, qwen3_moe, qwen3_next
from tests.hf.test_checkpoint import IDS, assert_same_tensors, copy
from tests.hf.test_logits import our_decoder

from longshore.batch import whole_context
from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.config_file import choose_architecture, read_config

SCAN, FULL, MLP = "linear_attention", "full_attention", "mlp"
CASES = {
    "nemotron-scans": (nemotron, {"layers_block_type": [SCAN]}),
    "nemotron-attention": (nemotron, {"layers_block_type": [FULL, FULL]}),
    "nemotron-mlps": (nemotron, {"layers_block_type": [MLP]}),
    "nemotron-no-attention": (nemotron, {"layers_block_type": [SCAN, MLP]}),
    "nemotron-no-scan": (nemotron, {"layers_block_type": [MLP, FULL]}),
    "nemotron-no-mlp": (nemotron, {"layers_block_type": [FULL, SCAN]}),
    "nemotron-tied": (nemotron, {"tie_word_embeddings": True}),
    "next-scans": (qwen3_next, {"layer_types": [SCAN], "num_hidden_layers": 1}),
    "next-attention": (qwen3_next, {"layer_types": [FULL] * 2, "num_hidden_layers": 2}),
    "next-no-experts": (qwen3_next, {"mlp_only_layers": [0, 1, 2]}),
    "moe-no-experts": (qwen3_moe, {"mlp_only_layers": [0, 1, 2]}),
    "deepseek-no-experts": (deepseek, {"first_k_dense_replace": 3}),
    "deepseek-far-experts": (deepseek, {"first_k_dense_replace": 99}),
    "deepseek-all-experts": (deepseek, {"first_k_dense_replace": 0}),
    "deepseek-nulls": (deepseek, {"rope_interleave": None, "norm_topk_prob": None}),
    "deepseek-zero": (
        deepseek,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0, "mscale_all_dim": 0}},
    ),
    "mamba2-one": (mamba2, {"num_hidden_layers": 1, "residual_in_fp32": False}),
    "llama-pad": (llama, {"pad_token_id": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_it_is_read_and_written_back(tmp_path, case):
    make, keys = CASES[case]
    base, same, anew = tmp_path / "base", tmp_path / "same", tmp_path / "anew"
    make(base, **keys)
    # Its cache wants a layer of attention.
    theirs = load(base)(IDS, use_cache=False).logits
    ours = our_decoder(base)(IDS[0], whole_context([IDS.shape[1]])).values
    assert (ours - theirs[0]).abs().max() / theirs.abs().max() < 1e-5
    copy(base, same)
    assert_same_tensors(base, same)
    assert (same / "config.json").read_bytes() == (base / "config.json").read_bytes()
    config = read_config(base)
    assert choose_architecture(config, base).keys(config)
    # Without a base, as a preset of the same shape is written.
    write_checkpoint(anew, config, open_weights(base).items(), base=None)
    assert read_config(anew).layers == config.layers
    assert torch.allclose(load(anew)(IDS, use_cache=False).logits, theirs, rtol=1e-5, atol=1e-6)
