"""Scans over the lanes of a CP group: the core of Mamba2 and gated delta net.

In: a lane's scan inputs and the micro-batch's context. Out: the lane's part of what the scan makes.
The way is chosen anew for each pack:

- CP size 1: the op alone; nothing is exchanged.
- `heads`: an all-to-all gives each lane all tokens of its share of the heads, with their channels
  of the convolution, and a second one brings the outputs back. The CP size must divide the heads,
  and for each part of the channels either divide its heads or be a multiple of them: then a head of
  the part (a group of Mamba2, a key head of the delta rule) goes to all lanes that need it.
- `states`: tokens stay; parallel/context/states.py passes states between the chunks.

`auto` takes heads where that is legal. With 4 heads in 2 groups CP sizes 2 and 4 go by heads, at
4 with each group on two lanes; CP size 3 goes by states.

T tokens of the lane; N = c·T of the pack at CP size c; H heads.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from longshore.batch import PackContext, SeqContext
from longshore.distributed.cp_groups import CPGroups
from longshore.model.scan import Scan, ScanInputs, split_heads
from longshore.parallel.context.heads import from_heads, to_heads
from longshore.parallel.context.states import by_states

ScanKind = Literal["auto", "heads", "states"]
Way = Callable[[ScanInputs, Scan, PackContext, ProcessGroup], Tensor]


class ContextScan:
    """The core of a scan for packs of any CP size."""

    def __init__(self, groups: CPGroups, kind: ScanKind = "auto") -> None:
        self.groups = groups
        self.kind = kind

    def __call__(self, inputs: ScanInputs, ctx: SeqContext, /, *, scan: Scan) -> Tensor:
        outputs = []
        for pack in ctx.packs:
            mine = inputs.of_rows(pack.rows)
            if pack.group.cp_size == 1:
                out = mine.prepare(scan, pack.padded).run()[0]
            else:
                group = self.groups.group(pack.group.first_lane, pack.group.cp_size)
                out = self._way(mine, pack.group.cp_size)(mine, scan, pack, group)
            outputs.append(out)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _way(self, inputs: ScanInputs, cp_size: int) -> Way:
        if self.kind == "states":
            return by_states
        heads = inputs.gates[0].shape[1]
        parts = [count for count, _ in inputs.parts]
        if heads % cp_size == 0 and all(n % cp_size == 0 or cp_size % n == 0 for n in parts):
            return by_heads
        if self.kind == "auto":
            return by_states
        raise ValueError(
            f"a scan over heads: CP size {cp_size} cannot share out {heads} heads with parts of "
            f"{', '.join(map(str, parts))} heads; plan with other CP sizes, or use "
            "parallel.scan='states'"
        )


def by_heads(inputs: ScanInputs, scan: Scan, pack: PackContext, group: ProcessGroup) -> Tensor:
    """All tokens of the pack in one run, each lane with its share of the heads."""
    rank, size = group.rank(), group.size()
    parts = [_enough(part, size, dim=1) for part in _split(inputs, inputs.mixed, dim=1)]
    gates = [gate.unsqueeze(2) for gate in inputs.gates]
    got = to_heads((*parts, *gates), pack, group)
    mixed, gates_got = got[: len(parts)], got[len(parts) :]

    def share(channels: Tensor) -> Tensor:
        found = [_enough(part, size, dim=0) for part in _split(inputs, channels, dim=0)]
        return torch.cat([part.chunk(size)[rank].flatten(0, 1) for part in found])

    whole = replace(
        inputs,
        mixed=torch.cat([part.flatten(1) for part in mixed], dim=1),
        parts=tuple((part.shape[1], part.shape[2]) for part in mixed),
        gates=tuple(gate.squeeze(2) for gate in gates_got),
        taps=share(inputs.taps),
        bias=None if inputs.bias is None else share(inputs.bias),
        per_head=tuple(number.chunk(size)[rank] for number in inputs.per_head),
    )
    return from_heads(whole.prepare(scan, pack.padded).run()[0], pack, group)


def _split(inputs: ScanInputs, channels: Tensor, *, dim: int) -> tuple[Tensor, ...]:
    return split_heads(channels, inputs.parts, dim=dim)


def _enough(part: Tensor, size: int, *, dim: int) -> Tensor:
    """With at least one head for each of `size` lanes, by repeating each."""
    heads = part.shape[dim]
    return part if heads % size == 0 else part.repeat_interleave(size // heads, dim=dim)
