"""What a rank receives from others, counted; and what one micro-batch of a model exchanges."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from tests.ranks.spine import batches_of, exact, lanes_of, make_samples, sharded

from longshore.arch.decoder import DecoderConfig
from longshore.distributed.recording import Operation, recorded
from longshore.parallel.fsdp import begin_round
from longshore.plan import make_plan

Calls = list[tuple[str, int]]


@dataclass(frozen=True)
class Counted:
    """What a block issued: kinds, and bytes from other ranks as if each sent directly."""

    operations: list[Operation]

    @property
    def log(self) -> Calls:
        """Broadcasts are counted on their source, too."""
        return [
            (o.kind, o.bytes * (1 if o.kind in ("all_to_all", "broadcast") else len(o.group) - 1))
            for o in self.operations
        ]

    def calls(self, kind: str | None = None) -> int:
        return sum(kind in (None, each) for each, _ in self.log)

    def bytes(self) -> int:
        return sum(amount for _, amount in self.log)


@contextmanager
def count() -> Iterator[Counted]:
    with recorded() as recording:
        yield Counted(recording)


def exchanged(config: DecoderConfig, cp_size: int, **ways) -> tuple[int, Calls, Calls]:
    """The lane's rows of shared packs, and the name and bytes of each call forward and backward."""
    lanes = dist.get_world_size()
    sizes = {"policy": "static", "cp_size": cp_size, "cp_sizes": "any"}
    plan = make_plan([50, 3], lanes=lanes, capacity=128, **sizes)
    with lanes_of(lanes) as (topology, groups):
        model = sharded(config, topology, groups, exact(mode="none", **ways))
        (batch,) = batches_of(plan, make_samples(plan), topology.lane)
        with count() as forward:
            nll = model(batch.token_ids, batch.ctx, batch.targets.labels).values
        begin_round(model, mode="none", is_last=False)  # FSDP sums no gradients
        with count() as backward:
            nll.sum().backward()
    rows = sum(pack.stop - pack.start for pack in batch.ctx.packs if pack.group.cp_size > 1)
    return rows, forward.log, backward.log
