"""The backends of an op, and which one runs: the only place that chooses.

In: the tensors of a call. Out: the first backend that supports them, and why it was chosen.
For float32 on the CPU:

    pick_attention(q, v).name     "blocks"
    pick_attention(q, v).reason   "varlen: the tensors are on cpu, not on CUDA"

A new kernel is a new entry in ATTENTION, in order of preference; the last supports everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from longshore.ops import attention_blocks, attention_varlen
from longshore.ops.boundaries import Bounds


class Forward(Protocol):
    """(out, lse) of attention, without defaults."""

    def __call__(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKV: Tensor,
        /,
        *,
        bounds: Bounds,
        key_bounds: Bounds,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]: ...


class Backward(Protocol):
    """(dq, dk, dv) of attention, without defaults."""

    def __call__(
        self,
        grad_THV: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKV: Tensor,
        out_THV: Tensor,
        lse_HT: Tensor,
        /,
        *,
        bounds: Bounds,
        key_bounds: Bounds,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """refusal: why it does not support such q and v, or None if it does."""

    name: str
    refusal: Callable[[Tensor, Tensor], str | None]
    forward: Forward
    backward: Backward


@dataclass(frozen=True, slots=True)
class PickedBackend:
    """The backend of one call. reason: why the preferred ones do not support it."""

    name: str
    reason: str
    forward: Forward
    backward: Backward


ATTENTION = (
    AttentionBackend(
        "varlen", attention_varlen.refusal, attention_varlen.forward, attention_varlen.backward
    ),
    AttentionBackend(
        "blocks", attention_blocks.refusal, attention_blocks.forward, attention_blocks.backward
    ),
)
"""In order of preference."""


def pick_attention(
    q_THD: Tensor, v_SKV: Tensor, *, among: tuple[AttentionBackend, ...] = ATTENTION
) -> PickedBackend:
    """The first backend that supports these tensors; forward and backward use the same."""
    refused: list[str] = []
    for backend in among:
        why_not = backend.refusal(q_THD, v_SKV)
        if why_not is None:
            reason = "; ".join(refused) or "the first choice"
            return PickedBackend(backend.name, reason, backend.forward, backend.backward)
        refused.append(f"{backend.name}: {why_not}")
    raise ValueError(f"no backend of attention supports these tensors: {'; '.join(refused)}")
