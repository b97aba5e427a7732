"""Folders of DeepSeek-V4: read, computed as transformers does, written again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.hf.folders import change_tensors, deepseek_v4, load
from tests.hf.test_checkpoint import assert_same_tensors, copy, tensors_of
from tests.hf.test_logits import our_decoder, packed_logits, random_ids, worst
from tests.model.deepseek_v4 import in_float64, stable_topk

from longshore.arch.presets import preset
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.batch import whole_context
from longshore.hf.checkpoint import open_weights, tensor_shapes, write_checkpoint
from longshore.hf.config_file import read_config
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 700)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    deepseek_v4(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "folder"))


def test_the_config(folder):
    config = read_config(folder)
    kinds = [(layer.mixer.ratio, layer.mixer.index is not None) for layer in config.layers]
    assert kinds == [(0, False), (4, True), (16, False), (4, True)]
    assert [layer.mlp.hash_rows for layer in config.layers] == [64, 64, 0, 0]
    assert [layer.mlp.bias for layer in config.layers] == [False, False, True, True]
    assert config.residuals.count == 3
    assert config.mtp == ()
    window, chosen = config.layers[0].mixer, config.layers[1].mixer
    assert (window.rope_dim, window.rope) == (4, RopeConfig(theta=10_000.0))
    yarn = YarnScaling(factor=4.0, original_length=16, attention_factor=1.0)
    assert chosen.rope == RopeConfig(theta=160_000.0, scaling=yarn)


@torch.no_grad()
def test_logits_are_those_of_transformers_in_float64(monkeypatch, tmp_path, folder):
    """Of the folder, and of the one that we write, in one pack against each sequence alone."""
    in_float64(monkeypatch)
    ours, theirs = our_decoder(folder, torch.float64), load(folder, torch.float64)
    sequences = random_ids(LENGTHS)
    logits = packed_logits(ours, sequences)
    assert worst(logits, [theirs(ids[None]).logits[0] for ids in sequences]) < 1e-9
    config = read_config(folder)
    write_checkpoint(tmp_path / "new", config, ours.state_dict().items(), base=None)
    assert read_config(tmp_path / "new") == config
    again = load(tmp_path / "new", torch.float64)
    assert worst(logits, [again(ids[None]).logits[0] for ids in sequences]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0, 4, 128])
@torch.no_grad()
def test_logits_of_one_kind_of_layer_alone(monkeypatch, tmp_path, ratio):
    in_float64(monkeypatch)
    layers = {"num_hidden_layers": 2, "compress_ratios": [ratio] * 2, "num_hash_layers": 1}
    deepseek_v4(tmp_path, **layers, compress_rate_hca=128, tie_word_embeddings=ratio == 4)
    ours, theirs = our_decoder(tmp_path, torch.float64), load(tmp_path, torch.float64)
    assert {layer.mixer.ratio for layer in ours.config.layers} == {ratio}
    sequences = random_ids(LENGTHS)
    logits = packed_logits(ours, sequences)
    assert worst(logits, [theirs(ids[None]).logits[0] for ids in sequences]) < 1e-9


def test_gradients_of_all_parameters_are_those_of_transformers(monkeypatch, folder):
    """Their gradients, written in the place of the weights, are read under our names."""
    in_float64(monkeypatch)
    ours, theirs = our_decoder(folder, torch.float64), load(folder, torch.float64)
    sequences = random_ids((5, 40))
    labels = [torch.cat([ids[1:], torch.tensor([-100])]) for ids in sequences]
    for ids in sequences:
        logits = theirs(ids[None]).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").backward()
    ours(torch.cat(sequences), whole_context([5, 40]), torch.cat(labels)).values.sum().backward()
    trained = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    theirs.save_pretrained(
        folder,
        state_dict=theirs.state_dict()
        | {name: torch.zeros_like(p) for name, p in theirs.named_parameters()}
        | gradients,
    )
    wanted = open_weights(folder)
    without = {name for name, _ in ours.named_parameters()} - trained.keys()
    assert all(".index" in name for name in without), "the index has a loss of its own"
    assert len(trained) > 100
    for name, grad in trained.items():
        assert worst([grad], [wanted[name]]) < 1e-9, name


@pytest.mark.parametrize("own", [False, True])
@torch.no_grad()
def test_import_and_export_change_no_byte(tmp_path, folder, own):
    """own: under the names of DeepSeek's own folders."""
    if own:
        ends = {"embed_tokens.": "embed.", "hc_head.hc": "hc_head"}

        def rename(tensors):
            for name in list(tensors):
                new = name.removeprefix("model.")
                for old, short in ends.items():
                    new = new.replace(old, short)
                tensors[new] = tensors.pop(name)

        change_tensors(folder, rename)
    copy(folder, tmp_path / "copy", shard_bytes=30_000)
    assert_same_tensors(folder, tmp_path / "copy")
    assert ("layers.1.attn.indexer.wq_b.weight" in tensors_of(tmp_path / "copy")) == own
    written = (tmp_path / "copy" / "config.json").read_bytes()
    assert written == (folder / "config.json").read_bytes()
    ids = torch.arange(1, 30)[None]
    assert torch.equal(load(folder)(ids).logits, load(tmp_path / "copy")(ids).logits)


