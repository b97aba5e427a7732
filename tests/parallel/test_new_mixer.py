"""CONTRIBUTING.md shows how a mixer is added; this follows it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.parallel.my_mixer import Mean, MeanConfig
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import error_of
from tests.ranks.spine import VOCAB, alone, exact, make_samples
from tests.ranks.test_exactness import check, several_packs
from tests.train.test_cuda_graph import WHOLE, compare

from longshore.advisor.peak_memory import expected_peak
from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import parameter_count, token_bytes
from longshore.arch.decoder import DecoderConfig, LayerConfig, decoder_on_tp_rank
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.memory import RankSetting
from longshore.cli.main import main
from longshore.config.check import graph_layers
from longshore.config.load import load_config
from longshore.model.decoder import Decoder
from longshore.model.registry import register_mixer
from longshore.plan import make_plan

ROOT = Path(__file__).parents[2]


def config() -> DecoderConfig:
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=4)
    mlp = MLPConfig(width=16)
    layers = (LayerConfig(MeanConfig(), mlp), LayerConfig(attention, mlp))
    return DecoderConfig(vocab_size=VOCAB, width=16, layers=layers, init_std=0.3)


def test_contributing_shows_this_very_file() -> None:
    shown = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = (ROOT / "tests/parallel/my_mixer.py").read_text(encoding="utf-8")
    assert f"```python\n{code}```" in shown


def without() -> DecoderConfig:
    first, second = config().layers
    return replace(config(), layers=(replace(first, mixer=None), second))


def test_it_is_counted() -> None:
    model = Decoder(config())
    assert parameter_count(config()) == sum(p.numel() for p in model.parameters())
    for predicted in (
        lambda decoder: expected_peak(decoder, RankSetting(), tokens=100_000).total,
        lambda decoder: token_bytes(decoder, RankSetting(dtype="bfloat16", recompute=False)).saved,
    ):
        assert predicted(config()) > predicted(without())
    local = decoder_on_tp_rank(config(), 2).layers[0].mixer
    assert local == MeanConfig(heads=2)
    with pytest.raises(ValueError, match="does not divide the 4 heads of the mean; use one of 1, "):
        decoder_on_tp_rank(config(), 3)


def test_it_is_advised(tmp_path, monkeypatch, capsys) -> None:
    """Before there are weights, and its time counts."""
    monkeypatch.chdir(tmp_path)
    Path("l.csv").write_text("length\n900\n1200\n300\n500\n77\n")

    def seconds(name: str) -> float:
        model = f"tests.parallel.test_new_mixer:{name}"
        assert main(["advise", "l.csv", "--gpus", "2", "--model", model, "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["model"] == model
        return data["candidates"][0]["seconds"]

    assert seconds("config") > seconds("without")


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_any_plan_is_each_sequence_alone(lanes: int) -> None:
    plans = [make_plan([1, 2, 7, 90, 5], lanes=lanes, capacity=128 // lanes, policy="dynamic")]
    plans += [several_packs()] if lanes == 4 else []
    cases = [(config(), plan, exact(mode="zero3", recompute="blocks")) for plan in plans]
    check(lanes, cases)


def run_tp() -> list[float]:
    plan = make_plan([1, 2, 7, 60, 5], lanes=1, capacity=64, align=2)
    with ranks_of(lanes=1, tp=2) as (topology, groups):
        samples = make_samples(plan)
        choices = exact(mode="zero3", recompute="blocks")
        result = composed(config(), plan, samples, topology, groups, choices, layout=None)
        return [] if topology.rank else [error_of(result, alone(config(), samples))[0]]


def test_tp_ranks_divide_its_heads() -> None:
    (error,) = [error for errors in run_ranks(2, run_tp) for error in errors]
    assert error <= 1e-9


def test_graphs_replay_it() -> None:
    layers = compare(config(), kinds={MeanConfig}, steps=WHOLE)
    # The first micro-batch runs eagerly, the other two are replayed.
    assert layers.take_runs() == [2, 0, 1]
    for name in ("mean", "all"):
        run = load_config(None, [f"graph.layers={name}"])
        assert "mean" in graph_layers(run, config())


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(ValueError, match="MeanConfig is already registered, with Mean"):
        register_mixer(MeanConfig, Mean)
