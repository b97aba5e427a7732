"""DeepSeek-V4's layers on one GPU: memory over lengths, a step's MFU, and where its time goes.

    python bench/gpu_sparse.py                   memory, and steps
    python bench/gpu_sparse.py lengths --lengths 8192
    python bench/gpu_sparse.py --write           also into bench/RESULTS.md

In: the names of parts. Out: a JSON line for each result, and tables. The model is the first four
layers of DeepSeek-V4-Flash (two with a window alone, one with chosen and one with pooled entries)
with 16 of its 256 experts each, of which a token uses 6 as in the whole model. A step has one
sequence of each length on one lane, and recomputes its blocks. Memory that grows linearly is the
same number of bytes for each further token: 70 GiB at 32,768 and 80 GiB at 65,536 are 327,680 bytes
a token.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from gpu import GIB, RESULTS, Report, dense, guarded, shares_of, steps_of, sync
from gpu_cases import running, words_of
from gpu_profile import grouped
from results import machine, table, write_section

LENGTHS = (8192, 16384, 32768, 65536)
WARMUP, STEPS = 2, 3


def words(length: int, *, smoke: bool) -> list[str]:
    """One sequence of that length a step."""
    changed = ("data.", "plan.capacity")
    kept = [w for w in words_of("deepseek-v4", smoke=smoke) if not w.startswith(changed)]
    mock = f"{{mode='distribution', type='uniform', min_seq_len={length}, max_seq_len={length}}}"
    return [
        *kept,
        f"data.mock={mock}",
        "data.count=16",
        "data.batch=1",
        f"plan.capacity={length}",
        "train.recompute=blocks",
        "train.steps=16",
    ]


def measured(chosen: list[str], *, steps: int) -> dict[str, Any]:
    """Time, memory and kernels of steps."""
    begin = time.perf_counter()
    with running(chosen) as (job, parts):
        before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        results = steps_of(job, parts, WARMUP + steps)
        sync()
        metrics = [each.metrics for each, _ in results[WARMUP:]]
        best = min(metrics, key=lambda each: each.elapsed_s)
        peak = metrics[-1].memory_gib
        step = next(parts.loader)
        groups, top = grouped(lambda: parts.stepper.step(step.batches, lr=1e-5))
        return {
            "tokens": best.tokens,
            "ms": best.elapsed_s * 1e3,
            "tokens_per_s": best.tokens / best.elapsed_s,
            "tflops": best.tflops,
            "first_gib": before / GIB,
            "memory_gib": peak,
            "losses": [each.metrics.loss for each, _ in results],
            "groups": {key: round(value, 2) for key, value in groups.items()},
            "top": [[name[:90], round(ms, 2), count] for name, ms, count in top],
            "all_s": time.perf_counter() - begin,
        }


def lengths(options: argparse.Namespace, report: Report) -> None:
    """One sequence a step."""
    for length in options.lengths or ((32, 64) if options.smoke else LENGTHS):
        with guarded(f"length {length}", report):
            row = measured(words(length, smoke=options.smoke), steps=STEPS)
            report.add("length", length=length, **shares_of(row["tflops"], report), **row)


def packed(options: argparse.Namespace, report: Report) -> None:
    """The 64 sequences of bench/gpu.py."""
    with guarded("packed", report):
        chosen = [*words_of("deepseek-v4", smoke=options.smoke), "train.recompute=blocks"]
        row = measured(chosen, steps=STEPS)
        report.add("packed", **shares_of(row["tflops"], report), **row)


def page(report: Report) -> str:
    rows = [row for row in report.rows if row["section"] in ("length", "packed")]
    header = (
        *("step", "tokens", "tokens/s", "MFU", "of a dense product", "a step", "peak"),
        "bytes of each further token",
    )
    cells, before = [], None
    for row in rows:
        slope = ""
        if row["section"] == "length":
            if before is not None:
                more = (row["memory_gib"] - before["memory_gib"]) * GIB
                slope = f"{more / (row['tokens'] - before['tokens']):,.0f}"
            before = row
        name = "one sequence" if row["section"] == "length" else "64 sequences"
        cells.append(
            [
                name, f"{row['tokens']:,}", f"{row['tokens_per_s']:,.0f}",
                *("–" if row[key] is None else f"{row[key]:.1%}" for key in ("mfu", "of_product")),
                f"{row['ms']:,.0f} ms", f"{row['memory_gib']:.1f} GiB", slope,
            ]
        )  # fmt: skip
    parts = [
        "## DeepSeek-V4 on one GPU",
        "Four layers of DeepSeek-V4-Flash, one of each kind and a second window, with 16 experts\n"
        "each; bf16, blocks recomputed. MFU counts products of real lengths, without those that\n"
        "are recomputed, against the vendor's dense peak; the next column has the same against a\n"
        "dense product in the same run.",
        table(header, cells),
    ]
    for row in rows[-2:]:
        parts.append(f"Where {row['tokens']:,} tokens spend their time:")
        shares = [[name, f"{ms:,.1f} ms"] for name, ms in row["groups"].items()]
        parts.append(table(("group", "time"), shares))
        top = [[name, f"{ms:,.1f} ms", str(count)] for name, ms, count in row["top"][:12]]
        parts.append(table(("kernel", "time", "calls"), top))
    parts.append(f"Machine: {machine(['torch', 'triton'])}. Made by `python bench/gpu_sparse.py`.")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("parts", nargs="*", default=["lengths", "packed"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[])
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("sparse.jsonl"))
    options = parser.parse_args()
    report = Report(options.out)
    for part in ["dense", *options.parts]:
        {"dense": dense, "lengths": lengths, "packed": packed}[part](options, report)
    print(page(report))
    if options.write:
        write_section(RESULTS, "gpu-sparse", page(report))


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    main()
