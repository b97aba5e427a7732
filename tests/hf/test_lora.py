"""Factors merged into weights, and as PEFT's folder, give the logits of the model that has them."""

from dataclasses import replace

import pytest
import torch
from tests.hf import folders

from longshore.arch.decoder import LoRAConfig
from longshore.arch.presets import preset
from longshore.hf.checkpoint import open_weights, write_checkpoint, write_own_checkpoint
from longshore.hf.config_file import read_config
from longshore.hf.lora import (
    base_from_json,
    check_base,
    factor_shapes,
    find_base,
    merged_decoder,
    merged_stream,
)
from longshore.hf.weights import SavedWeights, load_weights, save_weights, write_adapter
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder

IDS = torch.arange(30) * 11 % 64
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES = {
    "llama": ("all-linear",),
    "qwen3_moe": ATTENTION,
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "shared_gate"),
    "deepseek": ("q_down", "q_up", "kv_down", "kv_up", "o_proj"),
    "nemotron": (*ATTENTION, "in_proj", "up_proj", "down_proj"),
    "mamba2": ("in_proj",),
}
"""What PEFT can hold of each."""


def trained(config):
    """Factors as training leaves them: none is 0."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in factor_shapes(config).items()
    }


@pytest.mark.fuzz
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_by_peft_the_same_logits(tmp_path, family, is_fuzz):
    peft = pytest.importorskip("peft")
    if not is_fuzz and family not in ("deepseek", "qwen3_next"):
        pytest.skip("in `make fuzz`")
    base = tmp_path / "base"
    getattr(folders, family)(base)
    config = replace(read_config(base), lora=LoRAConfig(3, 4.0, FAMILIES[family]))
    factors, model = trained(config), Decoder(config).double()
    model.load_state_dict({**open_weights(base), **factors})
    with torch.no_grad():
        want = model(IDS).values

    known = find_base(config, base, seed=0)
    merged = merged_decoder(config, known, factors)
    write_checkpoint(tmp_path / "merged", config.merged(), merged.items(), base=base)
    pairs = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for (name, streamed), (same, tensor) in zip(
        merged_stream(config.lora, factors, pairs.items()), merged.items(), strict=True
    ):
        assert name == same
        torch.testing.assert_close(streamed.double(), tensor.double(), rtol=0, atol=1e-12)
    write_adapter(tmp_path / "adapter", SavedWeights(config, base, factors, known), base=base)
    with torch.no_grad():
        written = folders.load(tmp_path / "merged", torch.float64)(IDS[None]).logits[0]
        plain = folders.load(base, torch.float64)
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
        adapted = loaded(IDS[None]).logits[0]
    limit = 1e-5 * want.abs().max().item()  # some layers of transformers compute in float32
    torch.testing.assert_close(written.double(), want, rtol=0, atol=limit)
    torch.testing.assert_close(adapted.double(), want, rtol=0, atol=limit)


def test_saved_factors_name_their_base(tmp_path):
    base = tmp_path / "base"
    folders.qwen3(base)
    config = replace(read_config(base), lora=LoRAConfig(2, 4.0, ("q_proj", "layers.1.mlp.up_proj")))
    factors, known = trained(config), find_base(config, base, seed=0)
    assert {name.split(".")[1] for name in factors if "up_proj" in name} == {"1"}
    save_weights(tmp_path / "weights", config, factors.items(), base=base, lora=known)
    saved = load_weights(tmp_path / "weights")
    assert saved.config == config
    assert saved.lora == known == base_from_json(known.as_json())
    assert {name: tuple(tensor.shape) for name, tensor in saved.tensors.items()} == factor_shapes(
        config
    )
    assert saved.merged().config == read_config(base)

    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match="is not the base"):
        check_base(known, find_base(config, base, seed=0))
    with pytest.raises(ValueError, match=r"does not exist; name its folder with --base"):
        saved.merged(tmp_path / "gone")
    new = find_base(config, None, seed=5)
    assert new.folder is None
    assert new.digest != find_base(config, None, seed=6).digest


def test_a_new_model_with_a_table_of_experts(tmp_path):
    config = replace(preset("tiny-deepseek-v4", layers=2), lora=LoRAConfig(2, 4.0, ("q_down",)))
    merged = merged_decoder(config, find_base(config, None, seed=3), trained(config))
    write_own_checkpoint(tmp_path / "own", config.merged(), merged.items(), base=None)
    model = Decoder(config.merged())
    init_decoder(model, seed=3)
    tables = [name for name in merged if name.endswith("router.table")]
    assert tables
    for name in tables:
        assert torch.equal(open_weights(tmp_path / "own")[name], model.state_dict()[name])


def written(tmp_path, base, *targets):
    config = replace(read_config(base), lora=LoRAConfig(2, 4.0, targets))
    saved = SavedWeights(config, base, trained(config), find_base(config, base, seed=0))
    return write_adapter(tmp_path / f"adapter-{targets[0]}", saved, base=base)


def test_what_peft_cannot_hold(tmp_path):
    base, scan = tmp_path / "base", tmp_path / "scan"
    folders.deepseek(base)
    folders.add_depth(base)
    (note,) = written(tmp_path, base, "o_proj")
    assert note.startswith("left out: 1 modules of multi-token prediction")
    with pytest.raises(ValueError, match=r"factors of layers.0.mlp.down_proj for Deep.*experts"):
        written(tmp_path, base, "down_proj")
    folders.nemotron(scan)
    with pytest.raises(ValueError, match=r"layers.0.mixer.out_proj for Nemotron.*reads its weight"):
        written(tmp_path, scan, "out_proj")
    saved = SavedWeights(read_config(base), base, {})
    with pytest.raises(ValueError, match="this one had none"):
        write_adapter(tmp_path / "other", saved, base=base)
