import json
import tomllib
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.tiny import word_tokenizer

from longshore.cli.main import main
from longshore.config.schema import toml_value
from longshore.files import printable
from longshore.train.display import make_display

CLEAR = "\x1b[2J"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext ~", "plain\n\ttext ~"),
        (f"a{CLEAR}b", "a\\x1b[2Jb"),
        ("\r\x00\x07\x7f", "\\x0d\\x00\\x07\\x7f"),
        ("\x9b2J\x85", "\\u009b2J\\u0085"),
        ("a\u202eb\u2066\u200f", "a\\u202eb\\u2066\\u200f"),
        ("\ufeff\u2028\udcff\U000e0041", "\\ufeff\\u2028\\udcff\\U000e0041"),
        ("é – 漢字 ✓ 👩\u200d👧", "é – 漢字 ✓ 👩\u200d👧"),
    ],
)
def test_what_a_terminal_obeys_is_escaped(text, shown):
    assert printable(text) == shown


@pytest.mark.property
@given(st.text())
def test_any_text_can_be_written_and_stays_as_it_is_the_second_time(text):
    shown = printable(text)
    shown.encode()
    assert printable(shown) == shown
    assert all(
        letter.isprintable() or letter in "\n\t\u200c\u200d\xad" or ord(letter) > 0x7F
        for letter in shown
    )


def said(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    assert code == 2
    assert "\x1b" not in out + err
    return err


def test_names_and_recipes_reach_the_terminal_escaped(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"a{CLEAR}.toml"
    Path(name).write_text(f'[train]\n"l{CLEAR.replace(chr(27), chr(92) + "u001b")}r" = 3\n')
    assert "there is no train.l\\x1b[2Jr" in said(capsys, "train", name)
    assert "no\\x1b[2J.toml: cannot be read" in said(capsys, "train", f"no{CLEAR}.toml")
    assert "there is no train.\\x1b[2J" in said(capsys, "train", f"train.{CLEAR}=3")
    assert "\\x1b[2J.csv: cannot be read" in said(
        capsys, "plan", f"{CLEAR}.csv", "--capacity", "9", "--lanes", "2"
    )
    data = f"{CLEAR}.jsonl"
    Path(data).write_text(json.dumps({"text": "a", f"x{CLEAR}": 1}))
    word_tokenizer(tmp_path / "tok", "a")
    message = said(capsys, "prepare", data, "--tokenizer", "tok", "--out", "out")
    assert "\\x1b[2J.jsonl line 1: unknown column 'x\\x1b[2J' in a" in message


def test_notes_are_shown_as_they_are(monkeypatch):
    class Terminal(StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for kind, stream in (("plain", StringIO()), ("live", Terminal())):
        with make_display(kind, 3, stream=stream, title=f"run{CLEAR}") as display:
            display.note(f"[bold]wrote[/bold] :bug: a{CLEAR}")
        assert "[bold]wrote[/bold] :bug: a\\x1b[2J" in stream.getvalue()
        assert CLEAR not in stream.getvalue()


def test_a_recipe_that_is_printed_is_escaped_and_reads_back():
    text = f"a{CLEAR}\x7f\x9b\u202e\U000e0041é"
    quoted = toml_value(text)
    assert printable(quoted) == quoted
    assert tomllib.loads(f"value = {quoted}")["value"] == text
