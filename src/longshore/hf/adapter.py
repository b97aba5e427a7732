"""Causal language models of transformers, trained packed, with dynamic and mixed CP, under FSDP.

In: a model of transformers, or a folder of one. Out: a LanguageModel that takes token ids (T) and a
micro-batch's context instead of padded rows, and returns the loss of each token:

    model = adapt(AutoModelForCausalLM.from_pretrained("Qwen3-0.6B"))
    parallelize(model, topology, groups, choices=Choices(mode="zero3", dtype=torch.bfloat16))
    nll_T = model(batch.token_ids, batch.ctx, batch.targets.labels).values

The code of the model is transformers' own, but for attention (hf/attention_function.py) and for the
loss, which never holds all logits. Parameters have the names that transformers gives them. A model
whose layers mix tokens in other ways is refused: by its keys (hf/refused_keys.py), by its modules
here, or because a small copy of it, packed, differs from each sequence alone (hf/trial.py).

With a tied head the parameter is model.embed_tokens.weight alone; lm_head.weight is not listed.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from longshore.hf.generic_keys import describe_decoder
from longshore.hf.refused_keys import WAY_OUT, check_keys
from longshore.hf.transformers_model import TransformersModel, adapted, config_keys
from longshore.hf.trial import try_packed

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.RNNBase)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.AlphaDropout)
PEFT_TYPES = (
    *("LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "VBLORA"),
    *("LN_TUNING", "RANDLORA", "MISS", "SHIRA", "C3A", "WAVEFT", "DELORA", "TRAINABLE_TOKENS"),
)
"""Methods of PEFT that change layers inside the model, each token on its own, and nothing else."""


def adapt(hf: Any, *, check: bool = True) -> TransformersModel:  # noqa: ANN401
    """The model, in place: its attention is ours from now on. check: refuse what is not exact.

    hf: a PreTrainedModel with a head for causal language modelling, such as LlamaForCausalLM, or
    one with an adapter of PEFT. Only parameters that require gradients are trained.
    """
    if hasattr(hf, "peft_config") and hasattr(hf, "get_base_model"):
        _check_peft(hf.peft_config, with_dropout=check)
        hf = hf.get_base_model()
    if check:
        check_foreign(hf)
    return adapted(hf, describe_decoder(config_keys(hf.config)))


def _check_peft(configs: Mapping[str, Any], *, with_dropout: bool) -> None:
    """Refuses adapters of PEFT that are not in the base model, and so would be left out."""
    for name, config in configs.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind not in PEFT_TYPES:
            raise ValueError(
                f"PEFT's adapter {name} is of type {kind}, which does more than change the model's "
                f"own layers, and would be left out; use one of {', '.join(PEFT_TYPES)}"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"PEFT's adapter {name} has alora_invocation_tokens, which are looked for outside "
                "the model; make it without them"
            )
        for key, value in vars(config).items() if with_dropout else ():
            if "dropout" in key and isinstance(value, int | float) and value > 0:
                raise ValueError(
                    f"PEFT's adapter {name} has {key} {value}; packed and split sequences would "
                    f"drop other numbers than alone, so make it with {key}=0"
                )


def check_foreign(hf: Any) -> None:  # noqa: ANN401
    """Refuses a model that would be trained wrongly, by name."""
    try:
        check_keys(config_keys(hf.config))
        _check_modules(hf)
    except ValueError as error:
        raise ValueError(f"{type(hf).__name__}: {error}") from None
    try_packed(type(hf), hf.config)


def _check_modules(hf: Any) -> None:  # noqa: ANN401
    """Refuses parts that mix tokens, drop numbers, or share weights in ways FSDP cannot carry."""
    head = hf.get_output_embeddings()
    if isinstance(getattr(head, "base_layer", getattr(head, "original_module", None)), nn.Module):
        raise ValueError(
            "PEFT has changed its head, which Longshore's loss reads as it is; leave lm_head, or "
            "with tied weights embed_tokens, out of target_modules, modules_to_save and "
            "trainable_token_indices"
        )
    if not isinstance(head, nn.Linear):
        raise ValueError(f"it has no head for causal language modelling; {WAY_OUT}")
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"its head has a bias, which Longshore's loss does not add; {WAY_OUT}")
    names: dict[nn.Module, str] = {module: name for name, module in hf.named_modules()}
    for module, name in names.items():
        if isinstance(module, CONVOLUTIONS):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which mixes tokens besides attention; "
                f"{WAY_OUT}"
            )
        if isinstance(module, DROPOUTS) and module.p > 0:
            raise ValueError(f"{name} drops out {module.p}; set it to 0 in config.json")
    owners: dict[int, str] = {}
    tied = {f"{names[part]}.weight" for part in (hf.get_input_embeddings(), head)}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        first = owners.setdefault(id(parameter), name)
        if first != name and not {first, name} <= tied:
            raise ValueError(
                f"{first} and {name} are one parameter; FSDP can share only that of embedding and "
                f"head; {WAY_OUT}"
            )
