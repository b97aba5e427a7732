"""model.lora: the table of a recipe as a LoRAConfig, and what it does not work with.

In: {rank = 8, alpha = 16, targets = ["q_proj", "v_proj"]}, or the same by model.lora.rank=8 and so
on. Out: LoRAConfig(8, 16.0, ("q_proj", "v_proj")), None for rank 0; or a ValueError that names the
key. Without alpha it is 2·rank, without targets all linear layers have factors.
"""

from collections.abc import Mapping
from typing import Any

from longshore.arch.decoder import DecoderConfig
from longshore.arch.lora import ALL_LINEAR, LoRAConfig
from longshore.config.located import settings_in_keys
from longshore.config.schema import ModelConfig, RunConfig
from longshore.config.values import Kind, listed, number, texts, whole

MOST_RANK = 1 << 16
KINDS: dict[str, Kind] = {
    "rank": whole(0, MOST_RANK),
    "alpha": number(0, above=True),
    "targets": texts(),
}


def lora_config(table: Mapping[str, Any]) -> LoRAConfig | None:
    """The factors that model.lora asks for; None if it is off."""
    values = {}
    for name, value in table.items():
        if name not in KINDS:
            raise ValueError(f"there is no model.lora.{name}; model.lora has {listed([*KINDS])}")
        values[name] = KINDS[name].read(value)
        if values[name] is None:
            raise ValueError(f"model.lora.{name} is {value!r}; it must be {KINDS[name].wants}")
    if table and "rank" not in table:
        raise ValueError("model.lora has no rank; add model.lora.rank=8, or 0 for no factors")
    rank = values.get("rank", 0)
    if not rank:
        return None
    targets = values.get("targets", (ALL_LINEAR,))
    if not targets:
        raise ValueError(
            "model.lora.targets is empty; name modules, such as q_proj,v_proj, or leave it out "
            "for all linear layers"
        )
    return LoRAConfig(rank, values.get("alpha", 2.0 * rank), targets)


def check_router_bias(model: ModelConfig) -> None:
    """Refuses to move what LoRA freezes."""
    if model.bias_update not in ("auto", 0):
        raise ValueError(
            f"model.bias_update is {model.bias_update:g}, but with model.lora a router's bias is "
            "frozen like all of the base; leave model.bias_update out"
        )


def check_lora(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses unknown targets, and what factors do not work with; nothing without LoRA."""
    if decoder.lora is None:
        return
    if config.graph.layers:
        raise ValueError("graph.layers does not work with model.lora; leave one of them out")
    if decoder.lora.targets == (ALL_LINEAR,) or config.model.code == "transformers":
        return  # names of transformers' modules are checked once the model is made
    from longshore.model.lora import check_targets  # imports torch

    with settings_in_keys():
        check_targets(decoder)
