"""Causal language models of transformers, trained packed, with dynamic and mixed CP, under FSDP.

In: a model of transformers. Out: a LanguageModel that takes token ids (T) and a micro-batch's
context instead of padded rows, and returns the loss of each token:

    model = adapt(AutoModelForCausalLM.from_pretrained("Qwen3-0.6B"))
    parallelize(model, topology, groups, choices=Choices(mode="zero3", dtype=torch.bfloat16))
    nll_T = model(batch.token_ids, batch.ctx, batch.targets.labels).values

The code of the model is transformers' own, except for attention (hf/transformers_model.py) and the
loss, which never holds all logits. A model that would be trained wrongly is refused: by its keys
(hf/generic_keys.py), by its modules, or because a small copy of it, packed, differs from each
sequence alone.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longshore.batch import SeqContext, whole_context
from longshore.hf.generic_keys import WAY_OUT, check_keys, describe_decoder
from longshore.hf.transformers_model import (
    PackedRows,
    TransformersModel,
    adapted,
    config_keys,
    quiet,
)
from longshore.ops.backends import using_kernels

LENGTHS = (7, 1, 5)
VOCAB = 37
TOLERANCE = 1e-3
"""For float32, relative to the largest value; what is wrong differs by 0.1 or more."""

SMALL: dict[str, int] = {
    key: size
    for size, keys in {
        VOCAB: "vocab_size vocab_size_per_layer_input",
        32: "hidden_size",
        16: "intermediate_size moe_intermediate_size shared_expert_intermediate_size "
        "intermediate_size_mlp qk_head_dim",
        12: "q_lora_rank kv_lora_rank",
        8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim",
        4: "num_experts num_local_experts n_routed_experts moe_num_experts",
        2: "num_experts_per_tok",
        1: "n_group topk_group first_k_dense_replace",
    }.items()
    for key in keys.split()
}
"""Keys and what they become in the small copy, where a config has them and they are more."""
REACH = re.compile(
    r"window(?!_layers)|chunk|index_topk|block_size|floor_scale|original_max_position"
)
"""Keys of how far something reaches; 3 in the small copy, so that its few tokens show it."""


def try_packed(model_class: type[Any], config: Any) -> None:  # noqa: ANN401
    """Refuses the model if a small copy of it, packed, differs from each sequence alone.

    Packed through our attention must give, for every token and parameter, the loss and the gradient
    of each sequence alone through transformers' own eager code. So whatever mixes tokens of
    different sequences, counts positions in another way, or changes attention or logits in ways we
    do not know, is refused before the first step. It takes about a second on a CPU: a Qwen3 of 28
    layers, width 1024 and 151,936 tokens becomes one of 2 layers, width 32 and 37 tokens.
    """
    name = model_class.__name__
    with (
        torch.inference_mode(False),  # the caller may be in it, or in no_grad
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        using_kernels("plain"),
        quiet(),
    ):
        hf = _small_model(model_class, config)
        try:
            values, gradients = _alone(hf)
            hf.zero_grad()
            model = adapted(hf, describe_decoder(config_keys(hf.config)))
            packed, calls = _packed(model, whole_context(LENGTHS), _ids())
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{name} cannot be run packed ({type(error).__name__}: {error}); {WAY_OUT}"
            ) from error
        layers = hf.config.num_hidden_layers
        if calls != layers:
            raise ValueError(
                f"{name}: {calls} of its {layers} layers call transformers' attention interface; "
                f"{WAY_OUT}"
            )
        _compare(name, "the loss of a token", packed, values)
        for key, parameter in hf.named_parameters():
            _compare(name, f"the gradient of {key}", parameter.grad, gradients[key])
        hf.zero_grad()
        _packed(model, whole_context((2,)), _ids()[:2])
        trained = [(key, each) for key, each in hf.named_parameters() if each.requires_grad]
        missing = [key for key, parameter in trained if parameter.grad is None]
    if missing:
        raise ValueError(
            f"{name}: {missing[0]} gets no gradient from some tokens, on which FSDP would hang; "
            f"{WAY_OUT}"
        )


def _packed(model: Any, ctx: SeqContext, ids: Tensor) -> tuple[Tensor, int]:  # noqa: ANN401
    """Losses of all tokens and calls of attention; leaves gradients in the parameters."""
    rows = PackedRows(ctx, model.exchanges)
    values = model.from_hidden(model.hidden(ids, rows), _labels(ids))
    values.sum().backward()
    return values.detach(), rows.calls


def _alone(hf: Any) -> tuple[Tensor, dict[str, Tensor | None]]:  # noqa: ANN401
    """Losses and gradients of transformers' own code, one sequence at a time."""
    values = []
    for ids in _ids().split(LENGTHS):
        logits = hf(input_ids=ids[None], use_cache=False).logits[0]
        values.append(functional.cross_entropy(logits, _labels(ids), reduction="none"))
        values[-1].sum().backward()
    gradients = {
        key: None if parameter.grad is None else parameter.grad.clone()
        for key, parameter in hf.named_parameters()
    }
    return torch.cat(values).detach(), gradients


