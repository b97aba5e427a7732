"""One optimizer step: the rounds of a plan, then one update.

In: a model on its lanes, the lane's micro-batches, a loss. Out: the step's losses and gradient
norm, still on the device. Every lane runs every round. Each loss sum is divided by the count of the
full step before backward, and gradients are summed over lanes and rounds, so the update is that of
all sequences together, however they were packed:

    2 lanes × 2 rounds with loss sums 3, 5 and 2, 6 over 8 loss tokens: loss (3 + 5 + 2 + 6) / 8 = 2

With experts or depths of multi-token prediction the loss is

    main / loss tokens + balance / tokens + mtp_weight / depths · Σ depth_d / its loss tokens

where the balance loss of the experts of a depth is divided by the tokens that this depth sees.
A step without a loss token is skipped, on all lanes alike. The number of ranks that want the run to
stop is summed over the lanes together with the losses, so that all ranks stop after the same step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW

from longshore.batch import MicroBatch
from longshore.choices import ShardMode
from longshore.distributed.topology import Topology
from longshore.model.decoder import Decoder
from longshore.model.interface import Output
from longshore.parallel.fsdp import begin_round
from longshore.train.device import Timestamp
from longshore.train.heartbeat import RankStatus
from longshore.train.loss import Faults, Loss, masked_sum, without_uncounted_labels
from longshore.train.optimizer import RoutingCounts, clip, set_lr, update_bias
from longshore.train.out_of_memory import out_of_memory
from longshore.train.stop import RunError


@dataclass(frozen=True, slots=True, eq=False)
class RoundResults:
    """What the rounds of a step left on one lane."""

    losses: tuple[Tensor, ...]
    """This lane's part of the losses in each round."""
    timestamps: tuple[Timestamp, ...]
    """The start of the first round, then the end of each."""
    faults: tuple[Faults | None, ...]
    """Non-finite results of a user's loss function in each round; None for the default loss."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a step, on the device; except for `rounds` it is the same on all lanes."""

    losses: Tensor
    """float64 (2 + depths): the main loss, the experts' balance loss, then the loss of each depth
    of multi-token prediction, each divided by its own count."""
    grad_norm: Tensor
    """0-dim: the global norm before clipping."""
    stops: Tensor
    """float64 (1): how many ranks want the run to stop."""
    experts: tuple[Tensor, ...]
    """int64 (E) for each MoE layer: the tokens routed to each expert."""
    rounds: RoundResults
    """What each round left on this lane."""


@dataclass(frozen=True, slots=True, eq=False)
class Stepper:
    """Everything a step needs besides its data."""

    model: Decoder
    """Already parallelized, see parallel/apply.py."""
    optimizer: AdamW
    """Of the model's parameters."""
    topology: Topology
    """The lanes to sum losses and gradients over."""
    mode: ShardMode
    """How FSDP shards the parameters."""
    loss: Loss
    """The main loss and what it is divided by."""
    clip: float
    """The largest gradient norm; 0: no clipping."""
    mtp_weight: float = 0.0
    """Weight of the multi-token prediction losses, all depths together."""
    status: RankStatus = field(default_factory=RankStatus)
    """This rank's progress, updated during each step."""

    def step(
        self, batches: list[MicroBatch], lr: float, *, stop: bool = False
    ) -> StepResult | None:
        """Runs the rounds and updates the parameters; None if the step has no loss token.

        stop: whether this rank wants the run to stop.
        """
        with self._memory_limit(batches):
            result = self._step(batches, lr, stop=stop)
        self.status.at("waiting for data")
        return result

    def _step(self, batches: list[MicroBatch], lr: float, *, stop: bool) -> StepResult | None:
        self.status.at("counting loss tokens")
        divisor = self.loss.divisor(batches, self.topology.groups)
        if not divisor:
            return None
        losses, counts, rounds = self.gradients(batches, divisor)
        sums = torch.cat([losses, losses.new_full((1,), float(stop))])
        self.status.at("gradient norm")
        norm = clip(self.model, self.clip, self.topology, also=sums)
        self.status.at("optimizer")
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        experts = counts.over_lanes(self.topology)
        update_bias(self.model, experts)
        return StepResult(sums[:-1], norm, sums[-1:], experts, rounds)

    def gradients(
        self, batches: list[MicroBatch], divisor: float
    ) -> tuple[Tensor, RoutingCounts, RoundResults]:
        """Forward and backward of every round; returns this lane's part of the losses."""
        device = self.topology.device
        total = torch.zeros(2 + len(batches[0].mtp), dtype=torch.float64, device=device)
        counts = RoutingCounts()
        each, timestamps, faults = list[Tensor](), [Timestamp(device)], list[Faults | None]()
        for host in batches:
            self.status.at("forward", round=host.round + 1)
            batch = host.to(device, non_blocking=True)
            begin_round(self.model, mode=self.mode, is_last=batch.is_last)
            if self.loss.is_plain:
                batch = without_uncounted_labels(batch)
            assert batch.token_ids is not None
            assert batch.targets is not None
            out = self.model(
                batch.token_ids,
                batch.ctx,
                batch.targets.labels,
                batch.mtp,
                summed=self.loss.is_plain,
            )
            losses, fault = self.terms(out, batch, divisor)
            loss = self.weighted(losses)
            self.status.at("backward", round=host.round + 1)
            loss.backward()
            each.append(losses.detach())
            total += each[-1]
            counts.add(out.routed)
            faults.append(fault)
            timestamps.append(Timestamp(device))
        return total, counts, RoundResults(tuple(each), tuple(timestamps), tuple(faults))

    @contextmanager
    def _memory_limit(self, batches: list[MicroBatch]) -> Iterator[None]:
        """Reports a GPU that is out of memory in one line."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            text = out_of_memory(error, self.status, batches, optimizer=self.optimizer)
            raise RunError(f"rank {self.topology.rank} {text}") from None

    def terms(self, out: Output, batch: MicroBatch, divisor: float) -> tuple[Tensor, Faults | None]:
        """The round's part of each loss, divided by the count of the full step."""
        total, faults = self.loss.summed(out.values, batch)
        main = total / divisor
        balance = main.new_zeros(())
        for routed in out.routed:
            balance = balance + routed.auxiliary / max(batch.counts.tokens_at(routed.depth), 1)
        depths = [
            masked_sum(nll_T, depth.targets) / max(count, 1)
            for nll_T, depth, count in zip(out.mtp, batch.mtp, batch.counts.mtp, strict=True)
            if depth.targets
        ]
        return torch.stack([main, balance, *depths]), faults

    def weighted(self, losses: Tensor) -> Tensor:
        """The scalar loss to backpropagate."""
        depths = losses[2:]
        total = losses[:2].sum()
        return total + self.mtp_weight / len(depths) * depths.sum() if len(depths) else total
