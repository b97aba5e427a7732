"""What a run refuses while it is built, and what it does not ask of its data, without ranks."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.data.rows import from_rows
from tests.hf.test_adapter import make_gpt2

from longshore.config.check import decoder_config
from longshore.config.load import load_config
from longshore.data.source import Field, MemorySource, TokenizedSample
from longshore.hf.generic_keys import describe_decoder
from longshore.hf.transformers_model import config_keys
from longshore.plan import Sequence, check, make_plan
from longshore.run import parts
from longshore.run import parts as foreign
from longshore.run.data import given_planner


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
    monkeypatch.setattr(foreign, "check_transformers", lambda hf: None)
    monkeypatch.setattr(foreign, "parallelize", lambda *args, **options: None)
    monkeypatch.setattr(foreign, "fill_transformers", lambda *args, **options: None)
    job = SimpleNamespace(
        config=load_config(None, [f"model.from_hf={tmp_path}", "model.preset="]),
        decoder=describe_decoder(config_keys(hf.config)),
        dtype=torch.bfloat16,
        topology=SimpleNamespace(groups=None, device=None),
        source=source_of(3, 8),
    )
    model = foreign.make_transformers(job, None, None)
    foreign.check_positions(model, 8)
    job.source = source_of(3, 9, 2)
    with pytest.raises(ValueError, match=r"^data.path: a sequence has 9 tokens, .* 8 positions"):
        foreign.make_transformers(job, None, None)


PACK_FIELDS = (Field("pack", "sequence", "int64"), Field("cp_size", "sequence", "int64"))


def packed_source(*rows: tuple[int, int, int]) -> MemorySource:
    """Sequences of (length, pack, CP size)."""
    samples = [
        {"tokens": [5] * length, "loss_mask": [1] * length, "pack": pack, "cp_size": size}
        for length, pack, size in rows
    ]
    return MemorySource(from_rows(samples, PACK_FIELDS), PACK_FIELDS)


def steps_of(monkeypatch, *rows: tuple[int, int, int]):
    """What the steps of a run on 2 lanes of 100 tokens are made with."""
    monkeypatch.setattr(parts, "_packing", lambda job: None)
    monkeypatch.setattr(parts, "IndexedSteps", lambda source, **options: options)
    source, config = packed_source(*rows), load_config(None, ["plan.policy=given"])
    job = SimpleNamespace(
        config=config,
        decoder=decoder_config(config.model),
        topology=SimpleNamespace(groups=None, lanes=2),
        resolved=SimpleNamespace(capacity=100),
    )
    return parts.make_steps(job, config, source=source, shuffle=False)


def sequences_of(*rows: tuple[int, int]) -> list[Sequence]:
    return [Sequence(place, length, length) for place, length in rows]


def test_packs_of_the_data_are_trained_as_they_are(monkeypatch):
    rows = (60, 7, 2), (30, 9, 1), (61, 7, 2), (20, 9, 1), (10, 4, 0)
    options = steps_of(monkeypatch, *rows)
    assert options["groups"].tolist() == [7, 9, 7, 9, 4], "a pack is in one step"
    plan = options["planner"](sequences_of((2, 61), (1, 30), (4, 10), (0, 60), (3, 20)))
    check(plan)
    packs = {pack.sequences: pack.cp_size for _, pack in plan.packs()}
    assert (packs[0, 3], packs[1, 4]) == (2, 1)
    assert (2,) in packs, "without a CP size the planner chooses"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((60, 7, 2), (30, 7, 1)), "plan.policy: sequences of pack 7 have different values of the"),
        (((60, 7, 3),), "the data's pack 7 has CP size 3; legal are 1, 2"),
        (
            ((60, 3, 1), (60, 7, 1), (60, 7, 1)),
            "the data's pack 7: its 120 tokens do not fit at CP",
        ),
    ],
)
def test_wrong_packs_of_the_data_are_named(monkeypatch, rows, message):
    with pytest.raises(ValueError, match=message):
        steps_of(monkeypatch, *rows)


def test_a_pack_in_two_steps_is_refused():
    with pytest.raises(ValueError, match="of pack 7 have different values of data"):
        given_planner(make_plan, packed_source((5, 7, 1), (6, 7, 1)), np.array([1, 2]))


def test_held_out_sequences_need_no_groups(monkeypatch):
    monkeypatch.setattr(parts, "open_source", lambda *args, **options: source_of(3, 4))
    monkeypatch.setattr(parts, "make_planner", lambda *args: None)
    monkeypatch.setattr(parts, "_packing", lambda job: None)
    monkeypatch.setattr(parts, "IndexedSteps", lambda source, **options: options["groups"])
    words = ["data.group=prompt", "data.eval_path=other", "train.eval_every=2"]
    job = SimpleNamespace(
        config=load_config(None, words),
        decoder=None,
        topology=SimpleNamespace(groups=None, lanes=1),
        status=None,
        display="none",
    )
    assert parts.open_held_out(job, None) is None
