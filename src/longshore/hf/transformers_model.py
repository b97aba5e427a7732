"""A causal language model of transformers as the trainer calls it.

In: a model of transformers that was checked (hf/adapter.py), or a folder of one. Out: a
LanguageModel of the same modules, under the same names; or the model of a folder without weights.

A Qwen3 with a tied head has the parameters model.embed_tokens.weight, model.layers.0.…, but no
lm_head.weight; its blocks, which FSDP wraps and recomputes, are model.layers.0, 1, …
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
from longshore.hf.attention_function import KEYWORD, NAME, PackedRows, quiet, register
from longshore.hf.refused_keys import WAY_OUT
from longshore.model.decoder import Head
from longshore.model.interface import LOCAL, Exchanges, LanguageModel, Layer, Output, Reader
from longshore.plan.layout import one_stage


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
    register()
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

    Where a model means something else by these keys, hf/trial.py refuses it.
    """
    factor = getattr(config, "logit_scale", None) or 1.0
    return float(factor / (getattr(config, "logits_scaling", None) or 1.0))


def _most_positions(hf: Any) -> int | None:  # noqa: ANN401
    """Rows of a learned table of positions; None without one."""
    most = getattr(hf.config, "max_position_embeddings", None)
    tables = [part for part in hf.base_model.modules() if isinstance(part, nn.Embedding)]
    learned = [table for table in tables if table is not hf.get_input_embeddings()]
    return most if learned and isinstance(most, int) else None
