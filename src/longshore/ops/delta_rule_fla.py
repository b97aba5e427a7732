"""The gated delta rule by flash-linear-attention, for half precision on GPUs.

In: as `prepare_heads` of ops/delta_rule.py: queries and keys of any length, with fewer heads than
values; the kernels norm them and share them out. Out: what `PreparedDelta` offers. The kernels give
no transitions: whoever asks for `ends` gets those of plain torch, and then its outputs too.

Spans without rows are left out of the call, and their final states are their initial ones. Spans
of 0, 3 and 70 rows reach the kernels as cu_seqlens 0 3 73 and, in chunks of 64 rows, as the chunks
(0, 0), (1, 0), (1, 1). Both are made on the host, once for the boundaries (ops/boundaries.py).

Each kernel comes with a list of configurations, which its first call compiles and times one by one:
on an H200 there was no first step within 100 s. On Hopper one of each list is fixed instead;
elsewhere they are tried.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from longshore.ops.backends import HOPPER, capability
from longshore.ops.boundaries import (
    Bounds,
    PreparedScan,
    filled_spans,
    first_states,
    offsets_of,
)


@dataclass(slots=True, eq=False)
class FlaDelta:
    """A call of the kernels, to be made when the initial states are known."""

    rows: tuple[Tensor, ...]
    """q and k (T, R, K), v (T, H, V), g and beta (T, H)."""
    bounds: Bounds | None
    """The spans of the rows."""
    make_plain: Callable[[], PreparedScan]
    """The same by plain torch."""
    plain: PreparedScan | None = None
    """Made when transitions are asked for."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """The transition (S, H, K, K) and the final state from 0 (S, H, K, V) of each span."""
        if self.plain is None:
            self.plain = self.make_plain()
        return self.plain.ends()

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, V) and final states (S, H, K, V)."""
        if self.plain is not None:
            return self.plain.run(initial)
        q_TRK, _, v_THV, *_ = self.rows
        spans = filled_spans(self.bounds, len(v_THV), v_THV.device)
        count = len(offsets_of(self.bounds, len(v_THV))) - 1
        shape = (count, v_THV.shape[1], q_TRK.shape[2], v_THV.shape[2])
        dropped = len(spans.kept) < shape[0]
        states = None
        if initial is not None or dropped:
            states = first_states(initial, shape, like=v_THV)
        entering = states if states is None or not dropped else states.index_select(0, spans.kept)
        out, final = chunk_gated_delta_rule(
            *(each.unsqueeze(0) for each in self.rows),
            initial_state=entering,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=spans.cu_seqlens,
            chunk_indices=spans.chunks,
        )
        if dropped:
            assert states is not None
            final = states.index_copy(0, spans.kept, final)
        return out.squeeze(0), final


def prepare(
    q_TRK: Tensor,
    k_TRK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    bounds: Bounds | None,
    make_plain: Callable[[], PreparedScan],
) -> FlaDelta:
    """All that can be done before the initial states are known, which is nothing."""
    offsets_of(bounds, len(v_THV))
    return FlaDelta((q_TRK, k_TRK, v_THV, g_TH, beta_TH), bounds, make_plain)


WARPS, STAGES = 4, 3


def fix_configurations() -> None:
    """One configuration for each kernel of the delta rule, the nearest to 4 warps and 3 stages."""
    from fla.modules.norm import l2norm
    from fla.ops.common import chunk_delta_h, chunk_o
    from fla.ops.gated_delta_rule import chunk_fwd, wy_fast
    from fla.ops.utils import cumsum
    from triton.runtime.autotuner import Autotuner

    for module in (l2norm, chunk_delta_h, chunk_o, chunk_fwd, wy_fast, cumsum):
        for kernel in vars(module).values():
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                kernel.configs = [min(kernel.configs, key=_distance)]


def _distance(config: Any) -> tuple[int, int]:
    return abs(config.num_warps - WARPS), abs(config.num_stages - STAGES)


if torch.cuda.is_available() and capability(torch.device("cuda", 0)) == HOPPER:
    fix_configurations()
