"""What docs/ says is so: its generated parts, messages, code, commands and printed answers.

On a page every Python block runs unless `<!-- not run: why -->` stands above it, and with `<!--
prints below -->` it prints the text block behind it. A `sh` block runs where `<!-- run -->` stands
above it; with `<!-- refused -->` it fails, and says the text block behind it; others are only
looked at. The other text blocks of troubleshooting.md are messages of the code, … for what changes.
A Python block with `<!-- run after the commands -->` needs what the page's commands make. README.md
and the tutorial are executed from top to bottom in test_docs_in_order.py, where `<!-- run in order
-->` stands. That keys, commands, options and files exist is a matter of tests/lint.py.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from tests.data.tiny import CHATML, word_tokenizer
from tests.lint import INLINE, PACKAGE, ROOT, Block, blocks_of

from longshore.config.load import load_config
from longshore.config.other_systems import all_keys
from longshore.config.schema import SECTIONS
from longshore.train.display import StepMetrics

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
AFTER = "run after the commands"
IN_ORDER = "run in order"
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


def pages_with(is_wanted):
    """A case for each page with a block for which that holds."""
    pages = [page for page in PAGES if any(map(is_wanted, blocks_of(page)))]
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


def runs_at_once(block):
    is_left = block.mark.startswith("not run") or block.mark in (AFTER, IN_ORDER)
    return block.language == "python" and not is_left


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


@pytest.mark.slow
@pages_with(runs_at_once)
def test_python_blocks_run_and_print_what_they_say(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = blocks_of(page)
    for block, after in pairwise([*blocks, Block("", "", "")]):
        if not runs_at_once(block):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block.text, page.name, "exec"), {})
        if block.mark == "prints below":
            assert printed.getvalue() == after.text


@pytest.mark.slow
@pages_with(lambda block: block.mark == "run")
def test_commands_that_can_run_do(page, folder, monkeypatch):
    scripts = [block.text for block in blocks_of(page, "sh") if block.mark == "run"]
    code, said = shell(folder, "\n".join(scripts))
    assert code == 0, said
    monkeypatch.chdir(folder)
    for block in blocks_of(page, "python"):
        if block.mark == AFTER:
            exec(compile(block.text, page.name, "exec"), {})


@pytest.mark.slow
@pages_with(lambda block: block.mark == "refused")
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
