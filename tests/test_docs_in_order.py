"""README.md and the tutorial from top to bottom: every command and every Python block is executed.

Each page runs in a folder with chats and a tiny checkpoint of the name that the pages use. Commands
of Longshore run in this process as they stand, on one rank: `--ranks 8` becomes 1, and torchrun is
one process with torchrun's environment. The demo is cut to two steps. What would load from a
network or call these tests again is only looked at: `hf download` names a folder that is there,
`pip install` names extras of the package, and `make` targets that exist; `make demo` runs what the
Makefile runs.
"""

import contextlib
import io
import json
import re
import shlex
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
from tests.data.tiny import CHATML, word_tokenizer
from tests.hf.folders import qwen3
from tests.lint import ROOT, blocks_of
from tests.test_docs import WORDS

from longshore.cli.main import main

PAGES = ("README.md", "docs/tutorial.md")
DEMO = ["train.steps=2", "data.batch=4"]
TURNS = [{"role": "user", "content": "one ?"}, {"role": "assistant", "content": "two three"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
    word_tokenizer(tmp_path / "Qwen3-0.6B", WORDS + " \n", template=CHATML, **plain)
    qwen3(tmp_path / "Qwen3-0.6B")
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': TURNS})}\n" * 3)
    (tmp_path / "lengths.csv").write_text("length\n812\n90311\n1540\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def lines_of(script):
    return [line for line in script.replace("\\\n", " ").splitlines() if line.strip()]


def on_one_rank(words):
    """The words of a command, with one rank; without a recipe, data or a model: the short demo."""
    if words == ["doctor"]:
        return [*words, "--ranks=1"]
    if words[:1] != ["train"]:
        return words
    words = ["--ranks=1" if before == "--ranks" else word for before, word in pairs(words)]
    words = [word for word in words if word != "--ranks"]
    return [*words, *DEMO, "--ranks=1"] if words == ["train"] else words


def pairs(words):
    return zip([None, *words], words, strict=False)


def longshore(words):
    """Calls the command here; a > sends its output to a file."""
    words, _, target = (" ".join(map(shlex.quote, words))).partition(" '>' ")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(on_one_rank(shlex.split(words))) == 0, words
    if target:
        Path(target).write_text(out.getvalue())


def under_torchrun(words):
    """A torchrun of one process."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as environment:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
        free.close()
        values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}
        for name, value in {**values, "MASTER_ADDR": "localhost"}.items():
            environment.setenv(name, str(value))
        longshore(words)


def call_make(target):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(rf"^{target}: setup\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe or f"\n{target}:" in makefile, target
    if target == "demo":
        assert recipe[1].strip() == "$(BIN)/longshore train"
        longshore(["train"])


def extras(words):
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = [re.search(r"\[(.*)\]", word)[1] for word in words if "[" in word]
    assert set(wanted.split(",")) <= package["optional-dependencies"].keys()


def execute(line):
    words = shlex.split(line, comments=True)
    if words[0] == "longshore":
        longshore(words[1:])
    elif words[0] == "torchrun":
        under_torchrun(words[words.index("longshore.cli.main") + 1 :])
    elif words[0] == "make":
        call_make(words[1])
    elif words[0] == "hf":
        assert Path(words[words.index("--local-dir") + 1]).is_dir(), line
    elif words[0] == "pip":
        extras(words)
    else:
        subprocess.run(["bash", "-euc", line], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_every_python_block_is_executed(page, folder):
    executed = 0
    for block in blocks_of(ROOT / page, "sh", "python"):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, page, "exec"), {})
            executed += 1
            continue
        for line in lines_of(block.text):
            execute(line)
            executed += 1
    assert executed > 10
