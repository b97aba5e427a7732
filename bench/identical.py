"""Whether a change of the code changed any result, bit by bit: losses, plans, exported tensors.

    python bench/identical.py record before.json       on the code as it was
    python bench/identical.py compare before.json      on the code as it is; exits 1 on a difference

In: the recipes for a CPU, recipes/*-cpu.toml, and two runs of fine-tuning on random text: LoRA on
chats and DPO on pairs, both from a tiny Qwen3 with random weights. All go to their end through the
command line, with an export. Out: for each run the losses and gradient norms of all steps (as
Python prints a float, which is exact), a digest of each step's plan, and a SHA-256 of each tensor
of the weights, as the run saves them and as `longshore export` writes them. A LoRA run saves
factors, and its export is merged; the export with --adapter is there too.
Two machines may round differently, so a record is compared on the machine that made it.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save

ROOT = Path(__file__).resolve().parents[1]
PLAN = ("lanes", "capacity", "sync", "lengths", "rounds", "predicted_s")
RECIPES = sorted((ROOT / "recipes").glob("*-cpu.toml"))
STEPS = 12  # of a run of fine-tuning; a recipe says its own
WORDS = "zero one two three four five six seven eight nine ten"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run: what `longshore train` is given, and how its result is exported."""

    words: tuple[str, ...]
    exports: tuple[tuple[str, ...], ...] = ((),)
    """The options of each export."""


# The longest answers are split over both ranks.
TUNED = (
    *("model.from_hf=base", "parallel.ranks=2", "train.device=cpu", "plan.capacity=128"),
    *("data.batch=8", f"train.steps={STEPS}", "train.lr=1e-2"),
)
LORA = Run(
    words=(*TUNED, "data.path=chats.jsonl", "model.lora.rank=4", "parallel.shard=zero3"),
    exports=((), ("--adapter",)),
)
DPO = Run(words=(*TUNED, "data.path=pairs.jsonl", "train.loss=dpo"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, help="steps of each run (default: its own)")
    parser.add_argument("--only", action="append", choices=[*runs()], help="one run, by name")
    args = parser.parse_args()
    if args.task == "record":
        args.file.write_text(json.dumps(results(args.steps, args.only), indent=1) + "\n")
        return 0
    before = json.loads(args.file.read_text())
    after = results(before["steps"], args.only or [*before["recipes"]])
    expected = {name: before["recipes"][name] for name in args.only or before["recipes"]}
    different = compare(expected, after["recipes"])
    print("\n".join(different) or f"identical: {', '.join(expected)}")
    for name, recipe in after["recipes"].items():
        counts = ", ".join(f"{len(values)} {kind}" for kind, values in recipe.items())
        print(f"  {name}: {counts}; sha256 {digest(recipe)[:16]}")
    return bool(different)


def runs() -> dict[str, Run]:
    # An own mix of layers has no Hugging Face architecture, so it cannot be exported.
    recipes = {
        recipe.stem: Run((str(recipe),), () if recipe.stem == "tiny-hybrid-cpu" else ((),))
        for recipe in RECIPES
    }
    return {**recipes, "lora": LORA, "dpo": DPO}


def results(steps: int | None, names: list[str] | None) -> dict[str, Any]:
    recipes = {}
    for name, run in runs().items():
        if names is None or name in names:
            print(f"{name}…", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                recipes[name] = result(run, Path(folder), steps)
    return {"steps": steps, "recipes": recipes}


def result(run: Run, folder: Path, steps: int | None) -> dict[str, Any]:
    """What one run gives."""
    if run in (LORA, DPO):
        write_inputs(folder)
    changes = ["output.folder=run", "output.display=none"]
    if steps is not None:
        changes.append(f"train.steps={steps}")
    longshore = Path(sys.executable).parent / "longshore"
    subprocess.run([longshore, "train", *run.words, *changes], check=True, cwd=folder)
    exported: dict[str, str] = {}
    for number, options in enumerate(run.exports):
        target = f"export-{number}"
        subprocess.run([longshore, "export", "run", target, *options], check=True, cwd=folder)
        exported |= hashes(folder / target)
    metrics = read_lines(folder / "run/metrics.jsonl")
    return {
        "losses": [step["loss"] for step in metrics],
        "grad_norms": [step["grad_norm"] for step in metrics],
        "plans": [
            digest({key: step[key] for key in PLAN})
            for step in read_lines(folder / "run/steps.jsonl")
        ],
        "weights": hashes(folder / "run/weights"),
        "exported": exported,
    }


def write_inputs(folder: Path) -> None:
    """A checkpoint with a tokenizer in base/, and chats.jsonl and pairs.jsonl of random words."""
    write_base(folder / "base")
    draw = random.Random(0)
    chats, pairs = [], []
    for _ in range(96):
        question, answer, other = (text(draw, longest) for longest in (8, 100, 20))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.append({"messages": turns})
        pairs.append({"prompt": question, "chosen": " " + answer, "rejected": " " + other})
    for name, rows in (("chats", chats), ("pairs", pairs)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)


def text(draw: random.Random, longest: int) -> str:
    """Most texts are short, and a few are long."""
    return " ".join(draw.choices(WORDS.split(), k=int(longest ** draw.random())))


def write_base(folder: Path) -> None:
    """A tiny Qwen3 as transformers saves it, whose tokens are words."""
    import torch
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.1,
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    pieces = ["<unk>", *WORDS.split(), " ", "\n", "user", "assistant"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[-1], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def hashes(export: Path) -> dict[str, str]:
    sums = {}
    for file in sorted(export.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no dict
                content = save({"": tensors.get_tensor(name)})
                sums[name] = hashlib.sha256(content).hexdigest()
    return sums


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each result that differs."""
    lines = [f"{name}: only in one of both" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        lines += [
            f"{name}: {kind} differ"
            for kind in before[name]
            if before[name][kind] != after[name].get(kind)
        ]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
