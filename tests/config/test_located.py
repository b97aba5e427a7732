"""Errors of the parts below, in a recipe's words."""

import pytest

from longshore.config.located import as_key, in_keys, of_held_out, settings_in_keys
from longshore.config.other_systems import all_keys
from longshore.data.mock import mock_lengths
from longshore.settings import SettingError


def test_a_setting_is_its_key():
    assert as_key("max_cp") == "plan.max_cp"
    assert as_key("max_rejected", "0.43") == "data.max_rejected=0.43"
    assert as_key("start_over") == "remove the folder"
    assert as_key("workers") == "workers"


def test_a_name_is_a_key_of_one_section():
    names = [key.rpartition(".")[2] for key in all_keys()]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"seed", "layers", "max_sequences", "weights"}
    assert [as_key("layers"), as_key("graph_layers")] == ["model.layers", "graph.layers"]
    assert as_key("graph_max_sequences", "8") == "graph.max_sequences=8"
    assert as_key("graph_nothing") == "graph_nothing"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (SettingError("{max_bytes} is 0"), "data.path: data.max_bytes is 0"),
        (ValueError("a{b}.txt: must end in .jsonl"), "data.path: a{b}.txt: must end in .jsonl"),
        (OSError(13, "Permission denied", "a"), "data.path: a: cannot be read (Permission denied)"),
    ],
)
def test_an_error_is_one_of_its_key(error, message):
    with pytest.raises(ValueError) as caught, in_keys("data.path"):  # noqa: PT011 - compared below
        raise error
    assert str(caught.value) == message


def test_what_is_wrong_with_held_out_data_is_said_of_their_key():
    for key, named in {"data.path": "data.eval_path", "data.fields": "data.fields"}.items():
        with (
            pytest.raises(ValueError, match=rf"^{named}: a.jsonl is empty$"),
            of_held_out(),
            in_keys(key),
        ):
            raise ValueError("a.jsonl is empty")
    with pytest.raises(ValueError, match=r"^data.path: "), in_keys("data.path"):
        raise ValueError("of the run's own data")


def test_errors_about_other_things_pass():
    error = OSError(28, "No space left on device")
    with pytest.raises(OSError) as caught, settings_in_keys():  # noqa: PT011 - compared below
        raise error
    assert caught.value is error
    message = r"^the longest sequence: lower plan.max_cp$"
    with pytest.raises(ValueError, match=message), settings_in_keys(where="the longest sequence"):
        raise SettingError("{where}: lower {max_cp}", where="sequence 0")


def test_mock_data_is_named_once():
    """Python says what it is about; a recipe has its key for that."""
    settings = {"mode": "distribution", "type": "fixed", "mean_seq_len": 8}
    with pytest.raises(ValueError, match=r"^mock data: a distribution needs count, "):
        mock_lengths(settings, count=None, seed=0)
    end = r"^data.mock: a distribution needs data.count, the number of sequences to draw$"
    with pytest.raises(ValueError, match=end), in_keys("data.mock"):
        mock_lengths(settings, count=None, seed=0)
