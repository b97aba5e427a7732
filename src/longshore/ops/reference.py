"""Slow twins of the ops, written to be read: one sequence at a time, differentiable by autograd.

In and out: as the function of the same name in ops/. Attention of 2 queries over 3 keys has the
mask [1 1 0], [1 1 1], with window 2 [1 1 0], [0 1 1]. Logits [0, 0] with label 1 give a loss of
−log ½ = 0.693. A rotation is a product of complex numbers: (1, 3) is 1 + 3i; by 90°, times i, it is
−3 + 1i. Of the scores 1, 3, 3, 2 the two best are those of the entries 1 and 2. Rows 2 and 6 with
equal gates are pooled to 4.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import silu

from longshore.ops.boundaries import Bounds, offsets_of
from longshore.ops.sparse_attention import RowRanges


def attention(q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, **options: Any) -> Tensor:
    return attention_forward(q_THD, k_SKD, v_SKV, **options)[0]


def attention_forward(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    *,
    bounds: Bounds | None = None,
    key_bounds: Bounds | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output (T, H, V) and the log-sum-exp (H, T)."""
    shared = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD, v_SHV = k_SKD.repeat_interleave(shared, 1), v_SKV.repeat_interleave(shared, 1)
    scale = q_THD.shape[2] ** -0.5 if scale is None else scale
    rows = offsets_of(bounds, len(q_THD))
    keys = offsets_of(bounds if key_bounds is None else key_bounds, len(k_SKD))
    outs, lses = [], []
    for i in range(len(rows) - 1):
        q = q_THD[rows[i] : rows[i + 1]]
        k, v = k_SHD[keys[i] : keys[i + 1]], v_SHV[keys[i] : keys[i + 1]]
        scores_Hnm = torch.einsum("nhd,mhd->hnm", q, k) * scale
        if softcap is not None:
            scores_Hnm = softcap * torch.tanh(scores_Hnm / softcap)
        visible_nm = _visible(len(q), len(k), window).to(q.device)
        scores_Hnm = scores_Hnm.masked_fill(~visible_nm, -torch.inf)
        if sinks is not None:
            # A key more, whose value is 0.
            column_Hn1 = sinks[:, None, None].expand(-1, len(q), 1)
            scores_Hnm = torch.cat([scores_Hnm, column_Hn1], 2)
            v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
        outs.append(torch.einsum("hnm,mhv->nhv", scores_Hnm.softmax(2), v))
        lses.append(scores_Hnm.logsumexp(2))
    return torch.cat(outs), torch.cat(lses, 1)


def _visible(queries: int, keys: int, window: int | None) -> Tensor:
    """Query j is the token keys − queries + j of its sequence."""
    back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return (back >= 0) & (back < (keys if window is None else window))


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    *,
    bounds: Bounds | None = None,
    before: Tensor | None = None,
    activation: bool = False,
) -> Tensor:
    taps = weight_CK.shape[1]
    offsets = offsets_of(bounds, len(x_TC))
    rows = []
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        halo = x_TC.new_zeros(taps - 1, x_TC.shape[1]) if before is None else before[sequence]
        visible = torch.cat([halo, x_TC[start:stop]])
        for row in range(stop - start):
            y_C = (visible[row : row + taps] * weight_CK.T).sum(0)
            y_C = y_C if bias_C is None else y_C + bias_C
            rows.append(silu(y_C) if activation else y_C)
    return torch.stack(rows) if rows else x_TC


def logits(hidden_TC: Tensor, weight_VC: Tensor, softcap: float | None) -> Tensor:
    dtype = torch.promote_types(hidden_TC.dtype, torch.float32)
    logits_TV = hidden_TC.to(dtype) @ weight_VC.to(dtype).T
    return logits_TV if softcap is None else softcap * (logits_TV / softcap).tanh()