def _compare(name: str, what: str, packed: Tensor | None, alone: Tensor | None) -> None:
    if packed is None or alone is None:
        same = packed is alone
    else:
        limit = TOLERANCE * alone.abs().max() + 1e-6
        same = bool(((packed - alone).abs() <= limit).all())
    if not same:
        raise ValueError(
            f"{name}: in a small copy of it, {what} differs between packed sequences and each "
            f"sequence alone; {WAY_OUT}"
        )


def _small_model(model_class: type[Any], config: Any) -> Any:  # noqa: ANN401
    """A small copy with random weights, large enough for everything to matter."""
    try:
        small = small_config(config)
        small._attn_implementation = "eager"
        hf = model_class(small).float().train()
        if hasattr(hf, "set_experts_implementation"):
            hf.set_experts_implementation("eager")
    except Exception as error:
        raise ValueError(
            f"{model_class.__name__}: no small copy of it can be made to check it "
            f"({type(error).__name__}: {error}); {WAY_OUT}"
        ) from error
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in hf.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + noise * 0.3)
    return hf


def small_config(config: Any) -> Any:  # noqa: ANN401
    """The config with few, narrow layers, at least one of each kind."""
    small = copy.deepcopy(config)
    kept = _kept_layers(config)
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(small, key, [value[i] for i in kept])
    for key, size in SMALL.items():
        if isinstance(getattr(small, key, None), int) and getattr(small, key) > size:
            setattr(small, key, size)
    for key, value in list(vars(small).items()):
        if REACH.search(key) and _is_many(value):
            setattr(small, key, 3)
        if key.startswith("rope") and isinstance(value, dict):
            setattr(small, key, _near(value))
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    small.num_attention_heads = min(4, heads)
    own_dim = getattr(config, "head_dim", None)
    if own_dim is None or own_dim * heads == config.hidden_size:  # some models rely on it
        head_dim = min(SMALL["head_dim"], config.hidden_size // heads)
        small.hidden_size = small.num_attention_heads * head_dim
    if kv_heads is not None:
        fewer = 1 if kv_heads == 1 else 2
        small.num_key_value_heads = 4 if kv_heads == heads else fewer
        small.num_key_value_heads = min(small.num_key_value_heads, small.num_attention_heads)
    small.num_hidden_layers = len(kept)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, key, None)
    return small


def _near(rope: dict[str, Any]) -> dict[str, Any]:
    """Keys about positions, which may be nested by layer type, with a short reach."""
    changed = {key: _near(value) for key, value in rope.items() if isinstance(value, dict)}
    short = {key: 3 for key, value in rope.items() if REACH.search(key) and _is_many(value)}
    return {**rope, **changed, **short}


def _is_many(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 3


def _kept_layers(config: Any) -> list[int]:  # noqa: ANN401
    """The first layer of each kind, and at least two."""
    layers = config.num_hidden_layers
    lists = [
        value for value in vars(config).values() if isinstance(value, list) and len(value) == layers
    ]
    kinds = [tuple(map(str, kind)) for kind in zip(*lists, strict=True)] or [()] * layers
    kept = sorted({kinds.index(kind) for kind in kinds})
    return kept if len(kept) > 1 else list(range(min(2, layers)))


def _ids() -> Tensor:
    return torch.arange(sum(LENGTHS)) * 11 % VOCAB


def _labels(ids: Tensor) -> Tensor:
    return (ids * 7 + 3) % VOCAB


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
        check_transformers(hf)
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


def check_transformers(hf: Any) -> None:  # noqa: ANN401
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
