"""Compares what `longshore advise` predicts with runs: peak memory and tokens/s of four models.

    python bench/advised.py                               tiny models, on the CPU; no memory there
    python bench/advised.py --gpu --write                 0.6B, 1B, 8 layers of 8B, 4 of 30B-A3B
    python bench/advised.py --gpu --profile machine.json  times from a profile of this machine
    python bench/advised.py --gpu --predict               predictions only, without running

In: a machine profile. Out: a JSON line for each run in advised.jsonl, a table, and with --write a
section of bench/RESULTS.md. Each run trains the 64 sequences of bench/gpu_cases.py on one rank, in
a process of its own, at two capacities; the prediction is made before, from their lengths alone.
Predicted 40.8 GiB and measured 41.2 is an error of −1.0 %.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_cases import MOCK, SEED, words_of
from results import machine as machine_line
from results import table, write_section

from longshore.advisor.candidate_time import StepTimer
from longshore.advisor.candidates import AdviceTask, Candidate, LaneLoad, memory_of
from longshore.advisor.machine import load_machine
from longshore.arch.memory import ALONE
from longshore.config.check import decoder_config
from longshore.config.load import load_config
from longshore.data.mock import mock_lengths

RESULTS = Path(__file__).with_name("RESULTS.md")
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b")
CAPACITIES = {False: (96, 192), True: (16_384, 32_768)}
WANTED = {"memory": 0.10, "speed": 0.15}
GIB = 1 << 30
WARMUP, TIMED = 2, 4


def words_for(name: str, capacity: int, *, gpu: bool, profile: str) -> list[str]:
    """The overrides of the run; on a GPU its planner uses the same costs."""
    words = [word for word in words_of(name, smoke=not gpu) if "plan.capacity" not in word]
    words.append(f"plan.capacity={capacity}")
    return [*words, f"plan.cost={profile}"] if gpu else words


def predict(name: str, capacity: int, *, gpu: bool, profile: str) -> dict[str, Any]:
    """What advise says of this capacity on one GPU."""
    config = load_config(None, words_for(name, capacity, gpu=gpu, profile=profile))
    machine = load_machine(profile)
    mock, count = dict(config.data.mock), config.data.count
    assert not gpu or (mock == MOCK and config.data.seed == SEED)
    lengths = np.asarray(mock_lengths(mock, count=count, seed=config.data.seed), dtype=np.int64)
    task = AdviceTask(
        model=config.model,
        decoder=decoder_config(config.model),
        gpus=1,
        memory=140 * GIB,
        machine=machine,
        machine_name=profile,
        lengths=lengths,
        batch=count,
        dtype="float32" if machine.dtype == "float32" else "bfloat16",
    )
    candidate = Candidate(axes=ALONE, capacity=capacity, max_cp=1)
    step = StepTimer(task).planned(candidate, lengths.tolist())
    load = LaneLoad.of([step.plan])
    peak = memory_of(task, candidate, [step.plan]).peak
    return {
        "model": name,
        "capacity": capacity,
        "rounds": load.rounds,
        "fullest": load.tokens,
        "predicted_gib": peak.total / GIB,
        "moment": peak.moment,
        "predicted_tokens_s": step.tokens / step.seconds,
    }


def measure_here(words: list[str]) -> dict[str, Any]:
    """Peak memory and the median step of a run in this process."""
    import torch
    from gpu import steps_of, sync
    from gpu_cases import running

    with running([*words, f"train.steps={WARMUP + TIMED}"]) as (job, parts):
        results = steps_of(job, parts, WARMUP + TIMED)
        sync()
        metrics = [each.metrics for each, _ in results[WARMUP:]]
    elapsed = statistics.median(each.elapsed_s for each in metrics)
    return {
        "measured_rounds": metrics[-1].rounds,
        "measured_gib": metrics[-1].memory_gib if torch.cuda.is_available() else None,
        "measured_tokens_s": metrics[-1].tokens / elapsed,
    }


def measure(words: list[str]) -> dict[str, Any]:
    """The same from a process of its own, with an empty GPU."""
    command = [sys.executable, __file__, "--call", json.dumps(words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": f"it ended with status {done.returncode}; see its output above"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def error(row: dict[str, Any], what: str) -> float | None:
    predicted, measured = row.get(f"predicted_{what}"), row.get(f"measured_{what}")
    return predicted / measured - 1 if predicted and measured else None


def page(rows: list[dict[str, Any]], profile: str) -> str:
    header = ["model", "capacity", "rounds", "fullest round", "predicted GiB", "measured", "error"]
    header += ["at", "predicted tokens/s", "measured", "error"]
    cells = [
        [
            row["model"],
            f"{row['capacity']:,}",
            _rounds(row),
            f"{row['fullest']:,}",
            f"{row['predicted_gib']:.1f}",
            _number(row.get("measured_gib"), ".1f"),
            _number(error(row, "gib"), "+.1%"),
            row["moment"],
            f"{row['predicted_tokens_s']:,.0f}",
            _number(row.get("measured_tokens_s"), ",.0f"),
            _number(error(row, "tokens_s"), "+.1%"),
        ]
        for row in rows
    ]
    origin = load_machine(profile).products.origin
    return "\n".join(
        [
            "## Advice against runs\n",
            "Peak memory and speed that `longshore advise` predicts for one GPU, and what runs of "
            "the same lengths then measured (64 lognormal sequences a step, bf16, shard none). "
            f"Times from the profile {Path(profile).stem}, {origin}.\n",
            table(header, cells),
            verdict(rows),
            f"\nMachine: {machine_line(['torch', 'triton', 'flash-attn-4'])}. Made by "
            "`python bench/advised.py --gpu --write`.",
        ]
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _rounds(row: dict[str, Any]) -> str:
    measured = row.get("measured_rounds", row["rounds"])
    return str(measured) if measured == row["rounds"] else f"{row['rounds']}, ran {measured}"


def verdict(rows: list[dict[str, Any]]) -> str:
    """Whether all errors are as small as wanted."""
    texts = []
    for name, what in (("memory", "gib"), ("speed", "tokens_s")):
        errors = [abs(each) for row in rows if (each := error(row, what)) is not None]
        if errors:
            reached = "reached" if max(errors) <= WANTED[name] else "missed"
            texts.append(
                f"{name}: within {WANTED[name]:.0%} wanted, at most {max(errors):.1%} off: "
                f"{reached}"
            )
    return "; ".join(texts) + "." if texts else "Not run."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gpu", action="store_true", help="real models, on a GPU")
    parser.add_argument("--profile", default="h200", help="a name, or a file of calibrate")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--predict", action="store_true", help="only predict")
    parser.add_argument("--out", type=Path, default=Path("advised.jsonl"))
    parser.add_argument("--page", type=Path, default=RESULTS, help="where --write writes")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--call", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        print(json.dumps(measure_here(options.call)))
        return 0
    if options.write and not options.gpu and options.page == RESULTS:
        parser.error("without --gpu there is nothing to write into RESULTS.md")
    begin, rows = time.perf_counter(), []
    options.out.write_text("")
    for name in options.models:
        for capacity in CAPACITIES[options.gpu]:
            case = {"gpu": options.gpu, "profile": options.profile}
            row = predict(name, capacity, **case)
            print("predicted:", json.dumps(row), flush=True)
            if not options.predict:
                row |= measure(words_for(name, capacity, **case))
                print("measured: ", json.dumps(row), flush=True)
            rows.append(row)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(page(rows, options.profile))
    print(f"took {time.perf_counter() - begin:.0f} s")
    if options.write:
        write_section(options.page, "advised", page(rows, options.profile))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
