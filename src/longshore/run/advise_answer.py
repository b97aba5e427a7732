"""Advice as plain data: the recipe, a reason for each key, memory and times of all candidates.

In: Advice. Out: a dictionary that becomes JSON, the text of report/advise_text.py and the page of
report/advise_page.py. No torch. A part of one:

    {"recipe": "[plan]\\ncapacity = 16384\\n…", "reasons": [["plan.capacity", "16384", "the …"]],
     "candidates": [{"tp": 1, "capacity": 16384, "seconds": 5.4, "memory": {"parameters": …}}]}
"""

from collections.abc import Mapping
from typing import Any

from longshore.config.toml import toml_value, write_toml
from longshore.run.advise import Advice, Predicted
from longshore.run.advise_reasons import reasons

GIB = 1 << 30
DAY = 86_400
SHOWN = 8
"""Candidates, the recommended one first."""


def answer(advice: Advice, *, total_tokens: int) -> dict[str, Any]:
    """total_tokens: of the whole run."""
    task = advice.task
    why = reasons(advice)
    choices = (advice.best, *advice.others)[:SHOWN]
    return {
        "model": task.model.preset or task.model.from_hf,
        "layers": len(task.decoder.layers),
        "gpus": task.gpus,
        "gpu": task.machine_name,
        "machine": task.machine.device,
        "measured": task.machine.products.origin == "measured",
        "memory_gib": task.memory / GIB,
        "room_gib": task.room / GIB,
        "dtype": task.dtype,
        "sequences": len(task.lengths),
        "longest": task.longest,
        "batch": task.batch,
        "step_tokens": task.step_tokens,
        "total_tokens": total_tokens,
        "compared": len(advice.estimates),
        "recipe": recipe(advice, why),
        "reasons": [[key, toml_value(value), text] for key, (value, text) in why.items()],
        "candidates": [candidate_json(advice, each, total_tokens) for each in choices],
    }


def candidate_json(advice: Advice, choice: Predicted, total_tokens: int) -> dict[str, Any]:
    axes, speed = choice.candidate.axes, choice.tokens_per_second
    return {
        "tp": axes.tp,
        "pp": axes.pp,
        "vpp": axes.vpp,
        "ep": axes.ep,
        "lanes": axes.lanes,
        "shard": axes.shard,
        "sync": axes.sync,
        "recompute": axes.recompute,
        "capacity": choice.candidate.capacity,
        "max_cp": choice.candidate.max_cp,
        "graphs": choice.max_sequences,
        "memory": {name: size / GIB for name, size in choice.memory.parts().items()},
        "memory_gib": choice.memory.total / GIB,
        "tensors_gib": choice.memory.peak.total / GIB,
        "at_capacity_gib": choice.at_capacity / GIB,
        "moment": choice.memory.peak.moment,
        "seconds": choice.seconds,
        "tokens_per_s": speed,
        "mfu": advice.mfu(choice),
        "days": total_tokens / speed / DAY,
        "rounds": max(len(step.plan.rounds) for step in choice.steps),
    }


def recipe(advice: Advice, why: Mapping[str, tuple[object, str]]) -> str:
    """A fragment that `longshore train` accepts, with the reasons beside the keys."""
    task = advice.task
    model: dict[str, object] = {}
    if task.model.preset:
        model = {"preset": task.model.preset}
        if task.model.layers:
            model["layers"] = task.model.layers
    else:
        model = {"from_hf": task.model.from_hf}
    sections: dict[str, dict[str, object]] = {"model": model, "data": {"batch": task.batch}}
    for key, (value, _) in why.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    sections.setdefault("train", {})["dtype"] = task.dtype
    return write_toml(sections, {key: text for key, (_, text) in why.items()})
