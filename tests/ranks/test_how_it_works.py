"""docs/how-it-works.md names only functions that real runs call: they are traced, threads included.

Two ranks of torchrun run the command in this order: chats and a checkpoint, with context
parallelism, two steps; the same resumed, with heads exchanged instead of keys and values; a stream
of token ids through a pipeline of two stages, from random weights; scans that pass states. Export
and plan run alone.
"""

import importlib
import inspect
import json
import os
import sys
import threading
from operator import attrgetter
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.data.tiny import CHATML, word_tokenizer
from tests.hf.folders import qwen3
from tests.lint import CODE_NAME, LIFE, PACKAGE, ROOT
from tests.ranks.harness import run_ranks

import longshore

WORDS = "system user assistant Be kind . one two three ? "
SHARED = ("plan.capacity=64", "plan.min_cp=2", "data.batch=4", "output.save_every=2")
CHATS = ("data.path=chats.jsonl", "model.from_hf=base", "output.folder=run", *SHARED)
STREAM = ("data.path=rows.jsonl", "data.stream=true", "data.max_length=64", "data.batch=4")
PIPELINE = ("model.preset=tiny-qwen3", "parallel.pp=2", "plan.capacity=64", "output.folder=piped")
SCANS = ("data.path=rows.jsonl", "model.preset=tiny-hybrid", "output.folder=scanned")
COMMANDS = (
    ("train", *CHATS, "train.steps=2", "parallel.attention=gather"),
    ("train", "--resume", "run", "train.steps=3", "parallel.attention=heads"),
    ("train", *STREAM, *PIPELINE, "train.steps=1"),
    ("train", *SCANS, *SHARED, "parallel.scan=states", "train.steps=1"),
)


def named():
    """(file, name) of each function, class or attribute that the page names."""
    return sorted(set(CODE_NAME.findall((ROOT / LIFE).read_text(encoding="utf-8"))))


def traced(commands):
    """(file, name) of all functions of Longshore that the commands call, on any thread."""
    from longshore.cli.main import main

    called = set()

    def note(frame, event, _):
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        codes = [main([*words]) for words in commands]
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert codes == [0] * len(commands)
    ours = {code for code in called if Path(code.co_filename).is_relative_to(PACKAGE)}
    return {(str(Path(c.co_filename).relative_to(PACKAGE)), c.co_qualname) for c in ours}


def on_a_rank(folder, port):
    """A rank of torchrun that traces the commands."""
    rank = dist.get_rank()
    dist.barrier()  # the other may still be connecting
    dist.destroy_process_group()
    os.chdir(folder)
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "CUDA_VISIBLE_DEVICES": ""}
    return traced(COMMANDS)


@pytest.fixture(scope="module")
def called(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end_of_text|>"}
    word_tokenizer(folder / "base", WORDS + "\n", template=CHATML, **plain)
    qwen3(folder / "base")
    turns = [("user", "one ?"), ("assistant", "two three " * 12)]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 8)
    (folder / "rows.jsonl").write_text(f"{json.dumps({'input_ids': [*range(40)]})}\n" * 8)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = run_ranks(2, on_a_rank, str(folder), store.port, timeout=120)
    tuned, page = str(folder / "tuned"), str(folder / "plan.html")
    alone = [("export", str(folder / "run"), tuned), ("plan", "--demo", "--html", page)]
    return set().union(*ranks, traced(alone))


def is_called(file, name, called):
    """A function itself was; of a class or a table in it, a method of the class or a subclass."""
    module = importlib.import_module(f"longshore.{file.removesuffix('.py').replace('/', '.')}")
    owner, _, member = name.partition(".")
    kind = getattr(module, owner)
    if not isinstance(kind, type) or inspect.isroutine(getattr(kind, member or "__name__")):
        return (file, name) in called
    kinds = {(_file_of(each), each.__qualname__) for each in with_subclasses(kind)}
    return any((file, name.rpartition(".")[0]) in kinds for file, name in called)


def with_subclasses(kind):
    yield kind
    for each in kind.__subclasses__():
        yield from with_subclasses(each)


def _file_of(kind):
    return f"{kind.__module__.removeprefix('longshore.').replace('.', '/')}.py"


def test_a_run_calls_what_the_page_names(called):
    uncalled = [f"{file}:{name}" for file, name in named() if not is_called(file, name, called)]
    assert uncalled == [], f"{LIFE} names what no run calls"


def test_each_stage_of_a_sequence_has_a_name():
    page = (ROOT / LIFE).read_text(encoding="utf-8")
    part = page.partition("\n## Life of a sequence\n")[2].partition("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert [row for row in rows if not CODE_NAME.search(row)] == []


@pytest.mark.parametrize("thing", ["send_back", "MemorySource", "Trainer.export"])
def test_what_no_run_calls_is_noticed(thing, called):
    """A function, a class and a method: others' programs call them."""
    function = attrgetter(thing)(longshore)
    assert not is_called(_file_of(function), function.__qualname__, called)
