"""Measures the bubble of pipelines on two local processes: 1F1B beside interleaved stages.

    python bench/pipeline.py             prints a table
    python bench/pipeline.py --write     also into bench/RESULTS.md

In: nothing. Out: for 2 pipeline ranks and 2, 4 and 8 equal rounds, with 1, 2 and 4 stages a rank,
the share of a step in which a rank waits: as the plan predicts it, and as measured by real
`longshore train` runs (medians over steps after the first two, mean of both ranks). For equal
rounds theory says (pp − 1) / (pp − 1 + vpp · rounds). Every rank has one thread; run it on a
machine with two idle cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import machine, table, write_section

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("RESULTS.md")
LAYERS, TOKENS, SKIPPED = 16, 384, 2


def decoder() -> DecoderConfig:
    """Equal layers; embedding and head cost next to nothing."""
    attention = AttentionConfig(heads=4, kv_heads=4, head_dim=48)
    layer = LayerConfig(attention, MLPConfig(width=512))
    return DecoderConfig(vocab_size=64, width=192, layers=(layer,) * LAYERS)


def run(folder: Path, *, vpp: int, rounds: int, steps: int) -> tuple[float, float, float]:
    """Measured bubble, predicted bubble, seconds of a step."""
    each = "t" * (LAYERS // (2 * vpp))
    layout = "|".join(["E" + each, *[each] * (2 * vpp - 2), each + "L"])
    words = [
        "model.module=pipeline:decoder",
        "data.mock={mode='distribution', type='uniform', "
        f"min_seq_len={TOKENS}, max_seq_len={TOKENS}}}",
        f"data.count={rounds * steps}",
        f"data.batch={rounds}",
        f"plan.capacity={TOKENS}",
        f"train.steps={steps}",
        "train.device=cpu",
        "parallel.pp=2",
        f"parallel.layout={layout}",
        "output.keep=0",
        "output.weights=false",
        "output.display=plain",
        f"output.folder={folder}",
    ]
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "longshore.cli.main", "train", *words, "--ranks", "2"],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    lines = [
        json.loads(line)
        for file in sorted((folder / "pipeline").iterdir())
        for line in file.read_text().splitlines()
    ]
    kept = [line for line in lines if line["step"] > SKIPPED]
    measured, predicted, elapsed = (
        statistics.median(line[name] for line in kept)
        for name in ("bubble", "predicted", "elapsed_s")
    )
    return measured, predicted, elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    rows = []
    for rounds in (2, 4, 8):
        for vpp in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                measured, predicted, elapsed = run(
                    Path(folder) / "run", vpp=vpp, rounds=rounds, steps=options.steps
                )
            theory = 1 / (1 + vpp * rounds)
            rows.append(
                [str(rounds), str(vpp), *(f"{x:.1%}" for x in (theory, predicted, measured)),
                 f"{elapsed:.3f}"]
            )  # fmt: skip
            print(rows[-1], flush=True)
    header = ("rounds", "stages a rank", "bubble in theory", "predicted", "measured", "step, s")
    text = f"## Pipelines on two processes\n\n{machine(['torch'])}.\n\n{table(header, rows)}"
    print(text)
    if options.write:
        write_section(RESULTS, "pipeline-bubbles", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
