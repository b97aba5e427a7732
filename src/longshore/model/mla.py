"""Multi-head latent attention as a mixer: project down and up, rotate, attend, project.

In: hidden states (T, C), the context, the rotary tables. Out: (T, C). What lanes that share a pack
exchange is latent_TL: a row is the normed latent and then the rotated key, which is all that one
token needs of another. Keys and values of all heads are made from it and kv_up's weight, which has
for each head the rows of its keys and then of its values.

T tokens of the lane, S rows that they see; H heads; N dims of a key without position, E with one,
D = N + E; V dims of a value, X = N + V; R the latent's rank, L = R + E. With DeepSeek-V3's H 128, N
128, E 64, V 128, R 512 a lane needs 576 numbers of another token, not 128·(192 + 128) = 40,960.

For backward q, the lane's latents and the output are kept; keys and values are made again. Of a
long pack they are made for some heads at a time, so that they take EXPANDED_BYTES (ops/sizes.py).

Hugging Face's DeepSeek-V3 rotates dims 2i and 2i + 1 together (rope_interleave), `rotate` dims i
and i + E/2. So on the way in the rows of each head's last E of q_proj or q_up, and the last E of
kv_down (weight and bias), are put in the order 0 2 4 … 1 3 5 …, and back on the way out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from longshore.arch.attention import Form, MLAConfig
from longshore.arch.part import Norm
from longshore.batch import SeqContext
from longshore.model.attention_core import ALL_HEADS, attend_visible
from longshore.model.fill import NORM, RESIDUAL, Fill
from longshore.model.interface import LOCAL, Exchanges, Rows, ThreeStepMixer, joined
from longshore.model.norm import RMSNorm
from longshore.model.rope import Tables
from longshore.ops.low_rank import whole_weight
from longshore.ops.projections import projected
from longshore.ops.rope import rotate
from longshore.ops.sizes import expanded_values, heads_at_once


@dataclass(frozen=True, slots=True)
class FromLatents:
    """Keys and values from latents; nope: dims of a key without position."""

    nope: int
    form: Form

    def head_groups(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> list[slice]:
        (rows_SL,), weight_HXR = rows, weight
        assert weight_HXR is not None
        heads, product, rank = weight_HXR.shape
        if self.form == "absorbed":
            return ALL_HEADS
        key = self.nope + rows_SL.shape[1] - rank
        each = expanded_values(key, product, product - self.nope) * rows_SL.element_size()
        together = heads_at_once(len(rows_SL), heads, each)
        return [slice(first, first + together) for first in range(0, heads, together)]

    def make(self, rows: tuple[Tensor, ...], weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of each head (S, H, D) and (S, H, V); absorbed, one head of (S, 1, L) and (S, 1, R)."""
        (rows_SL,), weight_HXR = rows, weight
        assert weight_HXR is not None
        heads, _, rank = weight_HXR.shape
        if self.form == "absorbed":
            k_S1L = rows_SL.unsqueeze(1)
            return k_S1L, k_S1L[..., :rank]
        up_SHX = (rows_SL[:, :rank] @ weight_HXR.flatten(0, 1).T).unflatten(1, (heads, -1))
        rotated_SHE = rows_SL[:, None, rank:].expand(-1, heads, -1)
        k_SHD = torch.cat([up_SHX[..., : self.nope], rotated_SHE], dim=2)
        return k_SHD, up_SHX[..., self.nope :]

    def gradients(
        self, dk: Tensor, dv: Tensor, rows: tuple[Tensor, ...], weight: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        (rows_SL,), weight_HXR = rows, weight
        assert weight_HXR is not None
        rank = weight_HXR.shape[2]
        if self.form == "absorbed":
            drows_SL = dk.squeeze(1)
            drows_SL[:, :rank] += dv.squeeze(1)
            return (drows_SL,), None
        dup_SX = torch.cat([dk[..., : self.nope], dv], dim=2).flatten(1)
        drotated_SE = dk[..., self.nope :].sum(1)
        drows_SL = torch.cat([dup_SX @ weight_HXR.flatten(0, 1), drotated_SE], dim=1)
        return (drows_SL,), (dup_SX.T @ rows_SL[:, :rank]).view_as(weight_HXR)


class MLA(ThreeStepMixer):
    """exchanges: how the lane reaches rows of shared packs; set by parallel/apply.py."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_proj.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "kv_norm.weight": NORM,
    }

    def __init__(self, config: MLAConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        self.exchanges: Exchanges = LOCAL
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

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        cos_TE, sin_TE = tables[self.rope]
        q_in = self.q_proj if self.q_down is None else self.q_down
        assert q_in is not None
        q_TX, kv_TL = projected(x_TC, (q_in, self.kv_down))
        q_THD = rotate(self._queries(q_TX), cos_TE, sin_TE, start=self.config.nope_dim)
        down_TR, key_TE = kv_TL.split([self.config.kv_rank, self.config.rope_dim], dim=1)
        rotated_T1E = rotate(key_TE.unsqueeze(1), cos_TE, sin_TE)
        latent_TL = torch.cat([self.kv_norm(down_TR), rotated_T1E.squeeze(1)], dim=1)
        return (q_THD, latent_TL), ()

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        output_TC: Tensor = self.o_proj(mixed.flatten(-2))
        return output_TC

    def _queries(self, q_TX: Tensor) -> Tensor:
        """Of each head, from the first projection: the only one, or that to the queries' rank."""
        if self.q_norm is not None and self.q_up is not None:
            q_TX = self.q_up(self.q_norm(q_TX))
        q_THD: Tensor = q_TX.unflatten(-1, (-1, self.config.head_dim))
        return q_THD

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        q_THD, latent_TL = rows
        config = self.config
        # −1 heads: under tensor parallelism a rank has only some of them.
        per_head = (-1, config.nope_dim + config.value_dim)
        weight_HXR = whole_weight(self.kv_up).unflatten(0, per_head)
        from_latents = FromLatents(config.nope_dim, config.form)

        exchanges = tuple(self.exchanges.each(ctx))

        def attend(q: Tensor) -> Tensor:
            outputs = attend_visible(
                exchanges,
                q,
                (latent_TL,),
                scale=config.scale,
                weight=weight_HXR,
                keys_values=from_latents,
            )
            return joined(list(outputs))

        if config.form == "decompressed":
            return attend(q_THD)
        key_HNR, value_HVR = weight_HXR.split([config.nope_dim, config.value_dim], dim=1)
        q_THR = torch.einsum("thn,hnr->thr", q_THD[..., : config.nope_dim], key_HNR)
        q_THL = torch.cat([q_THR, q_THD[..., config.nope_dim :]], dim=2)
        attended_THR = attend(q_THL)
        return torch.einsum("thr,hvr->thv", attended_THR, value_HVR)
