import json
from pathlib import Path

import pytest

from longshore.data.rejected import WAYS_OUT, Rejections, rejections_of

REASONS = {"empty": 1, "too long": 12, "spans not located": 30}


@pytest.fixture
def rejections(tmp_path):
    entries = [("a.jsonl", 3, "too long"), ("a.jsonl", 5, "spans not located")]
    entries += [("b.parquet", 1, "spans not located"), ("b.parquet", 9, "empty")]
    lines = [
        {"file": file, "line": line, "reason": reason, "detail": "why " * 100}
        for file, line, reason in entries
    ]
    (tmp_path / "rejected.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Rejections(tmp_path, 100, REASONS)


def test_the_most_frequent_reason_comes_first_with_an_example_and_the_way_out(rejections):
    head, *lines = rejections.explain().splitlines()
    assert (
        head == f"rejected 43 of 100 samples (43 %); each is in {rejections.folder}/rejected.jsonl"
    )
    assert lines[0].startswith("  30 spans not located, such as a.jsonl line 5: why why")
    assert lines[0].endswith("…")
    assert "data.template=FILE" in lines[1]
    assert lines[2].startswith("  12 too long, such as a.jsonl line 3")
    assert "data.max_length=N" in lines[3]
    assert lines[4].startswith("   1 empty, such as b.parquet row 9")
    assert len(lines) == 5
    assert "data.too_long=truncate" in rejections.explain()


def test_above_the_limit_it_is_refused_with_the_way_out(rejections):
    rejections.check(0.43)
    with pytest.raises(ValueError, match="rejected 43 of 100") as caught:
        rejections.check(0.05)
    message = str(caught.value)
    assert "(43 %): 30 spans not located, 12 too long, 1 empty" in message
    assert "data.max_rejected=0.05 allows at most 5 %" in message
    assert message.endswith("with data.max_rejected=0.43")
    assert "rejected.jsonl" in message
    assert "\n" not in message


def test_what_it_suggests_is_enough():
    few = Rejections(Path("x"), 30_000, {"empty": 1501})
    with pytest.raises(ValueError, match="max_rejected=") as caught:
        few.check(0.05)
    few.check(float(str(caught.value).rpartition("=")[2]))


def test_examples_are_missed_without_their_file(tmp_path):
    assert "30 spans not located\n" in Rejections(tmp_path, 100, REASONS).explain()
    (tmp_path / "rejected.jsonl").write_text("[]\n{")
    assert "30 spans not located\n" in Rejections(tmp_path, 100, REASONS).explain()


def test_stores_of_other_makers_rejected_nothing(tmp_path):
    rejections_of(tmp_path, {}).check(0.0)
    assert rejections_of(tmp_path, {"samples": 4, "rejected": {"empty": 1}}).share == 0.25


def test_every_way_out_is_one_sentence():
    for way_out in WAYS_OUT.values():
        assert "\n" not in way_out
