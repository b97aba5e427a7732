import errno
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.tiny import CHATML, REWRITES, word_tokenizer

from longshore.data import prepare as prepare_module
from longshore.data.fields import Field
from longshore.data.prepare import prepare, show_progress
from longshore.data.source import Mixture
from longshore.data.store import Store
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer

WORDS = "system user assistant Be kind . Hi Yo One Two Three \n"


def chat(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def chats(count, seed=0):
    rng = random.Random(seed)
    return [
        chat(*(" ".join(rng.choices(["Hi", "Yo", "One"], k=rng.randint(1, 9))) for _ in range(4)))
        for _ in range(count)
    ]


BAD_LINES = {
    2: ("broken JSON", "{"),
    5: ("no messages", '{"messages": []}'),
    7: ("empty", ""),
    11: ("no loss tokens", json.dumps({"messages": chat("Hi")})),
    12: ("too long", json.dumps({"messages": chat("Hi", "Yo " * 200)})),
    20: ("bad message", '{"messages": [{"role": "user", "content": 5}]}'),
    21: ("broken JSON", "[1]"),
    30: ("undeclared field", json.dumps({"messages": chat("Hi", "Yo"), "source": "web"})),
}


def write_lines(path, count=40, bad=BAD_LINES, seed=0):
    lines = [json.dumps({"messages": messages}) for messages in chats(count, seed)]
    for number, (_, line) in bad.items():
        lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")
    return path


def files_of(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tokenizer and an input, to work in by plain names."""
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path / "tok", WORDS, template=CHATML)
    write_lines(tmp_path / "chats.jsonl")
    return tmp_path


def run(out="out", inputs="chats.jsonl", **settings):
    return prepare(inputs, "tok", out, **{"max_length": 100, "shard_bytes": 2000, **settings})


def rejected(out="out"):
    return [json.loads(line) for line in Path(out, "rejected.jsonl").read_text().splitlines()]


def test_a_store_of_all_good_lines(here):
    summary = run()
    store = Store("out")
    made = SampleTokenizer(Tokenizer("tok"), Rules())
    good = [m for i, m in enumerate(chats(40), start=1) if i not in BAD_LINES]
    assert [store[i] for i in range(len(store))] == [
        made({"messages": messages}, i) for i, messages in enumerate(good)
    ]
    store.verify()
    assert len(store.manifest.shards) > 3
    assert (summary.samples, summary.sequences) == (40, 32)
    assert summary.tokens == store.lengths.sum()
    assert summary.loss_tokens == store.loss_tokens.sum()
    assert summary.longest == store.lengths.max()
    assert (summary.reused, summary.truncated) == (0, 0)


def test_bad_lines_are_told_in_order(here):
    summary = run()
    told = [(entry["file"], entry["line"], entry["reason"]) for entry in rejected()]
    assert told == [("chats.jsonl", line, reason) for line, (reason, _) in BAD_LINES.items()]
    assert all(entry["detail"] for entry in rejected())
    assert summary.rejected == {
        "bad message": 1,
        "broken JSON": 2,
        "empty": 1,
        "no loss tokens": 1,
        "no messages": 1,
        "too long": 1,
        "undeclared field": 1,
    }
    assert "rejected 8 of 40 samples (20 %); each is in out/rejected.jsonl" in str(summary)
    assert "32 sequences of 40 samples" in str(summary)


def test_spans_that_cannot_be_located_are_rejected(here):
    Path("rewrites.jinja").write_text(REWRITES)
    thinks = json.dumps({"messages": chat("Hi", "<think>Yo</think>One", "Hi", "Two")})
    write_lines(here / "chats.jsonl", bad={3: ("", thinks)})
    summary = run(template="rewrites.jinja")
    assert summary.rejected == {"spans not located": 1}
    assert rejected()[0]["line"] == 3
    assert "the template rewrites turns" in rejected()[0]["detail"]


def test_too_long_may_be_truncated(here):
    summary = run(too_long="truncate", max_length=60)
    assert "too long" not in summary.rejected
    assert summary.truncated > 1
    assert Store("out").lengths.max() == 60
    assert f"({summary.truncated} truncated)" in str(summary)


def test_any_number_of_workers_and_any_file_names_give_the_same(here):
    write_lines(here / "more.jsonl", count=30, bad={1: ("", "x")}, seed=1)
    both = ["chats.jsonl", "more.jsonl"]
    run("one", both)
    run("three", both, workers=3)
    assert files_of(here / "one") == files_of(here / "three")
    told = [(entry["file"], entry["line"]) for entry in rejected("three")]
    assert told == [("chats.jsonl", line) for line in BAD_LINES] + [("more.jsonl", 1)]


@pytest.mark.parametrize("shard_bytes", [50, 333])
def test_the_cut_into_ranges_does_not_show(here, shard_bytes):
    run("whole", shard_bytes=10**6)
    run("cut", shard_bytes=shard_bytes)
    whole, cut = Store("whole"), Store("cut")
    assert [whole[i] for i in range(len(whole))] == [cut[i] for i in range(len(cut))]
    assert rejected("whole") == rejected("cut")


def test_line_ends_and_byte_order_mark(here):
    text = Path("chats.jsonl").read_text()
    Path("dos.jsonl").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n")[:-2].encode())
    run("unix")
    run("dos", "dos.jsonl")
    unix, dos = Store("unix"), Store("dos")
    assert [unix[i] for i in range(len(unix))] == [dos[i] for i in range(len(dos))]


def test_not_utf8(here):
    Path("chats.jsonl").write_bytes(Path("chats.jsonl").read_bytes() + b'{"text": "\xff"}\n')
    run()
    assert rejected()[-1]["line"] == 41
    assert "not UTF-8" in rejected()[-1]["detail"]


def test_parquet_gives_the_same_as_lines(here):
    """Objects of one column have all keys in Parquet; the nulls that adds must not show."""
    calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    rows = [{"messages": messages} for messages in chats(20)]
    rows[3]["messages"][1] = {"role": "assistant", "content": "Yo", "tool_calls": calls}
    rows[4]["messages"] = []
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), "rows.parquet", row_group_size=3)
    run("lines", "rows.jsonl")
    run("parquet", "rows.parquet", shard_bytes=1, workers=2)
    lines, parquet = Store("lines"), Store("parquet")
    assert len(parquet.manifest.shards) == 7
    assert [lines[i] for i in range(len(lines))] == [parquet[i] for i in range(len(parquet))]
    assert [(entry["file"], entry["line"]) for entry in rejected("parquet")] == [
        ("rows.parquet", 5)
    ]


def test_a_folder_stands_for_its_files(here):
    Path("data").mkdir()
    write_lines(here / "data" / "b.jsonl", seed=2)
    write_lines(here / "data" / "a.jsonl", seed=3)
    Path("data/readme.txt").write_text("not data")
    run("folder", "data")
    run("files", ["data/a.jsonl", "data/b.jsonl"])
    assert files_of(here / "folder") == files_of(here / "files")


def test_extra_fields(here):
    lines = [{"text": "Hi Yo", "reward": i / 4, "source": "web"} for i in range(9)]
    lines[4].pop("reward")
    Path("chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = [Field("reward", "sequence", "float32")]
    summary = run(fields=fields, ignore=["source"])
    store = Store("out")
    assert store.fields == tuple(fields)
    assert [float(s.fields["reward"]) for s in store] == [0, 0.25, 0.5, 0.75, 1.25, 1.5, 1.75, 2]
    assert summary.rejected == {"bad field": 1}


def test_a_column_that_nobody_declared_is_told_at_once(here):
    line = json.dumps({"messages": chat("Hi", "Yo"), "source": "web"})
    Path("chats.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=r"chats.jsonl line 2: column 'source' is neither part"):
        run()
    assert not Path("out").exists()
    assert run(ignore=["source"]).sequences == 1


def test_one_message_names_all_columns_of_all_inputs(here):
    rows = {
        "a.jsonl": [{"text": "Hi"}, {"text": "Hi", "id": 1}, {"text": "Hi", "source": "web"}],
        "b.jsonl": [{"text": "Hi", "source": "web", "score": 2}],
    }
    for name, lines in rows.items():
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    message = r"b.jsonl line 1: columns 'id', 'source', 'score' are .* \(id,source,score, or"
    with pytest.raises(ValueError, match=message):
        run(inputs=list(rows))
    assert run("named", list(rows), ignore=["id", "source", "score"]).sequences == 4
    assert run("all", list(rows), ignore=["*"]).sequences == 4


def test_ignoring_all_keeps_declared_fields(here):
    pq.write_table(pa.table({"text": ["Hi Yo"], "source": ["web"], "reward": [0.5]}), "a.parquet")
    run(inputs="a.parquet", ignore=["*"], fields=[Field("reward", "sequence", "float32")])
    assert Store("out")[0].fields["reward"] == 0.5


def test_json_lists_give_the_same_as_lines(here):
    rows = [{"messages": messages, "n": '],{"' * i} for i, messages in enumerate(chats(20))]
    rows[7:9] = [7, {"messages": []}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rows.json").write_bytes(b"\xef\xbb\xbf\r\n " + json.dumps(rows, indent=1).encode())
    run("lines", "rows.jsonl", ignore=["n"])
    run("list", "rows.json", ignore=["n"], workers=2)
    lines, records = Store("lines"), Store("list")
    assert len(records.manifest.shards) == 3
    assert [lines[i] for i in range(len(lines))] == [records[i] for i in range(len(records))]
    assert [(entry["file"], entry["line"]) for entry in rejected("list")] == [
        ("rows.json", 8),
        ("rows.json", 9),
    ]


def test_too_large_samples_are_rejected_unread(here):
    rows = [{"text": "Hi"}, {"text": "Hi " * 1000}, {"text": "Yo"}, {"text": "Hi " * 2000}]
    Path("a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), "a.parquet")
    for kind, unit in (("jsonl", "line"), ("json", "record"), ("parquet", "row")):
        summary = run(kind, f"a.{kind}", max_bytes=1500, shard_bytes=700)
        assert summary.rejected == {"too large": 2}, kind
        assert [(entry["line"], entry["reason"]) for entry in rejected(kind)] == [
            (2, "too large"),
            (4, "too large"),
        ]
        assert re.match(
            rf"the {unit} has 3,0\d\d bytes, more than 1,500", rejected(kind)[0]["detail"]
        )
        assert f"a.{kind} {unit} 2: the {unit} has" in str(summary)


def test_a_store_that_lost_its_manifest_may_be_started_over(here):
    run("reference")
    run()
    Path("out/manifest.json").unlink()
    with pytest.raises(ValueError, match=r"out: .* without its manifest.json.* \(start_over\)"):
        run()
    run(start_over=True)
    assert files_of(here / "out") == files_of(here / "reference")


def test_a_finished_store_is_left_alone(here):
    run()
    before = {name: os.stat(here / "out" / name).st_mtime_ns for name in files_of(here / "out")}
    again = run(workers=2)
    assert again.reused == len(Store("out").manifest.shards)
    assert again.sequences == 32
    after = {name: os.stat(here / "out" / name).st_mtime_ns for name in files_of(here / "out")}
    assert after == before


def test_killed_while_tidying_up(here):
    run("reference")
    run()
    Path("out/prepare.work").mkdir()
    Path("out/prepare.work/range-00003.json").write_text("{}")
    run()
    assert files_of(here / "out") == files_of(here / "reference")


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_or_start_over(here, monkeypatch, finished):
    run("reference", max_length=50, shard_bytes=3000)
    if finished:
        run()
    else:
        stop_at(monkeypatch, 8)
        with pytest.raises(Killed):
            run()
        monkeypatch.undo()
        monkeypatch.chdir(here)
    before = files_of(here / "out")
    with pytest.raises(
        ValueError, match=r"out: was started with other .*\(max_length, shard_bytes d"
    ):
        run(max_length=50, shard_bytes=3000)
    assert files_of(here / "out") == before
    run(max_length=50, shard_bytes=3000, start_over=True)
    assert files_of(here / "out") == files_of(here / "reference")


def test_changed_inputs_and_tokenizers_are_refused(here):
    run()
    with Path("chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": chat("Hi", "Yo")}) + "\n")
    with pytest.raises(ValueError, match=r"\(inputs differ\)"):
        run()
    write_lines(here / "chats.jsonl")
    with pytest.raises(ValueError, match=r"\(inputs differ\)"):
        run()  # the same size, but written after the store
    word_tokenizer(here / "tok", WORDS + " more", template=CHATML + "{# more #}")
    with pytest.raises(ValueError, match=r"\(tokenizer, template, inputs differ\)"):
        run()


class Killed(BaseException):
    """As good as a SIGKILL: nothing in the package handles it."""


def stop_at(monkeypatch, moment):
    """Stops before (even) or after (odd) the file number moment // 2 gets its name."""
    renames = iter(range(10**9))
    rename = Path.replace

    def stopping(path, target):
        number = next(renames)
        if moment == 2 * number:
            raise Killed
        rename(path, target)
        if moment == 2 * number + 1:
            raise Killed

    monkeypatch.setattr(Path, "replace", stopping)


def test_stopped_at_every_moment_it_goes_on_to_the_same_bytes(here, monkeypatch):
    run("reference", shard_bytes=6000)
    shards = len(Store("reference").manifest.shards)
    moments = 0
    while True:
        with monkeypatch.context() as patch:
            stop_at(patch, moments)
            try:
                run(f"out{moments}", shard_bytes=6000)
                break
            except Killed:
                pass
        summary = run(f"out{moments}", shard_bytes=6000)
        assert files_of(here / f"out{moments}") == files_of(here / "reference"), moments
        assert summary.reused == min(max(0, (moments - 1) // 4), shards), "each record counts"
        moments += 1
    assert moments == 2 * (1 + 2 * shards + 1 + 4 + 1), "job, shard and record, rejected, index"


CHILD = """
import json, sys
from longshore.data.prepare import prepare

if __name__ == "__main__":
    prepare(**json.loads(sys.argv[1]), progress=lambda done, total: print(done, flush=True))
"""


def start_child(arguments):
    command = [sys.executable, "child.py", json.dumps(arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finished_shards(out):
    """The shards that have a record, by when they were written."""
    records = Path(out).glob("prepare.work/range-*.json")
    shards = [json.loads(record.read_text())["shard"] for record in records]
    return {s["file"]: Path(out, s["file"]).stat().st_mtime_ns for s in shards if s}


@pytest.mark.fuzz
def test_killed_at_random_it_goes_on_to_the_same_bytes(here):
    """SIGKILL to the parent, its workers left to themselves, again and again on one folder."""
    kills = 10 if os.environ.get("HYPOTHESIS_PROFILE") == "fuzz" else 4
    write_lines(here / "chats.jsonl", count=3000)
    settings = {"max_length": 100, "shard_bytes": 5000 if kills > 4 else 12_000}
    run("reference", **settings)
    Path("child.py").write_text(CHILD)
    arguments = {"inputs": "chats.jsonl", "tokenizer": "tok", "out": "out", "workers": 2}
    rng = random.Random(7)
    done = {}
    for _ in range(kills):
        child = start_child({**arguments, **settings})
        for _ in range(rng.randint(1, 8)):
            child.stdout.readline()
        time.sleep(rng.random() / 50)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        now = finished_shards("out")
        assert done.items() <= now.items(), "a finished shard was done again"
        done = now
    summary = run(**settings)
    assert summary.reused >= len(done) > 0
    kept = {name: Path("out", name).stat().st_mtime_ns for name in done}
    assert kept == done
    assert files_of(here / "out") == files_of(here / "reference")


def test_stores_of_different_tokenizers_do_not_mix(here):
    run("one")
    run("two", max_length=50)
    assert len(Mixture([Store("one"), Store("two")], [1, 1], seed=0)) >= 32
    word_tokenizer(here / "tok", WORDS + " more", template=CHATML)
    run("other")
    with pytest.raises(ValueError, match="sources 0 and 2 were made with different tokenizers"):
        Mixture([Store("one"), Store("two"), Store("other")], [1, 1, 1], seed=0)


def test_two_at_once_are_refused(here):
    running = iter([True])

    def meanwhile(done, total):
        if next(running, False):
            with pytest.raises(ValueError, match="out: another prepare is at work here"):
                run()

    run(progress=meanwhile)
    assert next(running, None) is None


def test_progress_without_a_terminal():
    stream = StringIO()
    with show_progress(stream) as report:
        for done in (0, 40, 41, 1500, 1500, 2000):
            report(done, 2000)
    shown = [line.split(" of ")[0] for line in stream.getvalue().splitlines()]
    assert shown == ["prepared 0 %", "prepared 70 %", "prepared 100 %"]


def test_progress_on_a_terminal():
    class Terminal(StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with show_progress(stream) as report:
        report(0, 2000)
        report(2000, 2000)
    assert "preparing" in stream.getvalue()
    assert "2.0/2.0 kB" in stream.getvalue()


def test_nothing_is_shown_where_nothing_is_left_to_do():
    class Terminal(StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with show_progress(stream):
        pass
    assert stream.getvalue() == ""


def test_progress_counts_what_is_there(here, monkeypatch):
    size = os.stat("chats.jsonl").st_size
    stop_at(monkeypatch, 6)
    with pytest.raises(Killed):
        run()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    seen = []
    run(progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (2000, size)
    assert seen[-1] == (size, size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": "none.jsonl"}, r"none.jsonl: cannot be read \(No such file"),
        ({"inputs": []}, "no input is given"),
        ({"inputs": "tok"}, r"tokenizer.json: is one JSON object; .* in a folder, move it away"),
        ({"inputs": "none"}, "none: the folder has no file ending in .jsonl"),
        ({"inputs": "a.jsonl.gz"}, r"a.jsonl.gz: must end in .* unpack or convert"),
        ({"inputs": "empty.jsonl"}, "empty.jsonl: the file is empty"),
        ({"inputs": "list.jsonl"}, "list.jsonl: is one JSON list, not one object a line; name it"),
        ({"inputs": "cut.json"}, r"cut.json: the list has no end; record 2, at byte 16, is not"),
        ({"inputs": "left"}, "left: is a prepared folder without its manifest.json"),
        ({"inputs": "bad.parquet"}, "bad.parquet: cannot be read as Parquet"),
        ({"inputs": ["chats.jsonl", "chats.jsonl"]}, "chats.jsonl: is named more than once"),
        ({"workers": 0}, "workers is 0"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"loss_on": "user"}, "loss_on is 'user'"),
        ({"out": "data"}, "data: holds mine.txt and no store; choose an empty folder"),
        ({"template": "none.jinja"}, "there is no file none.jinja; give a file, auto, own"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_made(here, settings, message):
    Path("empty.jsonl").touch()
    Path("list.jsonl").write_text(' [{"text": "Hi"}]')
    Path("cut.json").write_text('[{"text": "Hi"},{"text": "H')
    for name, file in (("none", "a.txt"), ("left", "rejected.jsonl"), ("left", "lengths.npy")):
        Path(name).mkdir(exist_ok=True)
        Path(name, file).write_text("{}")
    Path("bad.parquet").write_text("PAR1")
    Path("data").mkdir()
    Path("data/mine.txt").touch()
    before = files_of(here / "data")
    with pytest.raises(ValueError, match=message):
        run(**settings)
    assert not Path("out").exists()
    assert files_of(here / "data") == before


def test_no_chat_template_is_told_at_once(here):
    word_tokenizer(here / "tok", WORDS)
    with pytest.raises(ValueError, match="has no chat template, and the samples are chats"):
        run()
    assert not Path("out").exists()


def test_all_rejected(here):
    write_lines(here / "chats.jsonl", count=3, bad=dict.fromkeys((1, 2, 3), ("", "{")))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no sample .*; rejected 3 of 3 .*: 3 broken J"):
            run()
    assert len(rejected()) == 3
    with pytest.raises(ValueError, match="unfinished"):
        Store("out")


def test_no_rows(here):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), "none.parquet")
    with pytest.raises(
        ValueError, match="no sample became a sequence; there is none in the inputs"
    ):
        run(inputs="none.parquet")


def test_a_folder_that_cannot_be_made(here):
    with pytest.raises(OSError, match=r"chats.jsonl.*: Not a directory; 0 of \d+ shards"):
        run("chats.jsonl/out")


def no_leftovers(job, ranges, finish=prepare_module._finish):
    assert not [*job.work.glob("*.tmp")]
    finish(job, ranges)


@pytest.mark.parametrize("failing", [1, 3, 4])
def test_a_full_disk_is_told_and_the_rest_goes_on(here, monkeypatch, failing):
    run("reference")
    calls = iter(range(10**9))
    fsync = os.fsync

    def full(descriptor):
        if next(calls) == 2 * failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        message = rf"out/\S+: No space left on device; {(failing - 1) // 2} of \d+ shards are fin"
        with pytest.raises(OSError, match=message) as caught:
            run()
    assert caught.value.errno == errno.ENOSPC
    assert not [*(here / "out").rglob("*.tmp")]
    (here / "out/prepare.work/shard-00001.arrow.99.tmp").write_bytes(b"of a killed run")
    monkeypatch.setattr(prepare_module, "_finish", no_leftovers)
    run()
    assert files_of(here / "out") == files_of(here / "reference")


def test_an_input_that_changes_meanwhile_is_refused(here):
    def meanwhile(done, total):
        if done > 0:
            write_lines(here / "chats.jsonl", seed=9)

    with pytest.raises(ValueError, match=r"chats.jsonl: was changed while it was being prepared"):
        run(progress=meanwhile)


def test_an_error_in_a_worker_arrives(here):
    def meanwhile(done, total):
        write_lines(here / "chats.jsonl", seed=9)

    with pytest.raises(ValueError, match=r"chats.jsonl: was changed while it was being prepared"):
        run(progress=meanwhile, workers=2)


def test_a_killed_worker_is_an_error_not_a_hang(here):
    killed = []

    def meanwhile(done, total):
        if done and not killed:
            killed.append(worker_ids()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(OSError, match=r"a worker ended with exit code -9; .* shards are finished"):
        run(progress=meanwhile, workers=2, shard_bytes=300)
    run(shard_bytes=300)


def worker_ids():
    return [process.pid for process in multiprocessing.active_children()]
