"""Files of chats, good lines and bad ones, and `prepare` of them: what its tests share."""

import json
import random
from pathlib import Path

from longshore.data.prepare import prepare

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
    7: ("no messages", "{}"),
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


def run(out="out", inputs="chats.jsonl", **settings):
    return prepare(inputs, "tok", out, **{"max_length": 100, "shard_bytes": 2000, **settings})


def rejected(out="out"):
    return [json.loads(line) for line in Path(out, "rejected.jsonl").read_text().splitlines()]
