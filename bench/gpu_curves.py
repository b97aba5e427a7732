"""Curves on one GPU: a mixture of experts by several plans and axes, one step of Qwen3-0.6B.

    python bench/gpu_curves.py experts          padded, static and mixed plans, bf16, 100 steps
    python bench/gpu_curves.py parallel         TP 2, EP 4 and both on 4 ranks, bf16, 50 steps
    python bench/gpu_curves.py doubt            a step with a large gradient norm, eight ways
    python bench/gpu_curves.py --smoke          tiny models, also without a GPU

In: the names of parts. Out: tables. Every run is a real `longshore train` in processes of its own;
4 ranks share the GPU through gloo. Losses and norms are read from metrics.jsonl. A part that fails
prints its traceback, and the other goes on.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from results import table

ROOT = Path(__file__).parents[1]
LIMIT = 0.01
STEPS = 12
"""Of the run in which `doubt` looks for a step whose gradient norm stands out."""
Row = dict[str, Any]


def run(folder: Path, words: list[str], *, ranks: int, timeout: int = 500) -> list[Row]:
    """The metrics of each step of a run in this folder; a resumed run's words come with it."""
    command = [sys.executable, "-m", "longshore.cli.main", "train", *words]
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, f"output.folder={folder}", "output.display=plain", "--ranks", str(ranks),
         "--force-ranks"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    print(f"{folder.name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def moe_recipe(*, smoke: bool, steps: int) -> list[str]:
    """A mixture of experts in bf16."""
    longest, mean = (64, 24) if smoke else (2048, 384)
    return [
        "model.preset=tiny-qwen3-moe" if smoke else "model.module=gpu_cases:moe_half_billion",
        "data.mock={mode='distribution', type='lognormal', min_seq_len=16, "
        f"max_seq_len={longest}, mean_seq_len={mean}, lognormal_sigma=1.1}}",
        "data.count=4096",
        "data.batch=16",
        f"plan.capacity={longest}",
        f"train.steps={steps}",
        "train.lr=5e-5",
        f"train.warmup={steps // 10}",
        f"train.dtype={'float32' if smoke else 'bfloat16'}",
        "output.keep=0",
        "output.weights=false",
    ]


def experts(folder: Path, *, smoke: bool) -> bool:
    """Three plans of one mixture of experts follow the same curve."""
    half = "plan.capacity=32" if smoke else "plan.capacity=1024"
    plans = {
        "padded, 1 rank": (["plan.policy=padded"], 1),
        # How far rounding alone leads: the same plan by other kernels.
        "padded, plain kernels": (["plan.policy=padded", "train.kernels=plain"], 1),
        "static, CP 2 on 2 ranks": (["plan.policy=static", "plan.cp_size=2"], 2),
        "mixed, 4 ranks": (["plan.policy=mixed", half], 4),
    }
    return follow(folder, moe_recipe(smoke=smoke, steps=5 if smoke else 100), plans)


def parallel(folder: Path, *, smoke: bool) -> bool:
    """Tensor and expert parallelism follow one rank."""
    plans = {
        "1 rank": ([], 1),
        "TP 2 × 2 lanes": (["parallel.tp=2"], 4),
        "EP 4": (["parallel.ep=4"], 4),
        "TP 2 × 2 lanes, EP 4, zero3": (
            ["parallel.tp=2", "parallel.ep=4", "parallel.shard=zero3"],
            4,
        ),
    }
    return follow(folder, moe_recipe(smoke=smoke, steps=5 if smoke else 50), plans)


def follow(folder: Path, common: list[str], plans: dict[str, tuple[list[str], int]]) -> bool:
    """Runs all plans at once; whether every loss is within LIMIT of the first plan's."""
    curves: dict[str, list[Row]] = {}
    with ThreadPoolExecutor() as pool:
        runs = {
            name: pool.submit(
                run,
                folder / name.replace(",", "").replace(" ", "-"),
                [*common, *words],
                ranks=ranks,
            )
            for name, (words, ranks) in plans.items()
        }
    for name, each in runs.items():
        try:
            curves[name] = each.result()
        except Exception:
            traceback.print_exc()
    if not curves:
        return False
    shown = [
        n
        for n in (1, 2, 3, 5, 10, 15, 20, 30, 40, 50, 60, 80, 100)
        if n <= len(next(iter(curves.values())))
    ]
    steps_shown = [[str(n), *(_both(curve[n - 1]) for curve in curves.values())] for n in shown]
    print(table(("step", *(f"{name}: loss (norm)" for name in curves)), steps_shown))
    first_name, first = next(iter(curves.items()))
    rows, good = [], len(curves) == len(plans)
    for name, curve in curves.items():
        pairs = list(zip(curve, first, strict=True))
        errors = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs]
        worst = max(errors)
        good = good and worst < LIMIT
        rows.append([name, f"{curve[0]['loss']:.4f}", f"{curve[-1]['loss']:.4f}",
                     f"{worst:.3%} at step {errors.index(worst) + 1}"])  # fmt: skip
    print(table(("plan", "first loss", "last loss", f"worst difference to {first_name}"), rows))
    return good


