"""Mamba2's state-space scan by Triton kernels.

In: rows, as in ops/ssd.py, with their strides; only the last dim must be contiguous. Out: rows, the
final states, and in backward the gradient of every input. Sequences of 3 and 70 rows have chunks of
3, 64 and 6 rows, which begin at rows 0, 3 and 67; no chunk holds two sequences. The kernels:

    steps       of each chunk and head: dt, and the sums of the log decays up to each row
    walk        chunk after chunk with the state in registers; stores the state entering each
    outputs     of each chunk and group: what its rows and the entering state contribute

Backward walks forwards again for the entering states, then backwards for the gradients of the
leaving ones, and ends with the kernel of ops/kernels/ssd_backward.py. Only inputs are kept.

Sums of logs are in base 2 and have two parts, high + low, from a sum in float64: then also a small
difference of two large sums has all digits of float32. Inside the kernels states are (N, P).

T rows, S sequences, H heads, P width of a head, G groups of heads, N width of the state; M chunks
of Q rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longshore.ops.boundaries import Bounds, first_states
from longshore.ops.kernels.ssd_backward import row_gradients
from longshore.ops.kernels.ssd_forward import outputs, steps, walk
from longshore.ops.tables import ChunkTable, chunk_table


@dataclass(frozen=True, slots=True, eq=False)
class KernelSSD:
    """The scan of these rows; initial states come later, as in ops/ssd.py."""

    x: Tensor
    """(T, H, P)."""
    dt: Tensor
    """(T, H)."""
    A: Tensor
    """(H)."""
    B: Tensor
    """(T, G, N)."""
    C: Tensor
    """(T, G, N)."""
    D: Tensor | None
    """(H)."""
    layout: ChunkTable
    """How the rows are divided into chunks."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """Of each sequence, the transition (S, H) and the final state from 0 (S, H, P, N)."""
        spans, final = _Ends.apply(self.x, self.dt, self.A, self.B, self.layout)
        return (self.A.float() * spans).exp(), final

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, P) and final states (S, H, P, N)."""
        if initial is not None:
            shape = (len(self.layout.lengths), *self.x.shape[1:], self.B.shape[2])
            initial = first_states(initial, shape, like=self.x).contiguous()
        y, final = _Scan.apply(
            self.x, self.dt, self.A, self.B, self.C, self.D, initial, self.layout
        )
        return y, final


def prepare(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    bounds: Bounds | None,
) -> KernelSSD:
    layout = chunk_table(bounds, len(x), x.device)
    B, C = (_by_columns(part.to(x.dtype)) for part in (B, C))
    A, D = A.contiguous(), None if D is None else D.contiguous()
    return KernelSSD(_by_columns(x), dt, A, B, C, D, layout)


def _by_columns(rows: Tensor) -> Tensor:
    """With a contiguous last dim."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Scan(torch.autograd.Function):
    """Outputs and final states."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial: Tensor | None,
        layout: ChunkTable,
    ) -> tuple[Tensor, Tensor]:
        scales = steps(dt, A, layout)
        entering, final, _ = walk(x, B, scales, layout, initial=initial)
        y = outputs(x, B, C, D, scales, entering, layout)
        ctx.save_for_backward(x, dt, A, B, C, D, initial)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:  # noqa: ANN401
        x, dt, A, B, C, D, initial = ctx.saved_tensors
        grads = _gradients(x, dt, A, B, C, D, initial, ctx.layout, dy=dy, dfinal=dfinal)
        return *grads, None


class _Ends(torch.autograd.Function):
    """The sums of dt (S, H), and final states from 0."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        layout: ChunkTable,
    ) -> tuple[Tensor, Tensor]:
        _, final, spans = walk(x, B, steps(dt, A, layout), layout, initial=None, store=False)
        ctx.save_for_backward(x, dt, A, B)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        return spans, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dspans: Tensor | None, dfinal: Tensor | None) -> tuple[Any, ...]:  # noqa: ANN401
        x, dt, A, B = ctx.saved_tensors
        layout: ChunkTable = ctx.layout
        dx, ddt, dA, dB, *_ = _gradients(
            x, dt, A, B, None, None, None, layout, dy=None, dfinal=dfinal
        )
        if dspans is not None:
            each = dspans.repeat_interleave(layout.lengths, dim=0, output_size=len(dt))
            ddt = each.to(dt.dtype) if ddt is None else ddt + each
        return dx, ddt, dA, dB, None


def _gradients(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor | None,
    D: Tensor | None,
    initial: Tensor | None,
    layout: ChunkTable,
    *,
    dy: Tensor | None,
    dfinal: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Of x, dt, A, B, C, D and the initial states."""
    if dy is None and dfinal is None:
        return (None,) * 7
    if dy is not None:
        dy = _by_columns(dy)
    scales = steps(dt, A, layout)
    entering, _, _ = walk(x, B, scales, layout, initial=initial, end=False)
    # Without dy, the rows and C only give shapes and strides.
    leaving, dinitial, _ = walk(
        x if dy is None else dy,
        B if C is None else C,
        scales,
        layout,
        initial=None if dfinal is None else dfinal.contiguous(),
        backwards=True,
        end=initial is not None,
        add=dy is not None,
    )
    grads = row_gradients(
        x, dt, A, B, C, D, dy=dy, steps=scales, entering=entering, leaving=leaving, layout=layout
    )
    return *grads, dinitial if initial is not None else None
