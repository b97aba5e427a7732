"""Errors name the key of a recipe where they are raised, once; nothing rewrites them."""

import pickle

import pytest

from longshore.config.other_systems import all_keys
from longshore.config.schema import in_keys
from longshore.data.mock import mock_lengths
from longshore.plan.planner import KEYS, PlaceError, make_plan


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("data.max_bytes is 0"), "data.path: data.max_bytes is 0"),
        (ValueError("a{b}.txt: must end in .jsonl"), "data.path: a{b}.txt: must end in .jsonl"),
        (OSError(13, "Permission denied", "a"), "data.path: a: cannot be read (Permission denied)"),
    ],
)
def test_an_error_is_one_of_its_key(error, message):
    with pytest.raises(ValueError) as caught, in_keys("data.path"):  # noqa: PT011 - compared below
        raise error
    assert str(caught.value) == message


def test_arguments_of_the_planner_are_keys():
    assert {name for name in KEYS.values() if "." in name} <= set(all_keys())
    assert {name for name in KEYS.values() if "." not in name} == {"lanes", "heads"}


def test_a_sequence_is_named_by_whoever_knows_its_name():
    with pytest.raises(PlaceError, match=r"^sequence 1: its 99 tokens do not fit") as caught:
        make_plan([5, 99], lanes=1, capacity=8)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.kind, copy.number, str(copy)) == ("sequence", 1, str(caught.value))
    assert f"l.csv line 3{copy.problem}".startswith("l.csv line 3: its 99 tokens do not fit")


def test_mock_data_is_named_once():
    settings = {"mode": "distribution", "type": "fixed", "mean_seq_len": 8}
    end = r"^data.mock: a distribution needs data.count, the number of sequences to draw$"
    with pytest.raises(ValueError, match=end), in_keys("data.mock"):
        mock_lengths(settings, count=None, seed=0)
