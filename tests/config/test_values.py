import pytest

from longshore.config.values import texts


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
    assert texts().read(given) == read
