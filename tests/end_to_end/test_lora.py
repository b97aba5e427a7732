"""LoRA from a Hugging Face folder: killed and resumed, merged on export, loaded by PEFT."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.end_to_end.killed import Kill, Runs
from tests.hf.folders import gemma3, load, qwen3

from longshore.cli.main import main
from longshore.hf.checkpoint import open_weights
from longshore.hf.config_file import read_config
from longshore.hf.transformers_model import adapted
from longshore.hf.transformers_weights import add_transformers_factors
from longshore.hf.weights import load_weights
from longshore.model.decoder import Decoder
from longshore.model.lora import is_factor
from longshore.train.checkpoint_files import checkpoint_folder, read_index

IDS = torch.arange(40) * 7 % 64


@pytest.fixture
def runs(tmp_path, monkeypatch):
    return Runs(tmp_path, monkeypatch)


def our_logits(config, tensors):
    """In float64."""
    model = Decoder(config).double()
    model.load_state_dict(tensors)
    with torch.no_grad():
        return model(IDS).values


def adapter_logits(run):
    """Of the model with factors beside the weights."""
    saved = load_weights(run / "weights")
    return our_logits(saved.config, {**open_weights(saved.lora.folder), **saved.tensors})


def their_logits(model):
    with torch.no_grad():
        return model(IDS[None]).logits[0]


close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)  # their norms are in float32


def test_killed_resumed_merged_and_loaded_by_peft(runs, capfd):
    peft = pytest.importorskip("peft")
    base = runs.folder / "base"
    before = qwen3(base).state_dict()
    words = [f"model.from_hf={base}", "model.lora.rank=3", "model.lora.alpha=9", "train.lr=1e-2"]
    words += ["model.lora.targets=q_proj,v_proj,o_proj,down_proj", "model.preset=", "train.steps=6"]
    words += ["parallel.shard=zero3"]
    assert runs.train("whole", *words, f"output.export={runs.folder / 'at-end'}", ranks=2) == 0
    assert runs.train("killed", *words, ranks=2, kill=Kill([1], step=5)) == 1
    assert runs.train("killed", *words, "--resume", ranks=2) == 0
    assert runs.losses("killed") == runs.losses("whole")
    assert runs.losses("whole")[-1] < runs.losses("whole")[0]
    whole, killed = runs.weights("whole"), runs.weights("killed")
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert all(name.endswith((".lora.a", ".lora.b")) for name in whole)

    index = read_index(checkpoint_folder(runs.folder / "killed", 6))
    assert index.base["folder"] == str(base)
    kinds = {name.split(".")[0] for name in index.tensors}
    assert kinds == {"model", "optimizer", "rng"}
    assert all(".lora." in name for name in index.tensors if not name.startswith("rng"))

    want = adapter_logits(runs.folder / "killed")
    for source in ("killed", "killed/checkpoints/step-00000006"):
        merged = runs.folder / f"merged-{source[-1]}"
        assert main(["export", str(runs.folder / source), str(merged)]) == 0
        close(our_logits(read_config(merged), dict(open_weights(merged))), want, atol=1e-12)
        close(their_logits(load(merged, torch.float64)), want)
    close(their_logits(load(runs.folder / "at-end", torch.float64)), want)
    adapter = runs.folder / "adapter"
    assert main(["export", str(runs.folder / "killed"), str(adapter), "--adapter"]) == 0
    plain = load(base, torch.float64)
    assert (their_logits(plain) - want).abs().max() > 1e-2
    close(their_logits(peft.PeftModel.from_pretrained(plain, adapter)), want)

    after = load_file(base / "model.safetensors")
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())

    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, base / "model.safetensors")
    capfd.readouterr()
    assert main(["export", str(runs.folder / "killed"), str(runs.folder / "other")]) == 2
    assert "is not the base that these low-rank factors were trained on" in capfd.readouterr().err
    assert runs.train("killed", *words, "train.steps=8", "--resume", ranks=2) == 2
    assert "has changed since the checkpoint of step 6" in capfd.readouterr().err


def foreign_logits(run):
    """Of transformers' own code with factors beside its linear layers."""
    saved = load_weights(run / "weights")
    model = adapted(load(saved.lora.folder, torch.float64), saved.config)
    add_transformers_factors(model, saved.config.lora)
    _, unexpected = model.load_state_dict(dict(saved.tensors), strict=False)
    assert unexpected == []
    with torch.no_grad():
        return model(IDS).values


@pytest.mark.long
def test_a_model_of_transformers_merged_and_loaded_by_peft(runs, is_fuzz, capfd):
    peft = pytest.importorskip("peft")
    base = runs.folder / "base"
    gemma3(base)
    words = [f"model.from_hf={base}", "model.code=transformers", "model.lora.rank=3"]
    words += ["model.preset=", "train.steps=4", "train.lr=1e-2", "parallel.shard=zero3"]
    words += ["model.lora.targets=q_proj,o_proj,down_proj"]
    assert runs.train("whole", *words, f"output.export={runs.folder / 'at-end'}", ranks=2) == 0
    assert runs.losses("whole")[-1] < runs.losses("whole")[0]
    assert all(map(is_factor, runs.weights("whole")))
    if is_fuzz:
        assert runs.train("killed", *words, ranks=2, kill=Kill([1], step=3)) == 1
        assert runs.train("killed", *words, "--resume", ranks=2) == 0
        assert runs.losses("killed") == runs.losses("whole")
    want = foreign_logits(runs.folder / "whole")
    for source in ("whole", "whole/checkpoints/step-00000004"):
        merged = runs.folder / f"merged-{source[-1]}"
        assert main(["export", str(runs.folder / source), str(merged)]) == 0
        close(their_logits(load(merged, torch.float64)), want)
    close(their_logits(load(runs.folder / "at-end", torch.float64)), want)
    assert main(["export", str(runs.folder / "whole"), str(runs.folder / "ad"), "--adapter"]) == 0
    plain = load(base, torch.float64)
    assert (their_logits(plain) - want).abs().max() > 1e-2
    close(their_logits(peft.PeftModel.from_pretrained(plain, runs.folder / "ad")), want)
    capfd.readouterr()
    assert runs.train("no", *words, "model.lora.targets=kv_up", ranks=1) == 2
    assert "no linear layer of this model is named 'kv_up'; there are " in capfd.readouterr().err
