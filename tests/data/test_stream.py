"""A lane's endless sequences: its share of the files, and positions that continue exactly."""

import gzip
import json
import os
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.tiny import word_tokenizer

from longshore.data import stream as stream_module
from longshore.data.inputs import content_digest, find_inputs
from longshore.data.source import BatchSize, Place
from longshore.data.steps import StreamedSteps
from longshore.data.stream import TextStream
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer

WORDS = " ".join(f"w{i}" for i in range(64))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return SampleTokenizer(
        Tokenizer(word_tokenizer(tmp_path_factory.mktemp("tok"), WORDS)), Rules()
    )


def stream_of(tokenizer, *parts, weights=(1.0,), shuffle=False, max_rejected=1.0):
    files = tuple(find_inputs(names) for names in parts)
    return TextStream(
        parts=files,
        content=content_digest([file for part in files for file in part]),
        weights=weights,
        tokenizer=tokenizer,
        check=lambda sample, where: None,
        max_bytes=10**6,
        max_rejected=max_rejected,
        shuffle=shuffle,
        seed=3,
    )


def write(path, numbers, *, bad=()):
    """Text i is the words wi wi; those of `bad` are no JSON."""
    lines = ["{" if i in bad else json.dumps({"text": f"w{i} w{i}"}) for i in numbers]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def word(tokenizer, sample):
    """The number i of a text."""
    return int(tokenizer.tokenizer._backend.id_to_token(int(sample.tokens[0]))[1:])


def test_the_example_of_the_module(tmp_path, tokenizer):
    stream = stream_of(tokenizer, [write(tmp_path / "chats.jsonl.gz", range(5))])
    for lane, expected in ((0, [0, 2, 4, 1, 3, 0]), (1, [1, 3, 0, 2, 4, 1])):
        drawn = list(islice(stream.lane(lane, 2), 6))
        assert [word(tokenizer, sample) for sample in drawn] == expected
        assert [sample.id for sample in drawn] == [0, 1, 2, 3, 4, 5]


@pytest.mark.property
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 40), max_size=4),
    st.sampled_from([0, stream_module.MOST_IN_TURN]),
)
def test_lanes_share_every_row_once(
    tmp_path_factory, tokenizer, sizes, lanes, packed, mixed, bad, most
):
    """Each pass of all lanes together has every good row of the files exactly once."""
    folder, names, first = tmp_path_factory.mktemp("rows"), [], 0
    for number, size in enumerate(sizes):
        ending = ".jsonl.gz" if packed else ".jsonl"
        names.append(write(folder / f"{number}{ending}", range(first, first + size), bad=bad))
        first += size
    stream = stream_of(tokenizer, names, shuffle=mixed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "MOST_IN_TURN", most)
        parts = [stream.lane(lane, lanes)._parts[0] for lane in range(lanes)]
    for turn in range(2):
        rows = [sample for part in parts for _, _, sample in part._pass(turn)]
        drawn = Counter(row["text"] for row in rows if isinstance(row, dict))
        assert drawn == Counter(f"w{i} w{i}" for i in range(first) if i not in bad)


@pytest.mark.property
@given(
    st.integers(0, 30),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([0, stream_module.MOST_IN_TURN]),
)
def test_a_position_continues_exactly(
    tmp_path_factory, tokenizer, drawn, shuffle, packed, lanes, most
):
    folder, ending = tmp_path_factory.mktemp("rows"), ".jsonl.gz" if packed else ".jsonl"
    parts = (
        [write(folder / f"a{ending}", range(9), bad={2, 5})],
        [write(folder / f"b{ending}", range(20, 33), bad={20})],
    )
    stream = stream_of(tokenizer, *parts, weights=(1.0, 2.5), shuffle=shuffle)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "MOST_IN_TURN", most)
        straight, resumed = (stream.lane(lanes - 1, lanes) for _ in range(2))
    before = list(islice(straight, drawn))
    assert len(before) == drawn
    resumed.skip_to(straight.position)
    assert resumed.position == straight.position
    assert list(islice(resumed, 15)) == list(islice(straight, 15))
    assert resumed.position == straight.position


def test_weights_decide_how_often_a_part_is_drawn(tmp_path, tokenizer):
    one = write(tmp_path / "a.jsonl", range(3))
    two = write(tmp_path / "b.jsonl", range(10, 13))
    stream = stream_of(tokenizer, [one], [two], weights=(3.0, 1.0))
    words = [word(tokenizer, sample) for sample in islice(stream.lane(0, 1), 40)]
    assert sum(number >= 10 for number in words) == 10


