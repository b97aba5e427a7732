import pickle

import pytest

from longshore.settings import SettingError, as_option


def too_large():
    return SettingError("{max_cp} is {given}, of {count} lanes; lower {max_cp}", given=8, count=4)


def test_each_front_end_spells_the_setting():
    error = too_large()
    assert str(error) == "max_cp is 8, of 4 lanes; lower max_cp"
    assert error.spelled(as_option) == "--max-cp is 8, of 4 lanes; lower --max-cp"
    assert error.spelled("plan.{}".format) == "plan.max_cp is 8, of 4 lanes; lower plan.max_cp"
    assert error.spelled(str, given="too large").startswith("max_cp is too large")


def test_it_says_which_settings_it_is_about():
    assert too_large().settings == ("max_cp",)


def test_values_are_never_read_as_settings():
    error = SettingError("{path}: {file} is missing", file="a{b}.csv")
    assert str(error) == "path: a{b}.csv is missing"
    assert error.spelled(as_option) == "--path: a{b}.csv is missing"


def test_it_survives_the_way_to_another_process():
    copy = pickle.loads(pickle.dumps(too_large()))
    assert isinstance(copy, SettingError)
    assert copy.spelled(as_option) == too_large().spelled(as_option)
    with pytest.raises(ValueError, match="max_cp is 8"):
        raise copy


def test_a_setting_may_have_a_value():
    error = SettingError("take {found} with {max_rejected:{enough}}", found="it", enough="0.43")
    assert error.settings == ("max_rejected",)
    assert str(error) == "take it with max_rejected=0.43"
    assert error.spelled(as_option) == "take it with --max-rejected 0.43"


def test_words_in_front_are_not_read_as_settings():
    error = too_large().after("a{b}.csv line 3: ")
    assert isinstance(error, SettingError)
    assert error.spelled(as_option) == f"a{{b}}.csv line 3: {too_large().spelled(as_option)}"
    assert str(error.after("{x} ")).startswith("{x} a{b}.csv line 3: max_cp")


def test_any_name_may_be_a_value():
    error = SettingError("{message} {spell} {self}", message=1, spell=2, self=3)
    assert str(pickle.loads(pickle.dumps(error))) == "1 2 3"
