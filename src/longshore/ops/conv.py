"""Causal depthwise convolution over joined sequences; no sequence sees another.

In: rows and a kernel for each channel. Out: rows; a token sees itself and the K − 1 before it in
its sequence. Before a sequence there are zeros, or the given rows, which another lane holds.

T rows, C channels, K taps, S sequences. Sequences of 3 and 2 rows of one channel, taps [1, 10]:

    x  1  2  3 | 4  5     y = 1·(row before) + 10·(row)
    y 10 21 32 | 40 54    and with before [[7]], [[8]]: 17 21 32 | 48 54
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from longshore.ops.backends import pick
from longshore.ops.boundaries import Bounds, conv_spans, offsets_of, table, to_device


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    *,
    bounds: Bounds | None = None,
    before: Tensor | None = None,
    activation: bool = False,
) -> Tensor:
    """(T, C); `before` (S, K − 1, C): the rows just before each sequence. activation: SiLU.

    Computed in float32 at least, returned in the dtype of x.
    """
    taps = weight_CK.shape[1]
    kernels = pick("conv", x_TC, weight_CK)
    if kernels is not None:
        _check_before(before, (len(offsets_of(bounds, len(x_TC))) - 1, taps - 1, x_TC.shape[1]))
        tables = _span_tables(bounds, x_TC)
        return kernels.conv(x_TC, weight_CK, bias_C, before, tables, activation)
    padded, places = _with_halos(x_TC, taps - 1, bounds=bounds, before=before)
    # Entry i of `sums` is the output of row i + taps − 1; those of halos are dropped.
    count = len(padded) - taps + 1
    sums = sum(padded[k : k + count] * weight_CK[:, k] for k in range(taps))
    assert isinstance(sums, Tensor)
    y_TC = sums.index_select(0, places - (taps - 1))
    if bias_C is not None:
        y_TC = y_TC + bias_C
    if activation:
        y_TC = silu(y_TC)
    return y_TC.to(x_TC.dtype)


def _with_halos(
    x_TC: Tensor, halo: int, *, bounds: Bounds | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows, each sequence after its halo, (T + S·halo, C), and the index of each row there."""
    offsets = np.asarray(offsets_of(bounds, len(x_TC)))
    sequences = len(offsets) - 1
    _check_before(before, (sequences, halo, x_TC.shape[1]))
    dtype = torch.promote_types(x_TC.dtype, torch.float32)

    def row_places() -> Tensor:
        shifts = np.repeat(np.arange(1, sequences + 1) * halo, np.diff(offsets))
        return to_device(np.arange(len(x_TC)) + shifts, x_TC.device)

    def halo_places() -> Tensor:
        starts = offsets[:-1] + np.arange(sequences) * halo
        return to_device((starts[:, None] + np.arange(halo)).reshape(-1), x_TC.device)

    places = table(bounds, f"conv: rows after halos of {halo}", row_places)
    padded = x_TC.new_zeros(len(x_TC) + sequences * halo, x_TC.shape[1], dtype=dtype)
    padded = padded.index_copy(0, places, x_TC.to(dtype))
    if before is not None:
        halos = table(bounds, f"conv: halos of {halo}", halo_places)
        padded = padded.index_copy(0, halos, before.to(dtype).flatten(0, 1))
    return padded, places


def _check_before(before: Tensor | None, shape: tuple[int, ...]) -> None:
    if before is not None and before.shape != shape:
        raise ValueError(
            f"`before` has shape {tuple(before.shape)}; it must be (sequences, taps − 1, "
            f"channels), here {shape}"
        )


def _span_tables(bounds: Bounds | None, x_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int32: of each row (T) the rows since its span began, and its span; first rows (S + 1)."""
    if bounds is not None:
        span, since = conv_spans(bounds, x_TC.device)
        return since, span, bounds.cu_seqlens
    # On the device: a copy from the host cannot be captured in a CUDA graph.
    since = torch.arange(len(x_TC), dtype=torch.int32, device=x_TC.device)
    starts = torch.arange(2, dtype=torch.int32, device=x_TC.device) * len(x_TC)
    return since, torch.zeros_like(since), starts
