"""What docs/ says is so: its keys, commands, options, files, messages, code and printed answers.

On a page every Python block runs unless `<!-- not run: why -->` stands above it, and with `<!--
prints below -->` it prints the text block behind it. A `sh` block runs where `<!-- run -->` stands
above it; with `<!-- refused -->` it fails, and says the text block behind it; others are only
looked at. The other text blocks of troubleshooting.md are messages of the code, … for what changes.
A Python block with `<!-- run after the commands -->` needs what the page's commands make. The keys,
commands and files that the READMEs name are checked too. README.md and the tutorial are executed
from top to bottom in test_docs_in_order.py, where `<!-- run in order -->` stands.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.data.tiny import CHATML, word_tokenizer
from tests.test_layout import PACKAGE, ROOT, defined_names

from longshore.cli import main as cli
from longshore.config.load import load_config
from longshore.config.other_systems import all_keys
from longshore.config.schema import SECTIONS
from longshore.train.display import StepMetrics

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "recipes" / "README.md"]
AFTER = "run after the commands"
IN_ORDER = "run in order"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))

BLOCK = re.compile(r"(?:<!-- ([^\n]*?) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
KEY = re.compile(rf"(?<![\w./-])({'|'.join(SECTIONS)})\.(\w+)(?![\w/])")
FILE_ENDINGS = ("csv", "html", "json", "jsonl", "md", "py", "svg", "toml", "yaml")
NAMED_PATH = re.compile(r"((?:[\w.-]+/)+[\w.-]+\.(?:md|py|sh|toml)|CONTRIBUTING\.md)(?::([\w.]+))?")
MADE_BY_RUNS = ("runs/", "prepared/")
SHORTEST = 12  # characters of a message that can only be found on purpose
CHECKPOINT = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
WORDS = "system user assistant Be kind . one two three ?"


class Block(NamedTuple):
    mark: str
    language: str
    text: str


def blocks_of(page, *languages):
    found = [Block(*(group or "" for group in match)) for match in BLOCK.findall(page.read_text())]
    return [block for block in found if not languages or block.language in languages]


def inline_of(page):
    """What stands between backticks, blocks aside."""
    return INLINE.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))


def commands_of(page):
    """Every command line of a page as words, inline ones included; refused ones are not."""
    lines = []
    for block in blocks_of(page, "sh"):
        if block.mark != "refused":
            lines += block.text.replace("\\\n", " ").splitlines()
    lines += [text for text in inline_of(page) if text.startswith(("longshore ", "make "))]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def ours(words):
    """The words behind `longshore`, up to a redirection; None for other programs."""
    if "longshore.cli.main" in words:
        words = words[words.index("longshore.cli.main") :]
    elif not words or words[0] != "longshore":
        return None
    cut = [i for i, word in enumerate(words) if word in (">", "|")]
    return words[1 : cut[0] if cut else None]


@pytest.fixture(scope="module")
def parsers():
    """The parser of each command."""
    commands = argparse.ArgumentParser().add_subparsers()
    for register in cli.COMMANDS:
        register(commands)
    return commands.choices


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A place with what the pages take for granted: chats and a checkpoint without its weights."""
    place = tmp_path_factory.mktemp("docs")
    base = place / "Qwen3-0.6B"
    word_tokenizer(base, WORDS + " \n", template=CHATML, eos_token="<|end_of_text|>")
    (base / "config.json").write_text(json.dumps(CHECKPOINT))
    turns = [{"role": "user", "content": "one ?"}, {"role": "assistant", "content": "two three"}]
    (place / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 3)
    (place / "lengths.csv").write_text("length\n812\n90311\n1540\n")
    return place


def shell(folder, script):
    """Exit code and stderr of a script in a folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr


def script(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_has_every_key_as_it_is():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == script("generate").with_keys(page), "stale: run python docs/generate.py"
    for name, kind in SECTIONS.items():
        for field in fields(kind):
            assert page.count(f"\n| `{name}.{field.name}` | {field.metadata['about'][:20]}") == 1


def test_the_api_is_as_the_code_has_it():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert page == script("api_reference").page(), "stale: run python docs/generate.py"


def test_the_drawing_of_a_step_is_what_the_planner_makes():
    drawn = (DOCS / "drawings" / "step.svg").read_text(encoding="utf-8")
    assert drawn == script("draw_plan").drawing(), "stale: run python docs/generate.py"


def foreign(page):
    """The first cells of the tables of coming-from.md, where other systems' words stand."""
    if page.stem != "coming-from":
        return set()
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return {text for row in rows for text in INLINE.findall(row.split("|")[1])}


@each_text
def test_keys_exist(page):
    shown = [text for text in inline_of(page) if text not in foreign(page)]
    shown += [block.text for block in blocks_of(page, "sh", "toml") if block.mark != "refused"]
    for section, name in (found for text in shown for found in KEY.findall(text)):
        known = f"{section}.{name}" in all_keys() or name in FILE_ENDINGS
        assert known, f"{page.name}: there is no key {section}.{name}"


