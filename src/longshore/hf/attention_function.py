"""The attention that models of transformers call instead of their own.

In: queries (1, H, T, D), keys and values (1, K, T, D) of one layer, and the keyword arguments that
transformers' attention interface passes: scaling, sliding_window, softcap, s_aux (sinks). Out:
(1, T, H, D). Boundaries, positions and CP groups come as `longshore=PackedRows(ctx, exchanges)`,
which a model hands from its forward to every layer; no mask is built.

    register()                                   once in a process; the name is NAME
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)

What would change the result and is not known here is refused, never left out: with
position_bias=tensor, a layer raises

    Qwen3Attention passes position_bias to its attention, which Longshore does not know; …
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longshore.batch import SeqContext
from longshore.hf.refused_keys import WAY_OUT
from longshore.model.attention_core import attend
from longshore.model.interface import Exchanges

NAME = "longshore"
KEYWORD = "longshore"
"""The keyword argument that carries PackedRows through a model to its layers."""

IGNORED = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "target_dtype",
    }
)
"""Keyword arguments that do not change what attention computes."""


class PackedRows:
    """What attention reads besides its tensors. A plain object: torch.compile passes it on."""

    def __init__(self, ctx: SeqContext, exchanges: Exchanges) -> None:
        self.ctx = ctx
        self.exchanges = exchanges
        self.calls = 0


@contextmanager
def quiet() -> Iterator[None]:
    """Without the remarks that transformers logs when models are made."""
    import logging as levels

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(levels.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def register() -> None:
    """Adds our attention to those of transformers; no mask function, so that none is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Attention of one layer over all packs, in the shape transformers wants."""
    rows = others.pop(KEYWORD, None)
    if not isinstance(rows, PackedRows):
        raise ValueError(
            f"{type(module).__name__} got no context: its model does not hand keyword arguments on "
            f"to its attention, or was not called through Longshore; {WAY_OUT}"
        )
    _refuse(module, query, attention_mask, dropout, is_causal, others)
    rows.calls += 1
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    out_THD = attend(
        rows.ctx,
        rows.exchanges,
        q_THD,
        k_TKD,
        v_TKD,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=sliding_window or None,
        softcap=softcap or None,
        sinks=None if s_aux is None else s_aux.flatten().to(query.dtype),
    )
    return out_THD[None], None


def _refuse(
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool | None,
    others: dict[str, Any],
) -> None:
    name, problem = type(module).__name__, ""
    unknown = [
        key
        for key, value in others.items()
        if key not in IGNORED and value is not None and value is not False
    ]
    if unknown:
        problem = f"passes {unknown[0]} to its attention, which Longshore does not know"
    elif mask is not None:
        problem = "made an attention mask, which packs do not have"
    elif dropout:
        problem = f"drops out {dropout} of its attention; set attention_dropout to 0"
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        problem = "is not causal"
    elif len(query) != 1:
        problem = f"got a batch of {len(query)} rows; packs are one row of many sequences"
    if problem:
        raise ValueError(f"{name} {problem}; {WAY_OUT}")
