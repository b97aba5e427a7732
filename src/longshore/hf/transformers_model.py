"""A causal language model of transformers as the trainer calls it, and the attention it calls.

In: a model of transformers that was checked (hf/adapter.py), or a folder of one. Out: a
LanguageModel of the same modules, under the same names; or the model of a folder without weights. A
Qwen3 with a tied head has the parameters model.embed_tokens.weight, model.layers.0.…, but no
lm_head.weight; its blocks, which FSDP wraps and recomputes, are model.layers.0, 1, …

Boundaries, positions and CP groups reach attention as `longshore=PackedRows(ctx, exchanges)`, which
a model hands from its forward to every layer; no mask is built. What would change the result and is
not known here is refused, never left out: with position_bias=tensor, a layer raises

    Qwen3Attention passes position_bias to its attention, which Longshore does not know; …
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from longshore.arch.decoder import DecoderConfig
from longshore.batch import Depth, SeqContext, whole_context
from longshore.hf.generic_keys import WAY_OUT
from longshore.model.attention import attend
from longshore.model.decoder import Head
from longshore.model.interface import LOCAL, Exchanges, LanguageModel, Layer, Output, Reader
from longshore.plan.layout import one_stage

NAME = "longshore"
"""Our attention among those of transformers."""
KEYWORD = "longshore"
"""The keyword argument that carries PackedRows through a model to its layers."""
IGNORED = (
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch"),
    "target_dtype",
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
    """Silences what transformers logs when models are made."""
    import logging as levels

    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(levels.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


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
    """Attention of one layer over all packs.

    query (1, H, T, D), key and value (1, K, T, D); returns (1, T, H, D), as transformers wants it.
    s_aux: sinks.
    """
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
    problem = ""
    given = [key for key, value in others.items() if value is not None and value is not False]
    unknown = [key for key in given if key not in IGNORED]
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
        raise ValueError(f"{type(module).__name__} {problem}; {WAY_OUT}")


class TransformersModel(LanguageModel):
    """A causal language model of transformers as the trainer calls it; made by `adapt`.

    Its parts are those of the model, under the same names; `trunk` is the name of the part that
    makes hidden states. exchanges: how a lane reaches rows of shared packs; set by parallelize.
    """

    def __init__(self, hf: Any, config: DecoderConfig) -> None:  # noqa: ANN401
        super().__init__()
        (self.stage,) = one_stage(layers=len(config.layers), depths=0).stages
        self.config = config
        self.exchanges: Exchanges = LOCAL
        if hf.base_model is hf:
            raise ValueError(f"{type(hf).__name__} has no part below its head; {WAY_OUT}")
        self.trunk: str = hf.base_model_prefix
        self.hf_config = hf.config
        self.tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
        for name, part in hf.named_children():
            if not (self.tied and part is hf.get_output_embeddings()):
                self.add_module(name, part)
        names = {part: name for name, part in hf.named_modules()}
        weighted = hf.get_input_embeddings() if self.tied else hf.get_output_embeddings()
        self.weighted = names[weighted]
        blocks = _blocks(hf)
        for block in blocks:
            block.__class__ = _layer_class(type(block))  # type: ignore[arg-type]
        self.layer_names = tuple(names[block] for block in blocks)
        self.most_positions = _most_positions(hf)
        self.wide_names = _wide_names(hf)
        self.logits_factor = _logits_factor(hf.config)
        softcap = getattr(hf.config, "final_logit_softcapping", None)
        self.loss_head = Head(config, tied=True, softcap=softcap)

    def blocks(self) -> list[Layer]:
        return [self.get_submodule(name) for name in self.layer_names]  # type: ignore[misc]

    def forward(
        self,
        x: Tensor,
        ctx: SeqContext | None = None,
        labels: Tensor | None = None,
        mtp: Sequence[Depth] = (),
        *,
        summed: bool = False,
        token_ids: Tensor | None = None,
        reader: Reader | None = None,
    ) -> Output:
        """As Decoder's: x are ids (T); without labels values are logits (T, V), else losses (T).

        ctx: None for one plain sequence. reader: computes other values instead, see Decoder.
        """
        if ctx is None:
            ctx = whole_context((x.shape[0],), device=x.device)
        hidden_TC = self.hidden(x, PackedRows(ctx, self.exchanges))
        return Output(self.from_hidden(hidden_TC, labels, summed=summed, reader=reader))

    def from_hidden(
        self,
        hidden_TC: Tensor,
        labels: Tensor | None,
        *,
        summed: bool = False,
        reader: Reader | None = None,
    ) -> Tensor:
        """The model's head, and the loss."""
        weight_VC = self.get_submodule(self.weighted).weight
        if self.logits_factor != 1:
            hidden_TC = hidden_TC * self.logits_factor
        values: Tensor = self.loss_head(hidden_TC, labels, weight_VC, summed=summed, reader=reader)
        return values

    def hidden(self, ids_T: Tensor, rows: PackedRows) -> Tensor:
        """(T, C), after the last norm."""
        if tuple(ids_T.shape) != (rows.ctx.tokens,):
            raise ValueError(
                f"this model takes token ids of shape ({rows.ctx.tokens},) for a context of "
                f"{rows.ctx.tokens} tokens, but got shape {tuple(ids_T.shape)}"
            )
        self.check_longest(max(length for pack in rows.ctx.packs for length in pack.lengths))
        # Padding may have positions past the last sequence's; a table of positions ends there.
        positions_T = rows.ctx.positions.where(rows.ctx.is_real, 0)
        output = self.get_submodule(self.trunk)(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            **{KEYWORD: rows},
        )
        hidden_TC: Tensor = output.last_hidden_state[0]
        return hidden_TC

    def check_longest(self, longest: int) -> None:
        """Refuses sequences past the end of a learned table of positions."""
        if self.most_positions is not None and longest > self.most_positions:
            raise ValueError(
                f"a sequence has {longest} tokens, but the model has a table of "
                f"{self.most_positions} positions; shorten it (data.max_length, or --max-length of "
                "longshore prepare)"
            )


