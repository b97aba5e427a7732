"""A small copy of a model of transformers, packed and alone: refuses what would be trained wrongly.

In: the class of a model and its config. Out: nothing, or a ValueError. Packed through our attention
must give, for every token and parameter, the loss and the gradient of each sequence alone through
transformers' own eager code, logits included. So whatever mixes tokens of different sequences,
counts positions in another way, or changes attention or logits in ways we do not know, is seen here
and refused before the first step. It takes about a second on a CPU.

A Qwen3 of 28 layers, width 1024 and 151,936 tokens becomes one of 2 layers, width 32 and 37 tokens;
of a Gemma 3 one layer of each kind stays, with windows of 3. Sequences have 7, 1 and 5 tokens.
"""

import copy
import re
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longshore.batch import SeqContext, whole_context
from longshore.hf.attention_function import PackedRows, quiet
from longshore.hf.generic_keys import describe_decoder
from longshore.hf.refused_keys import WAY_OUT
from longshore.hf.transformers_model import adapted, config_keys
from longshore.ops.backends import only

LENGTHS = (7, 1, 5)
VOCAB = 37
TOLERANCE = 1e-3
"""Of float32, relative to the largest value; what is wrong differs by 0.1 or more."""

SMALL: dict[str, int] = {
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "intermediate_size_mlp": 16,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size_per_layer_input": VOCAB,
    "vocab_size": VOCAB,
}
"""Keys and what they become in the small copy, where a config has them and they are more."""
REACH = re.compile(
    r"window(?!_layers)|chunk|index_topk|block_size|floor_scale|original_max_position"
)
"""Keys of how far something reaches; 3 in the small copy, so that its few tokens show it."""


def try_packed(model_class: type[Any], config: Any) -> None:  # noqa: ANN401
    """Refuses the model if a small copy of it, packed, differs from each sequence alone."""
    name = model_class.__name__
    with (
        torch.inference_mode(False),  # the caller may be in it, or in no_grad
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        only("plain"),
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
    """The losses of all tokens, their gradients in the parameters, and the calls of attention."""
    rows = PackedRows(ctx, model.exchanges)
    values = model.from_hidden(model.hidden(ids, rows), _labels(ids))
    values.sum().backward()
    return values.detach(), rows.calls


def _alone(hf: Any) -> tuple[Tensor, dict[str, Tensor | None]]:  # noqa: ANN401
    """Transformers' own code, one sequence at a time."""
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
    """With random weights, large enough for everything to matter."""
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
