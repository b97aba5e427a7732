import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.source import Field, check_declared, collect_fields, parse_field

ADVANTAGE = Field("advantage", "token", "float32")
SAMPLE_ID = Field("sample_id", "sequence", "int64")
EXPERTS = Field("experts", "token", "int16", (2, 2))


def collect(given: dict, *fields: Field, length: int = 3) -> dict:
    return collect_fields(given, fields, length=length, where="row 7")


def test_declared_fields_by_hand():
    got = collect({"sample_id": 17, "advantage": [0.5, 0.5, -1]}, ADVANTAGE, SAMPLE_ID)
    assert list(got) == ["advantage", "sample_id"]
    assert got["advantage"].tolist() == [0.5, 0.5, -1.0]
    assert got["advantage"].dtype == np.float32
    assert got["sample_id"].shape == ()
    assert got["sample_id"].dtype == np.int64
    assert got["sample_id"] == 17


def test_a_value_may_have_a_shape():
    got = collect({"experts": np.arange(12).reshape(3, 2, 2)}, EXPERTS)
    assert got["experts"].shape == (3, 2, 2)
    assert got["experts"].dtype == np.int16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"advantage": [1, 2, 3], "extra": 1}, "row 7: field 'extra' is not declared"),
        ({}, "row 7: the declared field 'advantage' is missing"),
        (
            {"advantage": [1, 2]},
            "row 7: field 'advantage' holds 2 values; .* 3 tokens, .* 3 values",
        ),
        ({"advantage": 1}, "holds one value"),
        ({"advantage": [[1], [2], [3]]}, "holds 3 × 1 values"),
        ({"advantage": ["a", "b", "c"]}, "not numbers"),
        ({"advantage": [1, [2], 3]}, "not numbers"),
        ({"advantage": None}, "not numbers"),
        ({"advantage": [1, 2, 1e300]}, "float32 cannot hold"),
    ],
)
def test_what_is_wrong_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        collect(given, ADVANTAGE)


def test_whole_numbers_that_were_floats_are_refused_where_floats_round():
    """Such as those of a Parquet column with nulls that went through pandas."""
    ids = [Field("pair", "sequence", "int64")]

    def collected(value):
        return collect_fields({"pair": value}, ids, length=3, where="row 4")["pair"]

    assert collected(2**53 + 1) == 2**53 + 1
    assert collected(float(2**53 - 1)) == 2**53 - 1
    for value in (float(2**53 + 1), -(2.0**60)):
        with pytest.raises(ValueError, match=r"'pair' holds .* as floats, which may have been"):
            collected(value)


@pytest.mark.parametrize("value", [1.5, 2**63, float("nan"), float("inf"), [1]])
def test_whole_numbers_are_never_rounded(value):
    with pytest.raises(ValueError, match="sample_id"):
        collect({"sample_id": value}, SAMPLE_ID)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("advantage", "must be name:per_token:dtype"),
        ("advantage:token:float32", "must be name:per_token:dtype"),
        ("advantage:per_word:float32", "one of token, target, sequence"),
        ("advantage:per_token:bfloat16", "one of bool, int8"),
        ("tokens:per_token:int32", "not one of the reserved names id, tokens"),
        ("a b:per_token:int32", "must be name"),
        ("a:per_token:int32:0x2", "has no values"),
    ],
)
def test_bad_declarations(text, message):
    with pytest.raises(ValueError, match=message):
        parse_field(text)


def test_declared_twice():
    with pytest.raises(ValueError, match="advantage: is declared more than once"):
        check_declared([ADVANTAGE, SAMPLE_ID, Field("advantage", "sequence", "int8")])


@pytest.mark.slow
@pytest.mark.property
@given(
    st.from_regex(r"[a-z]{2}[a-z_0-9]{0,8}x", fullmatch=True),
    st.sampled_from(["token", "target", "sequence"]),
    st.sampled_from(["bool", "int64", "float16"]),
    st.lists(st.integers(1, 99), max_size=3).map(tuple),
)
def test_text_and_back(name, per, dtype, shape):
    field = Field(name, per, dtype, shape)
    assert parse_field(str(field)) == field
