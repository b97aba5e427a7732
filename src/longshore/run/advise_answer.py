"""Advice as plain data: the recipe, a reason for each key, memory and times of all candidates.

In: Advice. Out: a dictionary that becomes JSON, the text of report/advise_text.py and the page of
report/advise_page.py. No torch. A part of one:

    {"recipe": "[plan]\\ncapacity = 16384\\n…", "reasons": [["plan.capacity", "16384", "the …"]],
     "candidates": [{"tp": 1, "capacity": 16384, "seconds": 5.4, "memory": {"parameters": …}}]}
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from longshore.config.schema import ModelConfig
from longshore.config.toml import toml_value, write_toml
from longshore.run.advise import Advice, Predicted
from longshore.run.advise_candidates import AdviceTask
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
        "basis": task.machine.basis,
        "notes": notes(task),
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


def notes(task: AdviceTask) -> list[str]:
    """What is known of the prediction's limits, in sentences."""
    texts = []
    if task.decoder.lora is not None:
        texts.append(
            "LoRA: the base is frozen and has no gradients of weights; times of its products are "
            "measured, what freezing saves of them is arithmetic."
        )
    if task.model.code == "transformers":
        texts.append(
            "model.code=transformers: memory and times are those of Longshore's own code for a "
            "model of these sizes. transformers' modules keep more for backward and are slower, "
            "compiled Qwen3-0.6B by 5 %, without compilation by 46 %; so plan.capacity is left to "
            "the run. Measure a few steps before you trust the days."
        )
    return texts


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
        "of_product": advice.of_product(choice),
        "days": total_tokens / speed / DAY,
        "rounds": max(len(step.plan.rounds) for step in choice.steps),
    }


def recipe(advice: Advice, why: Mapping[str, tuple[object, str]]) -> str:
    """A fragment that `longshore train` accepts, with the reasons beside the keys."""
    task = advice.task
    usual = ModelConfig()
    model = {
        each.name: value
        for each in fields(ModelConfig)
        if (value := getattr(task.model, each.name)) != getattr(usual, each.name)
    }
    sections: dict[str, dict[str, object]] = {"model": model, "data": {"batch": task.batch}}
    for key, (value, _) in why.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    sections.setdefault("train", {})["dtype"] = task.dtype
    return write_toml(sections, {key: text for key, (_, text) in why.items()})
