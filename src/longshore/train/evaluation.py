"""Evaluation on held-out sequences: every loss token has the same weight, whatever the plan.

In: a model on its lanes and a held-out set. Out: the mean over all loss tokens of all lanes, rounds
and steps; nothing if the run is asked to stop before the last round. Parameters, optimizer and
routing counts stay untouched.

Two steps with loss sums 6 and 1 over 3 and 1 tokens give (6 + 1) / (3 + 1) = 1.75; the mean of the
steps' means would be 1.5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from longshore.batch import MicroBatch
from longshore.data.source import Place
from longshore.data.steps import IndexedSteps
from longshore.distributed.collectives import sum_over
from longshore.model.interface import Output
from longshore.parallel.pipeline import Executor, Handlers
from longshore.train.loss import masked_sum
from longshore.train.supervision import RankStatus


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The losses of one pass over a held-out set."""

    name: str
    """Its name in evals.jsonl and on the display."""
    loss: float | None
    """The mean over loss_tokens; None if there are none, or if it is not finite."""
    loss_tokens: int
    mtp_losses: tuple[float | None, ...]
    """The same for each depth of multi-token prediction."""


def evaluate(
    held_out: IndexedSteps,
    executor: Executor,
    status: RankStatus | None = None,
    *,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """One pass over all steps, in order; all ranks call it together, between two training steps.

    stops: the same on all ranks, which ask together before each round, or with a pipeline before
    each step; None if it was stopped.
    """
    status = status or RankStatus()
    status.at("evaluation")
    topology, depths = executor.topology, len(executor.config.mtp)
    sums = torch.zeros(1 + depths, dtype=torch.float64, device=topology.device)
    counts = [0] * len(sums)

    def read(out: Output, batch: MicroBatch, stage: int) -> Tensor:
        if executor.layout.stages[stage].head:
            sums.add_(_sums(out, batch))
        return sums

    handlers = Handlers(
        prepare=lambda host: host.to(topology.device, non_blocking=True),
        read=read,
        begin=lambda action: status.at("evaluation", round=action.round + 1),
    )
    steps = islice(held_out.from_place(Place(), lambda: False), held_out.batches.steps(0))
    with torch.no_grad():
        for step in steps:
            queue = executor.queue(step.plan, rounds=len(step.batches), backward=False)
            # Half of a pipeline's messages would wait for the others.
            for part in [queue] if executor.layout.pp > 1 else [(entry,) for entry in queue]:
                if stops():
                    reshard(executor)
                    return None
                executor.run(step.batches, part, handlers)
            more = step.batches[0].counts
            counts = [a + b for a, b in zip(counts, (more.main, *more.mtp), strict=True)]
    reshard(executor)
    sum_over(sum_over(sums, topology.groups.lanes), topology.groups.pp)
    loss, *means = [
        total / count if count and math.isfinite(total) else None
        for total, count in zip(sums.tolist(), counts, strict=True)
    ]
    return Evaluation("held-out", loss, counts[0], tuple(means))


def _sums(out: Output, batch: MicroBatch) -> Tensor:
    """The lane's sums of one round: of the main loss, then of each depth."""
    pairs = [(out.values, batch.targets)]
    pairs += [(nll_T, depth.targets) for nll_T, depth in zip(out.mtp, batch.mtp, strict=True)]
    return torch.stack(
        [masked_sum(nll_T.double(), targets) for nll_T, targets in pairs if targets is not None]
    )


def reshard(executor: Executor) -> None:
    """Frees the gathered parameters: no backward will."""
    for part in executor.stages.values():
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
