"""Run folders made up in a moment, with real plans."""

import json
import math
import random
from dataclasses import asdict

from longshore.config.schema import write_toml
from longshore.plan.planner import make_plan
from longshore.plan.simulate import make_timeline

CONFIG = {
    "data": {"batch": 24, "seed": 0},
    "plan": {"policy": "mixed", "capacity": 2048, "sync": "round"},
    "model": {"preset": "tiny-llama"},
    "parallel": {"ranks": 4},
    "train": {"steps": 100, "lr": 5e-3},
}
PLANS = 6


def make_run(
    folder,
    *,
    steps=12,
    lanes=4,
    capacity=2048,
    batch=24,
    seed=0,
    experts=(),
    depths=0,
    graphs=False,
    evals=False,
    journal=True,
    sync="round",
    config=None,
    speed=1.0,
    pp=1,
    vpp=1,
    refined=False,
):
    """Writes a folder as a run does. experts: how many in each layer. graphs: whether CUDA
    graphs served its layers.

    Returns the folder.
    """
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    sections = {name: {**CONFIG[name], **(config or {}).get(name, {})} for name in CONFIG}
    if pp > 1:
        sections["parallel"] |= {"pp": pp, "vpp": vpp}
    (folder / "config.toml").write_text(write_toml(sections, {}), encoding="utf-8")
    plans = [
        make_plan(lengths(rng, batch, capacity), lanes=lanes, capacity=capacity, sync=sync)
        for _ in range(min(PLANS, steps))
    ]
    planned = [(plan, journal_of(plan)) for plan in plans]
    rows = [
        step_rows(rng, n, *planned[n % len(planned)], experts, depths, speed, steps)
        for n in range(1, steps + 1)
    ]
    if graphs:
        for n, (metrics, _) in enumerate(rows, start=1):
            metrics |= {"graphed": {"whole": n, "halves": 3, "eager": n % 2}, "graph_gib": 0.5}
    write_lines(folder / "metrics.jsonl", [metrics for metrics, _ in rows])
    if journal:
        write_lines(folder / "steps.jsonl", [line for _, line in rows])
    for rank in range(pp if pp > 1 else 0):
        (folder / "pipeline").mkdir(exist_ok=True)
        stages = range(rank, pp * vpp, pp)
        lines = [stage_line(rng, line["step"], line["elapsed_s"], stages) for line, _ in rows]
        write_lines(folder / "pipeline" / f"rank-{rank}.jsonl", lines)
    if refined:
        write_lines(folder / "refine.jsonl", [refine_line(n) for n in (21, 37, 53)])
    if evals:
        every = max(1, steps // 8)
        write_lines(
            folder / "evals.jsonl",
            [
                {"step": n, "name": name, "loss": curve(n, steps) + shift, "loss_tokens": 4096}
                for n in range(every, steps + 1, every)
                for name, shift in (("held-out", 0.2), ("code", 0.5))
            ],
        )
    return folder


def refine_line(step):
    """The last window changed nothing; rounds of CP size 2 are predicted worst."""
    before = {21: 2.0, 37: 1.1, 53: 1.0}[step]
    return {
        "step": step, "window": [step - 20, step - 5], "changed": step < 53, "rounds": 30,
        "left_out": 2, "factors": {"linear": 1.0, "quadratic": 9.5}, "errors": [0.4, 0.2, 0.1],
        "kinds": [[1, 20, 1.5, before, 1.0], [2, 10, 3.0, 1.5 * before, 1.0]],
    }  # fmt: skip


def lengths(rng, batch, capacity):
    return [min(capacity * 2, max(1, int(rng.lognormvariate(5.5, 1.2)))) for _ in range(batch)]


def journal_of(plan):
    """The part of a line that the plan decides."""
    ends = make_timeline(plan).end.max(axis=1).tolist()
    return {
        "lanes": plan.setting.lanes,
        "capacity": plan.setting.capacity,
        "sync": plan.setting.sync,
        "cost": asdict(plan.setting.profile),
        "lengths": [sequence.length for sequence in plan.sequences],
        "rounds": [
            [[pack.first_lane, pack.cp_size, list(pack.sequences)] for pack in round_.packs]
            for round_ in plan.rounds
        ],
        "predicted_s": [end - start for start, end in zip([0.0, *ends[:-1]], ends, strict=True)],
    }


def step_rows(rng, n, plan, line, experts, depths, speed, steps):
    """A line of metrics.jsonl and one of steps.jsonl."""
    tokens = sum(sequence.length for sequence in plan.sequences)
    elapsed = [3 / speed * p * rng.lognormvariate(0, 0.06) for p in line["predicted_s"]]
    wait = 2.5 if n == steps // 2 else 0.01 * rng.random()
    took = sum(elapsed) + wait
    metrics = {
        "step": n, "epoch": n // 40, "loss": curve(n, steps) * rng.lognormvariate(0, 0.02),
        "loss_tokens": tokens, "tokens": tokens, "sequences": len(plan.sequences),
        "grad_norm": rng.lognormvariate(0, 0.3) * (40 if n == steps * 2 // 3 else 1),
        "lr": 5e-3 * min(1, n / 3) * (1 - 0.9 * n / steps), "elapsed_s": took,
        "tokens_per_s": tokens / took, "tflops": 1.5 * rng.random(), "mfu": None,
        "rounds": len(plan.rounds), "efficiency": plan.stats.efficiency,
        "padding": plan.stats.padding, "plan_s": 0.02 * rng.random(), "data_wait_s": wait,
        "memory_gib": 1 + 0.1 * math.log(n), "skipped": False,
    }  # fmt: skip
    journal = {"step": n, **line, "elapsed_s": elapsed}
    if experts:
        metrics["balance_loss"] = 1 + rng.random() / n
        journal["experts"] = [
            expert_tokens(rng, n, layer, count, tokens) for layer, count in enumerate(experts)
        ]
    if depths:
        metrics["mtp_losses"] = [curve(n, steps) + 0.3 * (d + 1) for d in range(depths)]
        metrics["loss_metrics"] = {"reward_margin": n / steps}
    return metrics, journal


def stage_line(rng, n, elapsed, stages):
    """A line of a pipeline rank that works for 70 to 90 % of the step, a third of it forward."""
    work = elapsed * (0.7 + 0.2 * rng.random()) / len(stages)
    return {
        "step": n,
        "elapsed_s": elapsed,
        "stages": [[stage, work / 3, work * 2 / 3] for stage in stages],
        "bubble": 1 - work * len(stages) / elapsed,
        "predicted": 0.25,
    }


def expert_tokens(rng, n, layer, count, tokens):
    shares = [
        rng.lognormvariate(0, 0.2) * (1 + (layer + 1) * 3 * (e == layer) / (1 + n / 20))
        for e in range(count)
    ]
    return [int(2 * tokens * share / sum(shares)) for share in shares]


def curve(n, steps):
    return 1.8 + 3.8 * math.exp(-4 * n / steps)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
