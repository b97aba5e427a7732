"""TensorBoard and Weights & Biases, both as stubs; TensorBoard for real where it is installed."""

import importlib.util
import sys
from types import ModuleType

import pytest

from longshore.train.record import check_trackers, make_trackers, numbers

STEP = {"step": 3, "loss": 2.5, "mfu": None, "skipped": False, "mtp_losses": [2.6, 2.7]}
STEP["loss_metrics"] = {"reward_margin": 0.5, "reward_accuracy": None}
SENT = {"loss": 2.5, "skipped": 0.0, "mtp_losses/1": 2.6, "mtp_losses/2": 2.7}
SENT["loss_metrics/reward_margin"] = 0.5


class Calls(list):
    """What a stub was asked for; `fails` names the call that raises."""

    fails = ""

    def add(self, name, *values):
        if name == self.fails:
            raise OSError("no network")
        self.append((name, *values))


@pytest.fixture
def calls(monkeypatch):
    """Stub modules that write down how they are called."""
    found = Calls()

    class Writer:
        def __init__(self, log_dir):
            found.add("open", log_dir)

        def add_text(self, name, text, step):
            found.add("text", name, text)

        def add_scalar(self, name, value, step):
            found.add("scalar", name, value, step)

        def close(self):
            found.add("close")

    class Run:
        def log(self, values, step):
            found.add("log", values, step)

        def finish(self):
            found.add("finish")

    def init(**options):
        found.add("init", options)
        return Run()

    board, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    board.SummaryWriter, wandb.init = Writer, init
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return found


def test_numbers_are_what_can_be_drawn():
    assert numbers(STEP) == SENT
    assert numbers({"loss": float("nan"), "name": "x", "lr": 1}) == {"lr": 1.0}


def test_tensorboard(calls, tmp_path):
    (tracker,) = make_trackers(
        ["tensorboard"], tmp_path / "run", {"train.lr": 0.1}, warn=pytest.fail
    )
    tracker.log(3, STEP)
    tracker.close()
    assert calls[0] == ("open", str(tmp_path / "run/tensorboard"))
    assert calls[1] == ("text", "config", "    train.lr = 0.1")
    assert calls[2:-1] == [("scalar", name, value, 3) for name, value in SENT.items()]
    assert calls[-1] == ("close",)


def test_wandb_keeps_its_own_mode_and_project(calls, tmp_path):
    (tracker,) = make_trackers(["wandb"], tmp_path / "demo-1", {"train.lr": 0.1}, warn=pytest.fail)
    tracker.log(3, STEP)
    tracker.close()
    options = {"name": "demo-1", "dir": str(tmp_path / "demo-1"), "config": {"train.lr": 0.1}}
    assert calls == [("init", options), ("log", SENT, 3), ("finish",)]


def test_each_name_once_in_the_order_given(calls, tmp_path):
    made = make_trackers(["wandb", "tensorboard", "wandb"], tmp_path, {}, warn=pytest.fail)
    assert [tracker.name for tracker in made] == ["wandb", "tensorboard"]
    assert make_trackers([], tmp_path, {}, warn=pytest.fail) == []


@pytest.mark.parametrize("fails", ["init", "log", "finish"])
def test_a_tracker_that_fails_says_so_once(calls, tmp_path, fails):
    calls.fails = fails
    said = []
    (tracker,) = make_trackers(["wandb"], tmp_path, {}, warn=said.append)
    for step in (1, 2):
        tracker.log(step, STEP)
    tracker.close()
    tracker.close()
    assert said == ["wandb stopped, the run continues: OSError: no network"]


def test_refuses_an_unknown_name(tmp_path):
    with pytest.raises(ValueError, match="unknown tracker 'mlflow'; known are tensorboard, wandb"):
        make_trackers(["mlflow"], tmp_path, {}, warn=pytest.fail)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_says_how_to_install_what_is_missing(monkeypatch, name):
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf'pip install "longshore\[{name}\]"'):
        check_trackers([name])


def test_a_folder_called_wandb_is_not_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(ValueError, match="wandb is not installed"):
        check_trackers(["wandb"])


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="no tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_for_real(tmp_path):
    (tracker,) = make_trackers(["tensorboard"], tmp_path, {"train.lr": 0.1}, warn=pytest.fail)
    tracker.log(3, STEP)
    tracker.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
