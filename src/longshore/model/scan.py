"""Mixers that carry a state along a sequence: what they share, and the core that knows one lane.

In: what a projection made of the tokens. Out: what the scan made of them. Such a mixer is

    project → core: convolution with SiLU, then scan, inside each sequence → gated norm → project

A `Scan` says what the recurrence does with convolved parts, gates and numbers of each head; the
core, a plain function called core(inputs, ctx, scan=…), brings tokens together, and parallel/ puts
another in its place.

T tokens, C channels of the convolution and K its taps, H heads, V width of a head's output. Mamba2
with 4 heads of 8, 2 groups and a state of 16 convolves x, B, C: parts (4, 8), (2, 16), (2, 16).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from longshore.batch import SeqContext
from longshore.model.fill import DECAY_RATES, STEP_BIASES, Fill
from longshore.model.norm import Float32Parameters
from longshore.model.whole import refuse_shared
from longshore.ops.boundaries import Bounds
from longshore.ops.conv import causal_conv


@dataclass(frozen=True, slots=True, eq=False)
class ScanInputs:
    """mixed: (T, C), what is convolved. parts: heads and width of each part of its channels.

    gates: (T, H) each. taps, bias: (C, K) and (C), of the convolution. per_head: (H) each.
    """

    mixed: Tensor
    parts: tuple[tuple[int, int], ...]
    gates: tuple[Tensor, ...]
    taps: Tensor
    bias: Tensor | None
    per_head: tuple[Tensor, ...]

    def of_rows(self, rows: slice) -> "ScanInputs":
        gates = tuple(gate[rows] for gate in self.gates)
        return replace(self, mixed=self.mixed[rows], gates=gates)

    def prepare(
        self, scan: "Scan", bounds: Bounds | None, *, before: Tensor | None = None
    ) -> "Prepared":
        """The scan over these runs, convolved; before: the rows that stand before each run."""
        convolved_TC = causal_conv(
            self.mixed, self.taps, self.bias, bounds=bounds, before=before, activation=True
        )
        parts = split_heads(convolved_TC, self.parts, dim=1)
        return scan.prepare(parts, self.gates, self.per_head, bounds=bounds)


class Prepared(Protocol):
    """All of a scan that does not depend on the states its runs begin with."""

    def ends(self) -> tuple[Tensor, Tensor]:
        """Of each run (S, H, …), its transition and its final state from 0."""
        ...

    def run(self, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs (T, H, V), and the final state of each run."""
        ...


class Scan(Protocol):
    """A recurrence whose state is affine in the state it began with. Shapes come from tensors."""

    def prepare(
        self,
        parts: tuple[Tensor, ...],
        gates: tuple[Tensor, ...],
        per_head: tuple[Tensor, ...],
        *,
        bounds: Bounds | None,
    ) -> Prepared: ...

    def compose(self, transition: Tensor, state: Tensor) -> Tensor:
        """What the transition of a run leaves of a state."""
        ...


class Core(Protocol):
    """Convolution and scan inside each sequence of a context: (T, H, V)."""

    def __call__(self, inputs: ScanInputs, ctx: SeqContext, /, *, scan: Scan) -> Tensor: ...


def local_core(inputs: ScanInputs, ctx: SeqContext, /, *, scan: Scan) -> Tensor:
    """The scan over packs that this lane holds whole."""
    made = []
    for pack in ctx.packs:
        refuse_shared(pack, "scan")
        made.append(inputs.of_rows(pack.rows).prepare(scan, pack.padded).run()[0])
    return made[0] if len(made) == 1 else torch.cat(made)


def split_heads(
    joined: Tensor, parts: tuple[tuple[int, int], ...], *, dim: int
) -> tuple[Tensor, ...]:
    """Channels along `dim` as parts, each with dims for its heads and their width."""
    found = joined.split([heads * width for heads, width in parts], dim=dim)
    return tuple(part.unflatten(dim, shape) for part, shape in zip(found, parts, strict=True))


class Decay(Float32Parameters):
    """How each head forgets: its rate, −exp(A_log), and the bias of its step, dt_bias."""

    FILLS: Mapping[str, Fill] = {"A_log": DECAY_RATES, "dt_bias": STEP_BIASES}

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))

    def forward(self) -> tuple[Tensor, ...]:
        return -copied(self.A_log).exp(), copied(self.dt_bias)


def copied(parameter: Tensor) -> Tensor:
    """A copy, in float32 at least, that outlives the gathered parameter."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


def conv_taps(channels: int, kernel: int, *, bias: bool) -> nn.Conv1d:
    """Holds the taps (C, 1, K) of a causal convolution under their usual names; never called."""
    return nn.Conv1d(channels, channels, kernel, groups=channels, bias=bias)
