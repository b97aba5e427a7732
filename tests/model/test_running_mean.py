import torch
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import error_of
from tests.ranks.spine import VOCAB, alone, exact, make_samples
from tests.ranks.test_exactness import check
from tests.train.test_cuda_graph import WHOLE, compare

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.costs import parameter_count
from longshore.arch.presets import preset
from longshore.arch.running_mean import RunningMeanConfig
from longshore.batch import whole_context
from longshore.cli.main import main
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.plan import make_plan


def config():
    return preset("tiny-mean", vocab_size=VOCAB, width=16)


def test_the_mean_of_a_sequence_so_far():
    model = Decoder(config()).double()
    init_decoder(model, seed=0)
    mixer = model.layers["0"].mixer
    with torch.no_grad():
        (rows,), _ = mixer.before(torch.randn(5, 16, dtype=torch.float64), {})
        mixed = mixer.core(whole_context([3, 2]), (), rows)
    for start, stop in ((0, 3), (3, 5)):
        for place in range(start, stop):
            torch.testing.assert_close(mixed[place], rows[start : place + 1].mean(0))


def test_counted_saved_replayed_and_advised(tmp_path, monkeypatch):
    model = Decoder(config())
    assert parameter_count(config()) == sum(p.numel() for p in model.parameters())
    assert config_from_json(config_to_json(config())) == config()
    assert compare(config(), kinds={RunningMeanConfig}, steps=WHOLE).take_runs() == [2, 0, 1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "l.csv").write_text("length\n900\n77\n")
    assert main(["advise", "l.csv", "--gpus", "2", "--model", "tiny-mean"]) == 0


def test_on_two_lanes():
    plan = make_plan([1, 2, 7, 90, 5], lanes=2, capacity=64, policy="dynamic")
    check(2, [(config(), plan, exact(mode="zero3", recompute="blocks"))])


def run_tp():
    plan = make_plan([1, 2, 7, 60, 5], lanes=1, capacity=64, align=2)
    with ranks_of(lanes=1, tp=2) as (topology, groups):
        samples = make_samples(plan)
        result = composed(config(), plan, samples, topology, groups, exact(mode="none"))
        return [] if topology.rank else [error_of(result, alone(config(), samples))[0]]


def test_on_two_tp_ranks():
    (error,) = [error for errors in run_ranks(2, run_tp) for error in errors]
    assert error <= 1e-9
