"""Files of samples become a store, alone or in a cache."""

import json
import multiprocessing
import os
import re
import signal
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.samples import BAD_LINES, WORDS, chat, chats, files_of, rejected, run, write_lines
from tests.data.tiny import CHATML, REWRITES, word_tokenizer

from longshore.data import prepare as prepare_module
from longshore.data.prepare import TextRules, cache_folder, prepare_cache, show_progress
from longshore.data.source import Field, Joined, Mixture
from longshore.data.store import Store
from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer


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
    assert (summary.manifest.about["samples"], summary.manifest.sequences) == (40, 32)
    assert summary.manifest.tokens == store.lengths.sum()
    assert summary.manifest.loss_tokens == store.loss_tokens.sum()
    assert summary.manifest.longest == store.lengths.max()
    assert (summary.reused, summary.manifest.about["truncated"]) == (0, 0)


def test_bad_lines_are_told_in_order(here):
    summary = run()
    told = [(entry["file"], entry["line"], entry["reason"]) for entry in rejected()]
    assert told == [("chats.jsonl", line, reason) for line, (reason, _) in BAD_LINES.items()]
    assert all(entry["detail"] for entry in rejected())
    assert summary.rejections.reasons == {
        "bad message": 1,
        "broken JSON": 2,
        "no loss tokens": 1,
        "no messages": 2,
        "too long": 1,
        "undeclared field": 1,
    }
    assert "rejected 8 of 40 samples (20 %); each is in out/rejected.jsonl" in str(summary)
    assert "32 sequences of 40 samples" in str(summary)