def adapted(hf: Any, config: DecoderConfig) -> TransformersModel:  # noqa: ANN401
    """adapt without any check."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)  # without a mask function: none is built
    hf.set_attn_implementation(NAME)
    if hf.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(hf).__name__} does not use transformers' attention interface; {WAY_OUT}"
        )
    if next(hf.parameters()).dtype == torch.float64:
        hf.set_experts_implementation("eager")  # grouped products refuse float64
    return TransformersModel(hf, config).train()


def config_keys(config: Any) -> dict[str, Any]:  # noqa: ANN401
    """The keys of a config of transformers, those that it calls otherwise (n_embd) included."""
    others = {key: getattr(config, key, None) for key in config.attribute_map}
    return {**others, **config.to_dict()}


def empty_model(folder: str, dtype: torch.dtype = torch.float32) -> Any:  # noqa: ANN401
    """The model of a folder, its parameters on `meta` and its buffers filled.

    dtype: of both. That of the folder would round what its files hold wider: a routing bias is
    float32 beside weights in bfloat16.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        with parameters_on_meta(), quiet():
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, KeyError, AttributeError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"transformers cannot make this model: {first}") from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules made inside are on `meta` once they are registered.

    Buffers stay real: what they hold is computed when a module is made, and no folder has it.
    """
    register_parameter = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register_parameter(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]


def _blocks(hf: Any) -> list[nn.Module]:  # noqa: ANN401
    """The layers: the one list of as many modules as the config has layers."""
    layers = hf.config.num_hidden_layers
    lists = [part for part in hf.base_model.modules() if isinstance(part, nn.ModuleList)]
    for blocks in lists:
        if len(blocks) == layers:
            return list(blocks)
    raise ValueError(
        f"{type(hf).__name__} has no list of its {layers} layers, which FSDP would wrap; {WAY_OUT}"
    )


@cache  # one class for all layers of a kind, so that they share what torch.compile compiles
def _layer_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A Layer that computes what `kind` does; parameters keep their names, as with fully_shard."""
    if issubclass(kind, Layer):
        return kind
    return type(kind.__name__, (Layer, kind), {"run": kind.forward})


def _wide_names(hf: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Parameters that transformers keeps in float32 where the others are bfloat16."""
    patterns = getattr(hf, "_keep_in_fp32_modules_strict", None) or ()
    parts = [re.compile(pattern.replace("*", ".*")) for pattern in sorted(patterns)]
    names = (name for name, _ in hf.named_parameters())
    return tuple(name for name in names if any(part.search(name) for part in parts))


def _logits_factor(config: Any) -> float:  # noqa: ANN401
    """What logits are multiplied by: 1/8 for Granite with logits_scaling 8.

    Where a model means something else by these keys, hf/adapter.py refuses it.
    """
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor / (getattr(config, "logits_scaling", None) or 1.0))


def _most_positions(hf: Any) -> int | None:  # noqa: ANN401
    """Rows of a learned table of positions; None without one."""
    most = getattr(hf.config, "max_position_embeddings", None)
    tables = [part for part in hf.base_model.modules() if isinstance(part, nn.Embedding)]
    learned = [table for table in tables if table is not hf.get_input_embeddings()]
    return most if learned and isinstance(most, int) else None