def linear_cross_entropy(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    ignore: int = -100,
    softcap: float | None = None,
) -> Tensor:
    logits_TV = logits(hidden_TC, weight_VC, softcap)
    return functional.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=ignore)


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    scale: float | None = None,
    bounds: Bounds | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, heads, keys = k_THK.shape
    scale = keys**-0.5 if scale is None else scale
    offsets = offsets_of(bounds, rows)
    outs, finals = [], []
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        zero = v_THV.new_zeros(heads, keys, v_THV.shape[2])
        S_HKV = zero if initial is None else initial[sequence]
        for t in range(start, stop):
            S_HKV = g_TH[t].exp()[:, None, None] * S_HKV
            stored_HV = (k_THK[t, :, :, None] * S_HKV).sum(1)
            update_HV = beta_TH[t, :, None] * (v_THV[t] - stored_HV)
            S_HKV = S_HKV + k_THK[t, :, :, None] * update_HV[:, None, :]
            outs.append((scale * q_THK[t, :, :, None] * S_HKV).sum(1))
        finals.append(S_HKV)
    return torch.stack(outs) if outs else v_THV, torch.stack(finals)


def delta_transition(
    k_THK: Tensor, g_TH: Tensor, beta_TH: Tensor, *, bounds: Bounds | None = None
) -> Tensor:
    offsets = offsets_of(bounds, len(k_THK))
    eye_KK = torch.eye(k_THK.shape[2], dtype=k_THK.dtype, device=k_THK.device)
    transitions = []
    for start, stop in pairwise(offsets):
        product_HKK = eye_KK.expand(k_THK.shape[1], -1, -1)
        for t in range(start, stop):
            outer_HKK = k_THK[t, :, :, None] * k_THK[t, :, None, :]
            one_HKK = g_TH[t].exp()[:, None, None] * (
                eye_KK - beta_TH[t, :, None, None] * outer_HKK
            )
            product_HKK = one_HKK @ product_HKK
        transitions.append(product_HKK)
    return torch.stack(transitions)