def doubt(folder: Path, *, smoke: bool) -> bool:
    """One sensitive step from one checkpoint: 1 and 4 ranks, two dtypes, two ways to shard."""
    longest, mean = (64, 24) if smoke else (4096, 512)
    common = [
        f"model.preset={'tiny-qwen3' if smoke else 'qwen3-0.6b'}",
        "data.mock={mode='distribution', type='lognormal', min_seq_len=16, "
        f"max_seq_len={longest}, mean_seq_len={mean}, lognormal_sigma=1.1}}",
        "data.count=1024",
        "data.batch=16",
        f"plan.capacity={longest}",
        # The rate must not depend on the number of steps, which grows from 6 to 7.
        "train.schedule=constant",
        "train.lr=3e-4",
        "output.weights=false",
    ]
    bf16 = "train.dtype=bfloat16"
    scout = [*common, f"train.steps={STEPS}", bf16, "output.keep=0"]
    seen = run(folder / "scout", scout, ranks=1)
    print(table(("step", "loss", "gradient norm"), [_step(row) for row in seen]))
    # The step whose norm stands out most from the one before it, after the first ones.
    number = max(
        range(4, STEPS + 1), key=lambda n: seen[n - 1]["grad_norm"] / seen[n - 2]["grad_norm"]
    )
    begun = folder / "begun"
    run(begun, [*common, f"train.steps={number - 1}", bf16, "output.keep=1"], ranks=1)
    rows, norms = [], dict[str, list[float]]()
    for dtype in ("float32", "bfloat16"):
        for ranks, shard in ((1, "none"), (4, "none"), (4, "zero3"), (1, "zero3")):
            name = f"{dtype}-{ranks}-{shard}"
            try:
                row = _one_more(
                    folder / name, begun, common, number, ranks=ranks, dtype=dtype, shard=shard
                )
            except Exception:
                traceback.print_exc()
                rows.append([dtype, str(ranks), shard, "failed", "", ""])
                continue
            norms.setdefault(dtype, []).append(row["grad_norm"])
            rows.append([dtype, str(ranks), shard, f"{row['loss']:.6f}",
                         f"{row['grad_norm']:.6f}", str(row["loss_tokens"])])  # fmt: skip
    print(table(("dtype", "ranks", "shard", "loss", "gradient norm", "loss tokens"), rows))
    spread = {dtype: max(each) / min(each) - 1 for dtype, each in norms.items()}
    print("largest over smallest norm, less 1: "
          + ", ".join(f"{dtype} {value:.3%}" for dtype, value in spread.items()))  # fmt: skip
    return all(len(each) == 4 for each in norms.values()) and spread.get("float32", 1) < 1e-3


def _one_more(
    folder: Path,
    begun: Path,
    common: list[str],
    number: int,
    *,
    ranks: int,
    dtype: str,
    shard: str,
) -> Row:
    """Step `number`, in a copy of the run whose checkpoint is linked, not copied."""
    shutil.copytree(begun, folder, copy_function=_link_large)
    words = [*common, f"train.steps={number}", f"train.dtype={dtype}", f"parallel.shard={shard}",
             "output.keep=0", "--resume", str(folder)]  # fmt: skip
    try:
        row = run(folder, words, ranks=ranks)[-1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if row["step"] != number:
        raise RuntimeError(f"the last step is {row['step']}, not {number}")
    return row


def _link_large(source: str, target: str) -> None:
    """Small files are copied, because a run may change them."""
    if Path(source).stat().st_size > 1 << 20:
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _both(row: Row) -> str:
    return f"{row['loss']:.4f} ({row['grad_norm']:.3f})"


def _step(row: Row) -> list[str]:
    return [str(row["step"]), f"{row['loss']:.6f}", f"{row['grad_norm']:.6f}"]


PARTS = {"experts": experts, "parallel": parallel, "doubt": doubt}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    good = True
    for name in options.parts or PARTS:
        print(f"--- {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                agrees = PARTS[name](Path(folder), smoke=options.smoke)
                print(f"--- {name}: {'agrees' if agrees else 'DIFFERS'}", flush=True)
            except Exception:
                traceback.print_exc()
                agrees = False
        good = good and agrees
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
