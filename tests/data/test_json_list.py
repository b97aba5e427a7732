import io
import json
from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data import inputs as json_list
from longshore.data.inputs import read_elements

Element = namedtuple("Element", "start stop text ended_by")
VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='"\\[]{},: aé\n'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\],'), inner, max_size=3)
    ),
    max_leaves=8,
)


def elements(data, start=1, limit=10**9):
    parts = read_elements(io.BytesIO(data), start, len(data), limit=limit)
    return [Element(*part) for part in parts]


def test_the_example_of_the_module():
    data = b'[{"a": "]"}, 7 ]'
    assert [(part.start, part.stop, part.ended_by) for part in elements(data)] == [
        (1, 11, ","),
        (12, 15, "]"),
    ]


@pytest.mark.property
@given(st.lists(VALUES, min_size=1, max_size=8), st.integers(1, 20), st.booleans())
def test_records_are_those_of_json(monkeypatch_module, values, chunk, indent):
    data = json.dumps(values, ensure_ascii=False, indent=2 if indent else None).encode()
    monkeypatch_module.setattr(json_list, "CHUNK", chunk)
    parts = elements(data)
    assert [json.loads(part.text) for part in parts] == values
    assert all(data[part.start : part.stop] == part.text for part in parts)
    assert [part.ended_by for part in parts] == [","] * (len(values) - 1) + ["]"]
    small = elements(data, limit=6)
    assert [(p.start, p.stop) for p in small] == [(p.start, p.stop) for p in parts]
    assert [p.text for p in small] == [p.text if p.stop - p.start <= 6 else b"" for p in parts]


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize(
    ("data", "ended_by"),
    [
        (b"[1, {", [",", ""]),
        (b'[1, "]', [",", ""]),
        (b"[1, }, 2]", [",", ",", "]"]),
        (b"[1,, 2]", [",", ",", "]"]),
        (b"[]", ["]"]),
        (b"[", [""]),
    ],
)
def test_broken_lists(data, ended_by):
    assert [part.ended_by for part in elements(data)] == ended_by
