"""The twin of ops/experts.py: row by row, expert by expert."""

import torch
from torch import Tensor
from torch.nn.functional import silu


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