def test_a_model_of_ours_with_a_depth_is_written_and_read(monkeypatch, tmp_path):
    """transformers loads it too, and leaves the depth out."""
    # Of equal scores we choose the first; which ones torch.topk takes depends on the machine.
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)
    config = preset("tiny-deepseek-v4")
    model = Decoder(config)
    init_decoder(model, seed=1)
    write_checkpoint(tmp_path / "new", config, model.state_dict().items(), base=None)
    read = read_config(tmp_path / "new")
    assert len(read.mtp) == 1
    weights = open_weights(tmp_path / "new")
    assert weights.keys() == tensor_shapes(config).keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor), name
        rows = slice(len(tensor) // 4, len(tensor) // 2)
        columns = (slice(1, tensor.shape[1]),) if tensor.dim() > 1 else ()
        assert torch.equal(weights.block(name, (rows, *columns)), tensor[(rows, *columns)]), name
    copy(tmp_path / "new", tmp_path / "copy")
    assert_same_tensors(tmp_path / "new", tmp_path / "copy")
    ids = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = load(tmp_path / "new")(ids[None]).logits[0]
        ours = model(ids, whole_context([60])).values
    assert worst([ours], [theirs]) < 1e-4


def changed(folder, **keys):
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "drop"}))
    return read_config(folder)


def test_keys_of_deepseeks_own_files_mean_the_same(folder):
    config = read_config(folder)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    drop = ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor")
    keys = dict.fromkeys((*drop, "rope_parameters"), "drop")
    keys |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 2, "compress_rate_hca": 16}
    assert changed(folder, **keys, qk_rope_head_dim=4, rope_scaling=yarn) == config


def test_keys_that_are_missing_are_those_of_transformers(folder):
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": ["DeepseekV4ForCausalLM"]}))
    (folder / "model.safetensors").unlink()
    config, flash = read_config(folder), preset("deepseek-v4-flash")
    assert [layer.mixer.ratio for layer in config.layers[:5]] == [128, 128, 128, 4, 128]
    mixer = replace(flash.layers[2].mixer, rope=RopeConfig(theta=160_000.0))
    assert config.layers[3].mixer == mixer
    assert config.layers[0].mlp == flash.layers[0].mlp
    assert config.mtp[0].mixer == flash.mtp[0].mixer
    assert config.residuals == flash.residuals


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 'full_attention'"),
        ({"layer_types": ["sliding_attention"]}, "a kind for each of the 4 layers"),
        ({"mlp_layer_types": ["dense"] * 4}, "mlp_layer_types has 'dense'"),
        ({"layer_types": "drop", "compress_ratios": [3] * 4}, "each must be 0, 4 or 128"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; supported is 1"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"intermediate_size": 5}, "remove intermediate_size"),
        ({"compress_rates": 3}, "compress_rates is 3; it must be an object"),
        ({"partial_rotary_factor": 0.2}, "must be that of all layers, 0.2"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ({"o_groups": 3}, "o_groups is 3; it must divide heads, 4"),
    ],
)
def test_what_is_not_supported_is_refused(folder, keys, message):
    with pytest.raises(ValueError, match=message):
        changed(folder, **keys)


def test_a_table_of_floats_is_refused(folder):
    name = "model.layers.0.ffn.gate.tid2eid"

    def cast(tensors):
        tensors[name] = tensors[name].float()

    change_tensors(folder, cast)
    with pytest.raises(ValueError, match=r"tid2eid is F32; a table of experts is"):
        open_weights(folder)
