"""Folders of experts, latent attention and scans: in and out, no byte changes."""

import json
from dataclasses import replace

import pytest
import torch
from tests.hf.folders import (
    YARN,
    add_depth,
    change_tensors,
    deepseek,
    load,
    mamba2,
    nemotron,
    qwen3_moe,
    qwen3_next,
)
from tests.hf.test_checkpoint import IDS, assert_same_tensors, copy, tensors_of

from longshore.arch.presets import preset
from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.config_file import read_config
from longshore.hf.keys import bare
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder

CASES = {
    "qwen3-moe": (qwen3_moe, {}),
    "qwen3-next": (qwen3_next, {}),
    "deepseek": (deepseek, {"attention_bias": True, "rope_parameters": YARN}),
    "deepseek-plain": (deepseek, {"q_lora_rank": None, "rope_interleave": False}),
    "mamba2": (mamba2, {}),
    "mamba2-limits": (mamba2, {"time_step_limit": (0.5, 0.9), "tie_word_embeddings": False}),
    "nemotron": (nemotron, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_import_and_export_change_no_byte(tmp_path, case):
    make, keys = CASES[case]
    base, made = tmp_path / "base", tmp_path / "made"
    make(base, **keys)
    copy(base, made, shard_bytes=30_000)
    assert len(list(made.glob("*.safetensors"))) > 1
    assert_same_tensors(base, made)
    assert (made / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert torch.equal(load(base)(IDS).logits, load(made)(IDS).logits)


def fuse(folder):
    """All experts of a layer in two tensors."""

    def change(tensors):
        for i in {name.split(".")[2] for name in tensors if ".experts.0." in name}:
            at = f"model.layers.{i}.mlp.experts"
            count = sum(name.startswith(at) for name in tensors) // 3
            gate, up, down = (
                torch.stack([tensors.pop(f"{at}.{e}.{part}_proj.weight") for e in range(count)])
                for part in ("gate", "up", "down")
            )
            tensors[f"{at}.gate_up_proj"] = torch.cat([gate, up], dim=1)
            tensors[f"{at}.down_proj"] = down

    change_tensors(folder, change)


@torch.no_grad()
def test_fused_experts_are_read_and_written_as_such(tmp_path):
    base, fused, made = tmp_path / "base", tmp_path / "fused", tmp_path / "made"
    qwen3_moe(base)
    copy(base, fused)
    fuse(fused)
    copy(fused, made)
    assert_same_tensors(fused, made)
    assert len(tensors_of(fused)) < len(tensors_of(base))
    one, other = open_weights(base), open_weights(fused)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(load(base)(IDS).logits, load(made)(IDS).logits)


@torch.no_grad()
def test_a_nemotron_may_be_named_as_in_memory(tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    nemotron(base)
    wanted = dict(open_weights(base))

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("backbone.")]:
            tensors[name.replace("backbone.", "model.")] = tensors.pop(name)

    change_tensors(base, rename)
    copy(base, made)
    assert_same_tensors(base, made)
    found = open_weights(base)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_the_whole(tmp_path, case):
    make, keys = CASES[case]
    make(tmp_path, **keys)
    if case == "deepseek":
        add_depth(tmp_path)
    weights = open_weights(tmp_path)
    for name, shape in weights.shapes.items():
        whole = weights[name]
        assert whole.shape == shape
        cuts = sorted({0, 1, shape[0] // 3, shape[0] // 2 + 1, shape[0]})
        for start in cuts:
            for stop in [stop for stop in cuts if stop >= start]:
                index = (slice(start, stop), *(slice(size // 3, size) for size in shape[1:]))
                assert torch.equal(weights.block(name, index), whole[index]), name


def test_turned_rows(tmp_path):
    """Of heads of 6 + 8 the last 8; of the latent of 12 + 8 the last 8, and of its bias."""
    model = deepseek(tmp_path, attention_bias=True)
    weights, mixer = open_weights(tmp_path), model.model.layers[1].self_attn
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    heads = weights["layers.1.mixer.q_up.weight"].view(4, 14, 20)
    theirs = mixer.q_b_proj.weight.view(4, 14, 20)
    assert torch.equal(heads[:, :6], theirs[:, :6])
    assert torch.equal(heads[:, 6:], theirs[:, 6:][:, order])
    for part in ("weight", "bias"):
        ours = weights[f"layers.1.mixer.kv_down.{part}"]
        whole = getattr(mixer.kv_a_proj_with_mqa, part)
        assert torch.equal(ours, torch.cat([whole[:12], whole[12:][order]]))


def test_a_routers_bias_is_never_cast(tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    deepseek(base)
    copy(base, made, dtype=torch.bfloat16)
    for name, tensor in tensors_of(made).items():
        wide = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16), name
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


KINDS = {
    "tiny-qwen3-moe": "qwen3_moe",
    "tiny-qwen3-next": "qwen3_next",
    "tiny-deepseek-v3": "deepseek_v3",
    "tiny-nemotron-h": "nemotron_h",
}


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_model_without_base_is_loaded_by_transformers(tmp_path, name):
    """And it computes the same: the keys that were written say all."""
    config = preset(name)
    model = Decoder(config)
    init_decoder(model, seed=3)
    write_checkpoint(tmp_path / "made", config, model.state_dict().items(), base=None)
    assert read_config(tmp_path / "made") == bare(config)
    theirs = load(tmp_path / "made")
    assert theirs.config.model_type == KINDS[name]
    ours, expected = model(IDS[0]).values, theirs(IDS).logits[0]
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_mamba2_without_base(tmp_path):
    mamba2(tmp_path / "base")
    config, weights = read_config(tmp_path / "base"), open_weights(tmp_path / "base")
    write_checkpoint(tmp_path / "made", config, weights.items(), base=None)
    assert read_config(tmp_path / "made") == config
    assert_same_tensors(tmp_path / "base", tmp_path / "made")
    with torch.no_grad():
        one, other = (load(tmp_path / name)(IDS).logits for name in ("base", "made"))
    # Not the same bits: the chunks of their scan have another size.
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_what_only_training_knows_changes_no_key(tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    deepseek(base)
    config = read_config(base)
    last = config.layers[-1]
    trained = replace(last, mlp=replace(last.mlp, bias_update=1e-3, aux_weight=1e-4))
    layers = (*config.layers[:1], trained, trained)
    write_checkpoint(made, replace(config, layers=layers), open_weights(base).items(), base=base)
    assert (made / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (qwen3_moe, {"norm_eps": 1e-3}),
        (qwen3_next, {"norm_eps": 1e-3}),
        (deepseek, {"init_std": 0.5}),
        (mamba2, {"norm_eps": 1e-3}),
        (nemotron, {"norm_eps": 1e-3}),
    ],
)
def test_a_changed_config_is_written_over_that_of_the_base(tmp_path, make, change):
    base, made = tmp_path / "base", tmp_path / "made"
    make(base)
    config = replace(read_config(base), **change)
    write_checkpoint(made, config, open_weights(base).items(), base=base, max_length=777)
    assert read_config(made) == config
    assert load(made).config.max_position_embeddings == 777
    assert_same_tensors(base, made)
