"""The decoder: embedding, blocks, norm, head, further depths; a pipeline stage has only some of it.

In: token ids (T), or hidden states (T, C) where a stage has no embedding, and the context. Out:
hidden states; where the stage has the head, logits (T, V), or with labels the loss of each token
(T), 0 where the label is −100. The loss never holds all logits.

    model = Decoder(preset("tiny-llama"))
    init_decoder(model, seed=0)
    nll_T = model(token_ids, ctx, targets.labels).values

    layout = parse_layout("Et|tL", pp=2, layers=2)
    first, last = (Decoder(config, stage) for stage in layout.stages)
    last(first(token_ids, ctx).values, ctx, labels)     the same losses
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from longshore.arch.decoder import DecoderConfig, LayerConfig, ropes_of
from longshore.arch.part import Norm
from longshore.batch import Depth, SeqContext, whole_context
from longshore.model.hyper_connection import Collapse, HyperConnection
from longshore.model.interface import (
    Context,
    LanguageModel,
    Layer,
    MixerLoss,
    Output,
    PartCall,
    Reader,
    Routed,
    UntracedContext,
    call_part,
    joined,
)
from longshore.model.lora import add_factors
from longshore.model.norm_rope import RMSNorm, Tables, rope_tables
from longshore.model.registry import make_feed_forward, make_mixer
from longshore.ops.cross_entropy import (
    OutputLayer,
    VocabularyPart,
    linear_cross_entropy,
    softcapped,
)
from longshore.ops.pointwise import expand
from longshore.plan.layout import Stage, one_stage


class Block(Layer):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)); either may be left out with its norm.

    In: hidden states (T, C), the context, the rotary tables. Out: hidden states (T, C) and what
    experts did. Hidden states may be wider than the weights (DecoderConfig's float32_residual):
    norms and parts then compute in the weights' dtype, and the sums are as wide. mixer_hyper,
    mlp_hyper: None where rows have one residual. call_mixer, call_mlp: set by parallel/tensor.py
    where ranks share a lane's rows.
    """

    def __init__(self, config: LayerConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.call_mixer: PartCall = call_part
        self.call_mlp: PartCall = call_part
        self.mixer_hyper = self.mixer_norm = self.mixer = None
        self.mlp_hyper = self.mlp_norm = self.mlp = None
        if config.mixer is not None:
            self.mixer_hyper = _hyper_connection(config, width, norm)
            self.mixer_norm = RMSNorm(width, norm)
            self.mixer = make_mixer(config.mixer, width, norm=norm)
        if config.mlp is not None:
            self.mlp_hyper = _hyper_connection(config, width, norm)
            self.mlp_norm = RMSNorm(width, norm)
            self.mlp = make_feed_forward(config.mlp, width, norm=norm)

    def compile(self, **options: Any) -> None:  # noqa: ANN401
        run = torch.compile(self.run, **options)
        self.compiled = lambda x_TS, ctx, tables: run(x_TS, UntracedContext(ctx), tables)

    def run(self, x_TS: Tensor, ctx: Context, tables: Tables) -> Output:
        if self.config.residuals is not None:
            return self._run_hyper(x_TS, ctx, tables)
        mixed_TC = loss = None
        if self.mixer is not None and self.mixer_norm is not None:
            x_TS, normed_TC = self.mixer_norm.add(x_TS, None)
            mixed_TC, loss = self.call_mixer(self.mixer, normed_TC, ctx, tables)
        output = self.feed(x_TS, mixed_TC, ctx)
        return output if loss is None else output._replace(mixer_losses=(MixerLoss(loss),))

    def _run_hyper(self, x_TS: Tensor, ctx: Context, tables: Tables) -> Output:
        loss = routed = None
        if self.mixer is not None and self.mixer_norm is not None:
            assert self.mixer_hyper is not None
            row_TC, mixing = self.mixer_hyper(x_TS)
            _, normed_TC = self.mixer_norm.add(row_TC, None)
            mixed_TC, loss = self.call_mixer(self.mixer, normed_TC, ctx, tables)
            x_TS = expand(mixed_TC, x_TS, *mixing)
        if self.mlp is not None and self.mlp_norm is not None:
            assert self.mlp_hyper is not None
            row_TC, mixing = self.mlp_hyper(x_TS)
            _, normed_TC = self.mlp_norm.add(row_TC, None)
            out_TC, routed = self.call_mlp(self.mlp, normed_TC, ctx)
            x_TS = expand(out_TC, x_TS, *mixing)
        return Output(
            x_TS,
            () if routed is None else (routed,),
            mixer_losses=() if loss is None else (MixerLoss(loss),),
        )

    def feed(self, x_TC: Tensor, mixed_TC: Tensor | None, ctx: Context) -> Output:
        """The rest of the block, from its input and what the mixer made of it."""
        if self.mlp is not None and self.mlp_norm is not None:
            x_TC, normed_TC = self.mlp_norm.add(x_TC, mixed_TC)
            out_TC, routed = self.call_mlp(self.mlp, normed_TC, ctx)
            return Output(x_TC + out_TC, () if routed is None else (routed,))
        return Output(x_TC if mixed_TC is None else x_TC + mixed_TC, ())


def _hyper_connection(config: LayerConfig, width: int, norm: Norm) -> HyperConnection | None:
    if config.residuals is None:
        return None
    return HyperConnection(config.residuals, width, norm_eps=norm.eps)


class MTPDepth(Layer):
    """One depth of multi-token prediction, as in DeepSeek-V3; the first is depth 1.

    In: the normed hidden states (T, C) that the head saw at the depth before, and the embeddings
    (T, C) of the tokens d positions later. Out: normed hidden states, for the head and for the next
    depth. Embedding and head are the decoder's own. The tokens were picked while sequences were
    whole (data/pack.py), so nothing is shifted here, and lanes exchange no tokens.

    At depth 1 position 3 joins its state with the embedding of token 4 and predicts token 5.
    Position 5 of a sequence of 6 has no token to join: it runs along, and no loss, no expert and no
    count of theirs sees it. collapse: None where rows have one residual.
    """

    def __init__(self, layer: LayerConfig, width: int, *, depth: int, norm: Norm) -> None:
        super().__init__()
        self.depth = depth
        self.embed_norm = RMSNorm(width, norm)
        self.hidden_norm = RMSNorm(width, norm)
        self.proj = nn.Linear(2 * width, width, bias=False)
        self.block = Block(layer, width, norm=norm)
        self.residuals = layer.residuals
        self.collapse = None
        if layer.residuals is not None:
            self.collapse = Collapse(layer.residuals, width, norm_eps=norm.eps)
        self.norm = RMSNorm(width, norm)

    def compile(self, **options: Any) -> None:  # noqa: ANN401
        """Compiles its block; the rest is small."""
        self.block.compile(**options)

    def run(
        self, hidden_TC: Tensor, embedded_TC: Tensor, ctx: SeqContext, tables: Tables
    ) -> Output:
        both = torch.cat([self.embed_norm(embedded_TC), self.hidden_norm(hidden_TC)], dim=-1)
        rows = self.proj(both)
        if self.residuals is not None:
            rows = rows.repeat(1, self.residuals.count)
        out = self.block(rows, ctx.ahead(self.depth), tables)
        hidden_TC = out.values if self.collapse is None else self.collapse(out.values)
        return Output(
            self.norm(hidden_TC),
            tuple(layer._replace(depth=self.depth) for layer in out.routed),
            mixer_losses=tuple(loss._replace(depth=self.depth) for loss in out.mixer_losses),
        )


class Head(nn.Module):
    """Hidden states to logits, or to losses; `weight` is None where the embedding's serves."""

    vocabulary: VocabularyPart | None = None
    """The part that this rank has, where ranks split the vocabulary; set by parallel/tensor.py."""
    all_rows: Callable[[Tensor], Tensor] | None = None
    """Gathers the rows of all these ranks; set with it."""

    def __init__(self, config: DecoderConfig, *, tied: bool, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        own = None if tied else nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.register_parameter("weight", own)
        if own is not None:
            nn.init.normal_(own, std=config.init_std)

    def forward(
        self,
        hidden_TC: Tensor,
        labels_T: Tensor | None,
        tied_VC: Tensor | None = None,
        *,
        summed: bool = False,
        reader: Reader | None = None,
    ) -> Tensor:
        weight_VC = self.weight if tied_VC is None else tied_VC
        assert isinstance(weight_VC, Tensor), "a tied head is given the embedding's weight"
        part, softcap = self.vocabulary, self.softcap
        if labels_T is None:
            if part is not None:
                raise ValueError(
                    "under tensor parallelism the head computes losses, not logits; give labels, "
                    "or use tp=1"
                )
            return softcapped(functional.linear(hidden_TC, weight_VC), softcap)
        if self.all_rows is not None:
            hidden_TC = self.all_rows(hidden_TC)
        if reader is not None:
            return reader(hidden_TC, OutputLayer(weight_VC, part, softcap), labels_T)
        return linear_cross_entropy(
            hidden_TC, weight_VC, labels_T, summed=summed, vocabulary=part, softcap=softcap
        )


class Decoder(LanguageModel):
    """A stage of the decoder, or all of it.

    embed: nn.Embedding or None. layers: blocks by their number in the whole decoder, as text.
    tied: the head has no weight of its own. A stage with depths has a copy of the embedding, and
    where the config is tied, a stage with the head and no embedding has one too, head.weight.
    Copies begin with the same values; parallel/pipeline.py sums their gradients.

    A stage hands on the rows of the decoder, and after them those of each depth so far: with one
    depth before the head, rows (2·T, C) come to it. With hyper-connections (config.residuals)
    rows between blocks, and between stages before the last norm, are (T, S), S = residuals · C.

    Parameters are not initialised as model/init.py does it; call init_decoder.
    """

    def __init__(self, config: DecoderConfig, stage: Stage | None = None) -> None:
        super().__init__()
        if stage is None:
            (stage,) = one_stage(layers=len(config.layers), depths=len(config.mtp)).stages
        _check_stage(config, stage)
        self.config = config
        self.stage = stage
        self.reads_ids = any(number in stage.layers for number in config.hashed_layers)
        self.row_ranks = 1  # how many ranks share a lane's rows; set by parallel/tensor.py
        depths = (config.mtp[index] for index in stage.depths)
        self.ropes = ropes_of([*(config.layers[index] for index in stage.layers), *depths])
        self.tied = config.tied and stage.has_embedding and stage.head
        self.embed = None
        if stage.has_embedding:
            # Where the pad token is an input, its row gets no gradient; a tied head's still comes.
            pad = config.pad_token_id
            self.embed = nn.Embedding(config.vocab_size, config.width, padding_idx=pad)
        make_block = partial(Block, width=config.width, norm=config.norm)
        self.layers = nn.ModuleDict({str(i): make_block(config.layers[i]) for i in stage.layers})
        self.collapse = None
        if stage.norm and config.residuals is not None:
            self.collapse = Collapse(config.residuals, config.width, norm_eps=config.norm_eps)
        self.norm = RMSNorm(config.width, config.norm) if stage.norm else None
        self.head = Head(config, tied=self.tied) if stage.head else None
        make_depth = partial(MTPDepth, width=config.width, norm=config.norm)
        self.mtp = nn.ModuleDict(
            {str(i): make_depth(config.mtp[i], depth=i + 1) for i in stage.depths}
        )
        if config.lora is not None:
            add_factors(self, config.lora)

    def blocks(self) -> list[Layer]:
        return [*self.layers.values(), *self.mtp.values()]  # type: ignore[list-item]

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
        """x: ids int64 (T), or what the stage before returned. ctx: None for one plain sequence.

        mtp: all depths of the whole decoder, each with what the stage reads: ids where the depth is
        run, targets where the head is. The whole decoder without labels runs no depth. summed: the
        caller only adds up the losses of the labels, and scales the sum; that is faster.
        token_ids: where x are not ids, those of stages that choose experts by them. reader: what
        becomes of the head's input and weight instead of the losses of the labels.
        """
        if ctx is None:
            ctx = whole_context((x.shape[0],), device=x.device)
        self._check(x, ctx, labels, mtp)
        if self.reads_ids:
            ctx = replace(ctx, token_ids=self._ids(x, ctx, token_ids))
        streams, tables, routed, mixer_losses = self._trunk(x, ctx)
        for index in self.stage.depths if mtp else ():
            assert self.embed is not None
            ids = mtp[index].token_ids
            assert ids is not None, "a stage with a depth reads the ids ahead"
            out = self.mtp[str(index)](streams[-1], self.embed(ids), ctx, tables)
            streams.append(out.values)
            routed += out.routed
            mixer_losses += out.mixer_losses
        if self.head is None:
            return Output(joined(streams), routed, mixer_losses=mixer_losses)
        tied_VC = self.embed.weight if self.tied and self.embed is not None else None
        values = self.head(streams[0], labels, tied_VC, summed=summed, reader=reader)
        losses = []
        for ahead_TC, depth in zip(streams[1:], mtp, strict=True):
            assert depth.targets is not None, "the stage with the head reads the targets"
            losses.append(self.head(ahead_TC, depth.targets.labels, tied_VC, summed=summed))
        return Output(values, routed, tuple(losses), mixer_losses)

    def _ids(self, x: Tensor, ctx: SeqContext, token_ids: Tensor | None) -> Tensor:
        ids = x if self.stage.embed else token_ids
        if ids is None or tuple(ids.shape) != (ctx.tokens,):
            state = "none were given" if ids is None else f"got shape {tuple(ids.shape)}"
            raise ValueError(
                f"this stage chooses experts by token ids and wants {ctx.tokens} of them, but "
                f"{state}; pass token_ids"
            )
        return ids

    def _trunk(
        self, x: Tensor, ctx: SeqContext
    ) -> tuple[list[Tensor], Tables, tuple[Routed, ...], tuple[MixerLoss, ...]]:
        """Embedding, layers and last norm, as far as they are here; all streams of rows."""
        streams = [self.embed(x)] if self.stage.embed and self.embed is not None else []
        streams = streams or list(x.split(ctx.tokens // self.row_ranks))
        hidden_TC = streams[0]
        tables = rope_tables(self.ropes, ctx, hidden_TC.dtype)
        if self.config.float32_residual and self.stage.embed:
            hidden_TC = hidden_TC.to(torch.promote_types(hidden_TC.dtype, torch.float32))
        if self.config.residuals is not None and self.stage.embed:
            hidden_TC = hidden_TC.repeat(1, self.config.residuals.count)
        routed, mixer_losses = tuple[Routed, ...](), tuple[MixerLoss, ...]()
        for block in self.layers.values():
            out = block(hidden_TC, ctx, tables)
            hidden_TC = out.values
            routed += out.routed
            mixer_losses += out.mixer_losses
        if self.collapse is not None:
            hidden_TC = self.collapse(hidden_TC)
        if self.norm is not None:
            hidden_TC = self.norm(hidden_TC)
            if self.config.float32_residual:
                hidden_TC = hidden_TC.to(self.norm.weight.dtype)
        return [hidden_TC, *streams[1:]], tables, routed, mixer_losses

    def _check(
        self, x: Tensor, ctx: SeqContext, labels: Tensor | None, mtp: Sequence[Depth]
    ) -> None:
        stage, depths = self.stage, len(self.config.mtp)
        rows = ctx.tokens // self.row_ranks * (1 + stage.depths.start)
        # Stages hand on residual rows, and after the last norm single ones.
        is_normed = not stage.norm and stage.layers.start == len(self.config.layers)
        width = self.config.width if is_normed else self.config.row_width
        wanted = (ctx.tokens,) if stage.embed else (rows, width)
        what = "token ids" if stage.embed else "hidden states"
        if tuple(x.shape) != wanted:
            raise ValueError(
                f"this stage takes {what} of shape {wanted} for a context of {ctx.tokens} tokens, "
                f"but got shape {tuple(x.shape)}"
            )
        if labels is not None and not stage.head:
            raise ValueError("labels were given to a stage without a head, which computes no loss")
        is_needed = labels is not None if stage.head else bool(stage.depths)
        if len(mtp) != (depths if is_needed else 0):
            raise ValueError(
                f"the model has {depths} depths of multi-token prediction, but got labels for "
                f"{len(mtp)}; pack with depths={depths}, and pass mtp only with labels"
            )


def _check_stage(config: DecoderConfig, stage: Stage) -> None:
    layers, depths = len(config.layers), len(config.mtp)
    if stage.layers.stop > layers or stage.depths.stop > depths:
        raise ValueError(
            f"stage {stage} has layers up to {stage.layers.stop} and depths up to "
            f"{stage.depths.stop}, but this decoder has {layers} layers and {depths} depths"
        )