def sort_by_expert(expert_ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ids: list[int] = expert_ids_TK.flatten().tolist()
    order = sorted(range(len(ids)), key=lambda row: (ids[row], row))
    counts = [ids.count(expert) for expert in range(experts)]
    offsets = [sum(counts[: expert + 1]) for expert in range(experts)]
    return (
        torch.tensor(order, dtype=torch.int64),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(offsets, dtype=torch.int32),
    )


def dispatch(x_TC: Tensor, order: Tensor) -> Tensor:
    top_k = len(order) // len(x_TC)
    return torch.stack([x_TC[row // top_k] for row in order.tolist()])


def combine(rows_MC: Tensor, order: Tensor, weights_TK: Tensor) -> Tensor:
    tokens, top_k = weights_TK.shape
    sums = [rows_MC.new_zeros(rows_MC.shape[1]) for _ in range(tokens)]
    for index, row in enumerate(order.tolist()):
        token, k = divmod(row, top_k)
        sums[token] = sums[token] + weights_TK[token, k] * rows_MC[index]
    return torch.stack(sums)


def grouped_mlp(
    x_MC: Tensor, offsets_E: Tensor, *, gate_up_E2FC: Tensor, down_ECF: Tensor
) -> Tensor:
    stops: list[int] = offsets_E.tolist()
    rows = []
    for row, x_C in enumerate(x_MC):
        owners = [expert for expert, stop in enumerate(stops) if row < stop]
        if not owners:
            rows.append(0.0 * x_C)
            continue
        gate_F, up_F = (gate_up_E2FC[owners[0]] @ x_C).chunk(2)
        rows.append(down_ECF[owners[0]] @ (silu(gate_F) * up_F))
    # Weights without rows are used too, so that they get a gradient of 0.
    return torch.stack(rows) + 0.0 * (gate_up_E2FC.sum() + down_ECF.sum())


def choose(
    q_THD: Tensor, weights_TH: Tensor, keys_ED: Tensor, *, ranges: RowRanges, top_k: int
) -> Tensor:
    width = min(top_k, ranges.most_entries)
    chosen = []
    firsts, counts = ranges.entry_first.tolist(), ranges.entry_count.tolist()
    for t, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        scores = _scores(q_THD[t], weights_TH[t], keys_ED[first : first + count]).tolist()
        ranked = sorted(range(count), key=lambda j: (-scores[j], j))
        best = sorted(first + j for j in ranked[:width])
        chosen.append(best + [-1] * (width - len(best)))
    return torch.tensor(chosen, dtype=torch.int32).view(len(q_THD), width)


def index_loss(
    q_THD: Tensor,
    weights_TH: Tensor,
    keys_ED: Tensor,
    chosen_TK: Tensor,
    mass_TK: Tensor,
    counted_T: Tensor,
) -> Tensor:
    # All inputs are used, so that each gets a gradient.
    loss = 0.0 * (q_THD.sum() + weights_TH.sum() + keys_ED.sum())
    for t in range(len(q_THD)):
        own = chosen_TK[t] >= 0
        total = mass_TK[t][own].sum()
        if not counted_T[t] or not total > 0:
            continue
        target_k = mass_TK[t][own] / total
        scores_k = _scores(q_THD[t], weights_TH[t], keys_ED[chosen_TK[t][own].long()])
        loss = loss + (torch.xlogy(target_k, target_k) - target_k * scores_k.log_softmax(0)).sum()
    return loss


def _scores(q_HD: Tensor, weights_H: Tensor, keys_kD: Tensor) -> Tensor:
    dtype = torch.promote_types(q_HD.dtype, torch.float32)
    products_Hk = (q_HD.to(dtype) @ keys_kD.to(dtype).T).relu()
    return (weights_H.to(dtype)[:, None] * products_Hk).sum(0)


def pooled(
    values_RC: Tensor, gates_RC: Tensor, bias_GC: Tensor, rows_EG: Tensor, *, overlap: bool = False
) -> Tensor:
    dtype = torch.promote_types(values_RC.dtype, torch.float32)
    width = values_RC.shape[1] // 2 if overlap else values_RC.shape[1]
    entries = [values_RC.new_zeros(0, width)]
    for rows in rows_EG.tolist():
        values, scores = [], []
        for slot, row in enumerate(rows):
            if row < 0:
                continue
            late, place = divmod(slot, len(bias_GC)) if overlap else (0, slot)
            channels = slice(late * width, late * width + width)
            values.append(values_RC[row, channels].to(dtype))
            scores.append(gates_RC[row, channels].to(dtype) + bias_GC[place, channels].to(dtype))
        if values:
            entry_C = (torch.stack(scores).softmax(0) * torch.stack(values)).sum(0)
        else:
            entry_C = torch.zeros(width, dtype=dtype)
        entries.append(entry_C[None].to(values_RC.dtype))
    # All inputs are used, so that each gets a gradient.
    unused = 0.0 * (values_RC.sum() + gates_RC.sum() + bias_GC.sum())
    return torch.cat(entries) + unused


def rotate(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    dtype = torch.promote_types(x_THD.dtype, torch.float32)
    half = cos_TR.shape[1]
    x = x_THD.to(dtype)
    pairs_THR = torch.complex(x[..., :half], x[..., half : 2 * half])
    angles_T1R = torch.complex(cos_TR.to(dtype), sin_TR.to(dtype))[:, None]
    rotated_THR = pairs_THR * angles_T1R
    return torch.cat([rotated_THR.real, rotated_THR.imag, x[..., 2 * half :]], 2).to(x_THD.dtype)


def sparse_attention(
    q_THD: Tensor,
    near_RD: Tensor,
    entries_ED: Tensor,
    sinks_H: Tensor,
    *,
    ranges: RowRanges,
    scale: float,
    chosen_TK: Tensor | None = None,
    needs_mass: bool = False,
) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    rows_MD = torch.cat([near_RD, entries_ED]).to(dtype)
    visible_TM = torch.cat(
        [_near(ranges, len(near_RD)), _entries(ranges, len(entries_ED), chosen_TK)], 1
    )
    scores_THM = torch.einsum("thd,md->thm", q_THD.to(dtype), rows_MD) * scale
    scores_THM = scores_THM.masked_fill(~visible_TM[:, None], -torch.inf)
    sinks_TH1 = sinks_H.to(dtype).expand(len(q_THD), -1)[:, :, None]
    probs_THM = torch.cat([scores_THM, sinks_TH1], 2).softmax(2)[:, :, :-1]
    out_THD = torch.einsum("thm,md->thd", probs_THM, rows_MD).to(q_THD.dtype)
    if chosen_TK is None or not needs_mass:
        return out_THD, None
    mass_TE = probs_THM.detach().sum(1)[:, len(near_RD) :]
    mass_TK = torch.zeros(chosen_TK.shape, dtype=dtype)
    for t, entries in enumerate(chosen_TK.tolist()):
        for k, entry in enumerate(entries):
            if entry >= 0:
                mass_TK[t, k] = mass_TE[t, entry]
    return out_THD, mass_TK


def _near(ranges: RowRanges, rows: int) -> Tensor:
    row_R = torch.arange(rows)
    return (row_R >= ranges.near_first[:, None]) & (row_R < ranges.near_stop[:, None])


def _entries(ranges: RowRanges, entries: int, chosen_TK: Tensor | None) -> Tensor:
    first, count = ranges.entry_first[:, None], ranges.entry_count[:, None]
    entry_E = torch.arange(entries)
    if chosen_TK is None:
        return (entry_E >= first) & (entry_E < first + count)
    return (chosen_TK[:, :, None] == entry_E).any(1)


def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    *,
    D_H: Tensor | None = None,
    bounds: Bounds | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows, heads, width = x_THP.shape
    group_of_head = [head * B_TGN.shape[1] // heads for head in range(heads)]
    B_THN, C_THN = B_TGN[:, group_of_head], C_TGN[:, group_of_head]
    offsets = offsets_of(bounds, rows)
    outs, finals = [], []
    for sequence, (start, stop) in enumerate(pairwise(offsets)):
        zero = x_THP.new_zeros(heads, width, B_TGN.shape[2])
        h_HPN = zero if initial is None else initial[sequence]
        for t in range(start, stop):
            fading = (dt_TH[t] * A_H).exp()[:, None, None]
            h_HPN = fading * h_HPN + (dt_TH[t, :, None] * x_THP[t])[:, :, None] * B_THN[t, :, None]
            y_HP = (h_HPN * C_THN[t, :, None]).sum(-1)
            outs.append(y_HP if D_H is None else y_HP + D_H[:, None] * x_THP[t])
        finals.append(h_HPN)
    return torch.stack(outs) if outs else x_THP, torch.stack(finals)


def ssd_transition(dt_TH: Tensor, A_H: Tensor, *, bounds: Bounds | None = None) -> Tensor:
    offsets = offsets_of(bounds, len(dt_TH))
    return torch.stack(
        [(dt_TH[start:stop] * A_H).exp().prod(0) for start, stop in pairwise(offsets)]
    )


def token_statistics(
    hidden_TC: Tensor,
    weight_VC: Tensor,
    labels_T: Tensor,
    *,
    temperature: float = 1.0,
    ignore: int = -100,
    softcap: float | None = None,
) -> Tensor:
    logits_TV = logits(hidden_TC, weight_VC, softcap) / temperature
    logp_TV = logits_TV.log_softmax(-1)
    keep_T = labels_T != ignore
    own_T = logp_TV.gather(1, labels_T.where(keep_T, 0)[:, None])[:, 0]
    entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    columns = [own_T, entropy_T, logits_TV.logsumexp(-1), logits_TV.mean(-1)]
    return torch.stack(columns, dim=1).where(keep_T[:, None], 0)


def map_logits(
    function: Callable[..., Tensor],
    hidden_TC: Tensor,
    weight_VC: Tensor,
    rows: Sequence[Tensor] = (),
    *,
    softcap: float | None = None,
) -> Tensor:
    return function(logits(hidden_TC, weight_VC, softcap), *rows)
