"""Qwen3-0.6B as Longshore's own code, and as transformers' code through the adapter, on one GPU.

    python bench/gpu_adapter.py             whole optimizer steps of both; also uncompiled
    python bench/gpu_adapter.py --smoke     tiny, also without a GPU

In: nothing; a folder with random weights is made. Out: a JSON line for each way, with tokens/s, and
their share of our own code's. The sequences are those of bench/gpu.py: about 82,852 tokens a step.
"""

import argparse
import json
import tempfile

from gpu import measure
from gpu_cases import words_of

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    options = parser.parse_args()
    own: float | None = None
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder, smoke=options.smoke)
        for way in options.ways:
            words = words_of("qwen3-0.6b", smoke=options.smoke)[1:]
            words = [*words, f"model.from_hf={folder}", *WAYS[way]]
            result = measure(words, steps=options.steps)
            own = result["tokens_per_s"] if way == "longshore" else own
            share = result["tokens_per_s"] / own if own else None
            print(json.dumps({"way": way, "share": share, **result}), flush=True)


if __name__ == "__main__":
    main()
