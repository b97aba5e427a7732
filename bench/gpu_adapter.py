"""Qwen3-0.6B as Longshore's own code, and as transformers' code through the adapter, on one GPU.

    python bench/gpu_adapter.py             whole optimizer steps of both; also uncompiled
    python bench/gpu_adapter.py --profile   also where a step's time goes
    python bench/gpu_adapter.py --write     also into bench/RESULTS.md
    python bench/gpu_adapter.py --smoke     tiny, also without a GPU

In: nothing; a folder with random weights is made. Out: a JSON line for each way, with tokens/s, and
their share of our own code's. The sequences are those of bench/gpu.py: about 82,852 tokens a step.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from gpu import RESULTS, Report, apart, measure
from gpu_cases import words_of
from results import machine, table, write_section

WAYS = {
    "longshore": (),
    "transformers": ("model.code=transformers",),
    "transformers, not compiled": ("model.code=transformers", "train.compile=false"),
}


def make_folder(folder: str, *, smoke: bool) -> None:
    """Random weights in bfloat16, as transformers saves them."""
    import torch
    from gpu_transformers import make_model

    model = make_model(smoke=smoke).to("cpu", torch.bfloat16)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)


def text_of(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            row["way"], f"{row['ms']:.1f} ms", f"{row['tokens_per_s']:,.0f}", f"{row['share']:.2f}",
            f"{row['memory_gib']:.1f} GiB", f"{row['first_step_s']:.0f} s",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["code of the model", "a step", "tokens/s", "share", "peak", "first step"]
    return "\n\n".join(
        [
            "## transformers' code through the adapter",
            "Qwen3-0.6B, whole optimizer steps of the same 64 sequences, one lane, bf16. Share:\n"
            "of the tokens/s of our own code, in the same run.",
            table(header, lines),
            f"Machine: {machine(['torch', 'triton', 'flash-attn-4', 'transformers'])}. "
            "Made by `python bench/gpu_adapter.py --write`.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("adapter.jsonl"))
    options = parser.parse_args()
    report = Report(options.out)
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder, smoke=options.smoke)
        common = [*words_of("qwen3-0.6b", smoke=options.smoke)[1:], f"model.from_hf={folder}"]
        for way in options.ways:
            result = measure([*common, *WAYS[way]], steps=options.steps)
            own = report.value("adapter", "tokens_per_s", way="longshore")
            share = result["tokens_per_s"] / (own or result["tokens_per_s"])
            report.add("adapter", way=way, share=share, **result)
        for way in options.ways if options.profile else ():
            groups, top = apart("profile", [*common, *WAYS[way]])
            report.add("profile", way=way, groups=groups, top=top)
    if options.write:
        rows = [row for row in report.rows if row["section"] == "adapter"]
        write_section(RESULTS, "gpu-adapter", text_of(rows))


if __name__ == "__main__":
    main()
