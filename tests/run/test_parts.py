"""What a run refuses while it is built, and what it does not ask of its data, without ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.hf.test_adapter import make_gpt2

from longshore.config.load import load_config
from longshore.data.source import MemorySource, TokenizedSample
from longshore.hf.generic_keys import describe_decoder
from longshore.hf.transformers_model import config_keys
from longshore.run import foreign, parts


def source_of(*lengths: int) -> MemorySource:
    return MemorySource(
        TokenizedSample(0, np.zeros(length, np.int32), np.ones(length, np.bool_))
        for length in lengths
    )


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for module in (foreign, parts):
        monkeypatch.setattr(module, "agreed", lambda groups: nullcontext())


def test_a_short_table_of_positions_is_refused_before_the_first_step(tmp_path, monkeypatch):
    hf = make_gpt2()
    hf.save_pretrained(tmp_path)
    monkeypatch.setattr(foreign, "check_foreign", lambda hf: None)
    monkeypatch.setattr(foreign, "parallelize", lambda *args, **options: None)
    monkeypatch.setattr(foreign, "fill_foreign", lambda *args, **options: None)
    job = SimpleNamespace(
        config=load_config(None, [f"model.from_hf={tmp_path}", "model.preset="]),
        decoder=describe_decoder(config_keys(hf.config)),
        dtype=torch.bfloat16,
        topology=SimpleNamespace(groups=None, device=None),
        source=source_of(3, 8),
    )
    model = foreign.make_foreign(job, None, None)
    foreign.check_positions(model, 8)
    job.source = source_of(3, 9, 2)
    with pytest.raises(ValueError, match=r"^data.path: a sequence has 9 tokens, .* 8 positions"):
        foreign.make_foreign(job, None, None)


def test_held_out_sequences_need_no_groups(monkeypatch):
    monkeypatch.setattr(parts, "open_source", lambda *args, **options: source_of(3, 4))
    monkeypatch.setattr(parts, "make_planner", lambda *args: None)
    monkeypatch.setattr(parts, "_packing", lambda job: None)
    monkeypatch.setattr(parts, "IndexedSteps", lambda source, **options: options["groups"])
    monkeypatch.setattr(parts, "Evaluator", lambda held_out, *args, **options: held_out)
    words = ["data.group=prompt", "data.eval_path=other", "train.eval_every=2"]
    job = SimpleNamespace(
        config=load_config(None, words),
        decoder=None,
        topology=SimpleNamespace(groups=None, lanes=1),
        status=None,
        display="none",
    )
    built = SimpleNamespace(stepper=SimpleNamespace(model=None, executor=None))
    assert parts.make_evaluator(job, built, tell=None, wants_stop=None).steps is None