def test_sharegpt_roles_are_read_and_said(here):
    names = {"user": "human", "assistant": "gpt"}
    lines = [
        [{**m, "role": names[m["role"]]} for m in messages] if i % 2 else messages
        for i, messages in enumerate(chats(6))
    ]
    Path("mixed.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in lines))
    write_lines(Path("usual.jsonl"), count=6, bad={})
    mixed, usual = run(inputs="mixed.jsonl"), run("usual", "usual.jsonl")
    pairs = zip(Store("out"), Store("usual"), strict=True)
    assert all(a.tokens.tolist() == b.tokens.tolist() for a, b in pairs)
    said = "roles: in 3 samples ShareGPT's were read: 'human' as 'user', 'gpt' as 'assistant'\n"
    assert said in str(mixed)
    assert said in str(run(inputs="mixed.jsonl"))  # from the finished store
    assert "roles:" not in str(usual)


def test_spans_that_cannot_be_located_are_rejected(here):
    Path("rewrites.jinja").write_text(REWRITES)
    thinks = json.dumps({"messages": chat("Hi", "<think>Yo</think>One", "Hi", "Two")})
    write_lines(here / "chats.jsonl", bad={3: ("", thinks)})
    summary = run(template="rewrites.jinja")
    assert summary.rejections.reasons == {"spans not located": 1}
    assert rejected()[0]["line"] == 3
    assert "the template rewrites earlier turns" in rejected()[0]["detail"]


def test_too_long_may_be_truncated(here):
    summary = run(too_long="truncate", max_length=60)
    assert "too long" not in summary.rejections.reasons
    truncated = summary.manifest.about["truncated"]
    assert truncated > 1
    assert Store("out").lengths.max() == 60
    assert f"({truncated} truncated)" in str(summary)


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert summary.rejections.reasons == {"bad field": 1}


def test_a_column_that_nobody_declared_is_told_at_once(here):
    line = json.dumps({"messages": chat("Hi", "Yo"), "source": "web"})
    Path("chats.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(
        ValueError, match=r"chats.jsonl line 2: unknown column 'source' in a sample"
    ):
        run()
    assert not Path("out").exists()
    assert run(ignore=["source"]).manifest.sequences == 1


def test_one_message_names_all_columns_of_all_inputs(here):
    rows = {
        "a.jsonl": [{"text": "Hi"}, {"text": "Hi", "id": 1}, {"text": "Hi", "source": "web"}],
        "b.jsonl": [{"text": "Hi", "source": "web", "score": 2}],
    }
    for name, lines in rows.items():
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    message = (
        r"b.jsonl line 1: unknown columns 'id', 'source', 'score' in .*ignore=id,source,score \(or"
    )
    with pytest.raises(ValueError, match=message):
        run(inputs=list(rows))
    assert run("named", list(rows), ignore=["id", "source", "score"]).manifest.sequences == 4
    assert run("all", list(rows), ignore=["*"]).manifest.sequences == 4


def test_ignoring_all_keeps_declared_fields(here):
    pq.write_table(pa.table({"text": ["Hi Yo"], "source": ["web"], "reward": [0.5]}), "a.parquet")
    run(inputs="a.parquet", ignore=["*"], fields=[Field("reward", "sequence", "float32")])
    assert Store("out")[0].fields["reward"] == 0.5


@pytest.mark.slow
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
        assert summary.rejections.reasons == {"too large": 2}, kind
        assert [(entry["line"], entry["reason"]) for entry in rejected(kind)] == [
            (2, "too large"),
            (4, "too large"),
        ]
        assert re.match(
            rf"the {unit} has 3,0\d\d bytes; the limit is 1,500", rejected(kind)[0]["detail"]
        )
        assert f"a.{kind} {unit} 2: the {unit} has" in str(summary)


def test_stores_of_different_tokenizers_do_not_mix(here):
    run("one")
    run("two", max_length=50)
    assert len(Mixture([Store("one"), Store("two")], [1, 1], seed=0)) >= 32
    word_tokenizer(here / "tok", WORDS + " more", template=CHATML)
    run("other")
    with pytest.raises(ValueError, match="sources 0 and 2 were made with different tokenizers"):
        Mixture([Store("one"), Store("two"), Store("other")], [1, 1, 1], seed=0)


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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": "none.jsonl"}, r"none.jsonl: cannot be read \(No such file"),
        ({"inputs": "dolly/none"}, "dolly/none: there is no such file or folder"),
        ({"inputs": []}, "no input is given"),
        (
            {"inputs": "tok"},
            r"tokenizer.json: is one JSON object; .* if it is no data, move it away",
        ),
        ({"inputs": "absent"}, "absent: there is no such file or folder"),
        ({"inputs": "none"}, "none: the folder has no file ending in .jsonl"),
        ({"inputs": "a.jsonl.xz"}, r"a.jsonl.xz: must end in .* unpack or convert"),
        ({"inputs": "empty.jsonl"}, "empty.jsonl: the file is empty"),
        ({"inputs": "list.jsonl"}, "list.jsonl: is one JSON list, not one object per line; rename"),
        ({"inputs": "cut.json"}, r"cut.json: the list is not closed: the file ends in record 2, "),
        ({"inputs": "left"}, "left: is a prepared folder without its manifest.json"),
        ({"inputs": "bad.parquet"}, "bad.parquet: cannot be read as Parquet"),
        ({"inputs": ["chats.jsonl", "chats.jsonl"]}, "chats.jsonl: is named more than once"),
        ({"workers": 0}, "workers is 0"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"max_bytes": 0}, "max_bytes is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"loss_on": "user"}, "loss_on is 'user'"),
        ({"out": "data"}, "data: has mine.txt but is no store; use an empty folder"),
        ({"template": "none.jinja"}, "there is no file none.jinja; give a file, auto, own"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_made(here, settings, message):
    for name in ("empty.jsonl", "a.jsonl.xz"):
        Path(name).touch()
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
    with pytest.raises(ValueError, match="has no chat template, but the samples are chats"):
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
    with pytest.raises(ValueError, match="no sample became a sequence; the inputs have no samples"):
        run(inputs="none.parquet")


def test_a_folder_that_cannot_be_made(here):
    with pytest.raises(OSError, match=r"chats.jsonl.*: Not a directory; 0 of \d+ shards"):
        run("chats.jsonl/out")


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


@pytest.mark.slow
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


def text_rules(tokenizer="", template=""):
    return TextRules(
        tokenizer=tokenizer,
        template=template,
        loss_on="assistant",
        max_length=0,
        too_long="reject",
        fields=(),
        ignore=(),
        max_bytes=1000,
    )


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"text": "Hi"}\n')
    Path("tok").mkdir()

    def folder(template):
        rules = text_rules(tokenizer="tok", template=template)
        return cache_folder(["chats.jsonl"], rules, "prepared").name

    return folder


def test_the_choice_of_template_and_its_content_name_the_cache(folder_of, monkeypatch):
    Path("mine.jinja").write_text("one")
    names = [folder_of(choice) for choice in ("auto", "own", "qwen3", "mine.jinja")]
    assert len(set(names)) == 4
    Path("mine.jinja").write_text("two")
    assert folder_of("mine.jinja") not in names
    monkeypatch.setattr(prepare_module, "templates_digest", lambda: "of another version")
    assert folder_of("auto") not in names
    assert folder_of("qwen3") not in names
    assert folder_of("own") in names


def test_text_changed_without_another_size_or_time_is_noticed(here):
    def folder():
        return cache_folder(["chats.jsonl"], text_rules(tokenizer="tok"), "prepared").name

    run()
    name, path = folder(), Path("chats.jsonl")
    content, status = path.read_text(), path.stat()
    path.write_text(content.replace("Yo", "Hi", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert folder() != name
    with pytest.raises(ValueError, match=r"other settings or inputs \(content differ\)"):
        run()
    path.write_text(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert folder() == name


def test_a_pair_becomes_two_sequences_or_none(here):
    ask = [{"role": "user", "content": "one ?"}]
    yes, no = ({"role": "assistant", "content": text} for text in ("two three", "two"))
    long = {"role": "assistant", "content": "two " * 50}
    rows = [
        {"prompt": ask, "chosen": [yes], "rejected": [no]},
        {"prompt": ask, "chosen": [yes], "rejected": [long]},
        {"prompt": "one ?", "chosen": [*ask, no], "rejected": [*ask, yes]},
        {"prompt": "one", "chosen": " two", "rejected": " three"},
        {"prompt": ask, "chosen": "two", "rejected": [no]},
    ]
    Path("pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = run(inputs="pairs.jsonl", max_length=60)
    store = Store("out")
    assert [str(field) for field in store.fields] == [
        "pair:per_sequence:int64",
        "sign:per_sequence:int8",
    ]
    made = SampleTokenizer(Tokenizer("tok"), Rules())
    sides = [(ask, [yes]), (ask, [no]), (ask, [no]), (ask, [yes])]
    sides += [("one", " two"), ("one", " three")]
    for place, (prompt, completion) in enumerate(sides):
        want = made({"prompt": prompt, "completion": completion}, place)
        assert store[place].tokens.tolist() == want.tokens.tolist()
        assert store[place].loss_mask.tolist() == want.loss_mask.tolist()
    assert [int(store[i].fields["sign"]) for i in range(6)] == [1, -1] * 3
    first, *_ = pairs = store.sequence_values("pair").tolist()
    assert pairs == [x for x in dict.fromkeys(pairs) for _ in range(2)]
    assert len(set(pairs)) == 3
    assert 0 < first < 2**52
    assert summary.rejections.reasons == {"too long": 1, "bad message": 1}


def test_equal_rows_of_joined_files_are_different_pairs(here):
    row = {"prompt": "one", "chosen": " two", "rejected": " three"}
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(json.dumps(row))
        run(name, inputs=f"{name}.jsonl")
    joined = Joined([Store("a"), Store("b")])
    first, same, second, _ = joined.sequence_values("pair").tolist()
    assert first == same != second


def test_the_cache_takes_a_file_by_any_of_its_names(tmp_path, monkeypatch):
    """Relative, absolute and through a link: each was refused after another one."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    Path("link").symlink_to(tmp_path)
    rules = text_rules()
    for name in ("rows.jsonl", str(tmp_path / "rows.jsonl"), "link/rows.jsonl"):
        folder = cache_folder([name], rules, "prepared")
        for reused in (0, 1):
            assert prepare_cache([name], rules, folder, workers=1).reused == reused
