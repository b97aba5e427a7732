from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from longshore.config.schema import PATHS, SECTIONS, TEXTS


@pytest.mark.parametrize("section", SECTIONS)
def test_a_choice_takes_the_names_of_its_annotation(section):
    hints = get_type_hints(SECTIONS[section])
    for field in fields(SECTIONS[section]):
        kind, hint = field.metadata["kind"], hints[field.name]
        if get_origin(hint) is Literal:
            assert kind.names == get_args(hint), field.name
            assert [kind.read(name) for name in kind.names] == [*kind.names]
            assert field.default in kind.names
            assert kind.read("no such name") is None


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["id", "a,b"], ("id", "a,b")),
        ("id", ("id",)),
        ("*", ("*",)),
        ("id,source", ("id", "source")),
        (" id , source ", ("id", "source")),
        ("[id, 'source']", ("id", "source")),
        ("a:per_token:int16:4x2", ("a:per_token:int16:4x2",)),
        ("", ()),
        ("[]", ()),
        ([], ()),
        ("id,,source", None),
        ([""], None),
        (["id", 5], None),
        (5, None),
    ],
)
def test_lists_of_texts(given, read):
    assert TEXTS.read(given) == read


def test_a_path_that_is_there_may_contain_commas(tmp_path):
    name = f"{tmp_path}/a,b.jsonl"
    assert PATHS.read(name) == (f"{tmp_path}/a", "b.jsonl")
    (tmp_path / "a,b.jsonl").touch()
    assert PATHS.read(name) == PATHS.read([name]) == (name,)
