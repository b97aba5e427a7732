import re

import pytest

from longshore.plan.cost import CostProfile
from longshore.plan.lengths_file import demo_lengths, parse_lengths, read_lengths
from longshore.plan.planner import plan_setting
from longshore.plan.types import Axes


def parse(text):
    return parse_lengths(text.splitlines(), "l.csv")


@pytest.mark.parametrize(
    ("text", "lengths", "lines"),
    [
        ("5", (5,), (1,)),
        ("length\n5\n7\n", (5, 7), (2, 3)),
        ("\n\nlength\n\n5\n \n7\n\n", (5, 7), (5, 7)),
        ("Length\r\n 5 \r\n+7\r\n007", (5, 7, 7), (2, 3, 4)),
        ('"length"\n"5"\n', (5,), (2,)),
    ],
)
def test_lengths_and_their_lines(text, lengths, lines):
    found = parse(text)
    assert (found.lengths, found.lines, found.labels) == (lengths, lines, ())


def test_labels_make_packs_by_first_appearance():
    found = parse('length,pack\n900,b\n5000,"x, y"\n700,b\n')
    assert found.labels == ("b", "x, y", "b")
    assert found.packs() == [(0, 2), (1,)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "l.csv: contains no lengths"),
        ("\n \n", "l.csv: contains no lengths"),
        ("length\n", "l.csv: contains no lengths"),
        ("length\n1\n\n12.5", "l.csv line 4: '12.5' is not a whole number of tokens"),
        ("1\n1e3", "l.csv line 2: '1e3' is not a whole number of tokens"),
        ("1\n1_000", "l.csv line 2: '1_000' is not a whole number of tokens"),
        ("1\n٣", "l.csv line 2: '٣' is not a whole number of tokens"),
        ("1\nTrue", "l.csv line 2: 'True' is not a whole number of tokens"),
        ("1\nlength", "l.csv line 2: 'length' is not a whole number of tokens"),
        ("1\n0", "l.csv line 2: its length is '0'; a sequence has at least 1 token"),
        ("1\n-7", "l.csv line 2: its length is '-7'; a sequence has at least 1 token"),
        ("1\n" + "9" * 13, "is too large; a length has at most 12 digits"),
        ("1\n" + "9" * 5000, "l.csv line 2: '" + "9" * 39 + "…' is too large"),
        ("tokens\n1", "l.csv line 1: 'tokens' is neither a length nor a header"),
        ("id,length\n1,2", "l.csv line 1: 'id,length' is neither a length nor a header"),
        ("length;pack\n1;a", "l.csv line 1: 'length;pack' is neither a length nor a header"),
        ("1,024\n", "l.csv line 1: has 2 columns, not 1"),
        ("length,pack\n1,a\n2\n", "l.csv line 3: has 1 column, not 2"),
        ("length,pack\n1,a,b\n", "l.csv line 2: has 3 columns, not 2"),
        ("length,pack\n1,\n", "l.csv line 2: the name of its pack"),
        ('1\n"' + "9" * 200_000, "l.csv line 2: is not CSV"),
    ],
)
def test_bad_files_are_refused_by_line(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(text)


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    path = tmp_path / "l.csv"
    path.write_bytes(b"\xef\xbb\xbflength\n5\n")
    assert read_lengths(path).lengths == (5,)


def test_unreadable_files_are_named(tmp_path):
    binary = tmp_path / "l.bin"
    binary.write_bytes(b"\xff\xfe1\x00")
    for path, why in [(tmp_path / "no.csv", "No such file"), (tmp_path, "directory")]:
        with pytest.raises(ValueError, match=why) as refused:
            read_lengths(path)
        assert str(refused.value).startswith(f"{path}: cannot be read")
    with pytest.raises(ValueError, match=r"l\.bin: is not a text file"):
        read_lengths(binary)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.json.gz"])
def test_a_file_of_samples_is_to_be_prepared_first(tmp_path, name):
    """It was "line 1: has 2 columns, not 1", or "not a text file"."""
    (tmp_path / name).write_bytes(b'{"input_ids": [5, 6]}' if name == "rows.jsonl" else b"\xff")
    with pytest.raises(ValueError, match=rf"{name}: is a file of samples.* longshore prepare"):
        read_lengths(tmp_path / name)


def test_a_part_keeps_lines_and_labels():
    whole = parse("length,pack\n1,a\n2,b\n3,a\n4,a\n5,b\n")
    assert whole.part(range(5)) == whole
    steps = [whole.part(places) for places in ((0, 1), (3, 2), (4,))]
    assert [step.lengths for step in steps] == [(1, 2), (4, 3), (5,)]
    assert [step.lines for step in steps] == [(2, 3), (5, 4), (6,)]
    assert [step.packs() for step in steps] == [[(0,), (1,)], [(0, 1)], [(0,)]]


def test_only_policy_given_reads_the_packs():
    step = parse("length,pack\n5,a\n5,b\n5,a\n")
    given = step.plan(plan_setting(Axes(lanes=1), policy="given", capacity=100))
    assert sorted(pack.sequences for _, pack in given.packs()) == [(0, 2), (1,)]
    mixed = step.plan(plan_setting(Axes(lanes=1), capacity=100))
    assert [pack.sequences for _, pack in mixed.packs()] == [(0, 1, 2)]


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("mixed", {"capacity": 8}, "l.csv line 5: its 9 tokens do not fit"),
        ("given", {"capacity": 9}, "l.csv line 4: pack 'a': its 10 tokens do not fit"),
        ("given", {"capacity": 99, "max_sequences": 1}, "l.csv line 4: pack 'a' has 2 sequences"),
        ("mixed", {"capacity": 99, "align": 100}, "plan.align is 100, more than the capacity of"),
    ],
)
def test_the_planners_errors_name_the_line(policy, options, message):
    step = parse("length,pack\n1,a\n1,a\n1,a\n9,a\n9,b\n").part((2, 3))
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        step.plan(plan_setting(Axes(lanes=1), policy=policy, **options))


def test_policy_given_wants_labels():
    with pytest.raises(ValueError, match=r"l\.csv: plan\.policy given needs .* 'length,pack'"):
        parse("5").plan(plan_setting(Axes(lanes=1), policy="given", capacity=8))


@pytest.mark.parametrize("linear", [1e308, 1e-320])
def test_costs_beyond_floating_point_are_refused(linear):
    with pytest.raises(ValueError, match=r"linear is .*; it must be 0, or from"):
        CostProfile(linear, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)


def test_the_demo_is_long_tailed():
    lengths = sorted(demo_lengths().lengths)
    assert len(lengths) == 1024
    assert lengths[0] >= 16
    assert 900 < lengths[512] < 1150
    assert 60_000 < lengths[-1] <= 131_072
