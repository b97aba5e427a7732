"""Memory of the ranks of a pipeline: their parameters, and the rounds in flight."""

from dataclasses import replace

import pytest

from longshore.arch.costs import (
    auto_capacity,
    make_layout,
    model_bytes,
    parameter_count,
    token_bytes,
)
from longshore.arch.memory import RankSetting, stage_parameters, stage_saved, whole_model
from longshore.arch.part import Sharing
from longshore.arch.presets import preset
from longshore.plan.types import Axes

GIVEN = {"memory_bytes": 80 << 30, "cp_sizes": (1, 2)}
HOW = RankSetting(
    axes=Axes(lanes=8, shard="zero3"), recompute=True, sharing=Sharing("gather", "auto")
)


@pytest.mark.parametrize("name", ["qwen3-8b", "tiny-llama", "tiny-hybrid", "deepseek-v3"])
def test_one_stage_is_the_whole_model(name: str):
    config = preset(name)
    assert stage_parameters(config, whole_model(config).stages[0]).total == parameter_count(config)


def test_stages_have_all_parameters_and_copies_of_the_embedding():
    config = preset("deepseek-v3")
    embedding = config.vocab_size * config.width
    own = make_layout(config, pp=2, vpp=1, text="E" + "t" * 40 + "|" + "t" * 21 + "mL")
    assert not config.tied
    total = sum(stage_parameters(config, stage).total for stage in own.stages)
    assert total == parameter_count(config) + embedding, "the depth's copy"


def test_a_tied_head_away_from_the_embedding_is_a_copy():
    config = preset("tiny-llama", tied=True)
    layout = make_layout(config, pp=2, vpp=1)
    total = sum(stage_parameters(config, stage).total for stage in layout.stages)
    assert total == parameter_count(config) + config.vocab_size * config.width


@pytest.mark.parametrize("pp_rank", range(4))
def test_rounds_in_flight_of_1f1b(pp_rank: int):
    config = preset("qwen3-8b")
    layout = make_layout(config, pp=4, vpp=1)
    how = RankSetting(recompute=True, layout=layout, pp_rank=pp_rank)
    token = token_bytes(config, how)
    one = stage_saved(config, pp_rank, how)
    assert token.saved == (4 - pp_rank) * one


@pytest.mark.parametrize("pp_rank", range(4))
def test_stages_in_flight_of_interleaving(pp_rank: int):
    config = preset("qwen3-8b", layers=33)
    layout = make_layout(config, pp=4, vpp=2, text="Etttt" + "|tttt" * 7 + "tL")
    how = RankSetting(recompute=True, layout=layout, pp_rank=pp_rank)
    token = token_bytes(config, how)
    saved = [stage_saved(config, s, how) for s in (pp_rank, pp_rank + 4)]
    count = 2 * (4 - pp_rank - 1) + 4 + 1
    assert count * min(saved) <= token.saved <= count * max(saved)


def test_capacity_of_a_pipeline_is_that_of_its_fullest_rank():
    config = preset("qwen3-8b")
    whole, _ = auto_capacity(config, HOW, **GIVEN)
    same, _ = auto_capacity(config, replace(HOW, layout=whole_model(config)), **GIVEN)
    assert whole == same
    layout = make_layout(config, pp=4, vpp=1)
    capacity, lines = auto_capacity(config, replace(HOW, layout=layout), **GIVEN)
    # Rank 0 has a quarter of the layers, four rounds of them, and no loss.
    assert "of pipeline rank 0 in Et" in lines[1]
    assert "saved for all rounds in flight, blocks recomputed" in lines[3]
    model = model_bytes(
        config,
        RankSetting(axes=Axes(lanes=8, shard="zero3"), dtype="bfloat16", layout=layout, pp_rank=0),
    )
    assert 0.2 < model.parameters * 8 / (4 * parameter_count(config)) < 0.35
    interleaved, _ = auto_capacity(
        config, replace(HOW, layout=make_layout(config, pp=4, vpp=2)), **GIVEN
    )
    assert interleaved < capacity, "more stages are in flight"