def test_bad_rows_end_a_run_only_when_they_are_many(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl.gz", range(60), bad=range(0, 60, 10))
    stream = stream_of(tokenizer, [path], max_rejected=0.15)
    assert len(list(islice(stream.lane(0, 1), 300))) == 300
    message = r"rejected 1\d of 1\d\d samples of lane 0, such as .*a.jsonl.gz line \d+: Expect"
    with pytest.raises(ValueError, match=message):
        list(islice(stream_of(tokenizer, [path], max_rejected=0.05).lane(0, 1), 300))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("most", [0, stream_module.MOST_IN_TURN])
def test_a_lane_without_a_sequence_ends_the_run(tmp_path, tokenizer, monkeypatch, shuffle, most):
    monkeypatch.setattr(stream_module, "MOST_IN_TURN", most)
    path = write(tmp_path / "a.jsonl.gz", range(3), bad=range(3))
    stream = stream_of(tokenizer, [path], shuffle=shuffle)
    with pytest.raises(ValueError, match=r"no sample of lane 1 of 2 in .* became a sequence, in "):
        next(stream.lane(1, 2))


def test_a_pass_without_a_sequence_does_not_end_a_run(tmp_path, tokenizer):
    """5 long rows on 4 lanes in the shuffled order: some passes of a lane have none of them."""
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": f"w{i} " * 50}) for i in range(5)]
    path.write_text("\n".join([*rows, "{"]), encoding="utf-8")
    stream = stream_of(tokenizer, [path], shuffle=True)
    for lane in range(4):
        samples = stream.lane(lane, 4)
        sizes = [len(list(samples._parts[0]._pass(turn))) for turn in range(30)]
        assert 0 in sizes
        drawn = list(islice(samples, 40))
        resumed = stream.lane(lane, 4)
        resumed.skip_to(samples.position)
        assert list(islice(resumed, 10)) == list(islice(samples, 10))
        assert len({word(tokenizer, sample) for sample in drawn}) == 5


def test_one_row_is_enough_for_two_lanes(tmp_path, tokenizer):
    stream = stream_of(tokenizer, [write(tmp_path / "a.jsonl.gz", [7])])
    for lane in range(2):
        drawn = [word(tokenizer, sample) for sample in islice(stream.lane(lane, 2), 3)]
        assert drawn == [7, 7, 7]


def counts_of(tokenizer, stream, *, lanes, each):
    """How often each row comes when every lane draws `each` sequences."""
    drawn = [islice(stream.lane(lane, lanes), each) for lane in range(lanes)]
    return Counter(word(tokenizer, sample) for lane in drawn for sample in lane)


def test_rows_of_a_small_file_come_as_often_as_those_of_a_large_one(tmp_path, tokenizer):
    """60 and 4 rows in two files on 4 lanes: after 48 draws each row came 3 times."""
    large = write(tmp_path / "a.jsonl.gz", range(60))
    small = write(tmp_path / "b.jsonl.gz", range(60, 64))
    stream = stream_of(tokenizer, [large, small])
    counts = counts_of(tokenizer, stream, lanes=4, each=48)
    assert set(counts.values()) == {3}
    assert len(counts) == 64


@pytest.mark.parametrize("packed", [True, False])
def test_shares_of_much_data_have_equal_bytes(tmp_path, tokenizer, monkeypatch, packed):
    """9 files on 8 lanes: no lane has two of them, and all rows come about equally often."""
    monkeypatch.setattr(stream_module, "MOST_IN_TURN", 0)
    ending = ".jsonl.gz" if packed else ".jsonl"
    names = [write(tmp_path / f"{i}{ending}", [i + 10] * 80) for i in range(9)]
    stream = stream_of(tokenizer, names)
    parts = [stream.lane(lane, 8)._parts[0] for lane in range(8)]
    assert all(85 <= len(list(part._pass(0))) <= 95 for part in parts)
    counts = counts_of(tokenizer, stream, lanes=8, each=90)
    assert all(75 <= counts[i + 10] <= 85 for i in range(9))


def test_a_damaged_file_ends_the_stream_with_its_name(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl.gz", range(50))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a.jsonl.gz: cannot be unpacked after"):
        list(islice(stream_of(tokenizer, [path]).lane(0, 1), 100))


def test_what_a_stream_must_have_to_be_resumed(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", range(5))
    steps = StreamedSteps.__new__(StreamedSteps)
    steps.stream, steps.batch = stream_of(tokenizer, [path]), BatchSize("sequences", 4)
    steps.lanes, steps.lane = 2, 0
    steps.samples, steps._start = steps.stream.lane(0, 2), []
    state = {**steps.describe(), "epoch": 0, "step_in_epoch": 3, "step": 3}
    positions = [[6, 6], [6, 6]]
    steps.check_can_resume({**state, "positions": positions})
    steps._go_to(Place(0, 3, 3))
    assert steps.samples.position == (6, 6)
    with pytest.raises(ValueError, match="the run to resume had lanes 4, and now it is 2; the"):
        steps.check_can_resume({**state, "lanes": 4, "positions": positions})
    with pytest.raises(ValueError, match="has no position of a stream"):
        steps.check_can_resume(state)
    other = stream_of(tokenizer, [write(tmp_path / "b.jsonl", range(6))])
    assert other.digest != steps.stream.digest
    before, status = path.read_bytes(), path.stat()
    path.write_bytes(before.replace(b"w3", b"w4"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert stream_of(tokenizer, [path]).digest != steps.stream.digest, "of the same size and time"
