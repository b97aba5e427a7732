"""What a run writes at its end, without a run."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.hf.folders import qwen3

from longshore.arch.decoder import LoRAConfig
from longshore.config.load import load_config
from longshore.hf.config_file import read_config
from longshore.run import weights
from longshore.run.parts import model_base


def test_factors_belong_to_the_base_that_was_read(tmp_path, monkeypatch):
    """Another file in the place of the base, while the run trains, is not what it trained on."""
    base = tmp_path / "base"
    qwen3(base)
    decoder = replace(read_config(base), lora=LoRAConfig(rank=2, alpha=4))
    config = load_config(None, [f"model.from_hf={base}", "model.preset="])
    known = model_base(config, decoder)
    qwen3(base, seed=1)
    assert model_base(config, decoder).digest != known.digest
    topology = SimpleNamespace(groups=None)
    job = SimpleNamespace(base=known, decoder=decoder, config=config, topology=topology)
    saved = {}
    monkeypatch.setattr(weights, "save_weights", lambda *args, **given: saved.update(given))
    monkeypatch.setattr(weights, "write_shared", lambda items, groups, write, **rest: write(items))
    weights._write_weights(job, SimpleNamespace(config=decoder), Path(tmp_path))
    assert saved["lora"] == known


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("output.weights=true", "longshore export run out"),
        ("output.weights=false", "write it again with --resume run"),
    ],
)
def test_the_advice_after_a_failed_export_works(monkeypatch, word, advice):
    """`longshore export` reads RUN/weights, which output.weights=false does not write."""
    words = ["model.preset=tiny-llama", "output.export=out", word]
    topology = SimpleNamespace(rank=1)
    job = SimpleNamespace(config=load_config(None, words), topology=topology)
    given = {}
    monkeypatch.setattr(weights, "_write_weights", lambda *args: None)
    monkeypatch.setattr(weights, "_export", lambda *args, **rest: given.update(rest))
    weights.write_weights(job, None, folder=Path("run"), note=print)
    assert given["then"] == advice
