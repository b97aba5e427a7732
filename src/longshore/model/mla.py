"""Multi-head latent attention as a mixer: project down and up, turn, core, project.

In: hidden states (T, C), the context, the rotary tables. Out: (T, C). Tokens meet only in `core`, a
plain function called core(q_THD, latent_TL, weight_HXR, ctx, scale=…, form=…). A row of latent_TL
is the normed latent and then the turned key, which is all that one token needs of another; weight
is kv_up's, for each head the rows of its keys and then of its values.

T tokens of the lane, S rows that they see; H heads; N dims of a key without position, E with one,
D = N + E; V dims of a value, X = N + V; R the latent's rank, L = R + E. With DeepSeek-V3's H 128, N
128, E 64, V 128, R 512 a lane needs 576 numbers of another token, not 128·(192 + 128) = 40,960.

For backward are kept q, the latents, the output: keys and values are made again from the latents.

Hugging Face's DeepSeek-V3 turns dims 2i and 2i + 1 together (rope_interleave), `rotate` dims i and
i + E/2. So on the way in the rows of each head's last E of q_proj or q_up, and the last E of
kv_down (weight and bias), are put in the order 0 2 4 … 1 3 5 …, and back on the way out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longshore.arch.attention import Form, MLAConfig
from longshore.arch.part import Norm
from longshore.batch import Boundaries, PackContext, SeqContext
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.norm import RMSNorm
from longshore.model.opaque import Context, opened
from longshore.model.rope import Tables
from longshore.model.whole import refuse_shared
from longshore.ops.attention import attention_backward, attention_forward
from longshore.ops.rope import rotate


class Core(Protocol):
    """Causal attention inside each sequence of a context, through the latents."""

    def __call__(
        self,
        q_THD: Tensor,
        latent_TL: Tensor,
        weight_HXR: Tensor,
        ctx: SeqContext,
        /,
        *,
        scale: float,
        form: Form,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """What the rows of a pack see. bounds: of their queries; key_bounds: of the rows seen.

    fetch: from the lane's latents to the rows seen, run again in backward. give_back: from those
    rows' gradients to the latents'. Neither is differentiated.
    """

    bounds: Boundaries
    key_bounds: Boundaries
    fetch: Callable[[Tensor], Tensor]
    give_back: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Sight:
    reach: Reach
    nope: int
    scale: float
    form: Form

    @property
    def options(self) -> dict[str, Any]:
        bounds = {"bounds": self.reach.bounds, "key_bounds": self.reach.key_bounds}
        return {**bounds, "scale": self.scale}


def meet(
    q_THD: Tensor,
    latent_TL: Tensor,
    weight_HXR: Tensor,
    ctx: SeqContext,
    *,
    scale: float,
    form: Form,
    reach: Callable[[PackContext], Reach],
) -> Tensor:
    """(T, H, V). reach: what the rows of a pack see."""
    nope = q_THD.shape[2] + weight_HXR.shape[2] - latent_TL.shape[1]
    key_HNR, value_HVR = weight_HXR[:, :nope], weight_HXR[:, nope:]
    if form == "absorbed":
        q_THR = torch.einsum("thn,hnr->thr", q_THD[..., :nope], key_HNR)
        q_THD = torch.cat([q_THR, q_THD[..., nope:]], dim=2)
    made = []
    for pack in ctx.packs:
        sight = _Sight(reach(pack), nope, scale, form)
        q, latent = q_THD[pack.rows], latent_TL[pack.rows]
        made.append(_Meeting.apply(q, latent, weight_HXR, sight))  # type: ignore[no-untyped-call]
    out: Tensor = made[0] if len(made) == 1 else torch.cat(made)
    return torch.einsum("thr,hvr->thv", out, value_HVR) if form == "absorbed" else out


def local_core(
    q_THD: Tensor,
    latent_TL: Tensor,
    weight_HXR: Tensor,
    ctx: SeqContext,
    /,
    *,
    scale: float,
    form: Form,
) -> Tensor:
    """Attention over packs that this lane holds whole."""
    return meet(q_THD, latent_TL, weight_HXR, ctx, scale=scale, form=form, reach=own)


def own(pack: PackContext) -> Reach:
    """The reach inside a pack that the lane holds whole."""
    refuse_shared(pack, "attention")
    return Reach(pack.padded, pack.padded, lambda rows: rows, lambda grad: grad)


class _Meeting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, latent: Tensor, weight: Tensor, sight: _Sight) -> Tensor:  # noqa: ANN401
        rows = sight.reach.fetch(latent)
        k, v = _keys_values(rows, weight, sight)
        out, lse = attention_forward(q, k, v, **sight.options)
        ctx.sight = sight
        ctx.save_for_backward(q, latent, weight, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, latent, weight, out, lse = ctx.saved_tensors
        sight: _Sight = ctx.sight
        rows = sight.reach.fetch(latent)
        k, v = _keys_values(rows, weight, sight)
        dq, dk, dv = attention_backward(grad, q, k, v, out, lse, **sight.options)
        drows, dweight = _gradients(dk, dv, rows, weight, sight)
        return dq, sight.reach.give_back(drows), dweight, None


def _keys_values(rows_SL: Tensor, weight_HXR: Tensor, sight: _Sight) -> tuple[Tensor, Tensor]:
    """Of each head (S, H, D) and (S, H, V); absorbed, one head of (S, 1, L) and (S, 1, R)."""
    heads, _, rank = weight_HXR.shape
    if sight.form == "absorbed":
        k_S1L = rows_SL.unsqueeze(1)
        return k_S1L, k_S1L[..., :rank]
    up_SHX = (rows_SL[:, :rank] @ weight_HXR.flatten(0, 1).T).unflatten(1, (heads, -1))
    turned_SHE = rows_SL[:, None, rank:].expand(-1, heads, -1)
    k_SHD = torch.cat([up_SHX[..., : sight.nope], turned_SHE], dim=2)
    return k_SHD, up_SHX[..., sight.nope :]


def _gradients(
    dk: Tensor, dv: Tensor, rows_SL: Tensor, weight_HXR: Tensor, sight: _Sight
) -> tuple[Tensor, Tensor | None]:
    """Of the rows and the weight, from those of what _keys_values made."""
    rank = weight_HXR.shape[2]
    if sight.form == "absorbed":
        drows_SL = dk.squeeze(1)
        drows_SL[:, :rank] += dv.squeeze(1)
        return drows_SL, None
    dup_SX = torch.cat([dk[..., : sight.nope], dv], dim=2).flatten(1)
    dturned_SE = dk[..., sight.nope :].sum(1)
    drows_SL = torch.cat([dup_SX @ weight_HXR.flatten(0, 1), dturned_SE], dim=1)
    return drows_SL, (dup_SX.T @ rows_SL[:, :rank]).view_as(weight_HXR)


class MLA(nn.Module):
    """core: how tokens meet; see the module."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_proj.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "kv_norm.weight": NORM,
    }

    def __init__(self, config: MLAConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.core: Core = local_core
        self.rope = config.ropes[0]
        queries = config.heads * config.head_dim
        self.q_proj = self.q_down = self.q_norm = self.q_up = None
        if config.q_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_down = nn.Linear(width, config.q_rank, bias=config.bias)
            self.q_norm = RMSNorm(config.q_rank, norm)
            self.q_up = nn.Linear(config.q_rank, queries, bias=False)
        self.kv_down = nn.Linear(width, config.latent_dim, bias=config.bias)
        self.kv_norm = RMSNorm(config.kv_rank, norm)
        up = config.heads * (config.nope_dim + config.value_dim)
        self.kv_up = nn.Linear(config.kv_rank, up, bias=False)
        self.o_proj = nn.Linear(config.heads * config.value_dim, width, bias=config.bias)

    def forward(self, x_TC: Tensor, ctx: Context, tables: Tables) -> Tensor:
        cos_TE, sin_TE = tables[self.rope]
        q_THD = self._queries(x_TC)
        q_THN, q_THE = q_THD.split([self.config.nope_dim, self.config.rope_dim], dim=2)
        q_THD = torch.cat([q_THN, rotate(q_THE, cos_TE, sin_TE)], dim=2)
        down_TR, key_TE = self.kv_down(x_TC).split(
            [self.config.kv_rank, self.config.rope_dim], dim=1
        )
        turned_T1E = rotate(key_TE.unsqueeze(1), cos_TE, sin_TE)
        latent_TL = torch.cat([self.kv_norm(down_TR), turned_T1E.squeeze(1)], dim=1)
        mixed: Tensor = self._meet(q_THD, latent_TL, ctx)
        made: Tensor = self.o_proj(mixed.flatten(-2))
        return made

    def _queries(self, x_TC: Tensor) -> Tensor:
        if self.q_proj is not None:
            q_TX = self.q_proj(x_TC)
        else:
            assert self.q_down is not None
            assert self.q_norm is not None
            assert self.q_up is not None
            q_TX = self.q_up(self.q_norm(self.q_down(x_TC)))
        q_THD: Tensor = q_TX.unflatten(-1, (-1, self.config.head_dim))
        return q_THD

    # A compiled block must not specialise on the packs, which change every round.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _meet(self, q_THD: Tensor, latent_TL: Tensor, ctx: Context) -> Tensor:
        # −1 heads: under tensor parallelism a rank has only some of them.
        per_head = self.config.nope_dim + self.config.value_dim
        weight_HXR = self.kv_up.weight.unflatten(0, (-1, per_head))
        scale, form = self.config.scale, self.config.form
        return self.core(q_THD, latent_TL, weight_HXR, opened(ctx), scale=scale, form=form)
