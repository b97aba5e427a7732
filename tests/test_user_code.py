import sys

import pytest

from longshore.user_code import (
    FUNCTION_NAME,
    MODULE_NAME,
    check_module_exists,
    load_function,
    load_module,
)

FILES = {
    "users_code.py": "def double(x):\n    return 2 * x\n\nnumber = 3\n",
    "users_broken.py": "sizes = {}\n\nwidth = sizes['heads']\n",
    "users_typo.py": "def f(:\n",
    "users_needs.py": "import users_missing\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_function_by_name():
    assert load_function("users_code:double", "loss")(4) == 8
    assert load_module("users_code:double", "module") is load_module("users_code", "module")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "users_missing:f",
            ": there is no module users_missing; start in the folder that contains it, add that "
            "folder to PYTHONPATH, or install it",
        ),
        ("users_code.sub:f", ": there is no module users_code.sub; "),
        (
            "users_broken:f",
            ": importing users_broken raised KeyError: 'heads' (users_broken.py, line 3)",
        ),
        ("users_typo:f", ": importing users_typo raised SyntaxError: "),
        (
            "users_needs:f",
            ": importing users_needs raised ModuleNotFoundError: No module named 'users_missing' "
            "(users_needs.py, line 1)",
        ),
        ("users_code:triple", ": users_code has no triple; define it in FOLDER/users_code.py as a"),
        ("users_code:number", ": users_code:number is not a function but of type int"),
        ("users_code", " is 'users_code'; it must be module:function, such as mine:loss"),
        ("users code:f", " is 'users code:f'; it must be module:function"),
    ],
)
def test_what_is_wrong_is_an_error_about_the_setting(name, message, folder):
    with pytest.raises(ValueError, match=r"^train\.loss") as caught:
        load_function(name, "train.loss")
    expected = message.replace("FOLDER", str(folder))
    assert str(caught.value).startswith(f"train.loss{expected}")
    assert "\n" not in str(caught.value)


def test_a_module_is_found_without_importing_it():
    check_module_exists("users_broken:f", "train.loss")
    assert "users_broken" not in sys.modules
    with pytest.raises(ValueError, match=r"^train.loss: there is no module users_missing"):
        check_module_exists("users_missing:f", "train.loss")


def test_names():
    assert FUNCTION_NAME.fullmatch("a.b_1:c")
    assert not any(map(FUNCTION_NAME.fullmatch, ("a", "a:", ":c", "a.:c", "1a:c", "a:b.c")))
    assert MODULE_NAME.fullmatch("a.b")
    assert MODULE_NAME.fullmatch("a.b:c")
    assert not any(map(MODULE_NAME.fullmatch, ("", "a:", "a/b", "a.py:1")))
