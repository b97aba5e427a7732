import pytest

from longshore.config.spelling import as_recipe_keys
from longshore.errors import SettingError


def test_keys_of_the_section_are_spelled_and_other_settings_keep_their_name():
    with (
        pytest.raises(ValueError, match=r"^plan\.max_cp is 8, of 4 lanes$") as caught,
        as_recipe_keys("plan"),
    ):
        raise SettingError("{max_cp} is {given}, of 4 {lanes}", given=8)
    assert not isinstance(caught.value, SettingError)


def test_the_front_end_may_say_where():
    with (
        pytest.raises(ValueError, match=r"^the longest sequence: too long$"),
        as_recipe_keys("plan", where="the longest sequence"),
    ):
        raise SettingError("{where}: too long", where="sequence 0")


def test_a_key_stands_in_front_of_any_error():
    with (
        pytest.raises(ValueError, match=r"^plan\.cost: x\.json: is not JSON$"),
        as_recipe_keys("plan", "cost"),
    ):
        raise ValueError("x.json: is not JSON")
    with pytest.raises(ValueError, match=r"^unchanged$"), as_recipe_keys("plan"):
        raise ValueError("unchanged")
