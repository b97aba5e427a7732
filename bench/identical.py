"""Whether a change of the code changed any result, bit by bit: losses, plans, exported tensors.

    python bench/identical.py record before.json       on the code as it was
    python bench/identical.py compare before.json      on the code as it is; exits 1 on a difference

In: the recipes for a CPU, recipes/*-cpu.toml, run to their end through the command line with an
export. Out: for each recipe the losses and gradient norms of all steps (as Python prints a float,
which is exact), a digest of each step's plan, and a SHA-256 of each tensor of the weights, as the
run saves them and as `longshore export` writes them.
Two machines may round differently, so a record is compared on the machine that made it.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save

ROOT = Path(__file__).resolve().parents[1]
PLAN = ("lanes", "capacity", "sync", "lengths", "rounds", "predicted_s")
RECIPES = sorted((ROOT / "recipes").glob("*-cpu.toml"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, help="steps of each recipe (default: its own)")
    args = parser.parse_args()
    if args.task == "record":
        args.file.write_text(json.dumps(results(args.steps), indent=1) + "\n")
        return 0
    before = json.loads(args.file.read_text())
    after = results(before["steps"])
    different = compare(before["recipes"], after["recipes"])
    print("\n".join(different) or f"identical: {', '.join(before['recipes'])}")
    for name, recipe in after["recipes"].items():
        counts = ", ".join(f"{len(values)} {kind}" for kind, values in recipe.items())
        print(f"  {name}: {counts}; sha256 {digest(recipe)[:16]}")
    return bool(different)


def results(steps: int | None) -> dict[str, Any]:
    recipes = {}
    for recipe in RECIPES:
        print(f"{recipe.stem}…", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            recipes[recipe.stem] = result(recipe, Path(folder), steps)
    return {"steps": steps, "recipes": recipes}


def result(recipe: Path, folder: Path, steps: int | None) -> dict[str, Any]:
    """What one recipe gives."""
    run, export = folder / "run", folder / "export"
    changes = [f"output.folder={run}", "output.display=none"]
    if steps is not None:
        changes.append(f"train.steps={steps}")
    longshore = Path(sys.executable).parent / "longshore"
    subprocess.run([longshore, "train", recipe, *changes], check=True, cwd=folder)
    # An own mix of layers has no Hugging Face architecture, and is refused.
    subprocess.run([longshore, "export", run, export], check=recipe.stem != "tiny-hybrid-cpu")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return {
        "losses": [step["loss"] for step in metrics],
        "grad_norms": [step["grad_norm"] for step in metrics],
        "plans": [digest({key: step[key] for key in PLAN}) for step in records],
        "weights": hashes(run / "weights"),
        "exported": hashes(export),
    }


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