@each_text
def test_commands_options_and_words_exist(page, parsers):
    for words in filter(None, map(ours, commands_of(page))):
        command, rest = words[0], words[1:]
        if command.startswith("-"):
            continue
        assert command in parsers, f"{page.name}: there is no command {command}"
        options = parsers[command]._option_string_actions
        for word in rest:
            if word.startswith("--"):
                assert word.split("=")[0] in options, f"{page.name}: {command} has no {word}"
        overrides = [word for word in rest if re.match(r"\w+\.\w+=", word)]
        if command == "train":
            load_config(None, overrides)


@each_text
def test_make_targets_exist(page):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands_of(page):
        if words[0] == "make":
            assert words[1] in targets, f"{page.name}: make has no target {words[1]}"


@each_text
def test_named_files_and_functions_exist(page):
    shown = [*inline_of(page), *(word for words in commands_of(page) for word in words)]
    for path, name in (found for text in shown for found in NAMED_PATH.findall(text)):
        if path.startswith(MADE_BY_RUNS):
            continue
        bases = (ROOT, PACKAGE, page.parent)
        places = [base / path for base in bases if (base / path).is_file()]
        assert places, f"{page.name}: there is no file {path}"
        assert not name or name in defined_names(places[0]), f"{page.name}: {path} has no {name}"


def test_the_tutorial_shows_the_demo_that_there_is():
    demo = load_config(None)
    shown = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    assert f"\n{demo.model.preset}: " in shown
    assert f"\nstep {demo.train.steps} of {demo.train.steps} " in shown
    assert f"; {demo.parallel.ranks} ranks on {demo.train.device}" in shown


def test_named_metrics_exist():
    """The tables of the tutorial and of slow steps name fields of metrics.jsonl."""
    known = {field.name for field in fields(StepMetrics)}
    tables = [re.search(r"\| field \|.*?\n\n", (DOCS / "tutorial.md").read_text(), re.DOTALL)]
    rows = [line.split("|")[1] for line in tables[0][0].splitlines()[2:] if line]
    named = [name for row in rows for name in INLINE.findall(row)]
    assert len(named) > 10
    assert set(named) <= known
    slow = (DOCS / "troubleshooting.md").read_text().partition("### A step is slow")[2]
    first = [line.split("|")[1] for line in slow.partition("###")[0].splitlines() if "|" in line]
    assert {name for cell in first for name in INLINE.findall(cell)} <= known


@each_page
def test_python_blocks_run_and_print_what_they_say(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = blocks_of(page)
    for block, after in pairwise([*blocks, Block("", "", "")]):
        is_left = block.mark.startswith("not run") or block.mark in (AFTER, IN_ORDER)
        if block.language != "python" or is_left:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, page.name, "exec"), {})
        if block.mark == "prints below":
            assert printed.getvalue() == after.text


@each_page
def test_commands_that_can_run_do(page, folder, monkeypatch):
    scripts = [block.text for block in blocks_of(page, "sh") if block.mark == "run"]
    code, said = shell(folder, "\n".join(scripts))
    assert code == 0, said
    monkeypatch.chdir(folder)
    for block in blocks_of(page, "python"):
        if block.mark == AFTER:
            exec(compile(block.text, page.name, "exec"), {})


@each_page
def test_what_is_refused_is_told_so(page, folder):
    for block, after in pairwise(blocks_of(page)):
        if block.mark == "refused":
            assert shell(folder, block.text) == (2, after.text)


def strings_of(path):
    """Every string of a file, with … for what is put in, and as a recipe's errors are told."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
            yield PLACE.sub(lambda match: _as_told(match[1]), node.value)


PLACE = re.compile(r"\{(\w+)(?:![rs])?(:(?:[^{}]|\{\w+\})*)?\}")
KEYS = {key.rpartition(".")[2]: key for key in all_keys()}


def _as_told(name):
    """A {name} of an error: a setting is told as its key, all else is …"""
    return KEYS.get(name, "…")


def test_messages_of_troubleshooting_are_those_of_the_code():
    said = [text for path in PACKAGE.rglob("*.py") for text in strings_of(path)]
    said = "\0".join(said)
    blocks = blocks_of(DOCS / "troubleshooting.md")
    pairs = pairwise([Block("", "", ""), *blocks])
    messages = [b.text for before, b in pairs if (before.mark, b.language) == ("", "text")]
    assert len(messages) > 15
    for message in messages:
        pieces = [piece.strip() for piece in re.split("…|; |, or |, ", " ".join(message.split()))]
        long = [piece for piece in pieces if len(piece) >= SHORTEST]
        assert long, message
        for piece in long:
            assert piece in said, f"no message of the code has {piece!r}"
